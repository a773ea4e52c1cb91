"""Compiled and plain kernels, metrics and memory on random shapes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby

from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Action, Kind
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import stream
from rpbench.registry import entries
from rpbench.sim import graph as graphs
from rpbench.sim import longest_path, memory
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate, simulate_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.metrics import measure


@st.composite
def cells(draw):
    """A registered schedule with random cuts and times."""
    name = draw(st.sampled_from(sorted(entries())))
    generator = entries()[name]
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 4)) * draw(st.integers(1, 3))
    time = st.floats(0.01, 5, allow_nan=False)
    if generator.separate_cuts:
        forward = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any))
        cut = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        fused = draw(st.integers(0, 1))
        rest = sum(forward) - sum(cut)
        cut = [*cut, rest] if rest >= 0 else [sum(forward)]
        partition = Partition(tuple(forward), (*cut, fused), fused=True)
    else:
        p, v, m = nearby(name, p, draw(st.integers(1, 3)), m)
        stages = p * v
        partition = symmetric(tuple(draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages).filter(any))))
    num = partition.num_layers
    layer_times = LayerTimes(
        *(draw(st.lists(time, min_size=num, max_size=num)) for _ in range(3)),
        head_forward=draw(time),
        head_backward=draw(time),
        head_input_grad=draw(time),
        head_weight_grad=draw(time),
        hop=draw(time),
        input_grad=draw(st.lists(time, min_size=num, max_size=num)),
        weight_grad=draw(st.lists(time, min_size=num, max_size=num)),
        overlap_gain=draw(st.floats(0, 1)),
        speeds=tuple(draw(st.one_of(st.just([]), st.lists(st.floats(0.25, 4), min_size=p, max_size=p)))),
    )
    shape = Shape(p, len(partition.forward), m, len(partition.backward), fused=partition.fused)
    schedule = generator.build(shape).with_partition(partition)
    costs = layer_times.table(
        partition,
        recompute_ahead=draw(st.booleans()),
        fused_ahead=draw(st.booleans()),
        num_head_shards=schedule.shape.num_head_shards,
    )
    return generator, schedule, costs


@settings(deadline=None, max_examples=30)
@given(cell=cells())
def test_compiled_and_plain_kernels_give_the_same_bits(cell):
    _, schedule, costs = cell
    graph = build_graph(schedule)
    compiled_by_request, compiled_in_flight = simulate_graph(graph, costs, compiles=True), peak_in_flight(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "is_warm", lambda: False)
        assert peak_in_flight(graph) == compiled_in_flight
    plain = simulate(schedule, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "COMPILE_FROM", 0)
        patch.setattr(longest_path, "COMPILE_FROM", 0)
        compiled = simulate(schedule, costs)
    for name in ("start", "main", "end", "exposed"):
        assert np.array_equal(getattr(compiled_by_request, name), getattr(compiled, name))
    for name in ("start", "main", "end", "exposed"):
        assert np.array_equal(np.asarray(getattr(plain, name), float), getattr(compiled, name))


@settings(deadline=None, max_examples=60)
@given(cell=cells())
def test_parts_sum_to_the_whole(cell):
    generator, schedule, costs = cell
    graph = build_graph(schedule)
    timeline = simulate_graph(graph, costs)
    row = measure(graph, timeline, costs, switch_after_last_forward=generator.switch_after_last_forward)
    devices = schedule.shape.num_ranks
    work = sum(row["busy_s"])
    assert row["idle_s"] == pytest.approx(devices * row["makespan_s"] - work, abs=1e-9)
    assert row["fill_s"] + row["switch_s"] + row["drain_s"] + row["intra_s"] >= row["idle_s"] - 1e-9
    assert row["bubble_makespan"] == pytest.approx(row["idle_s"] / (devices * row["makespan_s"]), abs=1e-9)
    assert row["bubble_span"] <= row["bubble_makespan"] + 1e-9
    assert row["bubble_over_ideal"] == pytest.approx(row["idle_s"] / work, abs=1e-9)
    assert row["comm_data_s"] <= row["comm_total_s"] + 1e-9


@settings(deadline=None, max_examples=60)
@given(cell=cells())
def test_no_action_runs_before_its_lane_and_its_inputs_allow(cell):
    _, schedule, costs = cell
    graph = build_graph(schedule)
    timeline = simulate_graph(graph, costs)
    start, main, end = (
        np.asarray(column, float)[graph.order] for column in (timeline.start, timeline.main, timeline.end)
    )
    late = longest_path.late_edges(graph, costs)
    for i in range(graph.num_actions):
        assert start[i] <= main[i] <= end[i]
        if graph.previous[i] >= 0:
            assert end[graph.previous[i]] <= start[i] + 1e-9
        for edge in range(graph.pred_start[i], graph.pred_start[i + 1]):
            arrival = end[graph.pred[edge]] + costs.hop * graph.crosses[edge]
            assert arrival <= (main[i] if late[edge] else start[i]) + 1e-9


def test_in_flight_follows_the_textbook():
    p, m, v = 4, 8, 2
    peaks = {name: peak_in_flight(build_graph(entries()[name].build(Shape(p, p, m)))) for name in ("gpipe", "1f1b")}
    assert peaks == {"gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1]}
    looped = Shape(p, p * v, m)
    assert peak_in_flight(build_graph(entries()["interleaved_1f1b"].build(looped))) == [11, 9, 7, 5]
    assert peak_in_flight(build_graph(entries()["looped_bfs"].build(looped))) == [16, 16, 16, 16]
    streamed = stream(add_steps(replace(entries()["1f1b"].build(Shape(p, p, m)), weights=Weights.STREAMED)))
    assert peak_in_flight(build_graph(streamed)) == [1, 1, 1, 1]  # one that is computed, on each device


def test_a_deadlock_is_an_error_that_names_who_waits():
    rows = ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)))
    with pytest.raises(ScheduleError, match="device 0 waits at 0B0"):
        build_graph(Schedule(Shape(2, 2, 1), rows))


def test_costs_that_do_not_split_backward_refuse_its_halves():
    rows = ((Action(Kind.F, 0, 0), Action(Kind.I, 0, 0), Action(Kind.W, 0, 0)),)
    costs = LayerTimes([1.0], [1.0], [2.0]).table(symmetric((1,)))
    with pytest.raises(ScheduleError, match="do not split backward"):
        simulate(Schedule(Shape(1, 1, 1), rows), costs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e308])
def test_times_must_be_finite_and_not_negative(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        LayerTimes([bad], [1.0], [1.0])


def test_actions_that_are_made_shorter_end_as_much_earlier_and_at_once_where_nothing_is_left():
    """One device, six actions one after another, of 1, 2, 1, 2, 1 and 2 units."""
    schedule = Schedule(Shape(1, 1, 3), (tuple(Action(kind, 0, mb) for mb in range(3) for kind in (Kind.F, Kind.B)),))
    costs = LayerTimes([1.0], [0.0], [2.0]).table(symmetric((1,)))
    timeline = simulate_graph(build_graph(schedule), costs, [0.5, 0, 1, 9, 0, 2])
    assert list(timeline.end) == [0.5, 2.5, 2.5, 2.5, 3.5, 3.5]
