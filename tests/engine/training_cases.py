"""What the engine's numerics tests share: small models, a run on the virtual clock, and its reference."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import Backend, execute
from rpbench.engine.reference import Reads, Trajectory, reads_of, train_reference
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.policy import ASYNCHRONOUS, Policy
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Experts

TINY = Architecture("tiny", num_layers=4, hidden=16, heads=2, vocab=37, seq_len=5)
MOE = replace(TINY, family="qwen3", qk_norm=True, experts=Experts(3, 2, 12))


def workload_of(
    schedule: Schedule, model: Architecture = TINY, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Workload:
    model = replace(model, num_layers=schedule.partition.num_layers)
    if schedule.shape.tensor_parallel:  # every device takes as many heads as any other
        p = schedule.shape.num_ranks
        model = replace(model, heads=p, key_value_heads=p, head_dim=4, inner=4 * p)
    return Workload(
        list(build_model(model, seed=seed, dtype=dtype)),
        SyntheticTokens(model.vocab, model.seq_len, 2, seed),
        schedule.shape.num_microbatches,
        seed,
        model.dropout > 0,
    )


def counted_bytes(schedule: Schedule) -> Counter[tuple[int, str]]:
    """(device, lane) -> bytes that actions count for the model TINY in 16 bits."""
    found: Counter[tuple[int, str]] = Counter()
    for device, moved in enumerate(moved_bytes(schedule, model_bytes(TINY, 2 * TINY.seq_len))):
        for what, num_bytes in moved.items():
            found[device, what.split()[0]] += num_bytes
    return found


def uneven_costs(schedule: Schedule) -> CostTable:
    """Costs under which no two layers are in step."""
    layers = range(schedule.partition.num_layers)
    halves = [1 + layer % 2 for layer in layers], [1 + layer % 5 - layer % 2 for layer in layers]
    times = LayerTimes(
        [1 + layer % 3 for layer in layers],
        [1 + layer % 2 for layer in layers],
        [2 + layer % 5 for layer in layers],
        1.5,
        4.5,
        *halves,
        2.5,
        2.0,
        hop=0.3,
    )
    return times.table(schedule.partition, recompute_ahead=True, num_head_shards=schedule.shape.num_head_shards)


class Run(NamedTuple):
    training: Training
    timeline: Timeline


def train(schedule: Schedule, workload: Workload, *, backend: Backend | None = None, **settings) -> Run:
    """Run a schedule with tensors; gradients are kept."""
    optimizer = OptimizerSettings(**{key: settings.pop(key) for key in list(settings) if key in OPTIMIZER})
    training = Training(workload, schedule, Settings(optimizer, keep_gradients=True, **settings))
    costs = uneven_costs(schedule)
    program = training.program(costs, real_time=backend is not None)
    return Run(training, execute(program, training.handlers, backend or VirtualBackend(costs)))


OPTIMIZER = ("name", "momentum", "learning_rate", "weight_decay", "num_warmup_steps", "clip_norm", "loss_scaling")


def reference_of(run: Run, read_version=None, **options) -> Trajectory:
    """Plain training on the newest weights, on those `read_version` names, or on those that a late order reads."""
    training = run.training
    if read_version is not None:
        options["reads"] = Reads(read_version, read_version)
    elif training.schedule.policy in ASYNCHRONOUS | {Policy.TWO_BW, Policy.DELAYED, Policy.CYCLIC, Policy.TRIAL}:
        options["reads"] = reads_of(training.schedule, training.layout, training.settings.recompute_grain)
    options.setdefault("trials", training.schedule.policy is Policy.TRIAL)
    options.setdefault("late_rest", training.schedule.late_rest)
    if training.settings.compensation.is_needed:
        options["compensation"] = training.settings.compensation
    return train_reference(
        training.workload,
        training.layout,
        training.groups,
        training.settings.optimizer,
        num_steps=training.schedule.shape.num_steps,
        num_parts=training.schedule.shape.num_segments,
        **options,
    )


def assert_same(run: Run, reference: Trajectory) -> None:
    """Every gradient of every step, every weight and every loss, bit for bit."""
    for step, (found, expected) in enumerate(zip(run.training.gradients.by_step(), reference.gradients, strict=True)):
        assert found.keys() == expected.keys(), step
        for place in expected:
            assert torch.allclose(found[place], expected[place], rtol=0, atol=0, equal_nan=True), (step, place)
            assert found[place].dtype == expected[place].dtype
    masters = run.training.optimizer.masters
    assert masters.keys() == reference.masters.keys()
    for place in masters:
        assert torch.equal(masters[place], reference.masters[place]), place
    for step, loss in enumerate(reference.losses):
        assert run.training.mean_loss(step) == pytest.approx(loss, rel=1e-14)
