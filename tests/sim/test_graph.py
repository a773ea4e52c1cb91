"""The edges of a schedule, derived for all microbatches at once, are those found one by one."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.index import Index
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Shape
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.registry import entries
from rpbench.sim.graph import build_graph
from tests.one_by_one import waits_for


@st.composite
def schedules(draw):
    """A registered schedule of a random shape, split, stepped and lowered at random."""
    generator = entries()[draw(st.sampled_from(sorted(entries())))]
    p, m, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    if generator.separate_cuts:
        shape = Shape(p, draw(st.integers(1, 4)), m, draw(st.integers(1, 4)), steps, fused=draw(st.booleans()))
    else:
        p, v, m = nearby(generator.name, p, draw(st.integers(1, 3)), m)
        shape = Shape(p, p * v, m, num_steps=steps)
    schedule = generator.build(shape)
    if schedule.policy is Policy.FLUSH:  # an order that is not flushed would wait for itself under another policy
        schedule = replace(schedule, policy=draw(st.sampled_from([Policy.FLUSH, Policy.DELAYED])))
    if draw(st.booleans()):
        schedule = split_backward(schedule)
    if draw(st.booleans()):
        schedule = add_steps(schedule)
    if draw(st.booleans()):
        schedule = lower_communication(schedule, draw(st.sampled_from(["compute", "net"])))
    return schedule


@settings(deadline=None, max_examples=80)
@given(schedule=schedules())
def test_edges_are_those_found_one_by_one(schedule):
    index = Index(schedule)
    transfers = defaultdict(list)
    for producer, consumer in Analysis(schedule).transfer_edges:
        transfers[consumer].append((producer, "order"))
    one_by_one = {
        (producer, consumer, moved != "order")
        for consumer, action in enumerate(index.actions)
        for part in parts_of(action)
        for producer, moved in [*waits_for(index, part), *transfers[consumer]]
        if index.lane_of[producer] != index.lane_of[consumer] or producer > consumer
    }
    graph = build_graph(schedule)
    order = graph.order.tolist()
    at_once = {
        (order[graph.pred[edge]], order[i], bool(graph.moves[edge]))
        for i in range(graph.num_actions)
        for edge in range(graph.pred_start[i], graph.pred_start[i + 1])
    }
    received = {edge for edge in at_once if index.lane_of[edge[0]] == index.lane_of[edge[1]] and edge[0] < edge[1]}
    assert at_once - received == one_by_one
    for producer, consumer, _ in received:  # a gradient on lane compute holds back only what uses it
        assert (index.actions[producer].kind, producer) == (Kind.RECV_B, consumer - 1)
        assert graph.before[consumer] == (-1 if producer in graph.columns.lane_start else producer - 1)
    producers = Analysis(schedule).producers
    assert {(before, after) for after in range(len(producers)) for before in producers[after]} == {
        (producer, consumer) for producer, consumer, _ in one_by_one
    }


@settings(deadline=None, max_examples=40)
@given(schedule=schedules())
def test_positions_are_topological(schedule):
    graph = build_graph(schedule)
    assert sorted(graph.order.tolist()) == list(range(schedule.num_actions))
    for i in range(graph.num_actions):
        assert graph.previous[i] < i
        assert all(graph.pred[edge] < i for edge in range(graph.pred_start[i], graph.pred_start[i + 1]))
