"""Limits: the largest value that a contender still holds, as a search says that is asked again and again.

A bound on the memory of every plan (`rpbench.plan.contest.bounds`) says at once which values cannot be held. Below it a
search looks for a plan that fits: halving down until there is one, then between what fits and what does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from rpbench.advice.side_searches import Clock
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.plans import Budget, Tuned
from rpbench.plan.contest.search import Search, tune
from rpbench.plan.contest.terms import Terms

FINENESS = 16  # a limit is told to one part in so many
BUDGET = Budget(work=60, climb_work=100_000)
SECONDS = 3.0  # of a processor, for one search


@dataclass(frozen=True)
class Limit:
    """The largest value that a contender holds.

    Args:
        value: with a plan that fits; 0: none was found for any.
        beyond: the least value that was tried without success; None: the largest that there is fits.
        is_proven: whether a bound says that no plan fits beyond.
        found: the plan, as whoever asked has it; None where there is none.
    """

    name: str
    value: int
    beyond: int | None
    is_proven: bool
    found: Any


def largest(
    name: str, held: Callable[[int], Any], step: int, most: int, can_hold: Callable[[int], bool] | None = None
) -> Limit:
    """The largest multiple of a step, up to a most, for which there is a plan.

    Args:
        held: the plan for a value; None where none is found.
        can_hold: False for values that a bound excludes; it is asked first, and costs less.
    """
    held = cache(held)
    top, excluded = most // step * step, None
    if can_hold is not None:
        top, excluded = _between(can_hold, 0, top, step)
    if top and held(top) is not None:
        return Limit(name, top, excluded, excluded is not None, held(top))
    low = top
    while low and (low == top or held(low) is None):
        top, low = low, low // 2 // step * step
    if not low:
        return Limit(name, 0, top or excluded or step, not top, None)
    low, top = _refined(lambda value: held(value) is not None, low, top, step)
    return Limit(name, low, top, False, held(low))


def _between(good: Callable[[int], bool], low: int, most: int, step: int) -> tuple[int, int | None]:
    """A value that is good and the next one tried that is not, by doubling and halving; None: the most is good."""
    top = step
    while good(top):
        low = top
        if top == most:
            return most, None
        top = min(2 * top, most)
    return _refined(good, low, top, step)


def _refined(good: Callable[[int], bool], low: int, top: int, step: int) -> tuple[int, int]:
    while top - low > max(step, low // FINENESS):
        middle = (low + top) // 2 // step * step
        if middle in (low, top):
            break
        low, top = (middle, top) if good(middle) else (low, middle)
    return low, top


def limit_of(contender: Contender, terms_at: Callable[[int], Terms], step: int, most: int) -> Limit:
    """The limit of a contender on one host.

    Args:
        terms_at: of a value; its microbatches are what a plan may choose from.
    """

    def can_hold(value: int) -> bool:
        terms = terms_at(value)
        room = terms.limits.device_memory_bytes
        return room is None or Search(contender, terms, BUDGET).least_bytes <= room

    def held(value: int) -> Tuned | None:
        clock = Clock()
        clock.allow(SECONDS)
        try:
            plan = tune(contender, terms_at(value), BUDGET, is_over=clock.is_over)
        except ValueError:  # time was over, or the order does not take such sizes
            return None
        return plan if plan.outcome.fits else None

    return largest(contender.name, held, step, most, can_hold)
