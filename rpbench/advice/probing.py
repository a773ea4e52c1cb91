"""Probing: the plans of leading contenders, tried for others that accept them.

What is good for one is often good for its kin: how large a microbatch is, what runs again, how many stages a device
has, and where another has as many stages, their cut. A search would come there one dimension at a time, if time were
left.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.plan.contest.contender import OPTION, Setting
from rpbench.plan.contest.search import Search

LENT = ("microbatch_sequences", "chunks_per_device", "recompute")  # dimensions of a setting that go with a plan
MOST_LENDERS = 2  # of each number of stages
WORTH = 0.01  # what a bound must leave to gain, as a share of a pace


Kind = tuple[bool, bool, bool]  # `kind_of`


class Loan(NamedTuple):
    """A plan that fits, for others.

    Args:
        pace: that it has where it is from.
        values: of the dimensions `LENT`.
        kind: of its contender (`kind_of`); what is good for one kind is seldom good for another.
    """

    pace: float
    values: tuple[float | int | str | None, ...]
    cut: Partition
    kind: Kind


def loan_of(search: Search) -> Loan | None:
    """The best plan of a search; None where none fits."""
    pace = search.best_pace()
    if not pace:
        return None
    best = search.best()
    return Loan(pace, tuple(best.setting.value(name) for name in LENT), best.cut, kind_of(search))


def kind_of(search: Search) -> Kind:
    """Whether weights move, whether on every device for each microbatch, and whether directions are cut apart."""
    entry, setting = search.contender.entry, search.best().setting
    return search.bounds.moves, search.sketcher.moves_each_time(setting), entry.separate_cuts


def leading(loans: Iterable[Loan | None]) -> list[Loan]:
    """The fastest of them for each number of stages, of each kind, that differ in more than the cut."""
    found: dict[tuple[int, Kind], dict[tuple[float | int | str | None, ...], Loan]] = {}
    for loan in sorted(filter(None, loans), key=lambda each: -each.pace):
        alike = found.setdefault((len(loan.cut.backward), loan.kind), {})
        if len(alike) < MOST_LENDERS:
            alike.setdefault(loan.values, loan)
    return sorted((loan for alike in found.values() for loan in alike.values()), key=lambda each: -each.pace)


def borrow(search: Search, loan: Loan, work: int) -> None:
    """Try a plan for a contender, with its own options as they are and each of them changed, and search on from there.

    Args:
        work: that the way on may take at most.
    """
    timed = list[Setting]()
    for setting in _settings_with(search, loan) if loan.kind == kind_of(search) else ():
        if search.time_is_over():
            return
        if search.bounds.pace(setting) <= search.best_pace() * (1 + WORTH):
            continue
        known, chunks = search.tried.get(setting), setting.chunks_per_device
        if chunks is None or len(loan.cut.backward) == search.terms.num_devices * chunks:
            if known is None or known.partition != loan.cut:
                search.climb_from(setting, loan.cut, 1)
                timed.append(setting)
        elif known is None or known.outcome is None:
            search.begin_at(setting, work)
    found = [search.tried[each] for each in timed if each in search.tried]
    best = max((each for each in found if each.outcome is not None), key=lambda each: each.score, default=None)
    if best is not None and not search.time_is_over():
        search.climb_from(best.setting, best.cut, work)


def _settings_with(search: Search, loan: Loan) -> list[Setting]:
    """A contender's best setting with what it accepts of a plan, and with one option changed beside it."""
    setting = search.best().setting
    for name, value in zip(LENT, loan.values, strict=True):
        if value in search.space.dimensions[name]:
            setting = setting.changed(name, value)
    options = [changed for name, changed in search.space.changes(setting) if name.startswith(OPTION)]
    return [setting, *options]
