"""Levers: what a change of the machine or the batch brings to a plan, and what would reverse the order of two plans.

With faster links, host memory or devices a plan stays as it is and its actions are timed again. More device memory and
one more microbatch are searched anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import log
from typing import NamedTuple

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.action import Kind
from rpbench.plan.contest.contender import space_of
from rpbench.plan.contest.frame import Frame, Frames
from rpbench.plan.contest.plans import Budget, Tuned, rank
from rpbench.plan.contest.search import tune
from rpbench.plan.contest.terms import Limits, Terms

LINKS = (
    "copy_bytes_per_s",
    "host_to_device_bytes_per_s",
    "device_to_host_bytes_per_s",
    "intra_bytes_per_s",
    "collective_bytes_per_s",
    "root_complex_bytes_per_s",
)
HOST = ("host_bytes_per_s", "host_memory_bytes_per_s")
# To find the factor that reverses an order: how often a factor doubles, then how often the interval is halved.
DOUBLINGS, HALVINGS = 4, 4
Change = Callable[[CostTable, float], CostTable]  # the costs with a figure of the machine times a factor


class Lever(NamedTuple):
    """What one change brings."""

    name: str  # the change, for people
    tokens_per_s: float | None  # with the change, and `gain` over now; None if nothing was found
    gain: float | None


class Turn(NamedTuple):
    """The factor of a figure that puts the runner-up first; None: not within a factor of sixteen."""

    name: str
    factor: float | None


@dataclass(frozen=True)
class Timed:
    """A plan and the frame that times it."""

    plan: Tuned
    frame: Frame

    @cached_property
    def costs(self) -> CostTable:
        return self.frame.costs(self.plan.partition, self.plan.outcome.keeps)

    def pace(self, change: Change, factor: float) -> float:
        """Tokens per second with a figure of the machine times a factor."""
        outcome = self.plan.outcome
        return outcome.tokens_per_s * outcome.step_time_s / self.frame.paced(change(self.costs, factor))


def levers_of(winner: Timed, terms: Terms, with_memory: Callable[[], float | None]) -> list[Lever]:
    """What each change brings to a winner, the best first.

    Args:
        with_memory: gives the pace with twice the memory; called last, because it takes longest.
    """
    now = winner.plan.outcome.tokens_per_s
    found: list[tuple[str, float | None]]
    found = [(f"{name} twice as fast", winner.pace(change, 2.0)) for name, change in CHANGES.items()]
    found.append(_another_microbatch(winner.plan, terms))
    found.append(("twice the device memory", with_memory()))
    levers = [Lever(name, pace, None if pace is None else pace / now - 1) for name, pace in found]
    return sorted(levers, key=lambda lever: -(lever.gain or 0.0))


def turns_of(winner: Timed, runner_up: Timed) -> list[Turn]:
    """The factor of each figure that puts the runner-up first."""
    return [Turn(name, _turning(winner, runner_up, change)) for name, change in CHANGES.items()]


def _turning(winner: Timed, runner_up: Timed, change: Change) -> float | None:
    """The factor nearest to 1 that puts the runner-up first.

    A better figure makes no plan slower, which spares most timings: with a better one the second must exceed the
    first's pace of now, with a worse one the first must fall below the second's pace of now.
    """
    first, second = (cache(lambda factor, each=each: each.pace(change, factor)) for each in (winner, runner_up))
    first_now, second_now = (each.plan.outcome.tokens_per_s for each in (winner, runner_up))

    def may_be_ahead(factor: float) -> bool:
        return second(factor) > first_now if factor > 1 else first(factor) < second_now

    def ahead(factor: float) -> bool:
        return may_be_ahead(factor) and second(factor) > first(factor)

    found = []
    for way in (0.5, 2.0):
        if not may_be_ahead(way**DOUBLINGS):
            continue
        kept = 1.0
        for _ in range(DOUBLINGS):
            if ahead(kept * way):
                found.append(_halved(ahead, kept, kept * way))
                break
            kept *= way
    return min(found, key=lambda factor: abs(log(factor)), default=None)


def _halved(ahead: Callable[[float], bool], kept: float, turned: float) -> float:
    """The factor between two others at which the order reverses."""
    for _ in range(HALVINGS):
        middle = (kept * turned) ** 0.5
        kept, turned = (kept, middle) if ahead(middle) else (middle, turned)
    return turned


def _moving(costs: CostTable, factor: float, *, figures: tuple[str, ...]) -> CostTable:
    times = costs.transfer_time
    if not isinstance(times, TransferTimes):
        return costs
    known = {name: getattr(times.cluster, name) for name in figures}
    faster = {name: factor * value for name, value in known.items() if value is not None}
    hop, optimizer = costs.hop, times.optimizer
    if figures is LINKS:
        hop, optimizer = hop / factor, optimizer and replace(optimizer, tied_s=optimizer.tied_s / factor)
    moved = replace(times, cluster=replace(times.cluster, **faster), optimizer=optimizer)
    return replace(costs, transfer_time=moved, hop=hop)


def _computing(costs: CostTable, factor: float) -> CostTable:
    work = {
        kind: works if kind is Kind.STEP else tuple(own.over(factor) for own in works)
        for kind, works in costs.work.items()
    }
    return replace(costs, work=work)


# Figures of a machine that can change while a plan stays.
CHANGES: Mapping[str, Change] = {
    "links": partial(_moving, figures=LINKS),
    "host memory bandwidth": partial(_moving, figures=HOST),
    "devices": _computing,
}


def pace_with_twice_the_memory(
    plan: Tuned,
    terms: Terms,
    budget: Budget,
    frames: Frames | None = None,
    is_over: Callable[[], bool] | None = None,
) -> float | None:
    """Tokens per second of the best plan with twice the memory, searched for from this plan on.

    A longer search may also find a faster plan that needs no more memory. That is no gain of the memory, so plans that
    need more are compared with the best that does not.

    Args:
        frames: of the plan's own search.
        is_over: whether the time is over; what was found by then counts.

    Returns:
        None if memory has no limit, or there was no time.
    """
    limit = terms.limits.device_memory_bytes
    if limit is None or (is_over is not None and is_over()):
        return None
    roomy = replace(terms, limits=Limits(2 * limit, terms.limits.host_memory_bytes))
    space = space_of(plan.contender, roomy).beginning_at(plan.setting)
    known = None if frames is None else frames.under(roomy)
    found = tune(plan.contender, roomy, budget, space, frames=known, is_over=is_over)
    timed = [plan.outcome, found.outcome, *(each.outcome for each in found.tried if each.outcome is not None)]
    fitting = max(rank(each) for each in timed if each.peak_bytes <= limit)
    roomier = max((rank(each) for each in timed if each.peak_bytes > limit), default=0.0)
    return plan.outcome.tokens_per_s * max(1.0, roomier / fitting)


def _another_microbatch(plan: Tuned, terms: Terms) -> tuple[str, float | None]:
    """One more microbatch a step, or one more on every device where the schedule takes no other number."""
    size = plan.setting.microbatch_sequences
    for more in (1, terms.num_devices):
        name = "one more microbatch a step" if more == 1 else f"{more} more microbatches a step"
        longer = replace(terms, sequences_per_step=round(terms.sequences_per_step + more * size), microbatches=(size,))
        try:
            frame = Frame(plan.contender, plan.setting, longer, plan.partition, plan.num_steps)
            outcome = frame.outcome(plan.partition, plan.setting.recompute)
        except ValueError:
            continue
        return name, outcome.tokens_per_s if outcome.fits else None
    return "one more microbatch a step", None
