"""Replicas share a model for real: shards are gathered, gradients scattered, and each owner steps its own part."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import build
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spared import slow, spared
from test_replicated_training import complete
from training_cases import TINY, assert_same, counted_bytes, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.reference import largest_difference
from rpbench.engine.state.ownership import ALIGNMENT, cut_evenly, join, take
from rpbench.engine.state.updates.compensation import Compensation
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.engine.training_checks import check_momentum
from rpbench.ir.action import Action, Kind
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import shard

METHODS = {
    "data_parallel": ("data_parallel", {}),
    "zero_1": ("zero_2", {"reduce_each_microbatch": False}),
    "zero_2": ("zero_2", {}),
    "zero_3": ("zero_3", {}),
    "zero_3, no_sync": ("zero_3", {"reduce_each_microbatch": False}),
    "zero_3, offload": ("zero_3", {"offload": True}),
    "zero_offload": ("zero_offload", {}),
    "zero_offload, half": ("zero_offload", {"share": 0.5}),
    "zero_offload, delayed": ("zero_offload", {"delayed_update": True}),
    "zero_infinity": ("zero_infinity", {}),
}
# One for each part that is cut, on the device and on the host; the others differ by one option.
SPARED = spared(METHODS, lambda name: name in ("data_parallel", "zero_3"))


def schedule_of(method: str, num_devices: int, each: int = 2, num_stages: int = 3, num_steps: int = 2) -> Schedule:
    name, options = METHODS[method]
    return complete(name, num_devices, num_stages, each, num_steps, **options)


def read_by(method: str, schedule: Schedule) -> dict:
    """How a reference reads weights, where a method trains on old ones."""
    window = schedule.shape.num_microbatches
    late = "delayed" in method
    return {"read_version": lambda module, microbatch: max(0, microbatch // window - 1)} if late else {}


@pytest.mark.parametrize("method", SPARED)
@settings(deadline=None, max_examples=2, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_every_bit_is_that_of_plain_training(method, data):
    draw = data.draw
    schedule = schedule_of(method, draw(st.integers(2, 5)), draw(st.integers(1, 2)), draw(st.integers(2, 3)), 2)
    model = replace(TINY, tied=draw(st.booleans()))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    options = draw(st.sampled_from([{}, {"clip_norm": 0.05}, {"name": "sgd", "momentum": 0.9}]))
    workload = workload_of(schedule, model, dtype)
    run = train(schedule, workload, learning_rate=1e-2, **options)
    assert_same(run, reference_of(run, **read_by(method, schedule)))
    assert run.training.passes.num_left == 0
    assert run.training.weights._copies == {}


@pytest.mark.parametrize("method", spared(METHODS, lambda name: name in ("zero_3", "zero_offload, delayed")))
def test_on_threads_too(method):
    schedule = schedule_of(method, 3, num_steps=2)
    with CpuBackend() as backend:
        run = train(schedule, workload_of(schedule), backend=backend, clip_norm=0.05)
    assert_same(run, reference_of(run, **read_by(method, schedule)))


def test_frozen_weights_are_gathered_as_well_and_only_adapters_are_stepped():
    schedule = schedule_of("zero_3", 3)
    run = train(schedule, workload_of(schedule, replace(TINY, training_mode="lora", lora_rank=2)))
    assert_same(run, reference_of(run))


@pytest.mark.parametrize("num_devices", [slow(2), 5])
def test_replicas_that_keep_everything_stay_the_same_bit_for_bit(num_devices):
    schedule = schedule_of("data_parallel", num_devices, num_steps=3)
    weights = train(schedule, workload_of(schedule), learning_rate=1e-2).training.weights
    for module in range(6):
        first, *others = (weights.part(module, 3, device) for device in range(num_devices))
        for other in others:
            assert first.keys() == other.keys()
            for name in first:
                assert torch.equal(first[name], other[name])
                assert first[name].data_ptr() != other[name].data_ptr()


@pytest.mark.parametrize("method", [slow("data_parallel"), "zero_2", slow("zero_offload, delayed")])
@pytest.mark.slow
def test_a_run_that_goes_on_is_as_one_that_did_not_stop(method):
    """Shards of weights and moments are put together for a checkpoint and cut again."""

    def run(num_steps: int, start=None) -> Training:
        schedule = schedule_of(method, 3, num_steps=num_steps)
        optimizer = OptimizerSettings(1e-2, clip_norm=0.5)
        training = Training(workload_of(schedule), schedule, Settings(optimizer, keep_state=True), start)
        execute(training.program(uneven_costs(schedule)), training.handlers, VirtualBackend(uneven_costs(schedule)))
        return training

    straight, resumed = run(4).state(), run(2, run(2).state()).state()
    assert largest_difference(resumed.masters, straight.masters) == 0.0
    for age in straight.stale:
        assert largest_difference(resumed.stale[age], straight.stale[age]) == 0.0
    for place, moments in straight.moments.items():
        assert largest_difference(resumed.moments[place], moments) == 0.0


# --- what a device owns -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 6))
def test_owners_have_equal_parts_that_make_the_whole(sizes, owners):
    sizes = {(0, str(number)): size for number, size in enumerate(sizes)}
    cuts = cut_evenly(sizes, owners)
    tensors = {place: torch.randn(size) for place, size in sizes.items()}
    whole = join([take(tensors, pieces) for pieces in cuts], {place: t.shape for place, t in tensors.items()})
    assert all(torch.equal(whole[place], tensors[place]) for place in tensors if tensors[place].numel())
    owned = [sum(stop - start for _, start, stop in pieces) for pieces in cuts]
    assert sum(owned) == sum(sizes.values())
    assert max(owned) - min(owned) <= 2 * ALIGNMENT + 1
    assert all(start % ALIGNMENT == 0 for pieces in cuts for _, start, _ in pieces)


def test_a_device_keeps_a_shard_of_weights_and_moments():
    schedule = schedule_of("zero_3", 3)
    training = train(schedule, workload_of(schedule)).training
    total = sum(master.numel() for master in training.optimizer.masters.values())
    for device in range(3):
        kept = sum(t.numel() for module in range(6) for t in training.weights.part(module, 2, device).values())
        assert kept == pytest.approx(total / 3, abs=3 * 2 * ALIGNMENT)
    stepped = Counter()
    for part in training.optimizer._all_parts():
        for state in part.optimizer.state.values():
            stepped[part.owner] += state["exp_avg"].numel()
    assert sum(stepped.values()) == total
    assert max(stepped.values()) == pytest.approx(total / 3, abs=3 * 2 * ALIGNMENT)


# --- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SPARED)
@pytest.mark.parametrize("num_devices", [slow(1), 3])
def test_what_is_copied_is_what_the_actions_count(method, num_devices):
    """Links have as many bytes in the engine as in `moved_bytes`: all devices exactly, one but for where it is cut."""
    schedule = schedule_of(method, num_devices)
    training = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training
    counted, found = counted_bytes(schedule), training.traffic.moved_bytes
    num_transfers = sum(
        action.kind in (Kind.UNSHARD, Kind.LOAD, Kind.STORE, Kind.REDUCE_GRAD)
        for _, _, row in schedule.items()
        for action in row
    )
    for lane in ("h2d", "d2h", "net"):
        devices = range(num_devices)
        assert sum(found[d, lane] for d in devices) == pytest.approx(sum(counted[d, lane] for d in devices), abs=8)
        for device in devices:
            assert found[device, lane] == pytest.approx(counted[device, lane], abs=2 * 2 * ALIGNMENT * num_transfers)


# Elements a parameter over the links between n devices in a step of one microbatch each, times n / (n - 1); ZeRO, 7.
VOLUMES = {"data_parallel": 2, "zero_1": 2, "zero_2": 2, "zero_3": 3, "zero_offload": 2, "zero_infinity": 3}


@pytest.mark.parametrize("method", VOLUMES)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_volumes_of_the_papers(method, num_devices):
    schedule = schedule_of(method, num_devices, each=1, num_steps=1)
    training = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training
    parameters = sum(training.workload.parameter(place).numel() for place in training.workload.owner_of)
    moved = sum(number for (_, lane), number in training.traffic.moved_bytes.items() if lane == "net")
    assert moved == 2 * VOLUMES[method] * parameters * (num_devices - 1)
    if method == "zero_offload":  # 2 bytes a parameter down and 2 up; ATC'21, section 4
        for lane in ("d2h", "h2d"):
            assert sum(training.traffic.moved_bytes[d, lane] for d in range(num_devices)) == 2 * parameters


# --- what a device holds ----------------------------------------------------------------------------------------


def test_the_ledger_counts_shards_and_what_is_gathered():
    peaks = {}
    for method in ("data_parallel", "zero_2", "zero_3", "zero_infinity"):
        schedule = schedule_of(method, 4, num_stages=6, num_steps=1)
        model = replace(TINY, hidden=64)
        training = train(schedule, workload_of(schedule, model), device_memory_bytes=10**9).training
        peaks[method] = max(training.memory.peak_bytes)
        assert not any(held["gathered weights"] or held["gradients on their way"] for held in training.memory._held)
    assert peaks["zero_infinity"] < peaks["zero_3"] < peaks["zero_2"] < peaks["data_parallel"]


def test_what_is_gathered_can_be_too_much():
    schedule = schedule_of("zero_3", 2, num_stages=6, num_steps=1)
    workload = workload_of(schedule, replace(TINY, hidden=64))
    most = max(train(schedule, workload, device_memory_bytes=10**9).training.memory.peak_bytes)
    with pytest.raises(ActionFailed, match="OutOfDeviceMemory"):
        train(schedule, workload, device_memory_bytes=most - 1)


# --- what must show ---------------------------------------------------------------------------------------------


def run_with(method: str, kind: Kind, handler) -> Training:
    """A run in which actions of one kind do something else."""
    schedule = schedule_of(method, 2)
    training = Training(workload_of(schedule), schedule, Settings(OptimizerSettings(), keep_gradients=True))
    handlers = dict(training.handlers) | {kind: handler(training.handlers[kind])}
    execute(training.program(uneven_costs(schedule)), handlers, VirtualBackend(uneven_costs(schedule)))
    return training


def nothing(_):
    return lambda action, number, gate: None


def test_reading_what_has_not_been_gathered_is_an_error():
    with pytest.raises(ActionFailed, match=r"0F. reads module 0, which is not on its device: no UNSHARD"):
        run_with("zero_3", Kind.UNSHARD, nothing)


def test_a_gather_without_the_loaded_shard_of_a_replica_is_an_error():
    with pytest.raises(ActionFailed, match=r"UNSHARD.*failed"):
        run_with("zero_infinity", Kind.LOAD, nothing)


def test_a_step_without_a_replica_in_the_reduction_is_an_error():
    def without_device_1(handler):
        def run(action: Action, number: int, gate) -> None:
            if number % 2:
                handler(action, number, gate)

        return run

    with pytest.raises(ActionFailed, match=r"STEP@1 failed.*taken before it is complete"):
        run_with("data_parallel", Kind.REDUCE_GRAD, without_device_1)


def test_weights_that_are_dropped_too_early_are_not_numbers():
    def drop_at_once(handler):
        def run(action: Action, number: int, gate) -> None:
            handler(action, number, gate)
            training_weights = handler.__self__._weights
            for named in training_weights._copies[training_weights._gathers[number]].values():
                for tensor in named.values():
                    tensor.detach().fill_(torch.nan)

        return run

    with pytest.raises(ActionFailed, match="NonFiniteLoss"):
        run_with("zero_3", Kind.UNSHARD, drop_at_once)


def test_visits_of_several_microbatches_are_reduced_once_a_step():
    rows = [
        tuple(
            Action(kind, 0, mb)
            for kind in (Kind.F, Kind.B)
            for half in (0, 1)
            for mb in (4 * half + d, 4 * half + 2 + d)
        )
        for d in range(2)
    ]
    rows = [tuple(sorted(row, key=lambda a: (a.microbatch // 4, a.kind is not Kind.F))) for row in rows]
    plain = Schedule(Shape(2, 1, 8), rows, placement=((0, 1),)).with_partition(symmetric(split_evenly(2, 1)))
    schedule = shard(add_steps(plain), parameters=None, gradients="step")
    run = train(schedule, workload_of(schedule))
    assert_same(run, reference_of(run))
    often = shard(add_steps(plain), parameters=None, gradients="visit")
    with pytest.raises(ValueError, match="sums of sums of sums are not computed; reduce once a step"):
        Training(workload_of(often), often, Settings())


@pytest.mark.parametrize("name", ["rmsprop", "adafactor"])
def test_other_optimizers_step_the_same_bits_and_weigh_what_is_counted(name):
    for schedule in (build("1f1b", 2, 2, steps=True, num_steps=3), complete("data_parallel", 2, 2, 3, 2)):
        run = train(schedule, workload_of(schedule), name=name)
        assert_same(run, reference_of(run))
        optimizer = run.training.optimizer
        for place, state in optimizer.moments().items():
            master = optimizer.masters[place]
            num = master.numel() + sum(value.numel() for key, value in state.items() if key != "step")
            assert 4 * num == OptimizerSettings(name=name).state_bytes(master.shape)


def test_adafactor_is_refused_where_replicas_share_a_matrix():
    schedule = complete("zero_2", 2, 2, 2, 2)
    with pytest.raises(ValueError, match="adafactor steps whole matrices"):
        train(schedule, workload_of(schedule), name="adafactor")


def test_late_gradients_are_not_compensated_by_moments_that_are_not_known():
    with pytest.raises(ValueError, match=r"optimizer=rmsprop: late gradients are compensated .* use optimizer=adamw"):
        check_momentum(Compensation("spectrain"), OptimizerSettings(name="rmsprop"))
