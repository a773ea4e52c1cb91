"""The answer of the site's page of schedules to the words behind its `#`: overrides of the command line joined by `&`.

The page runs this file in the browser with Python's standard library alone, so its imports may need nothing else.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import parse_qsl

from rpbench.config.schedule_options import check_options
from rpbench.cost.constant import constant_times
from rpbench.cost.pieces import of_piece
from rpbench.cost.table import CostTable
from rpbench.drawing.timeline_svg import timeline_svg
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, from_text, to_text
from rpbench.passes.lower import add_steps
from rpbench.plan.even_and_greedy import plan_even
from rpbench.plan.problem import Problem
from rpbench.registry import entries, entry
from rpbench.sim.walk import bubble, held, makespan, walk

MOST = {"num_devices": 64, "num_microbatches": 512, "num_steps": 8, "chunks_per_device": 16}
MOST_ACTIONS = 8_000
MOST_TEXT = 200_000
SIZES = {"num_devices": 4, "num_microbatches": 8, "num_steps": 1}
TIMES = {"forward_ms": 1.0, "input_grad_ms": 1.0, "weight_grad_ms": 1.0, "recompute_ms": 0.0, "hop_ms": 0.0}
_PREFETCH = 1  # as the command line has it
_OWN = "order"  # the key of a pasted order
_FILE = "order.txt"  # what the command calls it


@dataclass(frozen=True)
class Asked:
    """The question of an address."""

    schedule: str
    sizes: Mapping[str, int]  # num_devices and others, by their names on the command line
    times: Mapping[str, float]  # milliseconds, by the keys of cost=constant
    options: Mapping[str, Any]  # of the schedule
    order: str | None = None  # a schedule in text form, instead of a generator

    @property
    def words(self) -> list[str]:
        """The same on the command line."""
        times = ["cost=constant", *(f"cost.{name}={value:g}" for name, value in self.times.items())]
        if self.order is not None:
            return [f"schedule_file={_FILE}", *times]
        sizes = [f"{name}={value}" for name, value in self.sizes.items()]
        options = [f"schedule.{name}={as_typed(value)}" for name, value in self.options.items()]
        return [f"schedule={self.schedule}", *sizes, *times, *options]


def catalogue() -> list[dict[str, Any]]:
    """The schedules of the page: name, source, default options, and whether the number of stages can be chosen."""
    return [
        {
            "name": each.name,
            "source": each.source,
            "options": {name: as_typed(value) for name, value in each.options.items()},
            "looped": each.looped and (each.chunks is None or each.more_chunks),
        }
        for each in entries().values()
    ]


def answer(address: str) -> dict[str, Any]:
    """Timeline, makespan, bubble and memory of an address's schedule; or `sentence`, the error."""
    try:
        asked = read(address)
        return _shown(asked, *_built(asked))
    except ValueError as error:
        return {"sentence": str(error)}


# --- reading ---------------------------------------------------------------------------------------------------


def read(address: str) -> Asked:
    """The question of an address; ValueError for an unknown key or an invalid value."""
    if len(address) > MOST_TEXT:
        raise ValueError(f"an address of {len(address):,} letters: at most {MOST_TEXT:,}; keep the order in a file")
    given = dict(parse_qsl(address, keep_blank_values=True))
    name, order = given.pop("schedule", "1f1b"), given.pop(_OWN, None)
    sizes, times, options = dict(SIZES), dict(TIMES), {}
    for key, text in given.items():
        group, _, rest = key.partition(".")
        if key in MOST:
            sizes[key] = _size(key, text)
        elif group == "cost" and rest in TIMES:
            times[rest] = _time(key, text)
        elif group == "schedule" and rest:
            options[rest] = _value(text)
        elif key != "cost" or text != "constant":
            known = ", ".join(("schedule", *MOST, *(f"cost.{each}" for each in TIMES), "schedule.OPTION", _OWN))
            raise ValueError(f"an address has no {key}={text}; it has {known}")
    return Asked(name, sizes, times, options, order)


def _size(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) >= 1):
        raise ValueError(f"{key}={text}: a whole number, at least 1")
    if len(text) > 9 or int(text) > MOST[key]:
        raise ValueError(
            f"{key}={text}: this page times at most {MOST[key]}; the command line takes more: "
            f"python -m rpbench schedule=NAME {key}={text}"
        )
    return int(text)


def _time(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ValueError(f"{key}={text}: a time in milliseconds, such as 1.5")
    return value


def _value(text: str) -> Any:
    """An option's value as on the command line: a number, true, false, null, a list of them, or a word."""
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return found if isinstance(found, int | float | list) else text


def as_typed(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- building --------------------------------------------------------------------------------------------------


def _built(asked: Asked) -> tuple[Schedule, CostTable]:
    """The unchecked schedule with its partition, and its costs."""
    if asked.order is not None:
        return _from_order(asked.order, asked.times)
    found = entry(asked.schedule)
    check_options(found, asked.options)
    options = found.options | dict(asked.options)
    pieces = found.pieces(options)
    devices, chunks = asked.sizes["num_devices"], asked.sizes.get("chunks_per_device")
    num_layers = devices * (chunks or found.chunks or (2 if found.looped else 1))
    _check_actions(num_layers * asked.sizes["num_microbatches"] * pieces * asked.sizes["num_steps"])
    problem = Problem(
        entry=found,
        times=of_piece(constant_times(num_layers, devices, **asked.times), pieces),
        num_ranks=devices,
        num_microbatches=asked.sizes["num_microbatches"] * pieces,
        num_steps=asked.sizes["num_steps"],
        chunks_per_rank=chunks,
        options=options,
        recompute_ahead=found.recompute_ahead,
    )
    partition = plan_even(problem)
    order = problem.order(partition)
    if found.lower is not None:
        schedule = found.lower(order, prefetch=_PREFETCH, **options)
    else:
        schedule = add_steps(order) if order.shape.num_steps > 1 else order
    return schedule, problem.costs(partition)


def _from_order(text: str, times: Mapping[str, float]) -> tuple[Schedule, CostTable]:
    schedule = from_text(text)
    _check_actions(schedule.num_actions)
    if schedule.partition is None:
        if schedule.shape.separate_cuts:
            raise ScheduleError("forward and backward are cut apart; its header must name a partition")
        schedule = schedule.with_partition(symmetric((1,) * schedule.shape.num_stages))
    assert schedule.partition is not None
    known = entries().get(schedule.name)
    layers = constant_times(schedule.partition.num_layers, schedule.shape.num_ranks, **times)
    costs = layers.table(
        schedule.partition,
        recompute_ahead=bool(known and known.recompute_ahead),
        num_head_shards=schedule.shape.num_head_shards,
    )
    return schedule, costs


def _check_actions(number: int) -> None:
    if number > MOST_ACTIONS:
        raise ValueError(
            f"{number:,} forwards: this page times at most {MOST_ACTIONS:,}; the command line takes more, or take "
            "fewer microbatches"
        )


# --- showing ---------------------------------------------------------------------------------------------------


def _shown(asked: Asked, schedule: Schedule, costs: CostTable) -> dict[str, Any]:
    analysis = Analysis(schedule)
    check(analysis)
    timeline = walk(analysis, costs)
    end, ranks = float(makespan(timeline)), range(schedule.shape.num_ranks)
    name = schedule.name or "an order of your own"
    return {
        "schedule": name,
        "source": entry(asked.schedule).source if asked.order is None else "",
        "makespan_ms": end * 1000 / costs.units_per_second,
        "bubble": float(bubble(timeline)),
        "held": held(analysis),
        "busy": [float(timeline.busy(device)) / end for device in ranks],
        "stages": schedule.shape.num_stages,
        "svg": timeline_svg(timeline, name),
        "order": to_text(schedule),
        "command": " ".join(["python -m rpbench", *asked.words]),
    }
