"""ZB-V: no bubble on the longest device-local span at the memory of 1F1B, by V placement.

Rank r holds stages r and 2p-1-r, so the pipeline runs down the ranks and up again (a V): the loss is on rank 0, where
forwards start, and so do gradients. With 3 ranks and 4 microbatches, fewer than the 2p-1 that fill it:

    rank 0   0F0 0F1 0F2 0F3 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0 0W0 5F3 5I3 5W3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1I0 1W0 4F3 4I2 4W2 1I1 1W1 4I3 4W3 1I2 1I3 1W2 1W3
    rank 2   2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2I1 2W1 3I2 3W2 2I2 3I3 2I3 2W2 3W3 2W3

For other times than F = I = W, W is moved and passes are pulled forward, as in `v_block`.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS'24 (arXiv 2405.15362), after "Zero Bubble
Pipeline Parallelism", ICLR'24. The order for equal F, I and W is, as in torch, made for at least 2p-1 microbatches, and
the surplus ones are left out.
"""

from dataclasses import replace
from functools import lru_cache

from baselines.bidirectional.dualpipe_v import check_v
from baselines.zero_bubble.v_block import Pass, stage_passes, tune, v_rank_of, v_schedule
from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ordering.list_order import Rows, time_rows
from rpbench.registry import schedule

_F0, _I0, _W0 = ((kind, 0) for kind in (Kind.F, Kind.I, Kind.W))
_F1, _I1, _W1 = ((kind, 1) for kind in (Kind.F, Kind.I, Kind.W))


@schedule("zb_v", source="Qi et al., NeurIPS'24", looped=True, chunks=2, needs_costs=True)
def zb_v(shape: Shape, costs: StageCosts) -> Schedule:
    """Every rank keeps at most 2p chunk activations."""
    check_v("zb_v", shape)
    return v_schedule("zb_v", shape, _rows(replace(shape, num_steps=1), costs))


@lru_cache(maxsize=64)  # a partition search asks for an order several times, and for more steps of it
def _rows(shape: Shape, costs: StageCosts) -> Rows:
    made = time_rows(_handmade(shape), v_rank_of(shape.num_stages), costs)
    return tune(made, costs, 2 * shape.num_ranks).rows


@lru_cache(maxsize=8)  # the same under many times, as a search of cuts asks
def _handmade(shape: Shape) -> Rows:
    return stage_passes([_order(shape, rank) for rank in range(shape.num_ranks)])


def _order(shape: Shape, rank: int) -> list[Pass]:
    p = shape.num_ranks
    num_microbatches = max(shape.num_microbatches, 2 * p - 1)
    done = dict.fromkeys((_F0, _I0, _W0, _F1, _I1, _W1), 0)
    order: list[Pass] = []

    def run(times: int, *passes: tuple[Kind, int]) -> None:
        for _ in range(times):
            for what in passes:
                order.append(Pass(*what, done[what]))
                done[what] += 1

    run(2 * (p - rank) - 1, _F0)
    run(rank, _F1, _F0)
    run(p - rank, _F1, _I1, _W1)
    while done[_F1] < done[_F0] or done[_F0] < num_microbatches:
        run(int(done[_F0] < num_microbatches), _F0)
        run(1, _I0, _W0, _F1, _I1, _W1)
    run(rank, _I0, _I1)
    run(p - rank, _I0, _W0)
    run(done[_I1] - done[_W1], _W1)
    run(done[_I0] - done[_W0], _W0)
    return [what for what in order if what.microbatch < shape.num_microbatches]
