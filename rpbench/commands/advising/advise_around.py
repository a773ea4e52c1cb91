"""Rows of `advise` at neighbouring settings, for the page of `--open`, and with sequences of unequal lengths."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpbench.advice.rows import mfu
from rpbench.advice.unequal import weighted
from rpbench.advice.what_if import Point, around_all
from rpbench.commands.advising.advise_questions import counts_of, powers_and_last
from rpbench.commands.advising.advise_table import label
from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.config.sizes import read_lengths
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.job import Job
from rpbench.plan.contest.plans import Tuned
from rpbench.records.provenance import usable_cores
from rpbench.run.modes.simulate import prepare
from rpbench.side_processes import side_processes
from rpbench.workload.architecture import Architecture

SECONDS = 20.0  # of a processor, for each of the processes
STEPS = 10  # how many lines of progress are printed
# Words of a row's command that differ between points -> the fields of a point.
CHANGED = {
    r"num_devices=\d+": "num_devices={num_devices}",
    r"num_microbatches=\d+": "num_microbatches={num_microbatches}",
    r"partition=\"[^\"]*\"": 'partition="{partition}"',
    r"recompute=\w+": "recompute={recompute}",
    r"workload\.microbatch_sequences=\S+": "workload.microbatch_sequences={microbatch_sequences}",
    r"mesh\.data=\d+": "mesh.data={data}",
}


def around(
    answer: Mapping[str, Any], plans: Sequence[Tuned | Job], machine: Machine, terms_on: Callable[[Machine], Any]
) -> dict[str, Any] | None:
    """The rows of an answer at other microbatch sizes, recomputation and numbers of devices; None if nothing fits.

    `plans` are of the rows, timely ones before late ones; `terms_on` gives the terms of one host on a part of it.
    """
    rows = [*answer["ranking"], *answer["ranking_late"]]
    if not rows:
        return None
    has_hosts = not all(isinstance(plan, Job) for plan in plans)
    alike = machine.device_speeds is None  # or a command for fewer would have to say which
    counts = powers_and_last(counts_of(machine)) if alike else [machine.size]
    on = {
        Job: {count: _put(machine, count, lambda part: part) for count in counts},
        Tuned: {count: _put(machine, count, terms_on) for count in counts if has_hosts},
    }
    every = max(1, len(rows) // STEPS)

    def told(done: int) -> None:
        if done % every == 0 or done == len(rows):
            print(f"rpbench: the page: {done} of {len(rows)} rows at other settings", file=sys.stderr, flush=True)

    found = around_all(plans, on, usable_cores(), SECONDS, told)
    limits = {"limit_bytes": answer["device_memory_bytes"], "host_limit_bytes": machine.host_memory_bytes}
    if isinstance(plans[0], Job) and not has_hosts:
        limits = {"limit_bytes": round(limits["limit_bytes"] / plans[0].software.scale), "host_limit_bytes": None}
    return {
        "fields": Point._fields,
        "values": {
            name: sorted({getattr(point, name) for points in found for point in points})
            for name in ("num_devices", "microbatch_sequences", "recompute")
        },
        **limits,
        "rows": [
            {
                "label": re.sub(r" data=\d+", "", label(row)),
                "late": row["staleness_steps"] > 0,
                "command": template(row["command"]),
                "points": points,
            }
            for row, points in zip(rows, found, strict=True)
        ],
    }


def template(command: str) -> str:
    """A row's command with the names of fields, in braces, for the words that differ between points."""
    for word, changed in CHANGED.items():
        command = re.sub(rf"(?<![\w.]){word}", changed, command)
    return command


def _put(machine: Machine, count: int, onto: Callable[[Machine], Any]) -> Any:
    """The result of `onto` for `count` devices of the machine, or the error's text."""
    try:
        return onto(machine.with_devices(count))
    except ValueError as error:
        return str(error)


NOTE = (
    "lengths: plans were searched with microbatches of mean cost, each as large in memory as the largest; the pace and "
    "the peak of a row are those of its own microbatches, the rest (interval, causes, classes of memory, levers) is of "
    "the search"
)
PASS_ON = ("tokens_per_s_low", "tokens_per_s_high", "tokens_per_day")  # in proportion to the pace


def lengths_asked(
    own: Mapping[str, str], model: Architecture, machine: Machine, question: str | None
) -> tuple[int, ...]:
    """Tokens of every sequence of a step, typed or from a file; empty if all have the model's length.

    ConfigError as of `workload.lengths`, or where all microbatches must be equal.
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
        raise ConfigError(f"batch={asked} with lengths=, which has {len(found)}, one for each; leave batch= out")
    return found


def timed_again(
    answer: dict[str, Any], text: str, lengths: Sequence[int], model: Architecture, machine: Machine
) -> dict[str, Any]:
    """An answer with the pace and memory of its rows' commands run with these lengths, sorted again.

    A row that then does not fit, or whose order takes no microbatches of unequal lengths, moves to `left_out`.
    """
    as_long, word = replace(model, seq_len=weighted(lengths)), shlex.quote(f"workload.lengths={text}")
    names = ("ranking", "ranking_late")
    rows = [row for name in names for row in answer[name]]
    for row in rows:
        row["command"] += f" {word}"
        for key in ("export", "export_note"):
            row[key] = row[key] and row[key].replace(" format=", f" {word} format=")
    commands = [row["command"] for row in rows]
    if len(rows) > 1 and hasattr(os, "fork"):
        with side_processes(usable_cores(), "fork") as pool:
            timed = list(zip(rows, pool.map(_ran, commands), strict=True))
    else:
        timed = list(zip(rows, map(_ran, commands), strict=True))
    answer["left_out"] |= {row["schedule"]: fields["reason"] for row, fields in timed if not fields["tokens_per_s"]}
    again = {id(row): _timed(row, fields, as_long, machine) for row, fields in timed if fields["tokens_per_s"]}
    for name in names:
        fitting = [again[id(row)] for row in answer[name] if id(row) in again]
        answer[name] = sorted(fitting, key=lambda row: -row["tokens_per_s"])
    return answer | {"tokens_per_step": sum(lengths), "lengths": list(lengths)}


def _ran(command: str) -> dict[str, Any]:
    """The result of a command's run; nothing is written."""
    words = shlex.split(command)
    try:
        work = prepare(load(words[words.index("rpbench") + 1 :]))
        fields = {**work.opening, **work.carry_out().fields}
    except ValueError as error:  # its order cuts sequences into segments, or the like
        return {"tokens_per_s": None, "reason": str(error)}
    names = ("tokens_per_s", "peak_memory_bytes", "host_memory_bytes", "kept_layers", "reason")
    return {name: fields.get(name) for name in names}


def _timed(row: dict[str, Any], fields: dict[str, Any], model: Architecture, machine: Machine) -> dict[str, Any]:
    pace, price = fields["tokens_per_s"], row["usd_per_1e9_tokens"]
    factor = pace / row["tokens_per_s"]
    kept = fields["kept_layers"] or row["options"]["kept_layers"]  # own microbatches may leave room for more layers
    return row | {
        "options": row["options"] | {"kept_layers": kept},
        **{name: factor * row[name] for name in PASS_ON},
        "tokens_per_s": pace,
        "usd_per_1e9_tokens": None if price is None else price / factor,
        "mfu": mfu(model, machine, machine.size, pace),
        "peak_memory_bytes": max(fields["peak_memory_bytes"]),
        "host_memory_bytes": fields["host_memory_bytes"],
        "gap": None,
        "searched_to_the_end": False,
    }
