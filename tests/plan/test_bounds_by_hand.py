"""Bounds of plain pipelines against every cut, by hand: what a device computes, and the way to it and back."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from contest_terms import small

from rpbench.cost.footprint.sizes import LayerSize, ModelBytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic
from rpbench.plan.contest.bounds import Bounds, _fullest
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.terms import Limits

F, R, B, I, W = 1.0, 1.0, 2.5, 1.5, 1.25  # noqa: E741  as in the papers
HEAD = (2.0, 3.0)
LAYERS, M = 6, 8
NOTHING = LayerSize(0, 0, 0)
SIZES = ModelBytes((LayerSize(10, 10, 60, activations=100),) * LAYERS, NOTHING, NOTHING, 0, 0, 0)


def bounds(name, num_devices=2, *, recompute=("none",), speeds=None, limit=None, sizes=SIZES, **changes):
    """Bounds of a method on a model of six layers, of eight microbatches a step, without an optimizer."""
    times = LayerTimes(
        [F] * LAYERS, [R] * LAYERS, [B] * LAYERS, *HEAD, input_grad=[I] * LAYERS, weight_grad=[W] * LAYERS,
        head_input_grad=2.0, head_weight_grad=1.0,
    )  # fmt: skip
    case = small(num_devices=num_devices, sequences_per_step=M, microbatches=(1,))
    case = replace(
        case,
        timed=lambda _: times,
        optimizer=changes.pop("optimizer", OptimizerTraffic(0, 1, inf)),
        cluster=replace(case.cluster, device_speeds=speeds),
        limits=Limits(limit),
        sized=lambda _: sizes,
    )
    who = contender(name)
    space = space_of(who, case).restricted(recompute=recompute, **changes)
    return Bounds(who, case, space), space.first


def step_of(found):
    """Seconds of a step at the bound."""
    made, first = found
    pace = made.pace(first)
    return made.terms.tokens(M) / pace if pace else inf


def cuts(stages):
    return [cut for cut in product(range(LAYERS + 1), repeat=stages) if sum(cut) == LAYERS]


def of_best_cut(num_devices, took):
    return min(max(took(cut, device) for device in range(num_devices)) for cut in cuts(num_devices))


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("again", [0.0, R])
def test_a_flushed_pipeline_computes_behind_the_first_way_down_and_before_the_last_way_back(num_devices, again):
    """(F + B) of the stages below, once, and M times what its own layers take, with the head on the last device."""

    def took(cut, device):
        below = (F + B) * sum(cut[:device])
        return below + M * ((F + again + B) * cut[device] + sum(HEAD) * (device == num_devices - 1))

    found = bounds("1f1b", num_devices, recompute=("all",) if again else ("none",))
    assert step_of(found) == pytest.approx(of_best_cut(num_devices, took), rel=1e-5)


def test_halves_of_a_backward_come_back_at_the_gradient_of_the_input():
    def took(cut, device):
        head = sum(HEAD) * (device == 1)
        way = (F + I) * sum(cut[:device]) + M * ((F + I) * cut[device] + 4.0 * (device == 1))
        return max(way, M * ((F + I + W) * cut[device] + head))

    assert step_of(bounds("zb_h1")) == pytest.approx(of_best_cut(2, took), rel=1e-5)


def test_faster_devices_take_less_for_their_layers():
    def took(cut, device):
        speed, head = (4.0, 1.0)[device], sum(HEAD) * (device == 1)
        return (F + B) * sum(cut[:device]) / 4.0 + M * ((F + B) * cut[device] + head) / speed

    assert step_of(bounds("1f1b", speeds=(4.0, 1.0))) == pytest.approx(of_best_cut(2, took), rel=1e-5)


def test_the_optimizer_steps_what_a_device_holds_after_the_way_back():
    """60 bytes of state a layer, at 10 bytes a second."""
    optimizer = OptimizerTraffic(0, 12, 10.0)

    def took(cut, device):
        below, own = (F + B) * sum(cut[:device]), M * ((F + B) * cut[device] + sum(HEAD) * (device == 1))
        first = below + own + 6 * cut[0]  # the way back ends on the first device, which steps then
        return max(first, own + 6 * cut[device])

    found = bounds("1f1b", optimizer=optimizer)
    assert step_of(found) == pytest.approx(of_best_cut(2, took), rel=1e-5)


def test_steps_that_overlap_have_no_way_to_wait_for():
    def took(cut, device):
        return M * ((F + B) * cut[device] + sum(HEAD) * (device == 1))

    found = bounds("pipedream")
    assert step_of(found) == pytest.approx(of_best_cut(2, took), rel=1e-5)


def test_what_is_not_known_of_an_order_is_bounded_by_all_devices_together():
    """Replicas share the whole model's computation; recomputation counts where everything is."""
    made, first = bounds("zero_2", recompute=("all",))
    together = M * ((F + R + B) * LAYERS + sum(HEAD)) / 2
    assert made.terms.tokens(M) / made.loose_pace(first) == pytest.approx(together)
    made, first = bounds("1f1b", recompute=("all", "none"))
    assert made.terms.tokens(M) / made.loose_pace(first) == pytest.approx(together - M * R * LAYERS / 2)
    assert made.pace(first) <= made.loose_pace(first)
    assert made.best_pace(lambda: True) == made.loose_pace(first)


@pytest.mark.parametrize("limit", [100, 339, 340, 440, 441, 539, 540])
def test_a_pipeline_in_which_a_device_has_no_room_for_its_layers_is_none(limit):
    """80 bytes a layer stay; 100 a layer and microbatch in flight: all again, one microbatch of one stage at a time."""

    def fits(cut):
        return all(80 * n + 100 * n <= limit for n in cut)

    made, first = bounds("1f1b", limit=limit, recompute=("all",))
    assert (made.pace(first) > 0) == any(map(fits, cuts(2)))


def test_as_few_layers_run_again_as_there_is_room_for():
    """A layer that is kept is there for all microbatches in flight, and one microbatch of the whole stage always is."""
    for limit in (560, 720, 900, 1120):

        def took(cut, device, limit=limit):
            below, held = (F + B) * sum(cut[:device]), 80 * cut[device]
            head = sum(HEAD) * (device == 1)
            times = [
                below + M * ((F + B) * cut[device] + R * (cut[device] - kept) + head)
                for kept in range(cut[device] + 1)
                if held + max(100 * cut[device], 100 * kept * (2 - device)) <= limit
            ]
            return min(times, default=inf)

        best = of_best_cut(2, took)
        found = step_of(bounds("1f1b", limit=limit, recompute=("fitting",)))
        assert found == (inf if best == inf else pytest.approx(best, rel=1e-5))


@pytest.mark.parametrize("limit, fused", [(None, LAYERS), (250, 2), (100, 0)])
def test_layers_of_a_fused_stage_run_forward_once(limit, fused):
    """As many as have room with their weights, gradients and activations, 120 bytes each."""
    found = step_of(bounds("roundpipe", limit=limit, recompute=("all",)))
    assert found == pytest.approx(M * ((F + B) * LAYERS + R * (LAYERS - fused) + sum(HEAD)) / 2)


def test_stages_that_stream_need_not_hold_anything():
    assert bounds("roundpipe", limit=100, recompute=("all",))[0].least_bytes(0) == 0


def test_the_fullest_moments_are_those_with_most_of_all_and_of_each_stage():
    table = np.array([[1, 1, 1], [2, 0, 0], [0, 3, 0], [0, 0, 0]])
    assert [row.tolist() for row in _fullest(table)] == [[1, 1, 1], [2, 0, 0], [0, 3, 0]]
    assert _fullest(()) == []


def test_bounds_are_asked_for_near_sizes_first_and_for_the_fastest_of_them():
    case = small(microbatches=(1, 2, 4))
    who = contender("interleaved_1f1b")
    made = Bounds(who, case, space_of(who, case))
    best = space_of(who, case).first.changed("microbatch_sequences", 2).changed("recompute", "none")
    order = made.nearest_first(best)
    sizes = [each.microbatch_sequences for each in order]
    assert sizes == sorted(sizes, key=lambda size: abs(np.log2(size / 2)))
    assert set(sizes) == {1, 2, 4}
    of_two = [made.pace(each) for each in order if each.microbatch_sequences == 2]
    assert of_two == sorted(of_two, reverse=True)
    assert {each.recompute for each in order} == {space_of(who, case).first.recompute, "none"}
    assert len(order) == len(set(order))
