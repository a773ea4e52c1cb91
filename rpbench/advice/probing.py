"""Probing: plans of leading contenders, tried for other contenders or used as the start of their searches.

What suits one contender often suits its kin: the microbatch size, what is recomputed, the number of stages on a device,
and with as many stages also their cut. A search of its own would get there one dimension at a time, if it had the time.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from rpbench.ir.partition import Partition
from rpbench.plan.contest.contender import OPTION, Setting
from rpbench.plan.contest.search import Known, Search

LENT = ("microbatch_sequences", "chunks_per_device", "recompute")  # dimensions of a setting that are lent with a plan
MOST_LENDERS = 2  # of each placement of stages
FAR_BEHIND = 0.1  # a loan that is slower by this fraction is not tried with other options
WORTH = 0.01  # the gain that a bound must leave, as a fraction of a pace


class Kind(NamedTuple):
    """A kind of contender; what suits one kind seldom suits another."""

    moves: bool  # whether weights move
    moves_each_time: bool  # whether they move on every device for each microbatch
    separate_cuts: bool  # whether both directions are cut apart
    overlaps: bool  # whether steps overlap, so that filling and draining hardly count, and more weights are kept
    steps_often: bool = False  # whether weights change after every microbatch


class Loan(NamedTuple):
    """A plan that fits, lent to other contenders."""

    pace: float  # with its own contender
    values: tuple[tuple[str, Any], ...]  # of the dimensions in `LENT` and of the schedule's options
    cut: Partition
    kind: Kind  # of its contender
    placement: tuple[tuple[int, ...], ...]  # the devices of each stage


def loan_of(search: Search) -> Loan | None:
    """The best plan of a search; None if none fits."""
    pace = search.best_pace()
    if not pace:
        return None
    best = search.best()
    lent = [*LENT, *(name for name in search.space.dimensions if name.startswith(OPTION))]
    values = tuple((name, best.setting.value(name)) for name in lent)
    return Loan(pace, values, best.cut, kind_of(search), search.sketcher.placement(best.setting))


def kind_of(search: Search, setting: Setting | None = None) -> Kind:
    """The kind of a contender at a setting that its schedule takes; None: at its best."""
    setting, sketcher = setting or search.best().setting, search.sketcher
    entry, moves_each_time = search.contender.entry, sketcher.moves_each_time(setting)
    overlaps = sketcher.overlaps(setting)
    return Kind(search.bounds.moves, moves_each_time, entry.separate_cuts, overlaps, entry.steps_each_microbatch)


def leading(loans: Iterable[Loan | None]) -> list[Loan]:
    """The fastest loans of each placement of stages and kind that differ in more than the cut."""
    found: dict[tuple[object, ...], dict[tuple[tuple[str, Any], ...], Loan]] = {}
    for loan in sorted(filter(None, loans), key=lambda each: -each.pace):
        alike = found.setdefault((len(loan.cut.backward), loan.placement, loan.kind), {})
        if len(alike) < MOST_LENDERS:
            alike.setdefault(loan.values, loan)
    return sorted((loan for alike in found.values() for loan in alike.values()), key=lambda each: -each.pace)


def known_plans(search: Search, loans: Iterable[Loan]) -> list[Known]:
    """The fastest plans of a contender's kind for each number of stages; the same placement of stages first.

    Where weights change as often they stand before others.
    """
    entry, alike, others = search.contender.entry, dict[tuple[int, bool], Known](), dict[tuple[int, bool], Known]()
    order = sorted(loans, key=lambda each: (each.kind.steps_often is not entry.steps_each_microbatch, -each.pace))
    for loan in order if not entry.separate_cuts else ():
        setting = _with_values(search, search.space.first, loan)
        stages = search.terms.num_devices * (setting.chunks_per_device or 0)
        with suppress(ValueError):  # the schedule does not take the setting
            if len(loan.cut.backward) == stages and kind_of(search, setting)[:-1] == loan.kind[:-1]:
                is_alike = search.sketcher.placement(setting) == loan.placement
                known = Known(setting, loan.cut, loan.pace, is_alike)
                (alike if is_alike else others).setdefault((stages, loan.kind.steps_often), known)
    return [*alike.values(), *others.values()]


def borrow(search: Search, loan: Loan, work: int) -> None:
    """Try a plan for a contender, with its own options as they are and with each one changed; search on from the best.

    Args:
        work: the most that the further search may take.
    """
    timed, useless = list[Setting](), set[str]()
    alike = loan.kind[:3] == kind_of(search)[:3]  # steps may overlap or not
    first = _with_values(search, search.best().setting, loan)
    for setting in (first, *search.space.other_options(first)) if alike else ():
        option, before = setting.option_beside(first), search.best_pace()
        if search.time_is_over():
            return
        if option in useless or search.bounds.pace(setting) <= before * (1 + WORTH):
            continue
        known, chunks = search.tried.get(setting), setting.chunks_per_device
        if chunks is None or len(loan.cut.backward) == search.terms.num_devices * chunks:
            if known is None or known.partition != loan.cut:
                search.climb_from(setting, loan.cut, 1)
                timed.append(setting)
        elif known is None or known.outcome is None:
            search.begin_at(setting, work)
        if search.best_pace() <= before:
            useless.add(option)
            lent = search.tried.get(setting)
            if setting == first and lent and lent.outcome and lent.score < before * (1 - FAR_BEHIND):
                break  # its options will not make up for that
    found = [search.tried[each] for each in timed if each in search.tried]
    best = max((each for each in found if each.outcome is not None), key=lambda each: each.score, default=None)
    if best is not None and not search.time_is_over():
        search.climb_from(best.setting, best.cut, work)


def _with_values(search: Search, setting: Setting, loan: Loan) -> Setting:
    """A setting with the values of a plan that the contender accepts."""
    for name, value in loan.values:
        if value in search.space.dimensions.get(name, ()):
            setting = setting.changed(name, value)
    return setting
