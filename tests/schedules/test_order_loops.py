"""The loops behind orders under given times: compiled ones make the orders of plain ones."""

from dataclasses import replace

import pytest

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Shape
from rpbench.ordering import loops
from rpbench.ordering.list_order import PULLS, Fill, Pass, pull_rows, time_rows
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


def test_rows_that_wait_for_each_other_are_no_order():
    rows = [[Pass(Kind.B, 0, 0), Pass(Kind.F, 0, 0)], [Pass(Kind.F, 1, 0), Pass(Kind.B, 1, 0)]]
    costs = StageCosts((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), 0.0, (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(AssertionError, match="wait for each other"):
        time_rows(rows, lambda stage, _: stage, costs)
