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


class Loan(NamedTuple):
    """A plan that fits, for others.

    Args:
        pace: that it has where it is from.
        values: of the dimensions `LENT`.
    """

    pace: float
    values: tuple[float | int | str | None, ...]
    cut: Partition


def loan_of(search: Search) -> Loan | None:
    """The best plan of a search; None where none fits."""
    pace = search.best_pace()
    if not pace:
        return None
    best = search.best()
    return Loan(pace, tuple(best.setting.value(name) for name in LENT), best.cut)


def leading(loans: Iterable[Loan | None]) -> list[Loan]:
    """The fastest of them for each number of stages, that differ in more than the cut."""
    found: dict[int, dict[tuple[float | int | str | None, ...], Loan]] = {}
    for loan in sorted(filter(None, loans), key=lambda each: -each.pace):
        alike = found.setdefault(len(loan.cut.backward), {})
        if len(alike) < MOST_LENDERS:
            alike.setdefault(loan.values, loan)
    return sorted((loan for alike in found.values() for loan in alike.values()), key=lambda each: -each.pace)


def borrow(search: Search, loan: Loan, work: int) -> None:
    """Try a plan for a contender, with its own options as they are and each of them changed, and search on from there.

    Args:
        work: that the way from each may take at most.
    """
    for setting in _settings_with(search, loan):
        if search.time_is_over():
            return
        if search.bounds.pace(setting) <= search.best_pace() * (1 + WORTH):
            continue
        known = search.tried.get(setting)
        if len(loan.cut.backward) == len(search.best().cut.backward):
            if known is None or known.partition != loan.cut:
                search.climb_from(setting, loan.cut, work)
        elif known is None or known.outcome is None:
            search.begin_at(setting, work)


def _settings_with(search: Search, loan: Loan) -> list[Setting]:
    """A contender's best setting with what it accepts of a plan, and with one option changed beside it."""
    setting = search.best().setting
    for name, value in zip(LENT, loan.values, strict=True):
        if value in search.space.dimensions[name]:
            setting = setting.changed(name, value)
    options = [changed for name, changed in search.space.changes(setting) if name.startswith(OPTION)]
    return [setting, *options]
