"""The program of a rotation: steps by hand, the best cut against all cuts, and what more room cannot harm."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.footprint.sizes import LayerSize, ModelBytes
from rpbench.plan.rotation import Links, Rotation, overlap_of_visits
from rpbench.plan.rotation_program import _whole, solve, step_times

NOTHING = LayerSize(0, 0, 0)


def links_of(num_ranks, per_byte=0.0, hop=0.0):
    """Every device has a link to itself, and the host's memory has no limit."""
    each = (per_byte,) * num_ranks
    return Links(each, per_byte, each, each, 0.0, hop, (0.0,) * num_ranks, ((0.0, 0.0),) * num_ranks)


def equal(num_layers, num_ranks, num_microbatches, per_byte=0.0, hop=0.0, **changes):
    """Layers of forward 1, backward 2 and weights of 5 bytes, without gradients and optimizer."""
    sizes = ModelBytes((LayerSize(5, 0, 0),) * num_layers, NOTHING, NOTHING, 0, 0, 0)
    return Rotation(
        num_ranks,
        num_microbatches,
        [1.0] * num_layers,
        [2.0] * num_layers,
        (0.0, 0.0),
        [0.0] * num_layers,
        sizes,
        links_of(num_ranks, per_byte, hop),
        **changes,
    )


def step_of(rotation, *counts):
    return float(step_times(rotation, np.array([counts]))[0])


def every_cut(num_layers, num_stages):
    """All cuts whose stages have a layer, the last maybe none."""
    ends = ((0, *inner, num_layers) for inner in combinations(range(1, num_layers + 1), num_stages - 1))
    return np.array([[end - first for first, end in pairwise(cut)] for cut in ends])


# --- by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_equal_stages_without_transfers_take_the_closed_form(rounds):
    """3 devices, M = 4 >= 3: every device works (rounds M) times (f + b), and fills and drains 2 (f + b)."""
    assert step_of(equal(3 * rounds, 3, 4), *[1] * 3 * rounds) == (rounds * 4 + 2) * 3


def test_two_rounds_of_three_devices_by_hand():
    """Hop 1, M = 2: forward starts 0 2 4, then 6 8 10 (the tensor), ends at 12; back from 12.

    0F 0..2  1F 2..4  2F 4..6  3F 6..8  4F 8..10  5F 10..12
    5B 12..16  4B 15..19  3B 18..22  2B 21..25  1B 24..28  0B 27..31
    """
    assert step_of(equal(6, 3, 2, hop=1.0), 1, 1, 1, 1, 1, 1) == 31


def test_uploads_by_hand():
    """3 devices, M = 2, uploads of 5: forward starts 5 6 7 and ends 7 8 9; weights come again for the way back.

    prefetched    2B from max(9, 7 + 5) = 12, 1B from 14, 0B from 16 to 20
    not           2B from 9 + 5 = 14, 1B from 16, 0B from 18 to 22
    """
    rotation = equal(3, 3, 2, per_byte=1.0)
    assert step_of(rotation, 1, 1, 1) == 20
    assert step_of(replace(rotation, prefetches=False), 1, 1, 1) == 22


def test_the_slowest_way_of_tensors_paces_a_visit():
    """1 device, 3 microbatches: forward 1 + 2 x 4, backward 2 + 2 x 7, one upload of nothing."""
    rotation = equal(1, 1, 3)
    slow = replace(rotation, links=replace(rotation.links, flow=((4.0, 7.0),)))
    assert step_of(slow, 1) == 9 + 16


def test_a_visit_brings_one_tensor_and_backward_one_more_where_there_are_stages_on_both_sides():
    """4 microbatches; a tensor takes 1, 2 and 3 to the three places."""
    rotation = equal(6, 3, 4)
    rotation = replace(rotation, links=replace(rotation.links, boundary=(1.0, 2.0, 3.0)))
    assert [rotation.arriving(stage, 6, backward=False) for stage in range(6)] == [0, 8, 12, 4, 8, 12]
    assert [rotation.arriving(stage, 6, backward=True) for stage in range(6)] == [4, 16, 24, 8, 16, 12]


def test_the_optimizer_takes_stages_one_after_the_other():
    """Backward ends at 9 and 15 on one device (M = 1, 2 stages of 1 and 3 layers): updates of 12 and 4 follow."""
    rotation = equal(4, 1, 1, optimizer=1.0)
    sizes = replace(rotation.sizes, layers=(LayerSize(0, 0, 4),) * 4)
    # F 0..1, F 1..4, B 4..10, B 10..12; the second stage's 12 from 10 to 22, the first one's 4 until 26.
    assert step_of(replace(rotation, sizes=sizes), 1, 3) == 26


def test_visits_overlap_by_their_distance_in_the_rotation():
    # 8 devices, 4 microbatches: visits of 4 in a period of 8.
    assert [overlap_of_visits(apart, 8, 4) for apart in range(1, 8)] == [0.75, 0.5, 0.25, 0, 0.25, 0.5, 0.75]
    assert {overlap_of_visits(apart, 4, 9) for apart in range(1, 4)} == {1.0}


# --- against all cuts ----------------------------------------------------------------------------------------


@st.composite
def rotations(draw):
    """Up to 10 layers on up to 3 devices; layers equal or not, memory tight or not."""
    ranks, layers = draw(st.integers(1, 3)), draw(st.integers(3, 10))
    alike = draw(st.booleans())

    def column(least, most):
        one = draw(st.integers(least, most))
        return [one] * layers if alike else draw(st.lists(st.integers(least, most), min_size=layers, max_size=layers))

    def paces(*values):
        return tuple(draw(st.sampled_from(values)) for _ in range(ranks))

    held = zip(column(1, 9), column(0, 3), strict=True)
    ends = [LayerSize(weight, weight, 6 * weight) for weight in draw(st.tuples(*[st.sampled_from([0, 3, 20])] * 2))]
    boundary, chunk = draw(st.integers(0, 2)), draw(st.sampled_from([0, 5]))
    sizes = ModelBytes(tuple(LayerSize(w, w, 6 * w, kept) for w, kept in held), *ends, boundary, 0, chunk)
    flow = tuple(zip(paces(0.0, 4.0), paces(0.0, 9.0), strict=True))
    host, hop = draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0.0, 0.3]))
    links = Links(paces(0.1, 1.0, 3.0), 0.1, paces(0.1, 1.0, 3.0), paces(0.05, 1.0), host, hop, paces(0.0, 0.1), flow)
    return Rotation(
        ranks,
        draw(st.integers(1, 6)),
        column(1, 5),
        column(2, 9),
        draw(st.sampled_from([(0, 0), (4, 9)])),
        [float(draw(st.booleans()))] * layers,
        sizes,
        links,
        draw(st.sampled_from([0.0, 0.2])),
        draw(st.booleans()),
        draw(st.sampled_from([None, None, 90, 60, 40])),
        draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(rotation=rotations())
def test_no_cut_has_a_shorter_step(rotation):
    numbers = range(rotation.num_ranks, rotation.num_layers + 2)
    best = min(step_times(rotation, every_cut(rotation.num_layers, number)).min() for number in numbers)
    found = solve(rotation, numbers)
    assert found.proven
    assert found.step == pytest.approx(best, rel=1e-8)
    if found.counts:
        assert step_of(rotation, *found.counts) == pytest.approx(found.step, rel=1e-8)
    else:
        assert best == np.inf


@settings(max_examples=15, deadline=None)
@given(rotation=rotations(), factor=st.sampled_from([1.5, 4.0]))
def test_more_memory_and_faster_links_never_make_the_best_step_longer(rotation, factor):
    numbers = range(rotation.num_ranks, rotation.num_layers + 2)
    step = solve(rotation, numbers).step
    links = rotation.links
    faster = replace(
        links,
        first_load=tuple(each / factor for each in links.first_load),
        alone=links.alone / factor,
        load=tuple(each / factor for each in links.load),
        store=tuple(each / factor for each in links.store),
        host=links.host / factor,
        boundary=tuple(each / factor for each in links.boundary),
    )
    assert solve(replace(rotation, links=faster), numbers).step <= step * (1 + 1e-8)
    if rotation.limit_bytes is not None:
        wider = replace(rotation, limit_bytes=int(rotation.limit_bytes * factor))
        assert solve(wider, numbers).step <= step * (1 + 1e-8)


def test_as_many_layers_as_you_like_fit_where_they_take_nothing():
    assert list(_whole(np.array([0.0, 1.0, 7.0, -1.0]), np.array([0.0, 0.0, 2.0, 2.0]))) == [np.inf, np.inf, 3, 0]


def test_a_search_that_is_cut_short_says_so():
    rotation = replace(equal(10, 3, 2, per_byte=0.1), head=(3.0, 6.0))
    assert not solve(rotation, (6,), limit=1).proven
    assert solve(rotation, (6,)).proven
