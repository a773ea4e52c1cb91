"""Cuts near a cut: a layer goes to a neighbouring stage."""

from collections.abc import Iterator

from rpbench.ir.partition import Partition, symmetric


def shifted(cut: Partition) -> Iterator[Partition]:
    """The cuts in which one layer went to a neighbouring stage; where directions are cut apart, in one of them."""
    if not cut.fused:
        yield from (symmetric(moved) for moved in _moved(cut.forward, least=0))
        return
    yield from (Partition(moved, cut.backward, fused=True) for moved in _moved(cut.forward, least=1))
    *below, top = cut.backward
    yield from (Partition(cut.forward, (*moved, top), fused=True) for moved in _moved(tuple(below), least=1))


def _moved(layers: tuple[int, ...], least: int) -> Iterator[tuple[int, ...]]:
    for giver in range(len(layers)):
        for taker in (giver - 1, giver + 1):
            if 0 <= taker < len(layers) and layers[giver] > least:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
