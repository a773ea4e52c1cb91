"""Schedules that split backward: orders copied by hand, what they hold, the shapes they take and refuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.registry import entry

CHUNKS = {"zb_h1": 1, "zb_h2": 1, "zb_auto": 1, "two_bp": 1, "interleaved_zb": 2, "zb_v": 2, "v_min": 2, "v_half": 2}
SPLIT = sorted(CHUNKS)

# Qi et al., ICLR'24, sections 2.2 and 2.3, written out by hand for four ranks and eight microbatches; their B is
# I here.
ZB_H1 = """
    0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
    2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7
"""
ZB_H2 = """
    0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1F6 1I2 1W0 1F7 1I3 1W1 1I4 1W2 1I5 1W3 1I6 1W4 1I7 1W5 1W6 1W7
    2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2W0 2F7 2I5 2W1 2I6 2W2 2I7 2W3 2W4 2W5 2W6 2W7
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2 3W3 3W4 3W5 3W6 3W7
"""


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule.compute(rank))) for rank in range(schedule.shape.num_ranks)]


def build(name: str, p: int, m: int, *, steps: int = 1, **options: object) -> Schedule:
    return entry(name).build(Shape(p, p * CHUNKS[name], m, num_steps=steps), **options)


@pytest.mark.parametrize("name, golden", [("zb_h1", ZB_H1), ("zb_h2", ZB_H2)])
def test_handcrafted_orders(name, golden):
    assert rows(build(name, 4, 8)) == [" ".join(line.split()) for line in golden.strip().splitlines()]


def test_the_automatic_order_at_1f1bs_memory_is_the_handcrafted_one():
    assert rows(build("zb_auto", 4, 8, memory_limit="1p")) == rows(build("zb_h1", 4, 8))


@pytest.mark.parametrize("name", SPLIT)
@settings(deadline=None, max_examples=10)
@given(p=st.integers(1, 8), m=st.integers(1, 24), steps=st.integers(1, 2))
def test_every_shape_up_to_8_ranks_and_24_microbatches(name, p, m, steps):
    check_shape(name, p, m, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
@settings(deadline=None, max_examples=50)
@given(p=st.integers(1, 16), m=st.integers(1, 64), steps=st.integers(1, 2))
def test_every_shape_up_to_16_ranks_and_64_microbatches(name, p, m, steps):
    check_shape(name, p, m, steps)


def check_shape(name: str, p: int, m: int, steps: int) -> None:
    if name == "interleaved_zb":
        m = p * max(1, m // p)
    schedule = build(name, p, m, steps=steps)
    check(schedule)
    if steps == 1:
        check(schedule, max_in_flight=in_flight(name, p, m))


def in_flight(name: str, p: int, m: int) -> int:
    """The papers' bounds in chunk activations of one rank."""
    bound = {
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zb_auto": 2 * p,
        "two_bp": m,
        "interleaved_zb": 2 * p,
        "zb_v": 2 * p,
        "v_min": 2 * ((p + 4) // 3),
        "v_half": 2 * ((p + 2) // 2),
    }
    return min(bound[name], m * CHUNKS[name])


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_min", "v_half", "interleaved_zb"])
@pytest.mark.parametrize("p, m", [(3, 12), (4, 16), (8, 32)])
def test_the_bounds_are_reached(name, p, m):
    with pytest.raises(ScheduleError, match="in flight"):
        check(build(name, p, m), max_in_flight=in_flight(name, p, m) - 1)


@pytest.mark.parametrize("base", ["gpipe", "1f1b"])
def test_2bp_is_its_base_with_weight_gradients_at_the_end(base):
    ours, whole = build("two_bp", 3, 5, steps=2, base=base), entry(base).build(Shape(3, 3, 5, num_steps=2))
    for rank in range(3):
        row = ours.compute(rank)
        without = [action._replace(kind=Kind.B) if action.kind is Kind.I else action for action in row]
        assert [action for action in without if action.kind is not Kind.W] == list(whole.compute(rank))
        for step in (row[:15], row[15:]):
            assert [action.kind for action in step[10:]] == [Kind.W] * 5


# --- costs --------------------------------------------------------------------------------------------------


def held_at_most(schedule: Schedule, costs: StageCosts) -> float:
    """The largest share of memory any rank holds: all at F, some let go at I, the rest at W."""
    most = 0.0
    for rank in range(schedule.shape.num_ranks):
        held, whole, kept = 0.0, costs.activations[rank], costs.kept_for_weights[rank]
        for action in schedule.compute(rank):
            held += {Kind.F: whole, Kind.I: kept - whole, Kind.W: -kept}[action.kind]
            most = max(most, held)
        assert held == pytest.approx(0, abs=1e-9)
    return most


@st.composite
def stage_costs(draw, p: int) -> StageCosts:
    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(draw(st.lists(st.floats(low, high), min_size=p, max_size=p)))

    whole = each(0.5, 2)
    kept = tuple(share * size for share, size in zip(each(0, 1), whole, strict=True))
    return StageCosts(each(0.1, 3), each(0.1, 3), each(0, 3), draw(st.floats(0, 0.5)), whole, kept)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), p=st.integers(1, 8), m=st.integers(1, 20), limit=st.floats(1, 12))
def test_the_automatic_order_keeps_to_its_memory_whatever_stages_cost(data, p, m, limit):
    costs = data.draw(stage_costs(p))
    schedule = entry("zb_auto").build(Shape(p, p, m), costs, memory_limit=f"{limit:.3f}")
    check(schedule)
    assert held_at_most(schedule, costs) <= (limit + 1e-3) * max(costs.activations)


@pytest.mark.parametrize("limit, told", [("0.5", "take 1 or more"), ("0p", "take 1 or more"), ("lots", "write 1p or")])
def test_a_limit_that_nothing_fits_in_is_refused(limit, told):
    with pytest.raises(ValueError, match=told):
        build("zb_auto", 4, 8, memory_limit=limit)


def test_what_does_not_fit_is_told_the_limit_that_fits(rpbench):
    """The order is made for `memory_limit`, 2p by default, and a number was refused as no word."""
    asked = ("schedule=zb_auto", "cost=analytic", "model=llama31_8b", "model.seq_len=8192", "cluster=dgx_h100")
    _, (twice,), _ = rpbench(*asked, "recompute=none")
    assert (
        "GB of it are activations: take smaller microbatches, a smaller schedule.memory_limit, rec" in twice["reason"]
    )
    _, (two,), _ = rpbench(*asked, "recompute=none", "schedule.memory_limit=2")
    assert (twice["status"], two["status"], max(two["peak_in_flight"])) == ("infeasible", "ok", 2)


def test_a_base_that_is_none_is_refused():
    with pytest.raises(ValueError, match="unknown base 'gpip'; did you mean gpipe"):
        build("two_bp", 2, 2, base="gpip")


@pytest.mark.parametrize("name", ["zb_v", "v_min", "v_half"])
@pytest.mark.parametrize("stages", [4, 5, 12])
def test_a_v_has_two_chunks_per_rank(name, stages):
    with pytest.raises(ValueError, match=f"{name} puts two stages on each rank, got {stages} stages on 4 ranks"):
        entry(name).build(Shape(4, stages, 8))


def test_costs_must_be_given_for_every_stage():
    with pytest.raises(ValueError, match="give every quantity for each stage"):
        StageCosts((1.0,), (1.0, 1.0), (1.0,), 0.0, (1.0,), (1.0,))
    with pytest.raises(ValueError, match="keeps more for its weight gradient"):
        StageCosts((1.0,), (1.0,), (1.0,), 0.0, (1.0,), (2.0,))
