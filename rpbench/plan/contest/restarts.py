"""Climbs and restarts: single layers move between stages, and random settings and cuts try to beat a search's plan.

A climb sees only cuts near its start. Each restart begins elsewhere. Half of them begin at a random setting, where
layers move and then one dimension at a time changes. The other half, and those whose random setting is known, refused
or bounded, begin at a plan close to the best, with some layers moved at random. Rounds go on as long as one gains more
than `SETTLED`; no round begins if a bound says that it cannot. The plan keeps the gain of the last round, which says
how hard the plan is to beat. A round divides the rest of the budget among its restarts, so that it ends.
"""

import random
from collections.abc import Callable, Iterator
from math import inf
from typing import Protocol

from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.contest.contender import Setting, Space
from rpbench.plan.contest.plans import Budget, Restarted, Tried, Tuned, beats

MOST_FAR = 250  # moves to distant stages without a better cut, after which a climb ends


def climbed(
    begun: Tried,
    recut: Callable[[Tried, Partition], Tried | None],
    is_spent: Callable[[], bool],
    enough: float = inf,
    *,
    far: bool = False,
) -> Tried:
    """The plan that single moves of a layer no longer improve.

    Args:
        recut: times the plan with another cut; returns None for a cut that is not promising.
        is_spent: whether the budget is spent.
        enough: tokens per second at which the climb ends.
        far: move to distant stages, in random order; else to neighbours, one stage after the other.
    """
    best, place, quiet = begun, 0, 0
    moves = _shuffled(best.cut, far)
    while not is_spent() and best.score < enough and quiet < (min(len(moves), MOST_FAR) if far else len(moves)):
        moved = recut(best, moves[place % len(moves)])
        if moved is not None and beats(moved, best):
            best, quiet = moved, 0
            moves = _shuffled(best.cut, far)
        else:
            place, quiet = place + 1, quiet + 1
    return best


def _shuffled(cut: Partition, far: bool) -> list[Partition]:
    found = list(shifted(cut, far=far))
    if far:
        random.Random(0).shuffle(found)
    return found


def shifted(cut: Partition, *, far: bool = False) -> Iterator[Partition]:
    """The cuts with one layer in a neighbouring stage, or with `far`, in any other; in one direction if cut apart."""
    if not cut.fused:
        yield from (symmetric(moved) for moved in _moved(cut.forward, 0, far))
        return
    yield from (Partition(moved, cut.backward, fused=True) for moved in _moved(cut.forward, 1, far))
    *below, top = cut.backward
    yield from (Partition(cut.forward, (*moved, top), fused=True) for moved in _moved(tuple(below), 1, far))


def _moved(layers: tuple[int, ...], least: int, far: bool) -> Iterator[tuple[int, ...]]:
    for giver in range(len(layers)):
        for taker in range(len(layers)) if far else (giver - 1, giver + 1):
            is_near = abs(giver - taker) < 2
            if 0 <= taker < len(layers) and layers[giver] > least and is_near is not far:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


ROUNDS, SETTLED = 2, 0.005  # most rounds, and the relative gain of a round below which they end
# Most work of a search with its restarts, over its budget; one restart gets at most 1 / CLIMBS of the budget.
MORE, CLIMBS = 1.6, 10
FEWEST, MOST = 2, 5  # least and most layers moved at random


class Beatable(Protocol):
    """A search that can begin elsewhere (`rpbench.plan.contest.search.Search`)."""

    budget: Budget
    space: Space

    @property
    def work(self) -> int: ...
    def time_is_over(self) -> bool: ...
    def close(self) -> list[Tried]: ...
    def best_pace(self) -> float: ...
    def plan(self) -> Tuned: ...
    def begin_at(self, setting: Setting, work: int) -> None: ...
    def climb_from(self, setting: Setting, cut: Partition, work: int) -> None: ...


def restart(search: Beatable, each_round: int) -> Restarted:
    """Try to beat the best plan of a search, which keeps every better plan; without restarts there are no rounds."""
    chance, number, gain = random.Random(0), 0, None
    for _ in range(ROUNDS if each_round else 0):
        before = search.best_pace()
        if not before or search.plan().gap <= SETTLED:
            break
        for turn in range(each_round):
            left = int(MORE * search.budget.work) - search.work
            if left < 0 or search.time_is_over():
                return Restarted(number, gain)
            number += 1
            work = min(left // (each_round - turn), search.budget.work // CLIMBS)
            before_it = search.work
            if turn % 2 == 0:
                drawn = {name: chance.choice(values) for name, values in search.space.dimensions.items()}
                search.begin_at(search.space.setting(drawn), work)
            if search.work == before_it:  # odd turn, or the drawn setting is known or refused
                search.climb_from(*_shaken(chance.choice(search.close()), chance), work)
        gain = search.best_pace() / before - 1
        if gain < SETTLED:
            break
    return Restarted(number, gain)


def _shaken(plan: Tried, chance: random.Random) -> tuple[Setting, Partition]:
    """A plan with some layers moved at random to neighbouring stages."""
    cut = plan.cut
    for _ in range(chance.randint(FEWEST, MOST)):
        near = list(shifted(cut))
        cut = chance.choice(near) if near else cut
    return plan.setting, cut
