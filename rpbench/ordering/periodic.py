"""Orders that repeat: one forward and one backward of every chunk in each period, wherever the ranks lie.

All ranks alternate slots for a forward and slots for a backward, at the same times. Pipelines (one, or several in
opposite directions) are laid through the slots from the first forward to the last backward, each pass in the first slot
that is free in every period.

Like 1F1B a repeated order waits only while it fills and drains, however many microbatches follow. Its rows are made
for equal stages, and then timed with the real ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ordering.list_order import ROUNDING


@dataclass(frozen=True)
class Period:
    """A repeating order: starts of the passes of each pipeline's first microbatch; the next follows a period later."""

    # start times by pipeline, then by (kind, stage), kinds being F and B
    starts: tuple[dict[tuple[Kind, int], float], ...]
    length: float  # length of the period


def make_period(routes: Sequence[Sequence[int]], num_ranks: int, forward: float, backward: float) -> Period:
    """A period with one microbatch of every pipeline, by the times of a forward and a backward on a stage.

    A route has the rank of each stage; together, the routes visit every rank equally often.
    """
    block = forward + backward or 1.0
    num_blocks = sum(map(len, routes)) // num_ranks
    used: dict[tuple[int, Kind], set[int]] = {}

    def place(rank: int, kind: Kind, ready: float) -> float:
        first = forward if kind is Kind.B else 0.0
        number = ceil((ready - first) / block - ROUNDING)
        taken = used.setdefault((rank, kind), set())
        while number % num_blocks in taken:
            number += 1
        taken.add(number % num_blocks)
        return first + number * block

    starts: list[dict[tuple[Kind, int], float]] = []
    for route in routes:
        passes, now = {}, 0.0
        for stage, rank in enumerate(route):
            passes[Kind.F, stage] = now = place(rank, Kind.F, now)
            now += forward
        for stage, rank in reversed(list(enumerate(route))):
            passes[Kind.B, stage] = now = place(rank, Kind.B, now)
            now += backward
        starts.append(passes)
    return Period(tuple(starts), num_blocks * block)


def grids(costs: StageCosts) -> list[tuple[float, float]]:
    """(forward time, backward time) to make periods with: means over the stages, also with a hop added to each."""
    forward, backward = (sum(times) / costs.num_stages for times in (costs.forward, costs.backward))
    return [(forward + hop, backward + hop) for hop in dict.fromkeys([costs.hop, 0.0])]
