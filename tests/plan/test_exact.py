"""The automatic scheduler against the optimum of small cases, which constraint programming finds."""

import pytest

from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate

pytest.importorskip("ortools", reason="OR-tools is not installed: extra `exact`")

from rpbench.ordering.exact import best_order

# Profiled times of the zero-bubble paper's 6.2B model in ms, and its activations.
SMALL = {"unit": (1.0, 1.0, 1.0, 0.0, 1.0), "6.2B": (29.718, 29.444, 19.927, 0.527, 0.432)}


def costs_of(name: str, p: int) -> StageCosts:
    forward, input_grad, weight_grad, hop, kept = SMALL[name]
    return StageCosts((forward,) * p, (input_grad,) * p, (weight_grad,) * p, hop, (1.0,) * p, (kept,) * p)


def span_of(schedule: Schedule, costs: StageCosts) -> float:
    table = CostTable(
        {
            Kind.F: tuple(map(Work, costs.forward)),
            Kind.I: tuple(map(Work, costs.input_grad)),
            Kind.W: tuple(map(Work, costs.weight_grad)),
        },
        costs.hop,
    )
    spans = list(simulate(schedule, table).spans())
    own = [[span for span in spans if span.device == rank] for rank in range(schedule.shape.num_ranks)]
    return max(max(span.end for span in rank) - min(span.start for span in rank) for rank in own)


# Small cases in which the heuristic finds the optimum, and one in which it does not: bubble .2799 for .2764.
@pytest.mark.parametrize(
    "name, p, m, limit, gap",
    [
        ("unit", 2, 4, 2, 0.0),
        ("unit", 3, 4, 3, 0.0),
        ("unit", 4, 6, 8, 0.0),
        ("6.2B", 2, 4, 4, 0.0),
        ("6.2B", 3, 4, 6, 0.0),
        ("6.2B", 4, 4, 8, 0.0),
        ("6.2B", 4, 4, 4, 0.005),
    ],
)
def test_how_far_the_heuristic_is_from_the_optimum(name, p, m, limit, gap):
    costs = costs_of(name, p)
    optimum = best_order(m, costs, limit, time_limit_s=60)
    assert optimum.proven
    check(optimum.schedule)
    assert span_of(optimum.schedule, costs) == pytest.approx(optimum.span, abs=2e-3)
    found = span_of(entry("zb_auto").build(Shape(p, p, m), costs, memory_limit=str(limit)), costs)
    assert found / optimum.span - 1 == pytest.approx(gap, abs=6e-4)


def test_memory_is_what_it_costs():
    """With room for one activation devices take turns; with room for p, half as long."""
    costs = costs_of("unit", 3)
    spans = [best_order(3, costs, limit).span for limit in (1, 2, 3)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[2]


def test_a_limit_that_nothing_fits_in_is_refused():
    with pytest.raises(ValueError, match=r"limit=0\.5: one microbatch leaves 1\.0"):
        best_order(2, costs_of("unit", 2), 0.5)
