"""Shapes a schedule takes: the one asked for where it does, otherwise one near it."""

from functools import cache
from itertools import product

from rpbench.ir.schedule import Shape
from rpbench.registry import entry


@cache
def nearby(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, int, int]:
    """Ranks, stages per rank and microbatches that a bound schedule accepts, as few more as need be."""
    chunks = chunks if entry(name).looped else 1
    multiples = [microbatches + -microbatches % ranks, microbatches + -microbatches % 2]
    tries = product(
        (ranks, ranks + 1),
        dict.fromkeys([chunks, 2, 1]),
        dict.fromkeys([microbatches, *multiples, *(rest + other for rest in multiples for other in (1, ranks)), *(
            number * other for other in (ranks, ranks + 1) for number in (1, 2, 4, 8))]),
    )  # fmt: skip
    for p, v, m in tries:
        if m >= microbatches:
            try:
                entry(name).build(Shape(p, p * v, m))
            except ValueError:
                continue
            return p, v, m
    raise ValueError(f"{name} takes nothing near {ranks} ranks, {chunks} chunks and {microbatches} microbatches")
