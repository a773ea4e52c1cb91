"""Ranking: every contender searched on equal terms under the memory, everything charged, the fastest first."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any

from rpbench.advice.causes import causes_of
from rpbench.advice.interval import compute_reach, half_width, ratio_reach, shared_errors
from rpbench.advice.levers import Lever, Timed, Turn, levers_of, pace_with_twice_the_memory, turns_of
from rpbench.advice.probing import leading
from rpbench.advice.rows import (
    NONE_RUNS,
    Misfit,
    Ranked,
    as_run_by,
    contender_runs_in,
    parameters,
    plain_misfit,
    plain_row,
)
from rpbench.advice.side_searches import CHANGING, Glance, Side, bare, compile_kernels, dealt
from rpbench.cost.footprint.replicas import ssd_bytes
from rpbench.cost.hardware.basis import Basis
from rpbench.ir.checks.residency import moves_activations
from rpbench.ir.partition import filled, symmetric
from rpbench.ir.policy import Policy
from rpbench.plan.contest.contender import Contender, contenders, space_of
from rpbench.plan.contest.frame import Frame, Frames, posed
from rpbench.plan.contest.plans import Budget, Tuned, rank
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import plain_partitions, promising_counts

# Looked at first, in this order: the leaders of figure 10, and one of every kind. The others begin near their plans.
FIRST = (
    *("roundpipe", "1f1b", "zero_3", "interleaved_1f1b", "pipedream_2bw", "dualpipe_v", "zero_infinity", "mobius"),
    *("xpipe", "zero_2", "greedysnake", "zero_offload", "pipelined_backprop"),
)
# Looked at last: they take the longest, and are seldom among the first two (AdaPtis is second of Llama-3.1-8B on H100).
LAST = (*("megatron_tp", "megatrain", "zb_v", "v_half", "v_min", "hanayo", "chimera", "zb_auto", "adaptis"),)
PLAIN = "data_parallel"  # plain training, where there is one device
AS_PLAIN = f"on one device it is plain training, as {PLAIN} is"
BESIDE = 4  # cuts without empty stages that are timed beside one with some
QUICK = Budget(work=100, climb_work=300_000)


@dataclass(frozen=True)
class Advice:
    """What to run, and why."""

    terms: Terms
    # plans that fit, the fastest first; without `late` only of methods that train exactly as plain training
    ranking: tuple[Ranked, ...]
    does_not_fit: tuple[Misfit, ...]  # contenders without a plan that fits, those that lack least first
    levers: tuple[Lever, ...]  # what changes would bring to the first; `turns`: what would put the second first
    turns: tuple[Turn, ...]
    left_out: Mapping[str, str]  # contenders that take no part, with the reason
    # the others, whose gradients are of older weights; empty if they are in the ranking
    ranking_late: tuple[Ranked, ...] = ()
    framework: str | None = None  # that plans are written for; None: the first that runs one

    def plain(self) -> dict[str, Any]:
        return {
            "model": self.terms.model.name,
            "cluster": self.terms.cluster.name,
            "num_devices": self.terms.num_devices,
            "parameters": parameters(self.terms.model),
            "device_memory_bytes": self.terms.limits.device_memory_bytes,
            "tokens_per_step": self.terms.tokens(self.terms.sequences_per_step),
            "ranking": [plain_row(row, self.terms, self.framework) for row in self.ranking],
            "ranking_late": [plain_row(row, self.terms, self.framework) for row in self.ranking_late],
            "does_not_fit": [plain_misfit(row) for row in self.does_not_fit if row.is_proven],
            "none_found": [plain_misfit(row) for row in self.does_not_fit if not row.is_proven],
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
    late: bool = False,
    framework: str | None = None,
) -> Advice:
    """Every schedule's best plan on equal terms, ranked, with reasons.

    Raises ValueError for an unknown schedule, or if none takes the model and the devices.

    Args:
        basis: the figures and constants behind the terms, for the intervals.
        names: schedules that take part; None: all, and those with a late update once more.
        processes: that search side by side.
        thorough: also search contenders that are far behind to the end.
        seconds: processor time of each process for the searches; None: no limit. A search that was cut short is ranked
            with what it found; one that did not begin is left out by name. With wall time the answer would depend on
            other load.
        framework: only schedules that run there today; None: all.
        late: whether methods with gradients of older weights join the ranking; otherwise they have their own.
    """
    asked = contenders(names)
    if framework is not None:
        asked = [as_run_by(each, framework) for each in asked if framework in contender_runs_in(each, terms)]
    if not asked:
        raise ValueError(NONE_RUNS.format(framework))
    left_out = dict[str, str]()
    if names is None and terms.num_devices == 1:
        left_out = {each.name: AS_PLAIN for each in asked if each.name != PLAIN and not _uses_the_host(each, terms)}
    taking_part = sorted((each for each in asked if each.name not in left_out), key=_place)
    if seconds is not None:
        compile_kernels(terms, basis)
    with ExitStack() as stack:
        sides = dealt(taking_part, terms, budget, partial(_row, terms, basis, {}), processes, stack)
        rows = _searched(taking_part, sides, thorough, seconds) if taking_part else {}
        left_out |= {taking_part[number].name: row for number, row in rows.items() if isinstance(row, str)}
        ranked = sorted(
            ((number, row) for number, row in rows.items() if isinstance(row, Ranked)),
            key=lambda pair: (-pair[1].plan.outcome.tokens_per_s, pair[0]),
        )
        misfits = sorted(
            (row for row in rows.values() if isinstance(row, Misfit)), key=lambda row: row.plan.outcome.misfit
        )
        if not ranked and not misfits:
            raise ValueError("; ".join(left_out.values()) or "no schedule takes part; name at least 1")
        first = [(number, row) for number, row in ranked if late or not row.staleness_steps]
        levers, turns = _what_would_change([(number, row.plan) for number, row in first[:2]], sides, seconds)
    others = tuple(row for _, row in ranked if not late and row.staleness_steps)
    apart = _beside_the_first([row for _, row in first], terms, basis)
    return Advice(terms, apart, tuple(misfits), levers, turns, left_out, others, framework)


def _beside_the_first(rows: Sequence[Ranked], terms: Terms, basis: Basis) -> tuple[Ranked, ...]:
    """The rows, each with how far the ratio of its pace to the first row's may be off."""
    if not rows:
        return ()
    first = rows[0]
    shared = shared_errors(terms, terms.tokens(first.plan.setting.microbatch_sequences), basis)
    others = [replace(row, ratio_reach=ratio_reach(first.why, row.why, shared)) for row in rows[1:]]
    return (first, *others)


# --- searches side by side -----------------------------------------------------------------------------------

_Row = Ranked | Misfit | str  # or why there is no plan


def _searched(
    asked: Sequence[Contender], sides: Sequence[Side], thorough: bool, seconds: float | None
) -> dict[int, _Row]:
    """The row of each contender: a first look at all, then the searches, the most promising first."""
    limit = inf if seconds is None else seconds
    num_first = sum(each.entry.name in FIRST for each in asked)
    glances, spent = dict[int, Glance](), 0.0
    for part in (range(num_first), range(num_first, len(asked))):  # the others begin near the plans of the first
        loans = leading(glance.loan for glance in glances.values())
        shares = [[number for number in side.share.numbers if number in part] for side in sides]
        later = [sum(number >= part.stop for number in side.share.numbers) for side in sides]
        waiting = [
            side.call("look", limit, own, left, loans) for side, own, left in zip(sides, shares, later, strict=True)
        ]
        for wait in waiting:
            found, spent_there = wait()
            glances |= found
            spent = max(spent, spent_there)
    pace = max(glance.pace for glance in glances.values())
    order = sorted((number for number in glances if not glances[number].remark), key=lambda n: -glances[n].hope)
    left = limit - spent
    loans, to_beat = leading(glance.loan for glance in glances.values()), None if thorough else pace or None
    going = [
        side.call("go_by_turns", [each for each in order if each in side.share.numbers], to_beat, left, loans)
        for side in sides
    ]
    loans = leading(loan for wait in going for loan in wait())
    finishing = [side.call("finish", to_beat, loans) for side in sides]
    rows: dict[int, _Row] = {number: glance.remark for number, glance in glances.items()}
    for found in finishing:
        rows |= found()
    return {number: _whole(row, asked[number]) for number, row in rows.items()}


def _whole(row: _Row, who: Contender) -> _Row:
    """The row with its contender, which is not sent between processes."""
    if isinstance(row, str):
        return row
    found = replace(row, plan=replace(row.plan, contender=who))
    if isinstance(found, Ranked) and found.filled is not None:
        found = replace(found, filled=replace(found.filled, contender=who))
    return found


def _what_would_change(
    leaders: Sequence[tuple[int, Tuned]], sides: Sequence[Side], seconds: float | None
) -> tuple[tuple[Lever, ...], tuple[Turn, ...]]:
    """Levers of the first, computed in the process with its frame, and what would put the second first."""
    if not leaders:
        return (), ()
    limit = inf if seconds is None else CHANGING * seconds
    known = [(number, bare(plan)) for number, plan in leaders]
    own = next(side for side in sides if leaders[0][0] in side.share.numbers)
    levers = own.call("change", _levers, known[:1], limit)
    if len(known) < 2:
        return tuple(levers()), ()
    other = next((side for side in sides if side is not own), own)
    turns = other.call("change", _turns, known, limit)
    return tuple(levers()), tuple(turns())


def _levers(
    plans: Sequence[Tuned], frames: Sequence[Frames], terms: Terms, budget: Budget, is_over: Callable[[], bool]
) -> list[Lever]:
    (plan,), (known,) = plans, frames
    roomy = partial(pace_with_twice_the_memory, plan, terms, budget, known, is_over)
    return levers_of(Timed(plan, known.of_plan(plan)), terms, roomy)


def _turns(
    plans: Sequence[Tuned], frames: Sequence[Frames], terms: Terms, budget: Budget, is_over: Callable[[], bool]
) -> list[Turn]:
    first, second = (Timed(plan, known.of_plan(plan)) for plan, known in zip(plans, frames, strict=True))
    return turns_of(first, second)


def _uses_the_host(each: Contender, terms: Terms) -> bool:
    """Whether a schedule keeps something in host memory: on one device all others compute the same."""
    space = space_of(each, terms)
    chunks = [changed for dimension, changed in space.changes(space.first) if dimension == "chunks_per_device"]
    for setting in (space.first, *chunks):
        with suppress(ValueError):  # the schedule does not take one device, or the setting
            problem = posed(each, setting, terms, 1)
            cut = plain_partitions(problem, promising_counts(problem)[0])[0]
            schedule = Frame(each, setting, terms, cut, 1).schedule
            if any("host" in lanes for lanes in schedule.lanes) or moves_activations(schedule):
                return True
    return False


def _place(each: Contender) -> int:
    """A contender's place in the order of first looks."""
    known = (*FIRST, *LAST)
    if each.entry.name not in known:
        return len(FIRST)
    place = known.index(each.entry.name)
    return place if place < len(FIRST) else place + 1


def _row(terms: Terms, basis: Basis, reaches: dict[float, float], plan: Tuned, frames: Frames) -> Ranked | Misfit:
    if not plan.outcome.fits:
        return _misfit(plan, terms)
    tokens = terms.tokens(plan.setting.microbatch_sequences)
    if tokens not in reaches:  # rows of one microbatch size share it
        reaches[tokens] = compute_reach(terms, tokens, basis)
    ranked = _ranked(Timed(plan, frames.of_plan(plan)), reaches[tokens], basis)
    return replace(ranked, filled=_filled(plan, frames))


def _filled(plan: Tuned, frames: Frames) -> Tuned | None:
    """The best similar plan without empty stages, which some frameworks cannot run; None if this one has none."""
    counts = plan.partition.forward
    if 0 not in counts[1:-1] or plan.partition.forward != plan.partition.backward:
        return None
    found = []
    for beside in islice(filled(counts), BESIDE):
        other = replace(plan, partition=symmetric(beside))
        with suppress(ValueError):  # an order that follows from times may not take the setting
            outcome = frames.of_plan(other).outcome(other.partition, plan.setting.recompute)
            found.append(bare(replace(other, outcome=outcome)))
    return max(found, key=lambda each: rank(each.outcome), default=None)


# --- rows ----------------------------------------------------------------------------------------------------


def _ranked(each: Timed, reach: float, basis: Basis) -> Ranked:
    plan, frame = each.plan, each.frame
    sequences, causes = plan.setting.microbatch_sequences, causes_of(frame, plan.partition, plan.outcome.keeps)
    updates = frame.terms.num_microbatches(sequences) / frame.schedule.shape.num_microbatches  # in a step of the answer
    why = {name: updates * seconds for name, seconds in causes.items()}
    factor = half_width(why, reach, basis)
    pace = plan.outcome.tokens_per_s
    late = 0 if frame.schedule.policy is Policy.FLUSH else frame.graph.analysis.versions.max_staleness
    memory = frame.memory(plan.partition, plan.outcome.keeps, plan.setting.recompute)
    sizes = frame.terms.sizes(sequences)
    ssd = ssd_bytes(frame.schedule.on_ssd, sizes.under(frame.schedule))
    return Ranked(plan, pace / factor, pace * factor, late, why, memory, ssd)


def _misfit(plan: Tuned, terms: Terms) -> Misfit:
    limits, outcome = terms.limits, plan.outcome
    device = limits.device_memory_bytes or outcome.peak_bytes
    host = limits.host_memory_bytes or outcome.host_bytes
    lacks = max(0, outcome.peak_bytes - device), max(0, outcome.host_bytes - host)
    return Misfit(plan, *lacks, limits.are_below(plan.least_bytes, plan.least_host_bytes))
