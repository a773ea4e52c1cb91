"""Limits: the largest value that a contender still holds, as a search says that is asked again and again.

A bound on the memory of every plan (`rpbench.plan.contest.bounds`) says at once which values cannot be held. Below it a
search looks for a plan that fits: halving down until there is one, then between what fits and what does not. The same
the other way round: the least memory with which something fits where nothing does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from rpbench.advice.rows import Misfit
from rpbench.advice.side_searches import Clock
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.plans import Budget, Tuned
from rpbench.plan.contest.search import Search, tune
from rpbench.plan.contest.terms import Terms

FINENESS = 16  # a limit is told to one part in so many
BUDGET = Budget(work=60, climb_work=100_000)
SECONDS = 3.0  # of a processor, for one search
CHANGING = 0.4  # of the time of an advice, for the least memory of both kinds; what is told fits, and less may do
NEAR = 100_000_000  # bytes between what fits and what does not, below which nobody looks on
Memory = Literal["device_memory_bytes", "host_memory_bytes"]


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
        return not Search(contender, terms_at(value), BUDGET).is_ruled_out

    return largest(contender.name, lambda value: _held(contender, terms_at(value)), step, most, can_hold)


def _held(contender: Contender, terms: Terms, seconds: float = SECONDS) -> Tuned | None:
    """A plan that fits, if one is found in time."""
    try:
        plan = tune(contender, terms, BUDGET, is_over=Clock(seconds).is_over)
    except ValueError:  # time was over, or the order does not take such sizes
        return None
    return plan if plan.outcome.fits else None


# --- the least memory ----------------------------------------------------------------------------------------


class More(NamedTuple):
    """So many more bytes of one memory with which a schedule fits."""

    kind: Memory
    lacks_bytes: int
    schedule: str


def least_more(misfits: Sequence[Misfit], terms: Terms, seconds: float) -> list[More]:
    """The least more of a device's memory, and of the host's, with which something fits, the smaller first.

    What the plans that were found need is enough. Less may be: schedules are asked in the order of what a bound says
    that they need; those that need more than is known to be enough are not.

    Args:
        misfits: of all that take part, none of which fits.
        seconds: of a processor, that the searches may take.
    """
    clock, found = Clock(), list[More | None]()
    kinds: tuple[Memory, ...] = ("device_memory_bytes", "host_memory_bytes")
    for place, kind in enumerate(kinds, 1):
        clock.allow(seconds * place / len(kinds))
        found.append(_least_of(kind, misfits, terms, clock))
    return sorted((each for each in found if each is not None), key=lambda more: more.lacks_bytes)


def _least_of(kind: Memory, misfits: Sequence[Misfit], terms: Terms, clock: Clock) -> More | None:
    limit: int | None = getattr(terms.limits, kind)
    if limit is None:
        return None
    of_device = kind == "device_memory_bytes"
    # As much as a plan needs that lacks nothing else is enough.
    known = [(_needs(kind, row.plan), row) for row in misfits if not _other_lack(of_device, row)]
    best, first = min(known, key=lambda pair: pair[0], default=(0, None))
    name = first.plan.contender.name if first else ""
    floors = [max(limit, row.plan.least_bytes if of_device else row.plan.least_host_bytes) for row in misfits]
    asked = zip(floors, misfits, strict=True)
    for floor, row in sorted(asked, key=lambda pair: (_needs(kind, pair[1].plan), pair[0])):
        if clock.is_over():
            break
        if best and floor >= best:
            continue
        if _other_lack(of_device, row) and floor == limit:
            continue  # it lacks both, or the other one
        enough = _enough(kind, row, terms, floor, best, clock)
        if enough:
            best, name = enough, row.plan.contender.name
    return More(kind, best - limit, name) if best else None


def _needs(kind: Memory, plan: Tuned) -> int:
    """Bytes of one memory that a plan takes."""
    return plan.outcome.peak_bytes if kind == "device_memory_bytes" else plan.outcome.host_bytes


def _other_lack(of_device: bool, row: Misfit) -> int:
    return row.host_lacks_bytes if of_device else row.device_lacks_bytes


def _enough(kind: Memory, row: Misfit, terms: Terms, floor: int, best: int, clock: Clock) -> int:
    """Bytes that are enough for a schedule, down to what is near the least; 0: no less than is known already."""

    def needed(bytes_: int) -> int:
        roomy = replace(terms, limits=replace(terms.limits, **{kind: bytes_}))
        plan = _held(row.plan.contender, roomy, min(SECONDS, clock.left))
        return 0 if plan is None else _needs(kind, plan)

    top = needed(best - 1 if best else max(_needs(kind, row.plan), floor + 1))
    while top and top - floor > NEAR and not clock.is_over():
        middle = (floor + top) // 2
        less = needed(middle)
        floor, top = (floor, less) if less else (middle, top)
    return top
