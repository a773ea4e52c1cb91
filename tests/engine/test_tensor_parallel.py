"""Devices with shares of every matrix: who has what, what they send each other, and what happens when one fails."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import build
from spared import slow
from training_cases import TINY, assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.config.loading import load
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.transfers import moved_bytes
from rpbench.engine.backends.threads import CpuBackend, ThreadBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.reference import largest_difference, largest_relative_difference, train_reference
from rpbench.engine.shards import tensor_parallel
from rpbench.engine.shards.collectives import Rank
from rpbench.engine.shards.cut import joined
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import _beside_the_whole, verified
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.passes.lower import split_backward
from rpbench.registry import entry
from rpbench.run.assemble import assemble
from rpbench.run.modes.train import check_request
from rpbench.workload.counts import Experts

LLAMA = replace(TINY, family="llama", gated=True)
QWEN = replace(TINY, family="qwen3", gated=True, qk_norm=True, tied=True)
EXPERTS = replace(TINY, family="qwen3", qk_norm=True, experts=Experts(3, 2, 4 * TINY.hidden))
MODELS = {"gpt": TINY, "llama": LLAMA, "qwen3": QWEN, "experts": EXPERTS}


def with_sums(num_devices: int, num_microbatches: int, **options):
    """The schedule with its sums and steps, as a run has it."""
    schedule = build("megatron_tp", num_devices, num_microbatches, steps=False, **options)
    return entry("megatron_tp").lower(schedule, prefetch=1)


def whole_of(run):
    """The same training of layers in one piece."""
    training = run.training
    return train_reference(
        training.uncut,
        training.layout,
        training.groups,
        training.settings.optimizer,
        num_steps=training.schedule.shape.num_steps,
    )


# --- numbers ---


@pytest.mark.parametrize("num_devices, grain", [(2, "stage"), slow((4, "layer"))])
@pytest.mark.parametrize("name", MODELS)
def test_shares_train_as_one_process_and_as_the_whole_model(name, num_devices, grain):
    schedule = with_sums(num_devices, 3, num_steps=2, num_layers=2, chunks=1, seed=num_devices)
    workload = workload_of(schedule, replace(MODELS[name], dropout=0.2))
    run = train(schedule, workload, recompute_grain=grain, name="sgd", momentum=0.9, learning_rate=0.1, clip_norm=0.5)
    assert_same(run, reference_of(run))
    assert all(largest_difference(*pair) == 0.0 for pair in run.training.gradients.copies())
    whole = whole_of(run)
    for found, expected in zip(run.training.gradients.by_step(), whole.gradients, strict=True):
        assert largest_relative_difference(joined(found), expected) <= 1e-12
    assert largest_relative_difference(joined(run.training.optimizer.masters), whole.masters) <= 1e-12


@pytest.mark.slow
def test_threads_and_the_virtual_clock_give_the_same_bits():
    schedule = with_sums(2, 3, num_steps=3)
    runs = [train(schedule, workload_of(schedule, QWEN), learning_rate=1e-2)]
    with CpuBackend() as backend:
        runs.append(train(schedule, workload_of(schedule, QWEN), learning_rate=1e-2, backend=backend))
    one, other = (run.training.optimizer.masters for run in runs)
    assert largest_difference(one, other) == 0.0


def test_every_device_has_its_own_gradients_and_state():
    schedule = with_sums(2, 2)
    run = train(schedule, workload_of(schedule, QWEN))
    names = [{name for found in own.by_step() for _, name in found} for own in run.training.gradients.by_rank[1:]]
    assert {name.split(".")[2] for name in names[0] if ".shares." in name} == {"1"}
    moments = run.training.optimizer.moments()
    queries = {name: moments[1, name]["exp_avg"].shape for _, name in moments if name.endswith(".q.weight")}
    assert queries == {f"attention.shares.{number}.q.weight": (4, 16) for number in range(2)}, "one head each"
    assert "attention.shares.1.q_norm.scale" not in dict(moments), "tied over the shares"


def test_a_device_holds_its_share():
    schedule = with_sums(2, 2)
    workload = workload_of(schedule, replace(TINY, vocab=64))
    whole = sum(parameter.nbytes for module in workload.modules for parameter in module.parameters())
    norms = (4 * 2 + 1) * 16 * 8
    held = 2 * ((whole - norms) // 2 + norms)  # weights and gradients
    Training(workload, schedule, Settings(device_memory_bytes=held))
    with pytest.raises(MemoryError):
        Training(workload, schedule, Settings(device_memory_bytes=held - 1))


# --- sums ---


@pytest.mark.parametrize("num_devices", [slow(1), 2, slow(4)])
def test_devices_send_what_the_schedule_says(num_devices):
    """Six sums a layer and microbatch and three at the ends, 2 (p - 1) / p of n s h elements each.

    Three more of n s elements make the loss, which a schedule leaves out.
    """
    schedule = with_sums(num_devices, 3, num_steps=2)
    workload = workload_of(schedule, replace(TINY, vocab=64, seq_len=6))
    run = train(schedule, workload)
    sent = [rank.sent_bytes for rank in run.training.team.ranks]
    n, s, h, double = 2, 6, TINY.hidden, 8
    p = num_devices
    of_the_loss = 3 * 3 * 2 * n * s * double * 2 * (p - 1) // p
    assert sent == [(6 * 4 + 3) * 3 * 2 * n * s * h * double * 2 * (p - 1) // p + of_the_loss] * p
    sizes = model_bytes(TINY, n * s)  # of 2 bytes a value
    assert [(number - of_the_loss) * 2 // double for number in sent] == [
        sum(device.values()) for device in moved_bytes(schedule, sizes)
    ]


@pytest.mark.parametrize("operator", ["spread", "sum"])
def test_a_sum_that_is_left_out_is_told(operator, monkeypatch):
    left_out = {"spread": lambda self, x, num_shards: [x], "sum": lambda self, parts: parts[0]}
    monkeypatch.setattr(tensor_parallel.AcrossRanks, operator, left_out[operator])
    schedule = with_sums(2, 2)
    with pytest.raises(ActionFailed, match=r"SUM_[FB]\d(\.1)? stands for \d sums, and \d have been made"):
        train(schedule, workload_of(schedule))


@pytest.mark.parametrize("lost", [0, 5, 11])
def test_a_sum_that_does_not_add_up_shows(lost, monkeypatch):
    real, seen = Rank.all_reduce, []

    def forgetful(self, tensor, *largest):
        total = real(self, tensor, *largest)
        if self.rank == 0 or largest:
            return total
        seen.append(None)
        return tensor if len(seen) == lost + 1 else total

    monkeypatch.setattr(Rank, "all_reduce", forgetful)
    schedule = with_sums(2, 2)
    run = train(schedule, workload_of(schedule))
    assert len(seen) > lost
    assert verified(run.training)["grad_max_abs_diff"] > 1e-6


def test_copies_that_differ_show():
    schedule = with_sums(2, 2)
    run = train(schedule, workload_of(schedule))
    assert verified(run.training)["grad_max_abs_diff"] == 0.0
    other = run.training.gradients.by_rank[1]
    other.total(0, 1)[1, "attention_norm.scale"][3] += 1e-9
    assert verified(run.training)["grad_max_abs_diff"] == pytest.approx(1e-9)
    other.total(3, 1)[4, "mlp.shares.1.down.weight"][3, 3] += 1e-6
    assert verified(run.training)["whole_grad_max_rel_diff"] > 1e-9


def test_the_whole_layers_are_asked_on_the_weights_of_each_step():
    """AdamW makes more than rounding of rounding, and clipping still more, so trainings part; gradients do not."""
    schedule = with_sums(2, 2, num_steps=3)
    run = train(schedule, workload_of(schedule), clip_norm=0.01, learning_rate=0.1)
    apart = largest_relative_difference(joined(run.training.gradients.by_step()[2]), whole_of(run).gradients[2])
    assert verified(run.training)["whole_grad_max_rel_diff"] < 1e-14 < apart / 5
    run.training.optimizer.gradient_norms[2].mul_(1 + 1e-9)
    assert verified(run.training)["whole_grad_max_rel_diff"] == pytest.approx(1e-9, rel=1e-3)


# --- a device that fails ---


class Failure(Exception):
    """One device's own."""


def failing(monkeypatch, error=Failure):
    """Make device 1 fail half-way through its third sum."""
    real = Rank.all_reduce

    def fails(self, tensor):
        if self.rank == 1 and self.num_sums == 2:
            raise error("out of order")
        return real(self, tensor)

    monkeypatch.setattr(Rank, "all_reduce", fails)


@pytest.mark.parametrize("on_threads", [False, True])
def test_a_device_that_fails_sends_the_others_home(on_threads, monkeypatch):
    failing(monkeypatch)
    schedule, before = with_sums(3, 2), set(threading.enumerate())
    training = Training(workload_of(schedule), schedule)
    costs = uneven_costs(schedule)
    program = training.program(costs, real_time=on_threads)
    with CpuBackend() as threads:
        backend = threads if on_threads else VirtualBackend(costs)
        with pytest.raises(ActionFailed, match=r"\dF0\.1 failed on device 1, lane compute: Failure: out of order"):
            execute(program, training.handlers, backend)
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]


def test_ctrl_c_brings_back_who_waits(monkeypatch):
    """Device 1 never comes to the sum; device 0 must not wait for it after the end."""
    schedule, before = with_sums(2, 2), set(threading.enumerate())
    training = Training(workload_of(schedule), schedule)
    waiting = threading.Event()
    real = Rank.all_reduce

    def late(self, tensor):
        if self.rank == 0:
            waiting.set()
            return real(self, tensor)
        while not training.team.meeting._stopped:
            waiting.wait(0.01)
        return tensor

    def interrupted(self, walk, places):
        waiting.wait(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(Rank, "all_reduce", late)
    monkeypatch.setattr(ThreadBackend, "_wait", interrupted)
    backend = CpuBackend()
    with pytest.raises(KeyboardInterrupt):
        execute(training.program(uneven_costs(schedule), real_time=True), training.handlers, backend)
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]


def test_devices_that_would_wait_for_one_another_for_ever_are_shown():
    """Without the meeting half-way, each lane could go on."""
    schedule = entry("megatron_tp").build(Shape(2, 1, 2)).with_partition(symmetric((4,)))
    first, (f0, b0, f1, b1) = schedule.compute(0), schedule.compute(1)
    crossed = replace(schedule, rows=(first, (f1, f0, b0, b1)))
    check(crossed)
    training = Training(workload_of(schedule), crossed)
    with pytest.raises(ScheduleError, match=r"no rank can move") as seen:
        training.program(uneven_costs(schedule))
    assert "waits at 0F0 for 0F1.1" in str(seen.value)


# --- checkpoints ---


def state_after(name: str, num_devices: int, num_steps: int, start=None):
    schedule = build(name, num_devices, 2, num_steps=num_steps, steps=True)
    model = replace(QWEN, heads=4, key_value_heads=2, head_dim=4, inner=24, dropout=0.1)
    workload = workload_of(replace(schedule, shape=replace(schedule.shape, tensor_parallel=False)), model)
    training = Training(workload, schedule, Settings(keep_state=True), start)
    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training.state()


@pytest.mark.slow
def test_training_goes_on_from_shares_as_if_it_had_not_stopped():
    straight, halfway = state_after("megatron_tp", 2, 4), state_after("megatron_tp", 2, 2)
    onward = state_after("megatron_tp", 2, 2, halfway)
    assert largest_difference(onward.masters, straight.masters) == 0.0
    for place, moments in straight.moments.items():
        assert largest_difference(onward.moments[place], moments) == 0.0


def test_a_checkpoint_is_of_the_model_not_of_its_shares():
    halfway = state_after("megatron_tp", 2, 2)
    whole = state_after("1f1b", 2, 2)
    assert halfway.masters.keys() == whole.masters.keys()
    assert halfway.moments.keys() == whole.moments.keys()
    onward, there = state_after("1f1b", 2, 1, halfway), state_after("1f1b", 2, 3)
    assert largest_relative_difference(onward.masters, there.masters) <= 1e-10
    back = state_after("megatron_tp", 1, 1, whole)
    assert largest_relative_difference(back.masters, there.masters) <= 1e-10


@pytest.mark.parametrize(
    "noted, of_whole, difference",
    [
        ({1: 3.0}, 2.0, 0.5),
        ({1: 1.0}, 2.0, 0.5),
        ({1: 0.25}, 0.0, 0.25),  # without gradients there is nothing to divide by
        ({1: 0.0}, 0.0, 0.0),
        ({2: 3.0}, 2.0, 0.0),  # of a step that was not verified
    ],
)
def test_a_noted_norm_is_held_to_that_of_whole_layers(noted, of_whole, difference, monkeypatch):
    gradients = {(0, "weight"): torch.full((1,), of_whole)}
    monkeypatch.setattr("rpbench.engine.verification._whole_gradient", lambda *_: gradients)
    training = SimpleNamespace(
        optimizer=SimpleNamespace(gradient_norms=noted),
        uncut=SimpleNamespace(owner_of={(0, "weight"): (0, "weight")}),
    )
    found = _beside_the_whole(training, [gradients], SimpleNamespace(begun_with=[{}]))
    assert found == {"whole_grad_max_rel_diff": difference}


# --- what is refused ---


@pytest.mark.parametrize(
    "num_devices, options, message",
    [
        (3, (), r"num_devices=3 of 4 heads: .* take one of 1, 2, 4$"),
        (4, ("model.key_value_heads=2",), r"4 heads, 2 KV heads, .* take num_devices from 2$"),
        (4, ("model.inner=126",), r"126 values inside its MLP; take num_devices from 2$"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "virtual"])
def test_devices_that_cannot_share_evenly_are_refused_before_any_work(backend, num_devices, options, message):
    sizes = (f"num_devices={num_devices}", "num_microbatches=2")
    config = load(("schedule=megatron_tp", f"backend={backend}", "model=tiny_gpt", *sizes, *options))
    with pytest.raises(ValueError, match=message):
        check_request(config, assemble(config))


def test_a_schedule_or_a_module_that_shares_do_not_train_is_refused():
    schedule = build("megatron_tp", 2, 2)
    workload = workload_of(schedule)
    with pytest.raises(ValueError, match=r"policy latest: shares of matrices are trained with policy=flush only"):
        Training(workload, replace(schedule, policy=Policy.LATEST))
    rows = tuple((*schedule.compute(device), schedule.compute(device)[0]._replace(kind=Kind.R)) for device in (0, 1))
    with pytest.raises(ValueError, match=r"R in megatron_tp: .* use mode=simulate"):
        Training(workload, replace(schedule, rows=rows))
    strange = [workload.modules[0], *(torch.nn.Identity() for _ in range(4)), workload.modules[-1]]
    with pytest.raises(ValueError, match=r"Identity has no shares"):
        Training(replace(workload, modules=strange), schedule)


def test_a_meeting_that_a_device_stays_away_from_is_refused_before_any_work():
    """One device goes back in one piece and the other in two: each would wait for a share that never comes."""
    order = build("megatron_tp", 2, 1, num_layers=2, chunks=1)
    rows = [order.compute(0), split_backward(order).compute(1)]
    with pytest.raises(ScheduleError, match="meets the shares of 2 devices, and 1 come to it"):
        check(replace(order, rows=tuple(rows)))
