"""What `advise --open` computes beside the answer: its rows at other settings, for a page that turns them."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rpbench.advice.what_if import Point, around_all
from rpbench.commands.advising.advise_questions import counts_of, powers_and_last
from rpbench.commands.advising.advise_table import label
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.job import Job
from rpbench.plan.contest.plans import Tuned

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
    answer: Mapping[str, Any],
    plans: Sequence[Tuned | Job],
    machine: Machine,
    terms_on: Callable[[Machine], Any],
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

    found = around_all(plans, on, os.cpu_count() or 1, SECONDS, told)
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
    """What rows are put on with so many devices, or why there is nothing."""
    try:
        return onto(machine.with_devices(count))
    except ValueError as error:
        return str(error)
