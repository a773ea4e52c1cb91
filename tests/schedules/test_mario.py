"""Mario: recomputation in the wait for gradients, on several schedules."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.virtual import known_clock
from rpbench.engine.program import make_program
from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.boundary_lanes import send_over_links
from rpbench.passes.recomputation import checkpoint, prepose
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.walk import walk

# Worked out by hand: the passes over 1F1B, 3 ranks and 4 microbatches.
GOLDEN = """
    0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3
    1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""


def build(p: int, m: int, v: int = 1, **options) -> Schedule:
    return entry("mario").build(Shape(p, v * p, m), **options)


def makespan(schedule: Schedule, *, recompute: int, ahead: bool) -> Fraction:
    """With F = 1, B = 2 and this recomputation of a stage, which the last stage spares."""
    stages = schedule.shape.num_stages
    times = LayerTimes(*([Fraction(time)] * stages for time in (1, recompute, 2)))
    table = times.table(symmetric((1,) * stages), recompute_ahead=ahead, keeps_last=True)
    return simulate(schedule, table).makespan


def test_order():
    rows = [" ".join(map(str, build(3, 4).compute(rank))) for rank in range(3)]
    assert rows == [line.strip() for line in GOLDEN.strip().splitlines()]


# Makespans with F = R = 1 and B = 2, worked out apart from this code: nothing recomputed, R when the gradient is
# there, R in the wait for it, and one forward more ahead of the first backward.
STEPS = {(4, 8): (33, 42, 39, 38), (8, 32): (117, 154, 147, 146)}


@pytest.mark.parametrize("p, m", STEPS)
def test_what_the_passes_save_on_1f1b(p, m):
    plain = entry("1f1b").build(Shape(p, p, m))
    found = (
        makespan(plain, recompute=0, ahead=False),
        makespan(plain, recompute=1, ahead=False),
        makespan(build(p, m), recompute=1, ahead=True),
        makespan(build(p, m, preposed=1), recompute=1, ahead=True),
    )
    assert found == STEPS[p, m]


@settings(deadline=None, max_examples=20)
@given(p=st.integers(2, 7), m=st.integers(7, 14))
def test_p_minus_1_recomputations_of_1f1b_cost_nothing(p, m):
    late = makespan(entry("1f1b").build(Shape(p, p, m)), recompute=1, ahead=False)
    assert makespan(build(p, m), recompute=1, ahead=True) == late - (p - 1)


@pytest.mark.parametrize("p, m", STEPS)
def test_a_gradient_over_a_direct_link_does_not_hold_back_the_recomputation(p, m):
    """RECV stands on lane compute there, before the backward."""
    order = send_over_links(build(p, m), direct=True)
    assert makespan(order, recompute=1, ahead=True) == STEPS[p, m][2]
    assert makespan(order, recompute=1, ahead=False) == STEPS[p, m][1]
    times = LayerTimes(*([Fraction(time)] * p for time in (1, 1, 2)))
    table = times.table(symmetric((1,) * p), recompute_ahead=True, keeps_last=True)
    for clock in (walk(Analysis(order), table), known_clock(make_program(order, table), table)):
        assert clock.main == simulate(order, table).main


@pytest.mark.parametrize("base, p, m, v", [("gpipe", 4, 6, 1), ("interleaved_1f1b", 4, 8, 2), ("chimera", 4, 8, 1),
                                           ("zb_h1", 4, 8, 1), ("dualpipe_v", 3, 8, 2)])  # fmt: skip
@pytest.mark.parametrize("preposed", [0, 1])
def test_any_flushed_schedule_takes_the_passes(base, p, m, v, preposed):
    schedule = build(p, m, v, base=base, preposed=preposed)
    check(schedule)
    plain = entry(base).build(Shape(p, v * p, m))
    for rank in range(p):
        row = schedule.compute(rank)
        if not preposed:
            assert tuple(action for action in row if action.kind is not Kind.R) == plain.compute(rank)
        for place, action in enumerate(row):
            if action.kind is Kind.R:
                following = [part for part in (row[place + 1], *row[place + 1].sub) if part.kind in (Kind.B, Kind.I)]
                assert (action.stage, action.microbatch) in {(part.stage, part.microbatch) for part in following}


@pytest.mark.parametrize("base, v", [("gpipe", 1), ("interleaved_1f1b", 2), ("chimera", 1)])
def test_recomputing_early_never_takes_longer(base, v):
    plain = entry(base).build(Shape(4, 4 * v, 8))
    assert makespan(build(4, 8, v, base=base), recompute=1, ahead=True) < makespan(plain, recompute=1, ahead=False)


def test_a_forward_more_is_in_flight_for_every_one_preposed():
    assert peak_in_flight(build_graph(build(4, 12, preposed=2))) == [6, 5, 4, 1]


def test_passes_on_a_row():
    row = [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), Action(Kind.F, 0, 1), Action(Kind.B, 0, 1)]
    assert checkpoint(row) == tuple(row), "what turns at once is kept"
    assert prepose(row, 1) == tuple(row)
    assert prepose([], 1) == ()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"base": "roundpipe"}, "base=roundpipe: its weights must stay .* take 1f1b"),
        ({"base": "pipedream_2bw"}, "base=pipedream_2bw: it must flush .* take 1f1b"),
        ({"base": "seq1f1b"}, "base=seq1f1b: .* whole microbatches"),
        ({"preposed": -1}, "preposed=-1: .* try 1"),
        ({"base": "1f1c"}, "unknown schedule '1f1c'; did you mean 1f1b"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(4, 8, **options)
