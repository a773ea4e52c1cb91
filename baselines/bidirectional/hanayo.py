"""Hanayo: waves. The stages go over the ranks and back again W times, and each turn stays on its rank.

With W waves a rank holds v = 2W stages (chunks_per_device): stage c p + i is on rank i for even c and on rank p - 1 - i
for odd c, a V for W = 1. There is one copy of the weights. Ranks are greedy: they run the ready backward of the
earliest microbatch, otherwise the deepest ready forward. With 2 ranks, 2 microbatches and one wave:

    rank 0   0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    rank 1   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

This is the order on a grid of equal slots. If F = B and m is a multiple of p its bubble is 2(p - 1) chunk slots; if B =
2F it would wait in every round of p microbatches. So the times choose among several orders: the grid's, one that
repeats (`rpbench.ordering.periodic`; for W > 1 groups of microbatches go through one wave after another), and both with
passes pulled forward.

A rank holds the activations of at most p microbatches, 2Wp chunk activations; `in_flight` allows more.

Source: Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency",
SC'23. Orders for more than p microbatches and given times are ours.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ordering import list_order
from rpbench.ordering.periodic import grids, make_period
from rpbench.registry import schedule

PULLS = (list_order.Pull(16, 0.0), list_order.Pull(48, 0.5))


@schedule(
    "hanayo",
    source="Liu et al., SC'23",
    looped=True,
    chunks=2,
    more_chunks=True,
    needs_costs=True,
    searched={"in_flight": lambda num_ranks, num_microbatches: (None, 2 * num_ranks)},
)
def hanayo(
    shape: Shape, costs: StageCosts, *, backward_slots: int | None = None, in_flight: int | None = None
) -> Schedule:
    """Waves of greedy ranks, or repeated ones, whichever ends first.

    Args:
        shape: with an even number of stages on every rank, two a wave.
        backward_slots: take the greedy order of a grid on which a backward is so many times as long as a forward.
        in_flight: microbatches whose activations a rank has room for, where times choose; p if not given.
    """
    p = shape.num_ranks
    if shape.num_stages % (2 * p):
        raise ValueError(
            f"hanayo's waves go over {p} ranks and back: the {shape.num_stages} stages must be a "
            f"multiple of {2 * p}; set chunks_per_device=2 for one wave, 4 for two"
        )
    if backward_slots is not None and backward_slots < 1:
        raise ValueError(f"schedule.backward_slots={backward_slots}: a backward takes at least 1 slot; try 1 or 2")
    if in_flight is not None and (in_flight < p or backward_slots):
        raise ValueError(
            f"schedule.in_flight={in_flight}: room for the activations of at least as many microbatches as ranks, {p}, "
            "and only where times choose the order; leave out backward_slots"
        )
    one = replace(shape, num_steps=1)
    step = _grid(one, backward_slots) if backward_slots else _by_times(one, costs, in_flight or p)
    placement = tuple((_rank_of(stage, p),) for stage in range(shape.num_stages))
    return Schedule(shape, list_order.repeat_steps(shape, step), name="hanayo", placement=placement)


@lru_cache(maxsize=8)  # the same under many times, as a search of cuts asks
def _grid(shape: Shape, backward_slots: int) -> list_order.Rows:
    """One step on a grid of slots: a free rank takes a pass that is ready."""
    p, slots = shape.num_ranks, {Kind.F: 1, Kind.B: backward_slots}
    ready: list[list[tuple[int, int, int, list_order.Pass]]] = [[] for _ in range(p)]
    ending: dict[int, list[list_order.Pass]] = {}  # slot -> passes that have ended when it begins

    def offer(what: list_order.Pass) -> None:
        backward = what.kind is Kind.B
        order = (0, what.microbatch, -what.stage) if backward else (1, -what.stage, what.microbatch)
        heappush(ready[_rank_of(what.stage, p)], (*order, what))

    def offer_next(ended: list_order.Pass) -> None:
        """Offer the pass that needs this one's result."""
        if ended.kind is Kind.F and ended.stage == shape.num_stages - 1:
            offer(ended._replace(kind=Kind.B))
        elif ended.kind is Kind.F:
            offer(ended._replace(stage=ended.stage + 1))
        elif ended.stage:
            offer(ended._replace(stage=ended.stage - 1))

    for microbatch in range(shape.num_microbatches):
        offer(list_order.Pass(Kind.F, 0, microbatch))
    rows: list[list[list_order.Pass]] = [[] for _ in range(p)]
    free_from, slot = [0] * p, 0
    while ending or any(ready):
        for ended in ending.pop(slot, ()):
            offer_next(ended)
        for rank, waiting in enumerate(ready):
            if waiting and free_from[rank] <= slot:
                what = heappop(waiting)[-1]
                rows[rank].append(what)
                free_from[rank] = slot + slots[what.kind]
                ending.setdefault(free_from[rank], []).append(what)
        slot = min(ending, default=slot)  # nothing changes before
    return rows


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _by_times(shape: Shape, costs: StageCosts, in_flight: int) -> list_order.Rows:
    p, limit = shape.num_ranks, shape.chunks_per_rank * in_flight

    def rank_of(stage: int, _: int) -> int:
        return _rank_of(stage, p)

    repeated = (_repeat(shape, *grid) for grid in grids(costs))
    others = (_grid(shape, slots) for slots in (2,))
    return ends_first(_grid(shape, 1), repeated, others, rank_of, costs, limit, PULLS)


def ends_first(
    rows: list_order.Rows,
    repeated: Iterable[list_order.Rows],
    others: Iterable[list_order.Rows],
    rank_of: list_order.RankOf,
    costs: StageCosts,
    limit: int,
    pulls: Sequence[list_order.Pull],
) -> list_order.Rows:
    """The order that ends first: of all given ones, and of the first and the repeated ones with passes pulled forward.

    A rank has at most `limit` chunk activations. Orders behind the first are made only while there is work to spend.
    """

    def timed(rows: list_order.Rows) -> list_order.Timed:
        return list_order.time_rows(rows, rank_of, costs)

    def trials() -> Iterator[list_order.Timed]:
        bases = [made]
        for each in repeated:
            bases.append(timed(each))
            yield bases[-1]
        yield from map(timed, others)
        for base in bases:
            for how in pulls:
                yield timed(list_order.pull_rows(base.rows, rank_of, costs, max(limit, base.peak), how))

    made = timed(rows)
    return list_order.shortest(made, trials(), limit).rows


@lru_cache(maxsize=8)  # the same under many times, as a search of cuts asks
def _repeat(shape: Shape, forward: float, backward: float) -> list_order.Rows:
    """One wave per period; groups of microbatches go through one wave, then through the next.

    A group is just large enough that its first microbatch is back when its last has started.
    """
    p, waves = shape.num_ranks, shape.chunks_per_rank // 2
    wave = range(2 * p)
    period = make_period([[_rank_of(stage, p) for stage in wave]], p, forward, backward)
    starts, length = period.starts[0], period.length
    there = starts[Kind.F, 2 * p - 1] + forward - starts[Kind.F, 0]
    back = starts[Kind.B, 0] + backward - starts[Kind.B, 2 * p - 1]
    group = 1 if waves == 1 else ceil(max(there, back) / length - list_order.ROUNDING)
    rows: list[list[tuple[float, list_order.Pass]]] = [[] for _ in range(p)]
    for microbatch in range(shape.num_microbatches):
        number, member = divmod(microbatch, group)
        first = number * group * waves + member
        for chunk in range(waves):
            later = {Kind.F: first + chunk * group, Kind.B: first + (2 * (waves - 1) - chunk) * group}
            for (kind, stage), start in starts.items():
                what = list_order.Pass(kind, chunk * 2 * p + stage, microbatch)
                rows[_rank_of(stage, p)].append((start + later[kind] * length, what))
    return [[what for _, what in sorted(row)] for row in rows]


def _rank_of(stage: int, p: int) -> int:
    chunk, place = divmod(stage, p)
    return p - 1 - place if chunk % 2 else place
