"""Levers: what a change of the machine or the batch brings to a plan, and what would turn the order of two around.

A plan that is made stays as it is while links, memories and devices get faster: its actions are timed again. More
memory and another microbatch are searched anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
# How far a figure may go until an order has turned: four doublings, and then how often an interval is halved.
DOUBLINGS, HALVINGS = 4, 4


class Lever(NamedTuple):
    """What one change brings.

    Args:
        name: the change, for people.
        tokens_per_s: with it, and `gain` over now; None where nothing can be had.
    """

    name: str
    tokens_per_s: float | None
    gain: float | None


class Turn(NamedTuple):
    """How much a figure must change until the runner-up is in front; None: not within a factor of sixteen."""

    name: str
    factor: float | None


@dataclass(frozen=True)
class Timed:
    """A plan with its frame."""

    plan: Tuned
    frame: Frame

    @cached_property
    def costs(self) -> CostTable:
        """Times of all that the plan does."""
        return self.frame.costs(self.plan.partition, self.plan.outcome.keeps)

    def pace(self, change: Callable[[CostTable], CostTable]) -> float:
        """Tokens per second with costs changed."""
        return self.plan.outcome.tokens_per_s * self.plan.outcome.step_time_s / self.frame.paced(change(self.costs))


def changes() -> dict[str, Callable[[float], Callable[[CostTable], CostTable]]]:
    """Figures that can change while a plan stays, each as a function of the factor."""
    return {
        "links": lambda factor: lambda costs: _on(costs, LINKS, factor),
        "host memory bandwidth": lambda factor: lambda costs: _on(costs, HOST, factor),
        "devices": lambda factor: lambda costs: _computing(costs, factor),
    }


def levers_of(winner: Timed, terms: Terms, with_memory: Callable[[], float | None]) -> list[Lever]:
    """What each change brings to a winner, the best first.

    Args:
        with_memory: the pace with twice the memory, asked for behind what is quicker to tell.
    """
    now = winner.plan.outcome.tokens_per_s
    found: list[tuple[str, float | None]]
    found = [(f"{name} twice as fast", winner.pace(change(2.0))) for name, change in changes().items()]
    found.append(_another_microbatch(winner.plan, terms))
    found.append(("twice the device memory", with_memory()))
    levers = [Lever(name, pace, None if pace is None else pace / now - 1) for name, pace in found]
    return sorted(levers, key=lambda lever: -(lever.gain or 0.0))


def turns_of(winner: Timed, runner_up: Timed) -> list[Turn]:
    """How much each figure must change until the second is first."""
    return [Turn(name, _turning(winner, runner_up, change)) for name, change in changes().items()]


def _turning(
    winner: Timed, runner_up: Timed, change: Callable[[float], Callable[[CostTable], CostTable]]
) -> float | None:
    """The factor nearest to 1 that puts the runner-up first.

    A plan gets no slower where a figure gets better, which spares most timings: with a better one the second must pass
    what the first has now, and with a worse one the first must fall below what the second has now.
    """
    first, second = (cache(lambda factor, each=each: each.pace(change(factor))) for each in (winner, runner_up))
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
    """Where between two factors the order turns."""
    for _ in range(HALVINGS):
        middle = (kept * turned) ** 0.5
        kept, turned = (kept, middle) if ahead(middle) else (middle, turned)
    return turned


def _on(costs: CostTable, figures: tuple[str, ...], factor: float) -> CostTable:
    times = costs.transfer_time
    if not isinstance(times, TransferTimes):
        return costs
    known = {name: getattr(times.cluster, name) for name in figures}
    faster = {name: factor * value for name, value in known.items() if value is not None}
    hop = costs.hop / factor if figures is LINKS else costs.hop
    return replace(costs, transfer_time=replace(times, cluster=replace(times.cluster, **faster)), hop=hop)


def _computing(costs: CostTable, factor: float) -> CostTable:
    work = {
        kind: works if kind is Kind.STEP else tuple(own.over(factor) for own in works)
        for kind, works in costs.work.items()
    }
    return replace(costs, work=work)


def pace_with_twice_the_memory(
    plan: Tuned,
    terms: Terms,
    budget: Budget,
    frames: Frames | None = None,
    is_over: Callable[[], bool] | None = None,
) -> float | None:
    """Tokens per second of the best plan then, searched for from this one on.

    A longer search may find a faster plan that needs no more memory. What it gains is no gain of memory: a plan that
    does need more is held against that one.

    Args:
        frames: of the plan's own search.
        is_over: whether time is; what has been found by then counts.

    Returns:
        None where memory has no limit, or there was no time.
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
