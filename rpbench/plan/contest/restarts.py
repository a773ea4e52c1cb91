"""Restarts: random settings and cuts that try to beat a search's plan, so that a plan says how hard it is to beat.

A climb sees what lies near where it began. Each restart begins elsewhere: half of them at a random setting, where
layers move and then one dimension at a time changes, half at the best plan or another that is close to it, with some
layers moved at random; so does one whose random setting is known or refused. Rounds go on as long as one finds more
than `SETTLED`; what the last round found is kept with the plan. A round shares what is left to spend among its
restarts, so that it comes to its end.
"""

import random
from typing import Protocol

from rpbench.ir.partition import Partition
from rpbench.plan.contest.plans import Budget, Restarted, Tried
from rpbench.plan.contest.shifted_cuts import shifted
from rpbench.plan.contest.space import Setting, Space

# Rounds, a round's restarts for each in the budget, and the gain that ends them.
ROUNDS, SETTLED = 2, 0.005
# Work of a search and its restarts, over its budget; one restart climbs with so large a part of the budget at most.
MORE, CLIMBS = 1.6, 10
# Layers that are moved at random.
FEWEST, MOST = 2, 5


class Beatable(Protocol):
    """A search that can begin elsewhere (`rpbench.plan.contest.search.Search`)."""

    budget: Budget
    space: Space

    @property
    def work(self) -> int: ...
    def time_is_over(self) -> bool: ...
    def close(self) -> list[Tried]: ...
    def best_pace(self) -> float: ...
    def begin_at(self, setting: Setting, work: int) -> None: ...
    def climb_from(self, setting: Setting, cut: Partition, work: int) -> None: ...


def restart(search: Beatable, each_round: int) -> Restarted:
    """Try to beat the best plan of a search; what does becomes its best plan.

    Args:
        each_round: restarts of a round; 0: none.
    """
    chance, number, gain = random.Random(0), 0, None
    for _ in range(ROUNDS if each_round else 0):
        before = search.best_pace()
        if not before:
            break
        for turn in range(each_round):
            left = int(MORE * search.budget.work) - search.work
            if left < 0 or search.time_is_over():
                return Restarted(number, gain)
            number += 1
            work = min(left // (each_round - turn), search.budget.work // CLIMBS)
            before_it = search.work
            if turn % 2 == 0:
                search.begin_at(_drawn(search.space, chance), work)
            if search.work == before_it:  # or what was drawn is known, or refused
                search.climb_from(*_shaken(chance.choice(search.close()), chance), work)
        gain = search.best_pace() / before - 1
        if gain < SETTLED:
            break
    return Restarted(number, gain)


def _drawn(space: Space, chance: random.Random) -> Setting:
    setting = space.first
    for dimension, values in space.dimensions.items():
        setting = setting.changed(dimension, chance.choice(values))
    return setting


def _shaken(plan: Tried, chance: random.Random) -> tuple[Setting, Partition]:
    """A plan with some layers in neighbouring stages."""
    cut = plan.partition
    assert cut is not None
    for _ in range(chance.randint(FEWEST, MOST)):
        near = list(shifted(cut))
        cut = chance.choice(near) if near else cut
    return plan.setting, cut
