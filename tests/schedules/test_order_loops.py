"""The loops behind orders under given times: compiled ones make the orders of plain ones."""

from dataclasses import replace

import pytest

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Shape
from rpbench.ordering import loops
from rpbench.ordering.list_order import PULLS, Fill, Pass, Pull, Timed, pull_rows, shortest, time_rows
from rpbench.ordering.periodic import grids, make_period
from rpbench.registry import entry
from rpbench.sim.kernels import compile_orders

STAGES = 6
TIMES = [tuple(1 + 0.1 * ((stage * step) % 7) for stage in range(STAGES)) for step in (1, 2, 3)]
COSTS = StageCosts(*TIMES, 0.05, (1.0,) * STAGES, (1.0,) * STAGES)
SHORT = replace(COSTS, forward=TIMES[1], input_grad=TIMES[2], weight_grad=TIMES[0])
RAGGED = replace(COSTS, each=(COSTS, SHORT, COSTS))  # by microbatch, in turn


def rank_of(stage, _):
    """Down three ranks and up again."""
    return min(stage, STAGES - 1 - stage)


def made(costs):
    """Everything that the loops say of one order, with W put in by every rule and passes pulled in every way."""
    table = entry("zb_v").build(Shape(3, STAGES, 7))
    rows = [[Pass(each.kind, each.stage, each.microbatch) for each in table.compute(rank)] for rank in range(3)]
    without = [[what for what in row if what.kind is not Kind.W] for row in rows]
    found = [time_rows(rows, rank_of, costs)]
    found += [time_rows(without, rank_of, costs, fill=fill, limit=6) for fill in Fill]
    found += [time_rows(pull_rows(without, rank_of, costs, 6, how), rank_of, costs) for how in PULLS]
    return [([list(row) for row in each.rows], each.makespan, each.span, each.peak) for each in found]


@pytest.mark.parametrize("costs", [COSTS, RAGGED], ids=["alike", "ragged"])
def test_compiled_loops_make_the_orders_of_plain_ones(costs):
    before = loops.means()
    try:
        loops.use(loops.PLAIN)
        plain = made(costs)
        compile_orders.cache_clear()
        compile_orders()
        assert loops.means() is not loops.PLAIN
        assert made(costs) == plain
    finally:
        loops.use(before)


def test_equal_microbatches_told_apart_make_the_same_orders():
    assert made(replace(COSTS, each=(COSTS,) * 3)) == made(COSTS) != made(RAGGED)


def test_a_rank_works_on_its_own_weight_gradient_until_a_later_pass_is_there():
    """Stage 0 ends F0, F2, F1 at 2, 4 and 6. Stage 1 ends F0 and I0 at 3 and its W at 4: F2 and I2 come before F1.

    With the W of stage 0, which takes 10, F1 were there first.
    """
    f, i = ([Pass(kind, 1, mb) for mb in range(3)] for kind in (Kind.F, Kind.I))
    first = [Pass(kind, 0, mb) for kind in (Kind.F, Kind.I) for mb in (0, 2, 1)]
    costs = StageCosts((2.0, 0.5), (1.0, 0.5), (10.0, 1.0), 0.0, (1.0, 1.0), (1.0, 1.0))
    rows = [first, [f[0], i[0], f[1], f[2], i[1], i[2]]]
    found = pull_rows(rows, lambda stage, _: stage, costs, 9, Pull(window=4, lateness=0.0))
    assert list(found[1]) == [f[0], i[0], f[2], i[2], f[1], i[1]]


@pytest.mark.parametrize("limit, taken", [(9, 5.0), (4, 8.0), (1, 9.0)])
def test_the_shortest_order_holds_no_more_than_the_limit_or_than_the_one_that_was_made(limit, taken):
    rows, found = [[Pass(Kind.F, 0, 0)]], ((10.0, 3), (5.0, 9), (8.0, 4), (9.0, 3))
    made, *trials = (Timed(rows, time, time, peak) for time, peak in found)
    assert shortest(made, trials, limit).makespan == taken


def test_passes_of_a_period_are_beside_each_other():
    """Three pipelines in blocks of F and B, on each of two ranks: none begins while another runs, in any period."""
    period = make_period([(0, 1)] * 3, 2, 2.0, 3.0)
    assert period.length == 3 * (2.0 + 3.0)
    for stage in range(2):
        spans = sorted(
            (starts[kind, stage] % period.length, time)
            for starts in period.starts
            for kind, time in ((Kind.F, 2.0), (Kind.B, 3.0))
        )
        assert [begin for begin, _ in spans] == [0.0, 2.0, 5.0, 7.0, 10.0, 12.0]
        assert [time for _, time in spans] == [2.0, 3.0] * 3


def test_a_grid_has_the_mean_times_with_a_hop_and_without():
    costs = StageCosts((1.0, 2.0, 6.0), (2.0, 4.0, 6.0), (1.0, 1.0, 1.0), 0.5, (1.0,) * 3, (1.0,) * 3)
    assert grids(costs) == [(3.5, 5.5), (3.0, 5.0)]
    assert grids(replace(costs, hop=0.0)) == [(3.0, 5.0)]


def test_rows_that_wait_for_each_other_are_no_order():
    rows = [[Pass(Kind.B, 0, 0), Pass(Kind.F, 0, 0)], [Pass(Kind.F, 1, 0), Pass(Kind.B, 1, 0)]]
    costs = StageCosts((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), 0.0, (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(AssertionError, match="wait for each other"):
        time_rows(rows, lambda stage, _: stage, costs)
