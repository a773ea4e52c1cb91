"""Chimera's backward halving: forwards of whole microbatches, backwards of halves."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.config.loading import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.pieces import of_piece
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import parts_of
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.run.assemble import assemble
from rpbench.run.recording import names
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

# Li and Hoefler, SC'21: figure 3's order (a and b go down, c and d up) with every backward run as two halves, 1 and 2;
# written out by hand.
HALVED = """
F0a F0b F3c B3c1 B3c2 F3d B3d1 B3d2 B0a1 B0a2 B0b1 B0b2
F1a F2c F1b F2d B2c1 B2c2 B1a1 B1a2 B2d1 B2d2 B1b1 B1b2
F1c F2a F1d F2b B2a1 B2a2 B1c1 B1c2 B2b1 B2b2 B1d1 B1d2
F0c F0d F3a B3a1 B3a2 F3b B3b1 B3b2 B0c1 B0c2 B0d1 B0d2
"""
HALVING = "schedule.backward_halving=true"
COSTS = ("cost=constant", "cost.forward_ms=1", "cost.input_grad_ms=1", "cost.weight_grad_ms=1")


def build(p: int, whole: int, **options) -> Schedule:
    """Of so many whole microbatches."""
    return entry("chimera").build(Shape(p, p, 2 * whole), backward_halving=True, **options)


def token(action) -> str:
    parts = parts_of(action)
    microbatch, half = divmod(parts[0].microbatch, 2)
    if len(parts) == 2:
        assert [part.microbatch for part in parts] == [2 * microbatch, 2 * microbatch + 1]
    return f"{parts[0].kind.name}{action.stage}{'abcd'[microbatch]}{half + 1 if len(parts) == 1 else ''}"


def test_the_order_of_four_ranks():
    schedule = build(4, 4)
    check(schedule)
    rows = [" ".join(map(token, schedule.compute(rank))) for rank in range(4)]
    assert rows == HALVED.strip().splitlines()


@settings(deadline=None, max_examples=15)
@given(half=st.integers(1, 4), units=st.integers(1, 4), time=st.fractions(Fraction(1, 9), 9))
def test_it_waits_p_minus_2_forwards_whatever_the_number_of_units(half, units, time):
    """Idle share (D - 2) / (3N + D - 2) with B = 2F, where whole backwards have (D - 2) / (3N/2 + D - 2) at best."""
    p, whole = 2 * half, 2 * half * units
    times = of_piece(LayerTimes([time] * p, [0] * p, [2 * time] * p), 2).table(symmetric((1,) * p))
    makespan = simulate(build(p, whole), times).makespan
    assert makespan == (3 * whole + p - 2) * time
    assert 1 - 3 * whole * time / makespan == Fraction(p - 2, 3 * whole + p - 2)


@pytest.mark.parametrize("p", [4, 6, 8])
def test_where_the_forward_is_run_again(p):
    """B = 3F: 3(D - 2) halves, half as much as forwards of two microbatches wait."""
    times = LayerTimes([Fraction(1)] * p, [Fraction(1)] * p, [Fraction(2)] * p)
    halved = simulate(build(p, p), of_piece(times, 2).table(symmetric((1,) * p))).makespan
    doubled = entry("chimera").build(Shape(p, p, 2 * p), forward_doubling=True)
    assert halved - 4 * p == Fraction(3 * (p - 2), 2)
    assert simulate(doubled, times.table(symmetric((1,) * p))).makespan - 8 * p == 3 * (p - 2)


@pytest.mark.parametrize("p, units", [(4, 1), (6, 1), (8, 1), (4, 3)])
def test_it_holds_what_whole_microbatches_hold(p, units):
    """D/2 + 1 microbatches at the ends to D in the middle, in halves; doubling holds twice as much."""
    halves = peak_in_flight(build_graph(build(p, p * units)))
    assert halves == [2 * min(p, p // 2 + 1 + min(rank, p - 1 - rank)) for rank in range(p)]


def facts(*words: str):
    request = load(["schedule=chimera", "num_devices=4", "num_microbatches=4", *words])
    return request, assemble(request)


def memory_of(assembled) -> list[int]:
    classes = classes_of(assembled.schedule, assembled.sizes, peak_in_flight(assembled.graph))
    return [sum(each.values()) for each in classes]


def test_a_run_counts_the_microbatches_of_forwards():
    shape = ("model=tiny_gpt", "model.num_layers=8", "model.seq_len=32", "recompute=none")
    whole, halved = facts(*shape), facts(*shape, HALVING)
    doubled = facts(*shape, "schedule.forward_doubling=true", "num_microbatches=8")
    assert halved[1].schedule.shape.num_microbatches == 8
    assert names(halved[0])["num_microbatches"] == 4
    assert halved[1].tokens_per_step == whole[1].tokens_per_step == 4 * 4 * 32
    assert memory_of(halved[1]) == memory_of(whole[1])
    assert max(memory_of(doubled[1])) > max(memory_of(whole[1]))
    assert halved[1].schedule.rows == doubled[1].schedule.rows, "the order is one, the microbatches differ in size"


@pytest.mark.parametrize("words, halved", [(("cost=unit",), 14), (COSTS, 14), ((*COSTS, "cost.recompute_ms=1"), 19)])
def test_given_times_are_those_of_a_whole_microbatch(words, halved):
    """Four of them through four ranks: 12 of work and D - 2 of waiting, 16 and 3(D - 2)/2 where forwards run again."""
    _, found = facts(*words, HALVING)
    timeline = simulate(found.schedule, found.costs)
    assert timeline.makespan * (1 if words == ("cost=unit",) else 1000 / found.costs.units_per_second) == halved


@pytest.mark.parametrize(
    "words, message",
    [
        (["schedule.forward_doubling=true"], "forward_doubling=true with schedule.backward_halving=true: .* take one"),
        (["schedule.pipelines=4"], "pipelines=4 with schedule.backward_halving=true: pairs of halves .* take one"),
        (["num_microbatches=6"], "chimera runs 6 microbatches in units of 1 .* multiple of 4; take num_microbatches=8"),
        (["num_devices=5"], "the 5 ranks must be an even number"),
        (["workload.microbatch_sequences=3"], "microbatch_sequences=3: .* 2 equal pieces; take a multiple of 2"),
        (["schedule.backward_halving=2"], "schedule.backward_halving=2: chimera takes true or false"),
        (["tuning_budget=100", "model=qwen3_1p7b"], "backward_halving=true with tuning_budget=100: the search"),
        (["mode=roofline", "model=qwen3_1p7b"], "backward_halving=true with mode=roofline"),
        (["cost=published", "model=qwen3_1p7b"], "sequences=4 .* 8192 tokens a microbatch; cut one of 16384 tokens"),
        (["model=tiny_gpt", "cost=profiled", "cost.profile=conf/cost/unit.yaml"], "nothing of the size of its microb"),
        (["schedule_file=conf/cost/unit.yaml"], "schedule_file=.* the file says its microbatches"),
    ],
)
def test_what_cannot_be_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        facts(HALVING, *words)


def test_halves_come_in_pairs():
    with pytest.raises(ValueError, match=r"chimera runs 4\.5 microbatches in units of 1 .* take num_microbatches=8"):
        entry("chimera").build(Shape(4, 4, 9), backward_halving=True)
