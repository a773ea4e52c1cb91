"""AdaPtis: partition, placement and order chosen together, by the times of the stages.

For given stages this tries the placements and orders of other schedules (one stage a rank, looped, V, waves; whole and
split backwards), each as it is and with passes pulled forward into waits, and takes the one that ends first within the
memory. With `partition=search` this happens for every cut that is tried, so that a layer moves only if the best order
for the new cut is faster. So all three are searched together, and the result is no worse than the best of these orders
for any one cut. With 3 ranks, 4 microbatches and F = I = W it is as long as `zb_h1`:

    rank 0   0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

No rank holds more chunk activations than with 1F1B (interleaved, where a rank has several stages), or than those of
`in_flight` microbatches. Where microbatches differ in length, the best order for equal ones is one more candidate.

Source: "AdaPtis: Reducing Pipeline Bubbles with Adaptive Pipeline Parallelism on Heterogeneous Models", after its
abstract: a loop over partition, placement and order, guided by a model of their times. Ours: which orders are tried,
and how passes are moved.
"""

from collections.abc import Hashable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from rpbench.ir.action import Kind, plain_of
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ordering import list_order
from rpbench.ordering.loops import Means, means
from rpbench.registry import entry, schedule

TRIED_PULLS = 2  # of the settings worth trying, best first
# Orders of one copy of the weights, whose rows are made of F, B, I and W alone.
WHOLE = ("1f1b", "dapple", "kfkb", "gpipe", "interleaved_1f1b", "looped_bfs", "hanayo")
SPLIT = ("zb_h1", "zb_h2", "zb_auto", "interleaved_zb", "zb_v", "v_half", "v_min", "gis")


Placement = tuple[tuple[int, ...], ...]


@schedule(
    "adaptis",
    source="AdaPtis, abstract",
    looped=True,
    needs_costs=True,
    chooses_placement=True,
    searched={"whole": (False, True)},
)
def adaptis(shape: Shape, costs: StageCosts, *, in_flight: int | None = None, whole: bool = False) -> Schedule:
    """The tried order that ends first within the memory.

    Args:
        in_flight: microbatches whose activations a rank has room for; None: as many as 1F1B takes.
        whole: try orders of whole backwards alone, as they are.
    """
    p, chunks, m = shape.num_ranks, shape.chunks_per_rank, shape.num_microbatches
    if in_flight is not None and (type(in_flight) is not int or in_flight < p):
        raise ValueError(
            f"schedule.in_flight={in_flight}: room for at least as many microbatches as ranks, {p}; try {p}"
        )
    limit = chunks * in_flight if in_flight else chunks * p + (p - 1) * (chunks > 1)
    step, placement = _best(Shape(p, shape.num_stages, m), costs, limit, whole=whole)
    return Schedule(shape, list_order.repeat_steps(shape, step), name="adaptis", placement=placement)


@lru_cache(maxsize=64)  # a search asks for one order several times
def _best(shape: Shape, costs: StageCosts, limit: int, *, whole: bool) -> tuple[list_order.Rows, Placement]:
    """Rows and placement of the candidate that ends first; of equal ones the first."""
    candidates = partial(_candidates, shape, costs, limit, whole=whole)
    found = [(timed, placement) for timed, placement in candidates() if timed.peak <= limit]
    if costs.each:  # the best of equal microbatches is one more candidate
        rows, placement = _best(shape, costs.mean, limit, whole=whole)
        found.append((list_order.time_rows(rows, lambda stage, _: placement[stage][0], costs), placement))
    if not found:  # too few microbatches for a group: the order that holds least
        found = [min(candidates(), key=lambda candidate: candidate[0].peak)]
    first = min(timed.makespan for timed, _ in found)
    timed, placement = next(one for one in found if one[0].makespan <= first * (1 + list_order.ROUNDING))
    return timed.rows, placement


def _candidates(
    shape: Shape, costs: StageCosts, limit: int, *, whole: bool
) -> Iterator[tuple[list_order.Timed, Placement]]:
    seen = set()
    for name in WHOLE + SPLIT * (any(costs.weight_grad) and not whole):
        try:
            made = _made(name, shape, costs if entry(name).needs_costs else None, means())
        except ValueError:  # other numbers of stages, ranks or microbatches
            continue
        if made.rows in seen:  # of equal orders the first is taken in any case
            continue
        seen.add(made.rows)
        yield from ((timed, made.placement) for timed in _tries(made, costs, limit, pulls=not whole))


class _Made(NamedTuple):
    """An order to try."""

    rows: Hashable  # what tells it from others
    lanes: list_order.Lanes
    without: list_order.Lanes | None  # its rows without W; None where nothing is split
    placement: Placement
    rank_of: list_order.RankOf


@lru_cache(maxsize=128)  # a search tries the orders that follow from no times under many
def _made(name: str, shape: Shape, costs: StageCosts | None, _using: Means) -> _Made:
    made = entry(name).build(shape, costs)
    placement, rows = made.placement, [plain_of(made.compute(rank)) for rank in range(shape.num_ranks)]
    lanes = list_order.Lanes.of_actions(rows)
    without = lanes.without(Kind.W) if Kind.W in rows[0].kinds() else None
    known = *(column.tobytes() for row in rows for column in row.columns), placement
    return _Made(known, lanes, without, placement, lambda stage, microbatch: placement[stage][0])


def _tries(made: _Made, costs: StageCosts, limit: int, *, pulls: bool) -> Iterator[list_order.Timed]:
    """An order as it is, and with passes pulled forward into its waits."""
    plain = list_order.time_rows(made.lanes, made.rank_of, costs)
    yield plain
    if plain.peak > limit or not pulls:
        return
    fill = None if made.without is None else list_order.Fill.ANY
    for how in list_order.PULLS[:TRIED_PULLS]:
        pulled = list_order.pull_rows(made.without or made.lanes, made.rank_of, costs, limit, how)
        yield list_order.time_rows(pulled, made.rank_of, costs, fill=fill, limit=limit)
