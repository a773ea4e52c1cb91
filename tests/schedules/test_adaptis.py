"""AdaPtis: placement and order chosen by times, with the cut: never worse than any of them alone."""

import random

import pytest
from evaluated import plan

from baselines.zero_bubble.adaptis import SPLIT, WHOLE
from rpbench.cost.table import LayerTimes
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.plan.problem import Problem
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight


def uneven(layers: int, seed: int) -> LayerTimes:
    """A model whose layers differ up to three times, with a head as long as two of them; halves of backward apart."""
    rng = random.Random(seed)
    forward, inputs, weights = ([rng.uniform(1, 3) for _ in range(layers)] for _ in range(3))
    both = [a + b for a, b in zip(inputs, weights, strict=True)]
    return LayerTimes(forward, [0.0] * layers, both, 2.0, 4.0, inputs, weights, 2.0, 2.0, hop=0.1)


def makespan(schedule: Schedule, times: LayerTimes) -> float:
    return float(simulate(schedule, times.table(schedule.partition)).makespan)


def order(name: str, p: int, m: int, times: LayerTimes, **options) -> Schedule:
    """The order of a schedule for one layer a stage."""
    cut = symmetric((1,) * times.num_layers)
    problem = Problem(entry(name), times, p, m, options=options, chunks_per_rank=times.num_layers // p)
    return problem.order(cut)


@pytest.mark.parametrize("p, v, m", [(3, 1, 6), (4, 2, 8), (2, 3, 4)])
def test_it_is_no_worse_than_any_order_alone(p, v, m):
    times = uneven(p * v, seed=p)
    ours = order("adaptis", p, m, times)
    check(ours)
    room = v * p + (p - 1) * (v > 1)
    assert max(peak_in_flight(build_graph(ours))) <= room
    found, tried = makespan(ours, times), 0
    for name in WHOLE + SPLIT:
        try:
            other = order(name, p, m, times)
        except ValueError:
            continue
        if max(peak_in_flight(build_graph(other))) <= room:
            tried += 1
            assert found <= makespan(other, times) * (1 + 1e-9), name
    assert tried >= 2


def test_cut_and_order_together_beat_each_alone():
    """Searched with the cut: no worse than the best order on an even cut, or than a searched cut of one order."""
    times = uneven(6, seed=5)

    def planned(name: str, method: str) -> float:
        return plan(method, Problem(entry(name), times, 3, 4, chunks_per_rank=1), budget=8_000).makespan

    together = planned("adaptis", "search")
    assert together <= planned("adaptis", "even")
    assert together <= planned("1f1b", "search")
    assert together <= planned("zb_h1", "search")
    assert together < planned("1f1b", "even")


def test_more_room_is_never_worse():
    times = uneven(4, seed=1)
    plain, more = (makespan(order("adaptis", 4, 8, times, **options), times) for options in ({}, {"in_flight": 7}))
    assert more <= plain


def test_whole_backwards_stay_whole():
    ones = (1.0,) * 4
    costs = StageCosts(ones, ones, (0.0,) * 4, 0.0, ones, ones)
    schedule = entry("adaptis").build(Shape(4, 4, 6), costs)
    assert {action.kind.name for rank in range(4) for action in schedule.compute(rank)} == {"F", "B"}


def test_whole_orders_alone_are_taken_as_they_are():
    """The fastest of those whose halves are never apart, for halves that could be: one stage a rank, that of 1F1B."""
    times = uneven(4, seed=1)
    ours, split = (order("adaptis", 4, 8, times, whole=whole) for whole in (True, False))
    assert {action.kind.name for rank in range(4) for action in ours.compute(rank)} == {"F", "B"}
    assert any(action.kind.name == "W" for rank in range(4) for action in split.compute(rank))
    assert list(peak_in_flight(build_graph(ours))) == [4, 3, 2, 1], "the last ranks hold less"
    assert makespan(ours, times) == pytest.approx(
        min(makespan(order(name, 4, 8, times), times) for name in ("1f1b", "dapple"))
    )


def test_room_for_fewer_microbatches_than_ranks_is_refused():
    with pytest.raises(ValueError, match="in_flight=3: room for at least as many microbatches as ranks, 4; try 4"):
        entry("adaptis").build(Shape(4, 4, 8), in_flight=3)
