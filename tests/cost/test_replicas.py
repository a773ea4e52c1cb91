"""Bytes a parameter on a device and elements over the links, counted from actions, against the papers' tables."""

from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.replicas import ReplicaShares, host_bytes
from rpbench.cost.footprint.sizes import ModelBytes, model_bytes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import analysed
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

STATES = ("weights", "gradients", "optimizer state")


def model(hidden: int) -> Architecture:
    return Architecture("tiny", num_layers=8, hidden=hidden, heads=2, vocab=60, seq_len=7)


def built(name: str, num_devices: int, num_stages: int, each: int = 1, **options) -> Schedule:
    """A method on replicas that take `each` microbatches, with all it moves."""
    found = entry(name)
    shape = Shape(num_devices, num_stages, num_devices * each)
    order = found.build(shape, **options).with_partition(symmetric(split_evenly(8, num_stages)))
    return found.lower(order, prefetch=1, **(found.options | options))


def on_devices(schedule: Schedule, sizes: ModelBytes) -> list[dict[str, int]]:
    return classes_of(schedule, sizes, peak_in_flight(build_graph(schedule)))


def test_layers_gathered_one_by_one_take_the_room_of_the_largest():
    """Two layers at a time, and the gradient of one; the third of eight is 50 times as large as the others."""
    plain = model_bytes(model(8), 14)
    layers = [layer._replace(inputs=10) for layer in plain.layers]
    large = layers[2]._replace(weights=50 * layers[2].weights, gradients=50 * layers[2].gradients)
    sizes = replace(plain, layers=(*layers[:2], large, *layers[3:]))
    for device in on_devices(built("zero_3", 2, 4), sizes):
        assert device["gathered weights"] >= 2 * large.weights
        assert device["gradients on their way"] == large.gradients


# Bytes a parameter that stay on a device of n: ZeRO, SC'20, figure 1; ZeRO-Offload, ATC'21, section 4.
STAY = {
    "data_parallel": ({}, lambda n: 16),
    "zero-1": ({"reduce_each_microbatch": False}, lambda n: 4 + 12 / n),
    "zero_2": ({}, lambda n: 2 + 14 / n),
    "zero_3": ({}, lambda n: 16 / n),
    "zero_offload": ({}, lambda n: 2),
    "zero_infinity": ({}, lambda n: 0),
}


@pytest.mark.parametrize("method", STAY)
@settings(deadline=None, max_examples=8)
@given(n=st.integers(2, 8), stages=st.integers(2, 8), hidden=st.integers(1, 40).map(lambda width: 2 * width))
def test_bytes_a_parameter_on_a_device(method, n, stages, hidden):
    options, bytes_a_parameter = STAY[method]
    parameters = model(hidden).total_parameters
    sizes = model_bytes(model(hidden), 14)
    schedule = built(method if method != "zero-1" else "zero_2", n, stages, each=2, **options)
    biggest = max(schedule_stage(schedule, sizes, stage) for stage in range(stages))
    for found in on_devices(schedule, sizes):
        whole = sum(found[name] for name in STATES)
        if method in ("zero-1", "zero_2", "zero_offload"):  # gathered for all of a step: the rest of the 2 bytes
            whole += found["gathered weights"]
        else:
            assert found["gathered weights"] <= 2 * biggest  # the stage that runs and the next one
        assert whole == pytest.approx(bytes_a_parameter(n) * parameters, abs=stages * 4)
        assert found["gradients on their way"] <= 2 * biggest
        assert (found["gradients on their way"] > 0) == (method not in ("data_parallel", "zero-1"))


def schedule_stage(schedule: Schedule, sizes: ModelBytes, stage: int) -> int:
    layers = schedule.partition.backward[stage]
    ends = sizes.embedding.weights * (stage == 0) + sizes.head.weights * (stage == len(schedule.partition.backward) - 1)
    return layers * sizes.layers[0].weights + ends


# Elements a parameter that a device sends in a step of one microbatch, times n / (n - 1); ZeRO, section 7.
VOLUMES = {"data_parallel": 2, "zero_2": 2, "zero_3": 3, "zero_infinity": 3, "zero_offload": 2}


@pytest.mark.parametrize("method", VOLUMES)
@settings(deadline=None, max_examples=6)
@given(n=st.integers(2, 8), stages=st.integers(2, 6), hidden=st.integers(1, 40).map(lambda width: 2 * width))
def test_elements_between_devices(method, n, stages, hidden):
    expected = 2 * VOLUMES[method] * model(hidden).total_parameters * (n - 1) / n
    for device in moved_bytes(built(method, n, stages), model_bytes(model(hidden), 14)):
        net = sum(moved for what, moved in device.items() if what.startswith("net"))
        assert net == pytest.approx(expected, abs=3 * stages)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_zero_offload_moves_two_bytes_a_parameter_down_and_two_up(n, each):
    """Down after every backward of a device, up once a step: 4 bytes a parameter for steps of one microbatch."""
    sizes, parameters = model_bytes(model(60), 14), model(60).total_parameters
    moved = moved_bytes(built("zero_offload", n, 3, each), sizes)
    assert sum(device["d2h STORE:G"] for device in moved) == pytest.approx(2 * each * parameters, abs=10)
    assert sum(device["h2d LOAD:P"] for device in moved) == pytest.approx(2 * parameters, abs=10)


@pytest.mark.parametrize("share, stages_on_host", [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_a_share_of_the_optimizer_is_on_the_host(share, stages_on_host):
    sizes = model_bytes(model(60), 14)
    found = entry("zero_offload")
    order = found.build(Shape(2, 4, 2), share=share).with_partition(symmetric((2, 2, 2, 2)))
    schedule = found.lower(order, prefetch=1, delayed_update=False, share=share)
    whole = sum(schedule_stage(schedule, sizes, stage) for stage in range(4 - stages_on_host, 4))
    assert host_bytes(schedule, sizes) == 7 * whole  # gradients 2 and state 12 for 2 of weights
    left = sum(schedule_stage(schedule, sizes, stage) for stage in range(4 - stages_on_host))
    assert on_devices(schedule, sizes)[0]["optimizer state"] == 6 * left // 2


@pytest.mark.parametrize("method", ["zero_3", "zero_infinity"])
def test_what_is_on_the_host_is_what_the_devices_do_not_keep(method):
    sizes, parameters = model_bytes(model(60), 14), model(60).total_parameters
    options = {"offload": True} if method == "zero_3" else {}
    assert host_bytes(built(method, 4, 4, **options), sizes) == 16 * parameters
    assert host_bytes(built("zero_3", 4, 4), sizes) == host_bytes(built("data_parallel", 4, 4), sizes) == 0


def test_without_no_sync_every_microbatch_is_scattered_and_with_it_the_whole_gradient_is_kept():
    sizes, parameters = model_bytes(model(60), 14), model(60).total_parameters
    volumes, kept = [], []
    for often in (True, False):
        schedule = built("zero_3", 4, 4, each=3, reduce_each_microbatch=often)
        volumes.append(moved_bytes(schedule, sizes)[0]["net REDUCE_GRAD"])
        kept.append(on_devices(schedule, sizes)[0]["gradients"])
    assert volumes == pytest.approx([3 * 2 * parameters * 3 / 4, 2 * parameters * 3 / 4], abs=20)
    assert kept == pytest.approx([2 * parameters / 4, 2 * parameters], abs=20)


@settings(deadline=None, max_examples=8)
@given(n=st.integers(1, 8), stages=st.integers(1, 8), microbatches=st.integers(1, 4))
def test_six_all_reduces_a_layer_of_tensor_parallelism(n, stages, microbatches):
    """Of n s h elements of two bytes: two forward, two recomputed, two backward (Megatron-LM, section 3).

    Three more at the ends: the embedding, forth and when it is run again, and the gradient of the head's input.
    """
    sizes, found = model_bytes(model(60), 14), entry("megatron_tp")
    order = found.build(Shape(n, stages, microbatches)).with_partition(symmetric(split_evenly(8, stages)))
    for device in moved_bytes(found.lower(order, prefetch=1), sizes):
        one = 14 * 60 * 2
        assert sum(device.values()) == pytest.approx((6 * 8 + 3) * microbatches * one * 2 * (n - 1) / n, abs=2)
    holds = on_devices(order, sizes)[0]
    parameters = model(60).total_parameters
    assert sum(holds[name] for name in STATES) == pytest.approx(16 * parameters / n, abs=3)
    assert holds["kept stage inputs"] == stages * sizes.boundary


def test_a_round_waits_whole_where_a_stage_leaves_after_its_round_and_another_after_each_visit():
    """ACCO, 2 microbatches a device and round: what stage 1 adds up goes out while the next round's gradients come."""
    order = built("acco", 2, 2, each=2)
    rows = [{lane: tuple(chain.from_iterable(map(after_each_visit, row))) for lane, row in own} for own in order.rows]
    mixed = replace(order, rows=tuple(rows))
    check(mixed)
    shares = ReplicaShares(analysed(mixed))
    for device in (0, 1):
        assert [shares.of_gradients(device, stage) for stage in (0, 1)] == [Fraction(1, 2), 1]
        assert max(moment.get(1, 0) for moment in shares.passing(device)) == 1


def after_each_visit(action: Action) -> list[Action]:
    """The sums of stage 0 twice, one for each of a round's two visits."""
    return [action] * (2 if action.kind is Kind.REDUCE_GRAD and action.stage == 0 else 1)
