"""Devices that have slices of every sequence between their shares of matrices: bits, bytes, memory, what is refused."""

from dataclasses import replace

import pytest
import torch
from cases import build
from spared import slow
from training_cases import MOE, TINY, assert_same, reference_of, train, workload_of

from rpbench.config.loading import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.transfers import moved_bytes
from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.reference import largest_difference
from rpbench.engine.shards import tensor_parallel
from rpbench.engine.shards.cut import cut_layers_state, joined
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import WHOLE_BOUNDS, verified
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import Schedule, Shape, from_text, to_text
from rpbench.registry import entry
from rpbench.run.assemble import assemble
from rpbench.run.modes.train import check_request
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight

LENGTH = 12  # tokens, of sequences that 2, 3 and 4 devices cut into slices
QWEN = replace(TINY, family="qwen3", gated=True, qk_norm=True, tied=True)
MODELS = {name: replace(model, seq_len=LENGTH) for name, model in (("gpt", TINY), ("qwen3", QWEN), ("experts", MOE))}


def of(num_devices: int, num_microbatches: int, *, along: bool = True, **options) -> Schedule:
    order = build("megatron_tp", num_devices, num_microbatches, steps=False, sequence_parallel=along, **options)
    found = entry("megatron_tp").lower(order, prefetch=1, sequence_parallel=along)
    check(found)
    return found


@pytest.mark.parametrize(
    "num_devices, name, how",
    [
        (2, "qwen3", {"clip_norm": 0.5}),
        slow((3, "gpt", {})),
        slow((2, "experts", {})),
        slow((4, "qwen3", {"recompute_grain": "layer"})),
        slow((4, "gpt", {"dtype": torch.bfloat16})),
    ],
)
@pytest.mark.parametrize("real_time", [False, slow(True)])
def test_slices_train_as_one_process_and_as_the_whole_model(num_devices, name, how, real_time):
    schedule, how = of(num_devices, 2, num_steps=2), dict(how)
    workload = workload_of(schedule, MODELS[name], how.pop("dtype", torch.float64))
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload, backend=backend, learning_rate=1e-2, **how)
    else:
        run = train(schedule, workload, learning_rate=1e-2, **how)
    assert_same(run, reference_of(run))
    found = verified(run.training)
    assert found["grad_max_abs_diff"] == found["weight_max_abs_diff"] == 0.0
    assert found["whole_grad_max_rel_diff"] <= WHOLE_BOUNDS[workload.modules[1].attention_norm.scale.dtype]


def test_a_norm_sees_its_own_tokens_alone():
    """Every device has its scale, and a part of its gradient: the parts differ, and the optimizer adds them up."""
    schedule = of(2, 2)
    run = train(schedule, workload_of(schedule, MODELS["gpt"]))
    parts = [own.total(1, 1) for own in run.training.gradients.by_rank]
    names = [f"attention_norm.shares.{number}.scale" for number in range(2)]
    one, other = (
        next(g for (_, name), g in part.items() if name == own) for part, own in zip(parts, names, strict=True)
    )
    assert largest_difference({(0, ""): one}, {(0, ""): other}) > 0
    assert sum(name.endswith("attention_norm.shares.0.scale") for _, name in run.training.optimizer.masters) == 4
    assert not any(name.endswith("attention_norm.shares.1.scale") for _, name in run.training.optimizer.masters), "tied"


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices, num_layers", [(2, 4), slow((2, 8)), slow((4, 8))])
def test_bytes_are_those_of_whole_sums_but_for_the_ends(num_devices, num_layers):
    """In layers two halves are a sum. At the ends: half forth at either, and back a whole and a half, not two."""
    p, model, sent = num_devices, replace(MODELS["gpt"], num_layers=num_layers), []
    tokens = 2 * LENGTH
    for along in (False, True):
        schedule = of(p, 2, along=along, num_layers=num_layers)
        training = train(schedule, workload_of(schedule, model)).training
        sent.append([rank.sent_bytes for rank in training.team.ranks])
        numbers = 2 * 3 * (2 * (p - 1) * tokens // p) * 8  # the loss asks for three numbers a token of the others
        moved = moved_bytes(schedule, model_bytes(model, tokens))
        counted = [sum(device.values()) * 8 // 2 for device in moved]  # the simulator's are in 16 bits
        assert sent[-1] == [own + numbers for own in counted]
    half_a_sum = (p - 1) * tokens * 16 // p * 8
    assert [whole - own for whole, own in zip(*sent, strict=True)] == [2 * half_a_sum] * p


# --- memory ---------------------------------------------------------------------------------------------------------


def saved_bytes(num_devices: int, num_layers: int, chunks: int) -> int:
    """What a device holds less at its peak than with whole norms."""
    peaks = []
    for along in (False, True):
        schedule = of(num_devices, 1, along=along, num_layers=num_layers, chunks=chunks)
        run = train(schedule, workload_of(schedule, MODELS["gpt"]), device_memory_bytes=1 << 30)
        peaks.append(max(run.training.memory.peak_bytes))
    return peaks[0] - peaks[1]


@pytest.mark.parametrize("p, by", [(2, "layer"), slow((2, "stage")), slow((4, "layer")), slow((4, "stage"))])
def test_memory_that_is_spared(p, by):
    """A norm keeps its input, what it makes of it and a number a token: two of them in a layer that is run again.

    One layer more in each of p stages: (1 - 1/p) (4 B S H + 2 B S) numbers. As many stages more: as many inputs.
    """
    inputs = 2 * LENGTH * 16
    chunks, spared = (1, 4 * inputs + 2 * 2 * LENGTH) if by == "layer" else (2, p * inputs)
    more = saved_bytes(p, 2 * p, chunks) - saved_bytes(p, p, 1)
    assert more * p == (p - 1) * spared * 8


def test_kept_inputs_in_the_simulator():
    sizes = model_bytes(MODELS["gpt"], 2 * LENGTH)
    found = []
    for along in (False, True):
        schedule = of(2, 2, along=along)
        found.append(classes_of(schedule, sizes, peak_in_flight(build_graph(schedule)))[0])
    assert found[1].pop("kept stage inputs") * 2 == found[0].pop("kept stage inputs") > 0
    assert found[0] == found[1]


# --- what else goes with it -----------------------------------------------------------------------------------------


def test_rows_are_the_same_and_the_text_says_it():
    one, other = of(2, 2, along=False), of(2, 2)
    assert one.rows == other.rows
    assert from_text(to_text(other)) == other
    assert "sequence_parallel=1" in to_text(other)
    assert "sequence_parallel" not in to_text(one)


@pytest.mark.slow
def test_a_checkpoint_does_not_know_of_slices():
    """What devices with slices have saved goes on with whole norms, and back."""
    schedule = of(2, 2, num_steps=2)
    training = train(schedule, workload_of(schedule, MODELS["qwen3"]), keep_state=True).training
    state = training.state()
    assert not any(".shares." in name for _, name in state.masters)
    again = cut_layers_state(state, training.workload, 2).changed(joined)
    assert largest_difference(again.masters, state.masters) == 0.0
    whole = Training(workload_of(schedule, MODELS["qwen3"]), of(2, 2, along=False), start=state)
    assert largest_difference(whole.start.changed(joined).masters, state.masters) == 0.0


@pytest.mark.parametrize("lost", ["gather", "scatter"])
def test_a_half_that_is_lost_shows(lost, monkeypatch):
    """One device takes its own slice for the sum, or the first's for those of all, once."""
    name = {"gather": "gather_slices", "scatter": "scatter_sum"}[lost]
    real, seen = getattr(tensor_parallel.Rank, name), []

    def forgetful(self, tensor):
        found = real(self, tensor)
        if self.rank == 1:
            seen.append(None)
        return found.roll(1, 1) if self.rank == 1 and len(seen) == 3 else found

    monkeypatch.setattr(tensor_parallel.Rank, name, forgetful)
    schedule = of(2, 2)
    run = train(schedule, workload_of(schedule, MODELS["gpt"]))
    assert verified(run.training)["grad_max_abs_diff"] > 1e-6


# --- what is refused ------------------------------------------------------------------------------------------------


def test_lengths_that_do_not_divide_are_refused():
    message = r"sequences of 5 tokens on 2 devices: .* multiple of 2; take model.seq_len=4 or 6, or schedule.sequence_p"
    schedule = of(2, 2)
    with pytest.raises(ValueError, match=message):
        Training(workload_of(schedule, TINY), schedule, Settings())
    sizes = ("num_devices=2", "num_microbatches=2", "model=tiny_gpt", "model.seq_len=5")
    config = load(("schedule=megatron_tp", "schedule.sequence_parallel=true", *sizes))  # which is simulated
    with pytest.raises(ValueError, match=message):
        assemble(config)


def test_dropout_is_refused_before_any_work():
    schedule = of(2, 2)
    with pytest.raises(ValueError, match=r"dropout with schedule.sequence_parallel=true: .* take model.dropout=0"):
        Training(workload_of(schedule, replace(MODELS["gpt"], dropout=0.1)), schedule)
    sizes = ("num_devices=2", "num_microbatches=2", "model=tiny_gpt", "model.dropout=0.1", "backend=virtual")
    config = load(("schedule=megatron_tp", "schedule.sequence_parallel=true", *sizes))
    with pytest.raises(ValueError, match=r"model.dropout=0.1: dropout with schedule.sequence_parallel=true"):
        check_request(config, assemble(config))


def test_slices_without_shares_are_refused():
    with pytest.raises(ValueError, match=r"schedule.sequence_parallel=1: .* take true or false"):
        entry("megatron_tp").build(Shape(2, 2, 2), sequence_parallel=1)
    with pytest.raises(ValueError, match="sequence_parallel=True: slices lie between shares of matrices"):
        Shape(2, 2, 2, sequence_parallel=True)
