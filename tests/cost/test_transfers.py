"""Bytes over links, counted from actions, against the volumes the papers give."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.charges import computations_that_carry
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import OptimizerTraffic, StageBytes, TransferTimes, moved_bytes
from rpbench.ir.action import HEAD, Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.costs import StageCosts
from rpbench.ir.moved_objects import Payload
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import offload, shard, stream
from rpbench.registry import entry
from rpbench.workload.architecture import Architecture

MODEL = Architecture("tiny", num_layers=6, hidden=60, heads=2, vocab=60, seq_len=7)
SIZES = model_bytes(MODEL, 14)
# Weights and gradients are two bytes a parameter each; so bytes / 2 are the elements that papers count.
PARAMETERS = MODEL.total_parameters


def data_parallel(num_devices: int, num_stages: int, per_device: int = 1) -> Schedule:
    order = [(Kind.F, stage) for stage in range(num_stages)] + [
        (Kind.B, stage) for stage in reversed(range(num_stages))
    ]
    rows = [
        tuple(
            Action(kind, stage, device * per_device + number) for number in range(per_device) for kind, stage in order
        )
        for device in range(num_devices)
    ]
    shape = Shape(num_devices, num_stages, num_devices * per_device)
    cut = symmetric(split_evenly(MODEL.num_layers, num_stages))
    return add_steps(Schedule(shape, tuple(rows)).with_partition(cut), lane="host")


METHODS = {
    "data parallel": ({"parameters": None}, 2),
    "zero-1": ({"parameters": "step"}, 2),
    "zero-2": ({"parameters": "step", "gradients": "visit"}, 2),
    "zero-3": ({"gradients": "visit"}, 3),
}


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=10)
@given(num_devices=st.integers(2, 8), num_stages=st.integers(2, 6))
def test_volumes_of_sharded_data_parallelism(method, num_devices, num_stages):
    """Elements a step and device (ZeRO, SC'20, section 7), times (n - 1) / n, which the paper leaves out."""
    options, elements = METHODS[method]
    moved = moved_bytes(shard(data_parallel(num_devices, num_stages), **options), SIZES)
    expected = 2 * elements * PARAMETERS * (num_devices - 1) / num_devices
    for device in moved:
        assert sum(device.values()) == pytest.approx(expected, abs=num_stages)


def test_zero_3_gathers_again_for_every_microbatch_and_zero_1_does_not():
    once, often = (data_parallel(4, 3, per_device=number) for number in (1, 5))
    for options, factor in (({"gradients": "visit"}, 5), ({"parameters": "step"}, 1)):
        few, many = (sum(moved_bytes(shard(schedule, **options), SIZES)[0].values()) for schedule in (once, often))
        assert many == pytest.approx(factor * few, abs=10)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_volumes_of_zero_offload(num_devices):
    """Two bytes a parameter down and two up, shared by the devices (ZeRO-Offload, ATC'21, section 4)."""
    schedule = data_parallel(num_devices, 3)
    if num_devices > 1:
        schedule = shard(schedule, parameters="step", gradients="visit")
    moved = moved_bytes(offload(schedule), SIZES)
    for lane in ("h2d LOAD:P", "d2h STORE:G"):
        assert sum(device[lane] for device in moved) == pytest.approx(2 * PARAMETERS, abs=10)


@pytest.mark.parametrize("rounds", [1, 2])
def test_volumes_of_roundpipe(rounds):
    """Weights twice a round, forward and backward, less the fused layers' once; gradients home once a round."""
    cut = Partition((2, 2), (2, 2, 2), fused=True)
    shape = Shape(3, 2, 4 * rounds, 3, fused=True)
    schedule = entry("roundpipe").build(shape, round_size=4).with_partition(cut)
    moved = moved_bytes(stream(schedule), SIZES)
    total = {what: sum(device.get(what, 0) for device in moved) for device in moved for what in device}
    fused = 2 * SIZES.layers[0].weights + SIZES.head.weights
    assert total["h2d LOAD:P"] == rounds * (2 * 2 * PARAMETERS - fused)
    assert total["d2h STORE:G"] == rounds * 2 * PARAMETERS
    assert total["d2h STORE:A"] == total["h2d LOAD:A"] == 4 * rounds * SIZES.boundary  # stage 1; 0 has its tokens
    assert total["d2h SEND_F"] == total["h2d RECV_F"]


def test_time_is_latency_and_bytes_at_the_pace_of_the_direction():
    schedule = offload(data_parallel(1, 2))
    cluster = Machine("x", host_to_device_bytes_per_s=1e3, device_to_host_bytes_per_s=5e2, transfer_latency_s=0.25)
    stages = StageBytes(schedule.partition, SIZES)

    for payload in (payload for payload in Analysis(schedule).payload.values() if payload.lane != "host"):
        pace = 1e3 if payload.lane == "h2d" else 5e2
        assert TransferTimes(stages, cluster, 1000)(payload) == pytest.approx(
            250 + 1000 * float(stages.of(payload)) / pace
        )
        free = replace(cluster, host_to_device_bytes_per_s=None, device_to_host_bytes_per_s=None)
        assert TransferTimes(stages, free)(payload) == 0.25


def net_times(schedule, **traits):
    """Seconds of what goes over lane net of a schedule, on links of 1,000 bytes a second."""
    cluster = Machine("x", copy_bytes_per_s=1e3, collective_bytes_per_s=1e3)
    optimizer = OptimizerTraffic(0.0, 0.0, 1.0, **traits)
    stages = StageBytes(schedule.partition, SIZES)
    times = TransferTimes(stages, cluster, optimizer=optimizer, num_parts=schedule.shape.num_parts)
    return {payload: times(payload) for payload in Analysis(schedule).payload.values() if payload.lane == "net"}


@pytest.mark.parametrize("gradients, rings", [("visit", 1), ("step", 2)])
@pytest.mark.parametrize("devices, hops", [(2, 1), (4, 3), (8, 7), (16, 9)])
def test_a_collective_waits_for_its_hops(gradients, rings, devices, hops):
    """A ring of n has n - 1, a tree of many 2 log2 n + 1; a gather or a scatter is one ring, an all-reduce two."""
    schedule = shard(data_parallel(devices, 2), parameters="visit" if rings == 1 else None, gradients=gradients)
    plain, waiting = net_times(schedule), net_times(schedule, hop_latency_s=0.5)
    assert {payload.object for payload in plain} == ({"P", "G"} if rings == 1 else {"G"})
    for payload, seconds in plain.items():
        assert waiting[payload] - seconds == pytest.approx(0.5 * rings * hops)


def test_of_sums_over_shards_computation_hides_a_part():
    """Of four devices: three layers forth, two sums each; four back, for they run again; and one at either end."""
    found = entry("megatron_tp")
    order = found.build(Shape(4, 2, 2)).with_partition(symmetric(split_evenly(MODEL.num_layers, 2)))
    schedule = found.lower(order, prefetch=1, **found.options)
    plain, shown = net_times(schedule), net_times(schedule, hidden_sums=0.25)
    waiting = net_times(schedule, hop_latency_s=0.5)
    assert {payload.object for payload in plain} == {"sum"}
    for payload, seconds in plain.items():
        assert shown[payload] == pytest.approx(0.75 * seconds)
    sums = sorted((waiting[payload] - seconds) / (0.5 * 2 * 3) for payload, seconds in plain.items())
    assert sums == pytest.approx([6, 7, 13, 13])


@pytest.mark.parametrize("name", ["interlaced", "vocab_parallel"])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_every_half_of_a_shared_head_ends_with_an_all_reduce_of_a_boundary_tensor(name, devices):
    """Hidden states go to all and the embedding's come back to the first, n - 1 of n parts each; gradients as well."""
    each, shape = (1.0,) * devices, Shape(devices, devices, 4, num_steps=2)
    times = [StageCosts(each, each, each, 0.0, each, each, 1.0, 1.0)] if entry(name).needs_costs else []
    order = entry(name).build(shape, *times).with_partition(symmetric(split_evenly(MODEL.num_layers, devices)))
    moved = moved_bytes(order, SIZES, carry=computations_that_carry(order))
    reduced = 2 * SIZES.boundary * (devices - 1) / devices
    assert [device.get("net vocab", 0) for device in moved] == [round(2 * 4 * 2 * reduced)] * devices
    assert {kind for kind, _ in computations_that_carry(entry("1f1b").build(shape))}.isdisjoint(HEAD)


def test_a_step_of_a_shared_head_updates_a_shard_of_both_ends():
    schedule = entry("interlaced").build(Shape(3, 3, 4)).with_partition(symmetric((3, 2, 1)))
    stages = StageBytes(schedule.partition, SIZES, num_head_shards=3)
    ends = -(-SIZES.embedding.optimizer // 3) + -(-SIZES.head.optimizer // 3)
    layer = SIZES.layers[0].optimizer
    assert [stages.stage(number, backward=True).optimizer - ends for number in range(3)] == [
        3 * layer,
        2 * layer,
        layer,
    ]


def test_whole_activations_that_move_have_the_logits_in_the_last_stage_alone():
    """What a graph saves of a stage is what its layers save; behind the last layer come a logit a token and word."""
    whole = replace(SIZES, keeps_activations=True)
    stages = StageBytes(symmetric((2, 2, 2)), whole)
    moved = [stages.of(Payload("A", stage, True, Fraction(1), "d2h")) for stage in range(3)]
    layers = 2 * SIZES.layers[0].activations
    assert SIZES.logits > 0
    assert moved[1] == layers
    assert moved[2] - SIZES.logits == layers + SIZES.head.activations
    assert StageBytes(symmetric((2, 2, 2)), SIZES).of(Payload("A", 2, True, Fraction(1), "d2h")) == SIZES.boundary
