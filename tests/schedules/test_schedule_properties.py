"""What holds for every registered schedule, whatever its shape."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby

from rpbench.ir.action import COMPUTE, HEAD, Kind, parts_of
from rpbench.ir.checks.check import check
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights, from_text, to_text
from rpbench.passes.lower import add_steps, lower_communication
from rpbench.registry import entries

NAMES = sorted(entries())
SIZES = st.integers(1, 5)

# In flight on each rank at most, in chunk activations: the formulas of the papers' memory sections.
IN_FLIGHT = {
    "gpipe": lambda p, v, m, r: m,
    "1f1b": lambda p, v, m, r: min(p - r, m),
    "interleaved_1f1b": lambda p, v, m, r: min(v * m, v * p + p - 1 - 2 * r),  # m a multiple of p
    "looped_bfs": lambda p, v, m, r: m * v,
    "pipedream": lambda p, v, m, r: p - r,  # m a multiple of p
    "pipedream_2bw": lambda p, v, m, r: p - r,
    "dapple": lambda p, v, m, r: min(2 * (p - r) - 1, m),
}

# Versions of its weights that a stage keeps at most; elsewhere one for each rank.
MOST_VERSIONS = {Policy.FLUSH: 1, Policy.TWO_BW: 2, Policy.DELAYED: 2, Policy.TRIAL: 2}


@st.composite
def shapes(draw, name: str) -> Shape:
    """Shapes of the kind a schedule takes, and some it must refuse."""
    entry = entries()[name]
    ranks, stages, microbatches, steps = (
        draw(SIZES),
        draw(SIZES),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 3)),
    )
    if entry.separate_cuts:
        return Shape(ranks, stages, microbatches, draw(SIZES), steps, fused=draw(st.booleans()))
    if entry.looped:
        stages = ranks * draw(st.integers(1, 3)) + draw(st.sampled_from([0, 0, 0, 1]))
    else:
        stages = draw(st.sampled_from([ranks, ranks, ranks, ranks + 1]))
    return Shape(ranks, stages, microbatches, num_steps=steps)


def build(name: str, shape: Shape) -> Schedule | None:
    """The schedule, or None where the shape is refused in the way a user should be told."""
    try:
        return entries()[name].build(shape)
    except ValueError as error:
        message = str(error)
        values = {shape.num_stages, shape.num_ranks, shape.num_microbatches}
        assert values & {int(number) for number in re.findall(r"\d+", message)}, "it names the value"
        assert re.search(r"must be|puts one stage|of equal size", message), "it names the rule"
        assert re.search(r"try |take |change |set ", message), "it names a way out"
        assert len(message) < 300
        return None


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_a_schedule_runs_or_its_shape_is_refused(name, data):
    shape = data.draw(shapes(name))
    check_runs_or_refused(name, shape)
    check_work(name, shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_schedule_runs_or_its_shape_is_refused_in_many_shapes(name, data):
    shape = data.draw(shapes(name))
    check_runs_or_refused(name, shape)
    check_work(name, shape)


def check_runs_or_refused(name, shape):
    schedule = build(name, shape)
    if schedule is None:
        return
    check(schedule)
    assert schedule.name == name
    assert replace(schedule.shape, num_parts=1, num_head_shards=0, tensor_parallel=False, keeps_every=1) == shape
    assert from_text(to_text(schedule)) == schedule
    check(lower_communication(schedule), rendezvous=True)
    check(lower_communication(schedule, lane="net"), rendezvous=True)
    stepped = add_steps(schedule)
    check(stepped, max_versions=MOST_VERSIONS.get(schedule.policy, shape.num_ranks))
    check(lower_communication(stepped), rendezvous=True)


def check_work(name, shape):
    """Every stage and microbatch has its actions once over all ranks: counted, not looked up."""
    schedule = build(name, shape)
    if schedule is None:
        return
    shape = schedule.shape
    found = Counter(
        (Kind.B if part.kind is Kind.I else part.kind, part.stage, part.microbatch, part.part)
        for _, _, row in schedule.items()
        for action in row
        for part in parts_of(action)
        if part.kind
        in COMPUTE - {Kind.W, Kind.R}  # one W for each I, or `check` would not pass; R where a method has it
    )
    top = shape.num_backward_stages - 1
    pieces = list(product(range(shape.total_microbatches), range(shape.num_parts)))
    expected = [(Kind.F, stage, *piece) for stage in range(shape.num_stages) for piece in pieces]
    expected += [
        (Kind.FB if shape.fused and stage == top else Kind.B, stage, *piece)
        for stage in range(shape.num_backward_stages)
        for piece in pieces
    ]
    expected += [(kind, shard, *piece) for kind in HEAD for shard in range(shape.num_head_shards) for piece in pieces]
    assert found == Counter(expected)


@pytest.mark.parametrize("name", sorted(IN_FLIGHT))
@settings(deadline=None, max_examples=25)
@given(p=SIZES, v=st.integers(1, 3), rounds=st.integers(1, 3), steps=st.integers(1, 2))
def test_activations_in_flight_reach_the_papers_bound_and_no_more(name, p, v, rounds, steps):
    v, m = (v if entries()[name].looped else 1), rounds * p
    schedule = entries()[name].build(Shape(p, p * v, m, num_steps=steps))
    bounds = [IN_FLIGHT[name](p, v, m, rank) for rank in range(p)]
    check(schedule, max_in_flight=bounds)
    for rank in range(p):
        tighter = [bound - (other == rank) for other, bound in enumerate(bounds)]
        with pytest.raises(ScheduleError, match=f"in flight on rank {rank}, {bounds[rank] - 1} may be"):
            check(schedule, max_in_flight=tighter)


@settings(deadline=None, max_examples=50)
@given(p=SIZES, m=st.integers(1, 9))
def test_1f1b_holds_fewer_when_there_are_fewer(p, m):
    schedule = entries()["1f1b"].build(Shape(p, p, m))
    check(schedule, max_in_flight=[min(p - rank, m) for rank in range(p)])


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_says_what_its_schedule_is(name):
    entry = entries()[name]
    shape = Shape(2, 2, 2, 3, fused=True)
    if not entry.separate_cuts:
        p, v, m = nearby(name, 2, 1, 2)
        shape = Shape(p, p * v, m)
    schedule = entry.build(shape)
    assert entry.source
    assert (schedule.weights is Weights.STREAMED) == (not schedule.placement)
    with pytest.raises(ValueError, match="has no option 'colour'"):
        entry.build(shape, colour=1)


def test_a_round_holds_at_least_one_microbatch():
    with pytest.raises(ValueError, match=r"round_size=0: a round holds at least 1"):
        entries()["roundpipe"].build(Shape(2, 2, 2, 3, fused=True), round_size=0)
