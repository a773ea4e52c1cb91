"""Schedules whose devices hold stages twice, in waves, or for parts of sequences: shapes, closed forms, memory."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.constant import constant_times
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

TIMES = st.fractions(Fraction(1, 10), 10, max_denominator=20)
HALVES = st.integers(1, 8)  # of an even number of devices


def timed(schedule: Schedule, f, i, w=Fraction(0), *, gain=Fraction(0)) -> Fraction:
    """Makespan with these times of one stage and microbatch."""
    stages, p = schedule.shape.num_stages, schedule.shape.num_ranks
    v = stages // p
    times = constant_times(stages, p, forward_ms=f * v, input_grad_ms=i * v, weight_grad_ms=w * v, overlap_gain=gain)
    return simulate(schedule, times.table(symmetric((1,) * stages))).makespan


def build(name: str, p: int, m: int, v: int = 1, *, costs: StageCosts | None = None, **options) -> Schedule:
    return entry(name).build(Shape(p, p * v, m), costs, **options)


def equal(stages: int, forward=1.0, backward=1.0, hop=0.0) -> StageCosts:
    """Whole backwards on stages that are all alike."""
    each = [(float(time),) * stages for time in (forward, backward, 0, 1, 1)]
    return StageCosts(each[0], each[1], each[2], float(hop), each[3], each[4])


# --- DualPipe -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p, m, bubble, peak", [(4, 8, 6, 9), (8, 32, 14, 17)])
def test_dualpipe_v_in_unit_slots(p, m, bubble, peak):
    """F = I = W = 1 and F&B = 3: values of torch's order, re-timed."""
    schedule = build("dualpipe_v", p, m, 2)
    assert timed(schedule, Fraction(1), Fraction(1), Fraction(1)) - 2 * m * 3 == bubble
    assert max(peak_in_flight(build_graph(schedule))) == peak


@settings(deadline=None, max_examples=10)
@given(p=HALVES, more=st.integers(0, 5), time=TIMES, gain=st.sampled_from([0, Fraction(1, 3), 1]))
def test_dualpipe_waits_as_its_table_says(p, more, time, gain):
    """(S/2 - 1)(F&B + B - 3W) for F = I = W, without a gain; a gain shortens every pair that runs together."""
    for name, ranks, m, v in (("dualpipe_v", p, 2 * p + more, 2), ("dualpipe", 2 * p, 4 * p + 2 * more, 1)):
        schedule = build(name, ranks, m, v)
        found = timed(schedule, time, time, time)
        assert found == v * m * 3 * time + (p - 1) * 2 * time
        assert max(peak_in_flight(build_graph(schedule))) == 2 * p + 1
        check(schedule, max_in_flight=2 * p + 1)
        assert timed(schedule, time, time, time, gain=gain) <= found


def test_a_full_gain_hides_forwards_behind_backwards():
    """F&B = B: the first rank's three pairs and the wait of (p - 1)(F&B + B - 3W) are a slot shorter each."""
    schedule, unit = build("dualpipe_v", 2, 4, 2), Fraction(1)
    assert sum(bool(action.sub) for action in schedule.compute(0)) == 3
    apart, together = (timed(schedule, unit, unit, unit, gain=gain) for gain in (0 * unit, unit))
    assert apart - together == 3 + 1


# --- Chimera ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(half=HALVES, units=st.integers(1, 3), time=TIMES)
def test_chimera_waits_p_minus_2_slots_where_forward_is_as_long_as_backward(half, units, time):
    p, m = 2 * half, 2 * half * units
    schedule = build("chimera", p, m, costs=equal(p, time, time))
    assert timed(schedule, time, time) == (2 * m + p - 2) * time
    peaks = peak_in_flight(build_graph(schedule))
    assert peaks == [min(p, half + 1 + min(rank, p - 1 - rank)) for rank in range(p)]
    check(schedule, max_in_flight=peaks)


@settings(deadline=None, max_examples=20)
@given(half=HALVES, units=st.integers(1, 4), time=TIMES)
@pytest.mark.slow
def test_chimera_with_backward_twice_as_long(half, units, time):
    """Idle share (D - 2) / (3N/2 + D - 2): the paper's for N = D, and kept for its multiples by orders that repeat."""
    p, m = 2 * half, 2 * half * units
    makespan = timed(build("chimera", p, m, costs=equal(p, time, 2 * time)), time, 2 * time)
    assert 1 - 3 * m * time / makespan == Fraction(p - 2) / (Fraction(3 * m, 2) + p - 2)


@pytest.mark.parametrize("name, m", [("chimera", 8), ("dualpipe", 8)])
def test_both_copies_of_a_stage_give_gradients_to_one_step(name, m):
    schedule = add_steps(build(name, 4, m))
    check(schedule)
    for stage in range(4):
        ranks = {rank for rank in range(4) for action in schedule.compute(rank) if action.stage == stage}
        steps = [str(action) for rank in range(4) for action in schedule.compute(rank) if action.kind.name == "STEP"]
        assert ranks == {stage, 3 - stage}
        assert steps.count(f"{stage}STEP@1") == 1


# --- Hanayo -------------------------------------------------------------------------------------------------

# Idle shares with B = 2F and m = p, by the greedy that knows it: p -> W = 1, 2, 4.
WAVES = {4: (0.3333, 0.2131, 0.1193), 8: (0.3684, 0.2381, 0.1351)}


@pytest.mark.parametrize("p", WAVES)
def test_waves_in_unit_slots(p):
    for waves, share in zip((1, 2, 4), WAVES[p], strict=True):
        schedule = build("hanayo", p, p, 2 * waves, backward_slots=2)
        makespan = timed(schedule, Fraction(1), Fraction(2))
        assert round(float(1 - 6 * waves * p / makespan), 4) == share


def test_a_greedy_backward_of_any_length_is_ordered_as_one_longer_than_all_forwards():
    long, longer = (
        build("hanayo", 4, 8, 2, backward_slots=slots) for slots in (1_000, 10**12)
    )  # a slot at a time: never
    assert long.rows == longer.rows != build("hanayo", 4, 8, 2, backward_slots=1).rows


@settings(deadline=None, max_examples=20)
@given(p=st.integers(1, 8), waves=st.integers(1, 3), groups=st.integers(1, 3), time=TIMES)
def test_waves_wait_two_slots_for_every_rank_but_one(p, waves, groups, time):
    m, v = groups * p, 2 * waves
    schedule = build("hanayo", p, m, v, costs=equal(v * p, time, time))
    assert timed(schedule, time, time) == (2 * v * m + 2 * (p - 1)) * time
    check(schedule, max_in_flight=v * p)


@settings(deadline=None, max_examples=20)
@given(p=st.integers(1, 8), waves=st.integers(1, 3), groups=st.integers(1, 3), time=TIMES)
@pytest.mark.slow
def test_waves_with_backward_twice_as_long(p, waves, groups, time):
    """Idle share (2p - 2) / (3Wm + 2p - 2) for any multiple of p, at the memory of the order for m = p."""
    m, v = groups * p, 2 * waves
    schedule = build("hanayo", p, m, v, costs=equal(v * p, time, 2 * time))
    check(schedule, max_in_flight=v * p)
    makespan = timed(schedule, time, 2 * time)
    assert 1 - 3 * v * m * time / makespan == Fraction(2 * p - 2, 3 * waves * m + 2 * p - 2)


def test_room_for_more_microbatches_must_be_room_for_p():
    build("hanayo", 4, 8, 2, in_flight=6)
    for options in ({"in_flight": 3}, {"in_flight": 6, "backward_slots": 1}):
        with pytest.raises(ValueError, match=r"in_flight=\d: room for .* at least as many microbatches as ranks, 4"):
            build("hanayo", 4, 8, 2, **options)


def test_turns_stay_on_their_rank():
    placement = build("hanayo", 3, 3, 4).placement
    assert [holders[0] for holders in placement] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]


# --- Seq1F1B ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 8), m=st.integers(1, 6), k=st.integers(1, 5), f=TIMES, b=TIMES)
def test_segments_divide_the_bubble(p, m, k, f, b):
    schedule = build("seq1f1b", p, m, num_segments=k)
    if m * k >= p + k - 1:
        assert timed(schedule, f, b) == m * (f + b) + (p - 1) * (f + b) / k
    peaks = peak_in_flight(build_graph(schedule))
    assert peaks == [min(p - rank + k - 1, m * k) for rank in range(p)]
    check(schedule, max_in_flight=peaks)


def test_one_segment_is_1f1b():
    assert build("seq1f1b", 4, 6, num_segments=1).rows == build("1f1b", 4, 6).rows


# --- every shape --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v", "chimera", "hanayo", "seq1f1b"])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_large_shapes_are_sound_or_refused(name, data):
    p, m = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 64))
    v = data.draw(st.integers(1, 4)) if entry(name).looped else 1
    if data.draw(st.booleans()):
        p += p % 2
        m = p * data.draw(st.integers(1, max(1, 64 // p)))
    if not SHAPES[name](p, m, v):
        with pytest.raises(ValueError, match="must be"):
            build(name, p, m, v)
        return
    schedule = build(name, p, m, v)
    check(schedule)
    assert timed(schedule, Fraction(1), Fraction(1), Fraction(1)) >= 3 * v * m


SHAPES = {
    "dualpipe": lambda p, m, v: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    "dualpipe_v": lambda p, m, v: v == 2 and m >= 2 * p,
    "chimera": lambda p, m, v: p % 2 == 0 and m % p == 0,
    "hanayo": lambda p, m, v: v % 2 == 0,
    "seq1f1b": lambda p, m, v: True,
}


@pytest.mark.parametrize(
    "name, shape, options, message",
    [
        ("dualpipe", Shape(3, 3, 6), {}, "the 3 ranks must be an even number; take num_devices=4"),
        ("dualpipe", Shape(4, 4, 6), {}, "half of 6 microbatches .* at least 8; take num_microbatches=8"),
        ("dualpipe", Shape(4, 4, 9), {}, "take num_microbatches=10"),
        ("dualpipe", Shape(4, 8, 8), {}, "one stage of each direction on each rank, got 8 stages on 4 ranks"),
        ("dualpipe_v", Shape(4, 12, 8), {}, "there must be two on each; set chunks_per_device=2"),
        ("chimera", Shape(5, 5, 5), {}, "the 5 ranks must be an even number"),
        ("chimera", Shape(4, 4, 6), {}, "multiple of 4; take num_microbatches=8"),
        ("hanayo", Shape(4, 12, 8), {}, "the 12 stages must be a multiple of 8"),
        ("hanayo", Shape(4, 8, 8), {"backward_slots": 0}, "backward_slots=0: a backward takes at least 1 slot"),
        ("seq1f1b", Shape(4, 4, 8), {"num_segments": 0}, "num_segments=0: a sequence has at least 1 segment"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(name, shape, options, message):
    with pytest.raises(ValueError, match=message):
        entry(name).build(shape, **options)
