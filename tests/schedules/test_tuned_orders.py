"""Orders that times choose: sound, within their memory, no worse than those for equal passes; published rates."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ordering.list_order import Fill, Pass, time_rows
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight

CHUNKS = {"zb_v": 2, "v_half": 2, "v_min": 2, "hanayo": 4, "chimera": 1, "vocab_parallel": 1}
SPANS = ("zb_v", "v_half", "v_min")  # judged by their longest device-local span
SLACK = 1e-6

# The published times of the 6.2B model (Qi et al., ICLR'24), here of every chunk.
PUBLISHED = 29.718, 29.444, 19.927, 0.527


def measured(schedule: Schedule, costs: StageCosts) -> tuple[float, float, int]:
    """Longest device-local span, makespan and most chunk activations, by the simulator."""
    times = costs.times(schedule.shape.num_ranks)
    graph = build_graph(schedule)
    work = {kind: tuple(map(Work, stages)) for kind, stages in times.items()}
    timeline = simulate_graph(graph, CostTable(work, costs.hop))
    ends = graph.columns.lane_start.tolist()
    spans = [max(timeline.end[a:b]) - min(timeline.start[a:b]) for a, b in pairwise(ends)]
    return max(spans), timeline.makespan, max(peak_in_flight(graph))


def alike(stages: int, f: float, i: float, w: float, hop: float, head: float = 0.0) -> StageCosts:
    ones = (1.0,) * stages
    return StageCosts((f,) * stages, (i,) * stages, (w,) * stages, hop, ones, ones, head, head)


def handmade(name: str, shape: Shape) -> Schedule:
    """The order that knows of no times."""
    if name in SPANS:
        return entry(name).build(shape)
    options = {"hanayo": {"backward_slots": 1}, "vocab_parallel": {"slack": 2}}.get(name, {})
    return entry(name).build(shape, alike(shape.num_stages, 1.0, 0.5, 0.5, 0.0), **options)


@st.composite
def stage_costs(draw, stages: int) -> StageCosts:
    def each(low: float) -> tuple[float, ...]:
        if draw(st.booleans()):
            return (draw(st.floats(low, 3)),) * stages
        return tuple(draw(st.lists(st.floats(low, 3), min_size=stages, max_size=stages)))

    ones = (1.0,) * stages
    hop, head = draw(st.sampled_from([0.0, 0.1, 1.0])), draw(st.floats(0, 2))
    return StageCosts(each(0.1), each(0.1), each(0), hop, ones, ones, head, 2 * head)


@pytest.mark.parametrize("name", CHUNKS)
@settings(deadline=None, max_examples=10)
@given(data=st.data(), half=st.integers(1, 3), m=st.integers(1, 16), steps=st.integers(1, 2))
def test_times_never_make_an_order_worse(name, data, half, m, steps):
    p = 2 * half if name == "chimera" else data.draw(st.integers(1, 6))
    m = p * (1 + m % 4) if name == "chimera" else m
    shape = Shape(p, p * CHUNKS[name], m)
    costs = data.draw(stage_costs(shape.num_stages))
    schedule, plain = entry(name).build(shape, costs), handmade(name, shape)
    check(schedule)
    check(entry(name).build(Shape(p, shape.num_stages, m, num_steps=steps), costs))
    (span, makespan, peak), (plain_span, plain_makespan, plain_peak) = (
        measured(one, costs) for one in (schedule, plain)
    )
    if name in SPANS:
        assert span <= plain_span * (1 + SLACK)
        assert makespan + span <= (plain_makespan + plain_span) * (1 + SLACK)
    else:
        assert makespan <= plain_makespan * (1 + SLACK)
    limits = {"hanayo": 4 * p, "chimera": p, "vocab_parallel": min(m, p + 4), "zb_v": 2 * p}
    assert peak <= max(plain_peak, limits.get(name, 0))


@pytest.mark.parametrize("name, rate, peak", [("zb_v", 0.0349, 16), ("v_half", 0.1397, 10), ("v_min", 0.2613, 8)])
def test_published_rates_with_measured_times(name, rate, peak):
    """8 devices, 24 microbatches: at most what the scheduler released with the paper makes of them."""
    costs = alike(16, *PUBLISHED)
    span, _, held = measured(entry(name).build(Shape(8, 16, 24), costs), costs)
    assert round(1 - 24 * 2 * sum(PUBLISHED[:3]) / span, 4) <= rate
    assert held == peak


@pytest.mark.parametrize("hop, share", [(0.0, 0.21), (0.1, 0.26)])
def test_a_cut_heads_two_barriers_take_two_more_microbatches(hop, share):
    """Backward twice as long as forward: slots of equal length waited 27.8 % of the time with the same memory."""
    costs = alike(8, 1.0, 1.0, 1.0, hop)
    _, makespan, peak = measured(entry("vocab_parallel").build(Shape(8, 8, 32), costs), costs)
    assert 1 - 32 * 3 / makespan < share
    assert peak == 10


@pytest.mark.parametrize("m, share", [(16, 0.201), (32, 0.112), (64, 0.06)])
def test_chimera_fills_the_gaps_between_its_units(m, share):
    """Backward twice as long as forward: units one after another waited 27, 24 and 22 %."""
    costs = alike(8, 1.0, 1.0, 1.0, 0.0)
    _, makespan, peak = measured(entry("chimera").build(Shape(8, 8, m), costs), costs)
    assert 1 - m * 3 / makespan < share
    assert peak == 8


def test_more_room_is_used_where_hops_take_time():
    costs = alike(16, 1.0, 1.0, 1.0, 0.2)
    makespans = [measured(entry("hanayo").build(Shape(8, 16, 32), costs, in_flight=room), costs)[1] for room in (8, 16)]
    assert makespans[1] <= makespans[0]


def test_rows_take_what_the_simulator_says():
    """F, I and the W put in between, by hand: two ranks, hops of a half."""
    costs = alike(2, 1.0, 1.0, 1.0, 0.5)
    rows = [
        [Pass(Kind.F, 0, 0), Pass(Kind.F, 0, 1), Pass(Kind.I, 0, 0), Pass(Kind.I, 0, 1)],
        [Pass(Kind.F, 1, 0), Pass(Kind.I, 1, 0), Pass(Kind.F, 1, 1), Pass(Kind.I, 1, 1)],
    ]
    # rank 0: F 0-1 F 1-2, I0 arrives at 4: 4-5, I1 at 6: W0 5-6, I 6-7, W1 7-8; rank 1: 1.5 F I F I W W 7.5
    found = time_rows(rows, lambda stage, _: stage, costs, fill=Fill.NONE, limit=2)
    assert (found.makespan, found.span, found.peak) == (8.0, 8.0, 2)
    assert [what.kind.name for what in found.rows[0]] == list("FFIWIW")
    assert [what.kind.name for what in found.rows[1]] == list("FIFIWW")
    tight = time_rows(rows, lambda stage, _: stage, costs, fill=Fill.NONE, limit=1)
    assert [what.kind.name for what in tight.rows[1]] == list("FIWFIW")
