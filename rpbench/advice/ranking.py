"""Ranking: every contender searched on equal terms under the memory, everything charged, the fastest first."""

import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from rpbench.advice.causes import causes_of
from rpbench.advice.interval import half_width
from rpbench.advice.levers import Lever, Timed, Turn, levers_of, pace_with_twice_the_memory, timed, turns_of
from rpbench.cost.basis import Basis
from rpbench.ir.analysis import replay
from rpbench.ir.policy import Policy
from rpbench.plan.contest.contender import Contender, contenders, why_not_charged
from rpbench.plan.contest.search import Budget, Frames, Tuned, tune
from rpbench.plan.contest.terms import Terms
from rpbench.side_processes import side_processes

# Searched first: what is far behind the best of them is not searched to the end. One of each kind: what streams, what
# is late, what splits backward.
FIRST = ("roundpipe", "pipedream_2bw", "zb_h1", "interleaved_1f1b")
# Then these, in this order: an advice that has to end early has who leads in figure 10, and a bit of everything.
SECOND = (
    *("pipe_offload", "zb_h2", "zb_v", "zero_3", "zero_infinity", "mobius", "interleaved_zb", "xpipe", "dualpipe_v"),
    *("v_half", "zero_2"),
)
UNSEARCHED = "not searched: the time was over; give more seconds"
QUICK = Budget(work=100, climb_work=300_000)


@dataclass(frozen=True)
class Ranked:
    """A plan that fits.

    Args:
        low, high: tokens per second that nine of ten errors of the figures leave.
        staleness_steps: between the weights that a gradient is of and those that it changes.
        why: seconds of a step by cause.
    """

    plan: Tuned
    low: float
    high: float
    staleness_steps: int
    why: Mapping[str, float]

    @property
    def bubble(self) -> float:
        """Share of a step in which devices wait for one another."""
        return self.why["bubble"] / sum(self.why.values())


@dataclass(frozen=True)
class Misfit:
    """A contender whose best plan does not fit, and the bytes that a device or the host lacks."""

    plan: Tuned
    device_lacks_bytes: int
    host_lacks_bytes: int


@dataclass(frozen=True)
class Advice:
    """What to run, and why.

    Args:
        ranking: what fits, the fastest first.
        levers: what changes would bring to the first; `turns` what would put the second in front.
        left_out: contenders that take no part, with the reason.
    """

    terms: Terms
    ranking: tuple[Ranked, ...]
    does_not_fit: tuple[Misfit, ...]
    levers: tuple[Lever, ...]
    turns: tuple[Turn, ...]
    left_out: Mapping[str, str]

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "model": self.terms.model.name,
            "cluster": self.terms.cluster.name,
            "num_devices": self.terms.num_devices,
            "tokens_per_step": self.terms.tokens(self.terms.sequences_per_step),
            "ranking": [_plain_row(row, self.terms) for row in self.ranking],
            "does_not_fit": [_plain_misfit(row) for row in self.does_not_fit],
            "levers": [lever._asdict() for lever in self.levers],
            "order_turns": [turn._asdict() for turn in self.turns],
            "left_out": dict(self.left_out),
        }


def advise(
    terms: Terms,
    basis: Basis,
    *,
    names: Iterable[str] | None = None,
    budget: Budget = QUICK,
    processes: int = 1,
    thorough: bool = False,
    seconds: float | None = None,
) -> Advice:
    """Every schedule's best plan on equal terms, ranked, with its reasons.

    Args:
        basis: the figures and constants behind the terms, for the intervals.
        names: schedules that take part; None: all, and those with a late update once more.
        processes: that search side by side.
        thorough: also search to the end what is far behind.
        seconds: of a processor's time, on each of the processes, after which no further contender's search begins;
            those are left out by name. None: no end. Wall time would make the answer depend on who else is busy.

    Raises:
        ValueError: for an unknown schedule, or if none takes the model and the devices.
    """
    asked = contenders(names)
    left_out = {each.name: reason for each in asked if (reason := why_not_charged(each))}
    taking_part = [each for each in asked if each.name not in left_out]
    rows = _rows(taking_part, terms, basis, budget, processes, thorough, seconds)
    left_out |= {each.name: row for each, row in zip(taking_part, rows, strict=True) if isinstance(row, str)}
    ranking = sorted(
        (row for row in rows if isinstance(row, Ranked)), key=lambda row: row.plan.outcome.tokens_per_s, reverse=True
    )
    misfits = sorted((row for row in rows if isinstance(row, Misfit)), key=lambda row: row.plan.outcome.misfit)
    if not ranking and not misfits:
        raise ValueError("; ".join(left_out.values()) or "no schedule takes part; name at least 1")
    levers, turns = _what_would_change([row.plan for row in ranking[:2]], terms, budget, processes)
    return Advice(terms, tuple(ranking), tuple(misfits), levers, turns, left_out)


def _what_would_change(
    leaders: Sequence[Tuned], terms: Terms, budget: Budget, processes: int
) -> tuple[tuple[Lever, ...], tuple[Turn, ...]]:
    """Levers of the first, and what would put the second before it; the search for more memory runs beside the rest."""
    if not leaders:
        return (), ()
    search: Callable[[], float | None] = partial(pace_with_twice_the_memory, leaders[0], terms, budget)
    with ExitStack() as stack:
        if processes > 1 and hasattr(os, "fork"):
            pool = stack.enter_context(side_processes(1, "fork", _inherited.append, search))
            search = pool.submit(_search_inherited).result
        frames = [timed(plan, terms) for plan in leaders]
        turns = tuple(turns_of(*frames)) if len(frames) > 1 else ()
        return tuple(levers_of(frames[0], terms, search)), turns


_inherited: list[Callable[[], float | None]] = []  # of a process that searches: copied at the fork


def _search_inherited() -> float | None:
    return _inherited[-1]()


# --- searches side by side -----------------------------------------------------------------------------------


class _Task(NamedTuple):
    contender: Contender
    terms: Terms
    basis: Basis
    budget: Budget
    to_beat: float | None
    seconds: float | None = None  # of a processor, that the searches of this process may take


_Row = Ranked | Misfit | str  # or why there is no plan

_tasks: list[_Task] = []  # of the processes that search: copied at the fork


def _rows(
    asked: Sequence[Contender],
    terms: Terms,
    basis: Basis,
    budget: Budget,
    processes: int,
    thorough: bool,
    seconds: float | None,
) -> list[_Row]:
    """The row of each contender: a few first, which the others are measured by."""
    began = _spent(processes)

    def search(chosen: Sequence[Contender], to_beat: float | None, side_by_side: int) -> None:
        left = None if seconds is None else seconds - (_spent(processes) - began)
        tasks = [_Task(each, terms, basis, budget, to_beat, left) for each in chosen]
        rows.update(zip(chosen, _searched(tasks, side_by_side), strict=True))

    rows: dict[Contender, _Row] = {}
    first = [each for each in asked if each.entry.name in FIRST]
    others = sorted((each for each in asked if each not in first), key=_place)
    search(others[:1], None, 1)  # in this process: the kernels that it loads are there for those that it is copied to
    search(first, None, processes)
    paces = [row.plan.outcome.tokens_per_s for row in rows.values() if isinstance(row, Ranked)]
    search(others[1:], None if thorough or not paces else max(paces), processes)
    return [rows[each] for each in asked]


def _spent(processes: int) -> float:
    """Processor time of this process, and what falls to each of those that it waited for."""
    user, system, of_children, system_of_children, _ = os.times()
    return user + system + (of_children + system_of_children) / processes


def _place(each: Contender) -> int:
    order = ("1f1b", *SECOND)
    return order.index(each.entry.name) if each.entry.name in order else len(order)


def _searched(tasks: Sequence[_Task], processes: int) -> list[_Row]:
    _start_clock()
    if processes < 2 or len(tasks) < 2 or not hasattr(os, "fork"):
        return [_row(task) for task in tasks]
    _tasks[:] = tasks
    with side_processes(processes, "fork", _start_clock) as pool:
        rows = list(pool.map(_row_without_contender, range(len(tasks))))
    _tasks.clear()
    return [
        row if isinstance(row, str) else replace(row, plan=replace(row.plan, contender=task.contender))
        for task, row in zip(tasks, rows, strict=True)
    ]


_began = [0.0]  # processor time of this process when its searches began


def _start_clock() -> None:
    _began[0] = time.process_time()


def _row_without_contender(number: int) -> _Row:
    """In a process of its own: what a schedule declares stays behind, for functions do not travel."""
    row = _row(_tasks[number])
    if isinstance(row, str):
        return row
    return replace(row, plan=replace(row.plan, contender=None))  # type: ignore[arg-type]


def _row(task: _Task) -> _Row:
    if task.seconds is not None and time.process_time() - _began[0] > task.seconds:
        return UNSEARCHED
    was_on = gc.isenabled()
    gc.disable()  # schedules are many small tuples in no circle
    try:
        frames = Frames(task.contender, task.terms)
        plan = tune(task.contender, task.terms, task.budget, to_beat=task.to_beat, frames=frames)
        if not plan.outcome.fits:
            return _misfit(plan, task.terms)
        return _ranked(Timed(plan, frames.of_plan(plan)), task.terms, task.basis)
    except ValueError as error:
        return str(error)
    finally:
        if was_on:
            gc.enable()


# --- rows ----------------------------------------------------------------------------------------------------


def _ranked(each: Timed, terms: Terms, basis: Basis) -> Ranked:
    plan, frame = each.plan, each.frame
    why = causes_of(frame, plan.partition, plan.outcome.keeps)
    tokens = terms.tokens(plan.setting.microbatch_sequences)
    factor = half_width(why, terms.model, tokens, basis, terms.source)
    pace = plan.outcome.tokens_per_s
    late = 0 if frame.schedule.policy is Policy.FLUSH else replay(frame.schedule).max_staleness
    return Ranked(plan, pace / factor, pace * factor, late, why)


def _misfit(plan: Tuned, terms: Terms) -> Misfit:
    limits, outcome = terms.limits, plan.outcome
    device = limits.device_memory_bytes or outcome.peak_bytes
    host = limits.host_memory_bytes or outcome.host_bytes
    return Misfit(plan, max(0, outcome.peak_bytes - device), max(0, outcome.host_bytes - host))


def _plain_row(row: Ranked, terms: Terms) -> dict[str, Any]:
    plan = row.plan
    return {
        "schedule": plan.contender.name,
        "options": _plain_options(plan),
        "tokens_per_s": plan.outcome.tokens_per_s,
        "tokens_per_s_low": row.low,
        "tokens_per_s_high": row.high,
        "peak_memory_bytes": plan.outcome.peak_bytes,
        "host_memory_bytes": plan.outcome.host_bytes,
        "bubble": row.bubble,
        "staleness_steps": row.staleness_steps,
        "why": dict(row.why),
        "command": command_of(plan, terms),
        "work": plan.work,
        "budget": plan.budget.work,
    }


def _plain_misfit(row: Misfit) -> dict[str, Any]:
    return {
        "schedule": row.plan.contender.name,
        "options": _plain_options(row.plan),
        "peak_memory_bytes": row.plan.outcome.peak_bytes,
        "device_lacks_bytes": row.device_lacks_bytes,
        "host_lacks_bytes": row.host_lacks_bytes,
    }


def _plain_options(plan: Tuned) -> dict[str, Any]:
    setting = plan.setting
    return {
        **dict(setting.options),
        "microbatch_sequences": setting.microbatch_sequences,
        "chunks_per_device": setting.chunks_per_device,
        "recompute": setting.recompute,
        "keeps": list(plan.outcome.keeps),
        "prefetch": setting.prefetch,
        "partition": str(plan.partition),
    }


def command_of(plan: Tuned, terms: Terms) -> str:
    """The command line that simulates a plan with everything charged."""
    words = [
        f"schedule={plan.contender.entry.name}",
        f"model={terms.model.name}",
        f"cluster={terms.cluster.name}",
        f"cost={terms.source}",
        *(["cost.split_backward=true", "cost.fused_ahead=false"] if terms.source == "published" else []),
        f"num_devices={terms.num_devices}",
        f"num_microbatches={terms.num_microbatches(plan.setting.microbatch_sequences)}",
        f"num_steps={terms.num_steps}",
        f"'partition=\"{plan.partition}\"'",
        "charge=bytes",
        "offload=auto",
        *plan.setting.overrides(),
    ]
    return "python -m rpbench " + " ".join(words)
