"""Ranking: every contender searched on equal terms under the memory, everything charged, the fastest first."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from rpbench.advice.causes import causes_of
from rpbench.advice.interval import half_width
from rpbench.advice.levers import Lever, Timed, Turn, levers_of, pace_with_twice_the_memory, turns_of
from rpbench.advice.side_searches import CHANGING, Side, bare, compile_kernels, dealt
from rpbench.cost.basis import Basis
from rpbench.ir.analysis import replay
from rpbench.ir.policy import Policy
from rpbench.plan.contest.contender import Contender, contenders, why_not_charged
from rpbench.plan.contest.frames import Frames
from rpbench.plan.contest.plans import Budget, Tuned
from rpbench.plan.contest.search import OUT_OF_TIME
from rpbench.plan.contest.terms import Terms

# Looked at first, in this order: who leads in figure 10, then a bit of everything, so that an advice that has to end
# early has it.
FIRST = (
    *("roundpipe", "pipe_offload", "1f1b", "pipedream_2bw", "zb_h1", "interleaved_1f1b", "zb_h2", "interleaved_zb"),
    *(
        "dapple",
        "zero_3",
        "zero_infinity",
        "mobius",
        "xpipe",
        "dualpipe_v",
        "zero_2",
        "stp",
        "greedysnake",
        "zero_offload",
    ),
)
# Looked at last: they take the longest, and are seldom among the first two (AdaPtis is second of Llama-3.1-8B on H100).
LAST = (*("zb_auto", "chimera", "megatrain", "zb_v", "v_half", "v_min", "hanayo", "megatron_tp", "adaptis"),)
UNSEARCHED = OUT_OF_TIME
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
    """A contender without a plan that fits.

    Args:
        plan: the one that lacks least, `device_lacks_bytes` of a device and `host_lacks_bytes` of the host.
        is_proven: whether a bound says that no plan fits; otherwise the search has found none.
    """

    plan: Tuned
    device_lacks_bytes: int
    host_lacks_bytes: int
    is_proven: bool


@dataclass(frozen=True)
class Advice:
    """What to run, and why.

    Args:
        ranking: what fits, the fastest first; without `late` only what trains exactly as plain training does.
        ranking_late: the others, whose gradients are of older weights; empty where they are in the ranking.
        does_not_fit: contenders without a plan that fits, those that lack least first.
        levers: what changes would bring to the first; `turns` what would put the second in front.
        left_out: contenders that take no part, with the reason.
    """

    terms: Terms
    ranking: tuple[Ranked, ...]
    does_not_fit: tuple[Misfit, ...]
    levers: tuple[Lever, ...]
    turns: tuple[Turn, ...]
    left_out: Mapping[str, str]
    ranking_late: tuple[Ranked, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "model": self.terms.model.name,
            "cluster": self.terms.cluster.name,
            "num_devices": self.terms.num_devices,
            "tokens_per_step": self.terms.tokens(self.terms.sequences_per_step),
            "ranking": [_plain_row(row, self.terms) for row in self.ranking],
            "ranking_late": [_plain_row(row, self.terms) for row in self.ranking_late],
            "does_not_fit": [_plain_misfit(row) for row in self.does_not_fit if row.is_proven],
            "none_found": [_plain_misfit(row) for row in self.does_not_fit if not row.is_proven],
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
) -> Advice:
    """Every schedule's best plan on equal terms, ranked, with its reasons.

    Args:
        basis: the figures and constants behind the terms, for the intervals.
        names: schedules that take part; None: all, and those with a late update once more.
        processes: that search side by side.
        thorough: also search to the end what is far behind.
        seconds: of a processor's time, on each of the processes, for the searches. What was searched in part is ranked
            with what was found; what has not begun is left out by name. None: no end. Wall time would make the
            answer depend on who else is busy.
        late: whether methods whose gradients are of older weights join the ranking; otherwise they have their own.

    Raises:
        ValueError: for an unknown schedule, or if none takes the model and the devices.
    """
    asked = contenders(names)
    left_out = {each.name: reason for each in asked if (reason := why_not_charged(each))}
    taking_part = sorted((each for each in asked if each.name not in left_out), key=_place)
    if seconds is not None:
        compile_kernels(terms, basis)
    with ExitStack() as stack:
        sides = dealt(taking_part, terms, budget, partial(_row, terms, basis), processes, stack)
        rows = _searched(taking_part, sides, thorough, seconds) if taking_part else {}
        left_out |= {taking_part[number].name: row for number, row in rows.items() if isinstance(row, str)}
        ranked = sorted(
            ((number, row) for number, row in rows.items() if isinstance(row, Ranked)),
            key=lambda pair: (-pair[1].plan.outcome.tokens_per_s, pair[0]),
        )
        misfits = sorted((row for row in rows.values() if isinstance(row, Misfit)), key=_misfit_of)
        if not ranked and not misfits:
            raise ValueError("; ".join(left_out.values()) or "no schedule takes part; name at least 1")
        first = [(number, row) for number, row in ranked if late or not row.staleness_steps]
        levers, turns = _what_would_change([(number, row.plan) for number, row in first[:2]], sides, seconds)
    others = tuple(row for _, row in ranked if not late and row.staleness_steps)
    return Advice(terms, tuple(row for _, row in first), tuple(misfits), levers, turns, left_out, others)


# --- searches side by side -----------------------------------------------------------------------------------

_Row = Ranked | Misfit | str  # or why there is no plan


def _searched(
    asked: Sequence[Contender], sides: Sequence[Side], thorough: bool, seconds: float | None
) -> dict[int, _Row]:
    """The row of each contender: a first look at all, then the searches, the most promising first."""
    limit = inf if seconds is None else seconds
    waiting = [side.call("look", limit) for side in sides]
    looked = [wait() for wait in waiting]
    glances = {number: glance for found, _ in looked for number, glance in found.items()}
    pace = max(glance.pace for glance in glances.values())
    order = sorted((number for number in glances if not glances[number].remark), key=lambda n: -glances[n].hope)
    left = limit - max(spent for _, spent in looked)
    waiting = [
        side.call(
            "finish", [each for each in order if each in side.share.numbers], None if thorough else pace or None, left
        )
        for side in sides
    ]
    rows: dict[int, _Row] = {number: glance.remark for number, glance in glances.items()}
    for wait in waiting:
        rows |= wait()
    return {number: _whole(row, asked[number]) for number, row in rows.items()}


def _whole(row: _Row, who: Contender) -> _Row:
    """The row with its contender, which does not travel."""
    return row if isinstance(row, str) else replace(row, plan=replace(row.plan, contender=who))


def _what_would_change(
    leaders: Sequence[tuple[int, Tuned]], sides: Sequence[Side], seconds: float | None
) -> tuple[tuple[Lever, ...], tuple[Turn, ...]]:
    """Levers of the first, told where its frame is, and beside it what would put the second before it."""
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


def _place(each: Contender) -> int:
    """Where in the order of first looks a contender has its turn."""
    known = (*FIRST, *LAST)
    if each.entry.name not in known:
        return len(FIRST)
    place = known.index(each.entry.name)
    return place if place < len(FIRST) else place + 1


def _row(terms: Terms, basis: Basis, plan: Tuned, frames: Frames) -> Ranked | Misfit:
    if not plan.outcome.fits:
        return _misfit(plan, terms)
    return _ranked(Timed(plan, frames.of_plan(plan)), terms, basis)


# --- rows ----------------------------------------------------------------------------------------------------


def _ranked(each: Timed, terms: Terms, basis: Basis) -> Ranked:
    plan, frame = each.plan, each.frame
    why = causes_of(frame, plan.partition, plan.outcome.keeps)
    tokens = terms.tokens(plan.setting.microbatch_sequences)
    factor = half_width(why, terms, tokens, basis)
    pace = plan.outcome.tokens_per_s
    late = 0 if frame.schedule.policy is Policy.FLUSH else replay(frame.schedule).max_staleness
    return Ranked(plan, pace / factor, pace * factor, late, why)


def _misfit_of(row: Misfit) -> float:
    return row.plan.outcome.misfit


def _misfit(plan: Tuned, terms: Terms) -> Misfit:
    limits, outcome = terms.limits, plan.outcome
    device = limits.device_memory_bytes or outcome.peak_bytes
    host = limits.host_memory_bytes or outcome.host_bytes
    is_proven = limits.device_memory_bytes is not None and plan.least_bytes > limits.device_memory_bytes
    return Misfit(plan, max(0, outcome.peak_bytes - device), max(0, outcome.host_bytes - host), is_proven)


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
        "searched_to_the_end": plan.is_whole,
    }


def _plain_misfit(row: Misfit) -> dict[str, Any]:
    return {
        "schedule": row.plan.contender.name,
        "options": _plain_options(row.plan),
        "least_memory_bytes": row.plan.least_bytes,
        "peak_memory_bytes": row.plan.outcome.peak_bytes,
        "device_lacks_bytes": row.device_lacks_bytes,
        "host_lacks_bytes": row.host_lacks_bytes,
        "searched_to_the_end": row.plan.is_whole,
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
