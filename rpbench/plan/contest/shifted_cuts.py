"""Cuts near a cut: a layer goes to a neighbouring stage, or to one that is farther away."""

import random
from collections.abc import Callable, Iterator

from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.contest.plans import Tried, beats, cut_of

MOST_FAR = 250  # layers that go to stages far away, in a row without a better cut


def climbed(
    begun: Tried,
    recut: Callable[[Tried, Partition], Tried | None],
    is_spent: Callable[[], bool],
    *,
    far: bool = False,
) -> Tried:
    """A plan after single layers moved while that helped.

    Args:
        recut: the plan with another cut; None: not worth a look.
        is_spent: whether no more may be tried.
        far: to stages far away, in an order by chance, until many in a row did not help; or to neighbours, one stage
            after the other.
    """
    best, place, quiet = begun, 0, 0
    moves = _shuffled(cut_of(best), far)
    while not is_spent() and quiet < (min(len(moves), MOST_FAR) if far else len(moves)):
        moved = recut(best, moves[place % len(moves)])
        if moved is not None and beats(moved, best):
            best, quiet = moved, 0
            moves = _shuffled(cut_of(best), far)
        else:
            place, quiet = place + 1, quiet + 1
    return best


def _shuffled(cut: Partition, far: bool) -> list[Partition]:
    found = list(shifted(cut, far=far))
    if far:
        random.Random(0).shuffle(found)
    return found


def shifted(cut: Partition, *, far: bool = False) -> Iterator[Partition]:
    """The cuts in which one layer went to a neighbouring stage; where directions are cut apart, in one of them.

    Args:
        far: to any stage that is no neighbour instead. Devices that hold several stages are seldom neighbours there.
    """
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
