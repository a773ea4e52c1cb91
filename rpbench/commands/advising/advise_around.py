"""Rows of `advise --open` at neighbouring settings, which its page lets the reader choose."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

from rpbench.advice.interval import Shared
from rpbench.advice.rows import mesh_misfit, mesh_row, mfu, parameters
from rpbench.advice.unequal import weighted
from rpbench.advice.what_if import Point, around_all
from rpbench.commands.advising.advise_questions import counts_of, powers_and_last
from rpbench.commands.advising.advise_table import label
from rpbench.config.choices import ConfigError
from rpbench.config.request import load
from rpbench.config.sizes import read_lengths
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.job import Job
from rpbench.mesh.layout import AXES
from rpbench.mesh.plan_search.closed_forms import Question
from rpbench.mesh.plan_search.plans import Space
from rpbench.mesh.plan_search.search import NothingFits, search
from rpbench.mesh.software import DEFAULT, software
from rpbench.plan.contest.plans import Tuned
from rpbench.predict.prediction import NORMAL
from rpbench.records.provenance import usable_cores
from rpbench.run.modes.simulate import prepare
from rpbench.side_processes import side_processes
from rpbench.workload.architecture import Architecture

SECONDS = 20.0  # of a processor, for each of the processes
STEPS = 10  # how often people are told
# Words of a row's command that a point changes, as its fields say them.
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
    """The rows of an answer at other microbatch sizes, recomputation and numbers of devices, as a page holds them.

    Args:
        plans: of the rows, those on time first.
        machine: that the rows are of.
        terms_on: what contenders share on a part of it.

    Returns:
        None where nothing fits.
    """
    rows = [*answer["ranking"], *answer["ranking_late"]]
    if not rows:
        return None
    on_nodes = isinstance(plans[0], Job)
    alike = machine.device_speeds is None  # or a command for fewer would have to say which
    counts = powers_and_last(counts_of(machine)) if alike else [machine.size]
    on = {count: _put(machine, count, (lambda part: part) if on_nodes else terms_on) for count in counts}
    every = max(1, len(rows) // STEPS)

    def told(done: int) -> None:
        if done % every == 0 or done == len(rows):
            print(f"rpbench: the page: {done} of {len(rows)} rows at other settings", file=sys.stderr, flush=True)

    found = around_all(plans, on, usable_cores(), SECONDS, told)
    limits = {"limit_bytes": answer["device_memory_bytes"], "host_limit_bytes": machine.host_memory_bytes}
    if isinstance(plans[0], Job):
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
    """A row's command with the names of fields, in braces, where points differ."""
    for word, changed in CHANGED.items():
        command = re.sub(rf"(?<![\w.]){word}", changed, command)
    return command


def _put(machine: Machine, count: int, onto: Callable[[Machine], Any]) -> Any:
    """The result of `onto` for `count` devices of the machine, or the reason why there is none."""
    try:
        return onto(machine.with_devices(count))
    except ValueError as error:
        return str(error)


NOTE = (
    "lengths: plans were searched with microbatches of mean cost, each as large in memory as the largest; the pace and "
    "the peak of a row are those of its own microbatches, the rest (interval, causes, classes of memory, levers) is of "
    "the search"
)
PASS_ON = ("tokens_per_s_low", "tokens_per_s_high", "tokens_per_day")  # what is as many times as much as the pace


def lengths_asked(
    own: Mapping[str, str], model: Architecture, machine: Machine, question: str | None
) -> tuple[int, ...]:
    """Tokens of every sequence of a step, of a file or as typed; none where all are as long as the model's. Raises
    ConfigError as of `workload.lengths`, or where microbatches are all alike.
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


# Assumed: one standard deviation as of a pipeline's unmodelled terms (conf/cost/analytic.yaml), nine of ten errors.
REACH = exp(0.2 * NORMAL)
SHARED = Shared({name: log(REACH) for name in ("hops", "data", "tied")}, log(REACH))
NUM_SIMULATED = 36
_CHANGES: Mapping[str, Callable[[Machine], Machine]] = {
    "links between nodes twice as fast": lambda m: replace(
        m, inter_bytes_per_s=m.inter_bytes_per_s and 2 * m.inter_bytes_per_s
    ),
    "links inside nodes twice as fast": lambda m: replace(
        m,
        intra_bytes_per_s=2 * (m.intra_bytes_per_s or m.device.link_bytes_per_s),
        collective_bytes_per_s=m.collective_bytes_per_s and 2 * m.collective_bytes_per_s,
    ),
    "twice the device memory": lambda m: replace(m, device_memory_bytes=2 * m.device.memory_bytes),
}


def advise_nodes(
    model: Architecture, machine: Machine, *, seq_len: int, global_batch: int, space: Space, words: Sequence[str]
) -> dict[str, Any]:
    """The ranking of meshes, as JSON-ready data.

    Args:
        global_batch: sequences of a step.
        space: what the search may choose from.
        words: of the command line that asks for it.

    Returns:
        Where nothing fits, an empty ranking, what the smallest plan lacks, and the smallest change that makes it fit.

    Raises:
        ValueError: if nothing divides.
    """
    about = {
        "model": model.name,
        "cluster": machine.name,
        "num_devices": machine.size,
        "parameters": parameters(model),
        "device_memory_bytes": machine.device.memory_bytes - (machine.reserved_memory_bytes or 0),
        "seq_len": seq_len,
        "tokens_per_step": global_batch * seq_len,
        "ranking_late": [],
        "none_found": [],
        "order_turns": [],
        "left_out": {},
        "search": "python -m rpbench plan mesh=search " + " ".join(words),
    }
    question = Question(model, machine, software(DEFAULT), seq_len, global_batch)
    try:
        found = search(question, space, NUM_SIMULATED)
    except NothingFits as nothing:
        return about | {
            "ranking": [],
            "does_not_fit": [mesh_misfit(nothing.smallest)],
            "levers": [],
            "smallest_change": f"the smallest plan {nothing.change}",
            "change": nothing.change.plain(),
        }
    best = found.best[0].tokens_per_s_per_device
    levers: list[dict[str, Any]] = []
    for name, change in _CHANGES.items():
        faster = search(question._replace(machine=change(machine)), space, 1).best
        pace = faster[0].tokens_per_s_per_device if faster else best
        levers.append({"name": name, "tokens_per_s": pace * machine.size, "gain": max(0.0, pace / best - 1)})
    return about | {
        "ranking": _one_each(
            [mesh_row(each, REACH, found.best[0], SHARED) | {"plan": each.job} for each in found.best]
        ),
        "does_not_fit": [],
        "num_plans": found.num_plans,
        "num_plans_that_fit": found.num_fitting,
        "levers": sorted(levers, key=lambda lever: -lever["gain"]),
    }


def _one_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest row of every method and mesh: as on one host, other settings of it are no rows of their own."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        options = row["options"]
        found.setdefault((row["schedule"], options["shares"], *(options[axis] for axis in (*AXES, "expert"))), row)
    return list(found.values())
