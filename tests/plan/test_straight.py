"""`partition=pipedream`: the shortest longest stage of a straight pipeline, against all cuts tried one by one."""

import re
from itertools import combinations, pairwise

import pytest
from evaluated import plan
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import small, uniform

from rpbench.cost.table import LayerTimes


def longest_stage(times, counts):
    """Forward, recomputation and backward of a cut's longest stage; the last one has the head."""
    totals = [sum(layer) for layer in zip(times.forward, times.recompute, times.backward, strict=True)]
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    stages = [sum(totals[first:end]) for first, end in pairwise(ends)]
    stages[-1] += times.head_forward + times.head_backward
    return max(stages)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 7), head=st.integers(1, 9))
def test_no_cut_has_a_shorter_longest_stage(data, num_layers, head):
    per_layer = [data.draw(st.lists(st.integers(0, 4), min_size=num_layers, max_size=num_layers)) for _ in range(3)]
    times = LayerTimes(*per_layer, head_forward=head, head_backward=head)
    num_stages = data.draw(st.integers(1, num_layers))
    counts = plan("pipedream", small("1f1b", times, num_stages)).partition.forward
    # Every stage has a layer, but the last may have the head alone.
    every = [
        [end - first for first, end in pairwise((0, *inner, num_layers))]
        for inner in combinations(range(1, num_layers + 1), num_stages - 1)
    ]
    assert list(counts) in every
    assert longest_stage(times, counts) == min(longest_stage(times, cut) for cut in every)


def test_the_head_may_stand_alone_and_a_head_of_no_time_may_not():
    assert plan("pipedream", small("1f1b", uniform(4, head=8.0), 3)).partition.forward == (2, 2, 0)
    assert min(plan("pipedream", small("1f1b", uniform(4), 4)).partition.forward) == 1


def test_every_device_gets_as_many_stages_as_asked_for():
    found = plan("pipedream", small("interleaved_1f1b", uniform(7), 2, chunks_per_rank=3))
    assert sorted(found.partition.forward) == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "schedule, num_ranks, message",
    [
        ("roundpipe", 2, "schedule roundpipe cuts forward and backward apart, PipeDream cuts both at once"),
        ("1f1b", 7, "partition=pipedream: 6 layers make no 7 stages"),
    ],
)
def test_what_is_no_straight_pipeline_is_refused(schedule, num_ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan("pipedream", small(schedule, uniform(6), num_ranks))
