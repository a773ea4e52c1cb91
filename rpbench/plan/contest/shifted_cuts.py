"""Cuts near a cut: a layer goes to a neighbouring stage, or to one that is farther away."""

from collections.abc import Iterator

from rpbench.ir.partition import Partition, symmetric


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
