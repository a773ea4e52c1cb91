"""`advise lengths=FILE`: rows whose microbatches are of unequal lengths, timed as their commands are."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpbench.advice.rows import mfu
from rpbench.advice.unequal import weighted
from rpbench.config.choices import ConfigError
from rpbench.config.lengths import read_lengths
from rpbench.config.request import load
from rpbench.cost.hardware.machine import Machine
from rpbench.run.modes.simulate import prepare
from rpbench.side_processes import side_processes
from rpbench.workload.architecture import Architecture

NOTE = (
    "lengths: plans were searched with microbatches of mean cost, each as large in memory as the largest; the pace and "
    "the peak of a row are those of its own microbatches, the rest (interval, causes, classes of memory, levers) is of "
    "the search"
)
PASS_ON = ("tokens_per_s_low", "tokens_per_s_high", "tokens_per_day")  # what is as many times as much as the pace


def lengths_asked(
    own: Mapping[str, str], model: Architecture, machine: Machine, question: str | None
) -> tuple[int, ...]:
    """Tokens of every sequence of a step, of a file or as typed; none where all are as long as the model's.

    Raises:
        ConfigError: as of `workload.lengths`, or where microbatches are all alike.
    """
    if "lengths" not in own:
        return ()
    text = own["lengths"]
    given = text.strip("[]").split(",") if text.startswith("[") else text
    try:
        found = tuple(read_lengths(given, model) or ())
    except ConfigError as error:
        raise ConfigError(str(error).replace("workload.", "").replace("model.seq_len", "seq_len")) from None
    if machine.num_nodes > 1:
        raise ConfigError(f"lengths= on {machine.num_nodes} nodes: microbatches of a mesh are alike; take one node")
    if question not in (None, "compare"):
        raise ConfigError(f"lengths= and {question}=: the lengths are of one step on this machine; leave one out")
    if found and own.get("sequences_per_step", str(len(found))) != str(len(found)):
        asked = own["sequences_per_step"]
        raise ConfigError(f"sequences_per_step={asked}: lengths= has {len(found)}, one each; leave it out")
    return found


def timed_again(
    answer: dict[str, Any], text: str, lengths: Sequence[int], model: Architecture, machine: Machine
) -> dict[str, Any]:
    """An answer whose rows have the pace and the memory of their commands, with the lengths, in the order of that.

    A row that does not fit after all, or whose order takes no microbatches of unequal lengths, is left out by name.
    """
    as_long = replace(model, seq_len=weighted(lengths))
    names = ("ranking", "ranking_late")
    for name in names:
        for row in answer[name]:
            row["command"] += " " + shlex.quote(f"workload.lengths={text}")
    rows = [row for name in names for row in answer[name]]
    apart = len(rows) > 1 and hasattr(os, "fork")
    commands = [row["command"] for row in rows]
    if apart:
        with side_processes(os.cpu_count() or 1, "fork") as pool:
            found = list(pool.map(_ran, commands))
    else:
        found = list(map(_ran, commands))
    timed = list(zip(rows, found, strict=True))
    answer["left_out"] |= {row["schedule"]: fields["reason"] for row, fields in timed if not fields["tokens_per_s"]}
    again = {id(row): _timed(row, fields, as_long, machine) for row, fields in timed if fields["tokens_per_s"]}
    for name in names:
        fitting = [again[id(row)] for row in answer[name] if id(row) in again]
        answer[name] = sorted(fitting, key=lambda row: -row["tokens_per_s"])
    return answer | {"tokens_per_step": sum(lengths), "lengths": list(lengths)}


def _ran(command: str) -> dict[str, Any]:
    """What a run of a command finds; nothing is written."""
    words = shlex.split(command)
    try:
        fields = prepare(load(words[words.index("rpbench") + 1 :])).carry_out().fields
    except ValueError as error:  # its order cuts sequences into segments, or the like
        return {"tokens_per_s": None, "reason": str(error)}
    return {name: fields.get(name) for name in ("tokens_per_s", "peak_memory_bytes", "reason")}


def _timed(row: dict[str, Any], fields: dict[str, Any], model: Architecture, machine: Machine) -> dict[str, Any]:
    pace, price = fields["tokens_per_s"], row["usd_per_1e9_tokens"]
    factor = pace / row["tokens_per_s"]
    return row | {
        **{name: factor * row[name] for name in PASS_ON},
        "tokens_per_s": pace,
        "usd_per_1e9_tokens": None if price is None else price / factor,
        "mfu": mfu(model, machine, machine.size, pace),
        "peak_memory_bytes": max(fields["peak_memory_bytes"]),
        "gap": None,
        "searched_to_the_end": False,
    }
