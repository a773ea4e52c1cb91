"""Limits: the largest value (sequence length, microbatch) that a contender can hold, found by repeated searches.

A bound on the memory of all plans (`rpbench.plan.contest.bounds`) excludes values at once. Below it a search looks for
a plan that fits: it halves the value until there is one, then bisects between what fits and what does not. Likewise it
finds the least memory with which something fits where nothing does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt
from typing import Any, Literal, NamedTuple

from rpbench.advice.rows import Misfit
from rpbench.advice.side_searches import Clock
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.plans import Budget, Tuned
from rpbench.plan.contest.search import TIME_OVER, Search, tune
from rpbench.plan.contest.terms import Terms

FINENESS = 16  # a limit is exact to one part in so many
BUDGET = Budget(work=60, climb_work=100_000)
SECONDS = 3.0  # of a processor, for one search
CHANGING = 0.4  # of the time of an advice, for the least memory of both kinds; the answer fits, and less may fit
NEAR = 100_000_000  # bytes between what fits and what does not, below which the search stops
Memory = Literal["device_memory_bytes", "host_memory_bytes"]


@dataclass(frozen=True)
class Limit:
    """The largest value that a contender holds."""

    name: str
    value: int  # the largest with a plan that fits; 0: none was found for any value
    beyond: int | None  # the least value that was tried without success; None: even the largest possible value fits
    is_proven: bool  # whether a bound proves that no plan fits beyond
    found: Any  # what `held` gave for the value; None where there is no plan
    why: str = ""  # why the contender takes no value, where that is not memory


def largest(
    name: str, held: Callable[[int], Any], step: int, most: int, can_hold: Callable[[int], bool] | None = None
) -> Limit:
    """The largest multiple of `step`, up to `most`, for which there is a plan.

    Args:
        held: the plan for a value; None where none is found.
        can_hold: False for values that a bound excludes; asked first, because it is cheaper.
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
    """A good value and the next one tried that is not, by doubling and bisection; None: `most` is good."""
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
        terms_at: the terms at a value; a plan chooses among their microbatches.
    """

    def can_hold(value: int) -> bool:
        return not Search(contender, terms_at(value), BUDGET).is_ruled_out

    refusal: list[str] = []

    def held(value: int) -> Tuned | None:
        refusal.clear()
        try:
            return _fitting(contender, terms_at(value))
        except ValueError as error:
            refusal.append(str(error))
            return None

    found = largest(contender.name, held, step, most, can_hold)
    if found.value or not refusal or TIME_OVER in refusal[0]:
        return found
    return replace(found, why=refusal[0])  # of the smallest value that was tried


def _held(contender: Contender, terms: Terms, seconds: float) -> Tuned | None:
    """A plan that fits, if one is found in time."""
    try:
        return _fitting(contender, terms, seconds)
    except ValueError:
        return None


def _fitting(contender: Contender, terms: Terms, seconds: float = SECONDS) -> Tuned | None:
    """A plan that fits; ValueError if the time was over, or the order does not take such sizes."""
    plan = tune(contender, terms, BUDGET, is_over=Clock(seconds).is_over)
    return plan if plan.outcome.fits else None


# --- the least memory ----------------------------------------------------------------------------------------


class More(NamedTuple):
    """Extra bytes of one memory with which a schedule fits."""

    kind: Memory
    lacks_bytes: int
    schedule: str


def least_more(misfits: Sequence[Misfit], terms: Terms, seconds: float) -> list[More]:
    """The least extra memory of a device, and of the host, with which something fits, the smaller first.

    What the plans found need is enough, and less may be. Schedules are searched in the order of what a bound says they
    need; those that need more than what is known to be enough are left out.

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
    # What a plan needs that lacks no other memory is enough.
    known = [(_needs(kind, row.plan), row) for row in misfits if not _other_lack(of_device, row)]
    best, first = min(known, key=lambda pair: pair[0], default=(0, None))
    name = first.plan.contender.name if first else ""
    floors = [max(limit, row.plan.least_bytes if of_device else row.plan.least_host_bytes) for row in misfits]
    asked = zip(floors, misfits, strict=True)
    for floor, row in sorted(asked, key=lambda pair: (pair[0], _needs(kind, pair[1].plan))):
        if clock.is_over():
            break
        if best and floor >= best:
            continue
        if _other_lack(of_device, row) and floor == limit:
            continue  # it lacks the other memory
        enough = _enough(kind, row, terms, floor, best, clock)
        if enough:
            best, name = enough, row.plan.contender.name
    return More(kind, best - limit, name) if best else None


def _needs(kind: Memory, plan: Tuned) -> int:
    """Bytes of one memory that a plan needs."""
    return plan.outcome.peak_bytes if kind == "device_memory_bytes" else plan.outcome.host_bytes


def _other_lack(of_device: bool, row: Misfit) -> int:
    return row.host_lacks_bytes if of_device else row.device_lacks_bytes


def _enough(kind: Memory, row: Misfit, terms: Terms, floor: int, best: int, clock: Clock) -> int:
    """Bytes that are enough for a schedule, near the least; 0: no fewer than is known already."""

    def needed(bytes_: int) -> int:
        roomy = replace(terms, limits=replace(terms.limits, **{kind: bytes_}))
        plan = _held(row.plan.contender, roomy, min(SECONDS, clock.left))
        return 0 if plan is None else _needs(kind, plan)

    top = needed(best - 1 if best else max(_needs(kind, row.plan), floor + 1))
    while top and top - floor > NEAR and not clock.is_over():
        middle = isqrt(floor * top)  # they may lie orders of magnitude apart
        less = needed(middle)
        floor, top = (floor, less) if less else (middle, top)
    return top
