"""Steps that go ahead of overflow and norm, and are taken back: every bit is that of steps that wait."""

from dataclasses import replace

import pytest
import torch
from spared import slow
from test_replicated_training import complete
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.reference import largest_difference
from rpbench.engine.state.gradients import Gradients
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.updates.optimizer import KeptState
from rpbench.engine.training import Training
from rpbench.engine.transfers import Traffic
from rpbench.ir.schedule import Schedule

STEPS = 4
SCALED = {"dtype": torch.float16, "loss_scaling": LossScaling(2.0**20, growth_steps=2)}


def of(name: str = "superoffload", devices: int = 1, stages: int = 3, each: int = 2, **options) -> Schedule:
    return complete(name, devices, stages, each, STEPS, **options)


def run_of(schedule: Schedule, *, real_time: bool = False, dtype=torch.float64, tied: bool = False, **options):
    workload = workload_of(schedule, replace(TINY, tied=tied), dtype)
    options = {"learning_rate": 1e-2} | options
    if real_time:
        with CpuBackend() as backend:
            return train(schedule, workload, backend=backend, **options)
    return train(schedule, workload, **options)


def assert_equal_runs(one: Training, other: Training) -> None:
    """The same weights, moments, losses and scales."""
    assert largest_difference(one.optimizer.masters, other.optimizer.masters) == 0.0
    moments = one.optimizer.moments(), other.optimizer.moments()
    assert moments[0].keys() == moments[1].keys()
    for place, found in moments[0].items():
        assert largest_difference(found, moments[1][place]) == 0.0
    assert one.passes.losses == other.passes.losses
    if one.scaler is not None:
        assert (one.scaler.scales, one.scaler.skipped) == (other.scaler.scales, other.scaler.skipped)


@pytest.fixture
def taken_back(monkeypatch) -> list[KeptState]:
    """What is given back from a copy, as it happens."""
    found: list[KeptState] = []
    give_back = KeptState.give_back

    def noted(kept: KeptState) -> None:
        found.append(kept)
        give_back(kept)

    monkeypatch.setattr(KeptState, "give_back", noted)
    return found


@pytest.mark.parametrize("devices", [1, slow(3)])
@pytest.mark.parametrize(
    "options", [{}, *map(slow, ({"device_stages": 1}, {"speculate": False}, {"device_stages": 3}))]
)
def test_without_an_overflow_it_is_zero_offload(devices, options, taken_back):
    run, other = run_of(of(devices=devices, **options)), run_of(of("zero_offload", devices))
    assert_equal_runs(run.training, other.training)
    assert_same(run, reference_of(run))
    assert not taken_back


@pytest.mark.parametrize(
    "devices, real_time, tied, options",
    [
        slow((1, False, False, {})),
        (2, True, True, {}),
        slow((1, False, False, {"speculate": False})),
        slow((1, True, False, {"device_stages": 1})),
        slow((2, False, False, {"gather_each_visit": False})),
        *(slow((p, real, True, {"device_stages": k})) for p in (1, 3) for real in (False, True) for k in (0, 1)),
    ],
)
def test_overflows_are_taken_back_to_the_last_bit(devices, real_time, tied, options, taken_back):
    run = run_of(of(devices=devices, **options), real_time=real_time, tied=tied, **SCALED)
    other = run_of(of("zero_offload", devices), tied=tied, **SCALED)
    assert 0 < len(run.training.scaler.skipped) < STEPS
    assert_equal_runs(run.training, other.training)
    assert_same(run, reference_of(run))
    if not real_time:  # where all may be known before a step begins
        assert bool(taken_back) == options.get("speculate", True)


@pytest.mark.parametrize(
    "clip_norm, devices, real_time, options",
    [
        (0.05, 1, False, {}),
        slow((0.05, 2, True, {"device_stages": 1})),
        slow((1e6, 1, False, {})),
        slow((0.05, 3, True, {})),
    ],
)
def test_a_norm_that_is_too_large_is_stepped_again(clip_norm, devices, real_time, options, taken_back):
    run = run_of(of(devices=devices, **options), real_time=real_time, tied=True, clip_norm=clip_norm)
    other = run_of(of("zero_offload", devices), tied=True, clip_norm=clip_norm)
    norms = [float(norm) for norm in run.training.optimizer.gradient_norms.values()]
    assert len(norms) == STEPS
    assert all((norm > clip_norm) == (clip_norm < 1) for norm in norms)
    assert_equal_runs(run.training, other.training)
    assert_same(run, reference_of(run))
    if not real_time:
        assert bool(taken_back) == (clip_norm < 1)


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2)])
def test_an_overflow_of_one_stage_takes_all_back(stage, monkeypatch, taken_back):
    """Injected into the gradient of one stage, in step 2 of 4: the others step on finite gradients, and go back too."""
    add = Gradients.add

    def injected(self, own, version, microbatch, gradients):
        if (own, version) == (stage, 2):
            gradients = {place: torch.full_like(gradient, torch.inf) for place, gradient in gradients.items()}
        add(self, own, version, microbatch, gradients)

    monkeypatch.setattr(Gradients, "add", injected)
    scaled = {"loss_scaling": LossScaling(1.0, growth_steps=100)}
    run, other = run_of(of(), **scaled), run_of(of("zero_offload"), **scaled)
    assert run.training.scaler.skipped == {2}
    assert len(taken_back) == 3
    assert_equal_runs(run.training, other.training)


def test_without_rollbacks_it_is_something_else(monkeypatch):
    """What the tests above would see if nothing were taken back."""
    monkeypatch.setattr(KeptState, "give_back", lambda kept: None)
    run, other = run_of(of(), clip_norm=0.05), run_of(of("zero_offload"), clip_norm=0.05)
    assert largest_difference(run.training.optimizer.masters, other.training.optimizer.masters) > 0


def test_steps_end_before_the_backward_does():
    """On the virtual clock stage 2 is stepped while stage 0 has not begun its backward."""
    run = run_of(of(), **SCALED)
    spans = {str(span.action): span for span in run.timeline.spans()}
    assert spans["2STEP@1"].end <= spans["0B1"].start < spans["0VALIDATE@1"].start
    other = run_of(of("zero_offload"), **SCALED)
    spans = {str(span.action): span for span in other.timeline.spans()}
    assert spans["2STEP@1"].start >= spans["0B1"].end, "zero_offload waits for all gradients where losses are scaled"


def test_weights_that_were_brought_too_early_are_brought_again():
    """A skipped step costs one more way up of what had been loaded: nothing else is copied more often."""

    def loaded(traffic: Traffic) -> int:
        return sum(moved for (_, lane), moved in traffic.moved_bytes.items() if lane == "h2d")

    run = run_of(of(), **SCALED)
    weights = sum(p.nbytes for module in run.training.workload.modules for p in module.parameters())
    again = len(run.training.scaler.skipped - {STEPS})  # behind the last step nothing is loaded
    assert again
    assert loaded(run.training.traffic) == (STEPS + again) * weights


# --- undoing by arithmetic ------------------------------------------------------------------------------------------


def undone(weight, gradient, state, *, lr: float, decay: float, betas=(0.9, 0.999), eps=1e-8):
    """The weight and moments before a step of AdamW, from those after it; the inverse in DeepSpeed's order."""
    first, second, count = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    mean, spread = first / (1 - betas[0] ** count), second / (1 - betas[1] ** count)
    before = (weight + lr * mean / (spread.sqrt() + eps)) / (1 - lr * decay)
    return before, (first - (1 - betas[0]) * gradient) / betas[0], (second - (1 - betas[1]) * gradient**2) / betas[1]


def stepped(gradient_of, num_steps: int, lr: float = 1e-3):
    """A weight of float32 before and after its last step of AdamW, its moments before it, and the gradient."""
    torch.manual_seed(0)
    weight = torch.randn(10_000)
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.01)
    for step in range(1, num_steps + 1):
        weight.grad = gradient_of(step)
        before = weight.clone(), {name: value.clone() for name, value in optimizer.state[weight].items()}
        optimizer.step()
    return weight, optimizer.state[weight], weight.grad, before


def test_an_inverse_adam_is_off_by_rounding_and_a_copy_is_not():
    """Why a copy is kept: in float32, after five steps, some weights and half of the first moments have other bits."""
    weight, state, gradient, (kept, moments) = stepped(lambda step: torch.randn(10_000), 5)
    found, first, second = undone(weight, gradient, state, lr=1e-3, decay=0.01)
    pairs = (found, kept), (first, moments["exp_avg"]), (second, moments["exp_avg_sq"])
    differing = [float((one != other).float().mean()) for one, other in pairs]
    assert 0.001 < differing[0] < 0.01
    assert 0.4 < differing[1] < 0.6
    assert 0.1 < differing[2] < 0.4
    assert 0 < float((found - kept).abs().max()) < 2e-7
    assert float(((second - moments["exp_avg_sq"]) / moments["exp_avg_sq"]).abs().max()) < 1e-4


def test_an_overflow_has_no_inverse():
    overflow = lambda step: torch.full((10_000,), torch.inf if step == 3 else 1.0)  # noqa: E731
    weight, state, gradient, _ = stepped(overflow, 3)
    found, first, second = undone(weight, gradient, state, lr=1e-3, decay=0.01)
    assert found.isnan().all()
    assert first.isnan().all()
    assert second.isnan().all()


@pytest.mark.parametrize(
    "words", [slow((("dtype=float16", "schedule.device_stages=1"),)), ("optimizer.clip_norm=0.01",)]
)
def test_on_the_command_line(words, rpbench):
    sizes = ("model=tiny_gpt", "model.num_layers=4", "num_devices=2", "num_microbatches=4", "num_steps=3")
    status, (row,), err = rpbench("schedule=superoffload", "backend=cpu", *sizes, "verify=true", *words)
    assert (status, row["status"]) == (0, "ok"), err
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert (row["staleness_steps"], row["versions_as_reference"]) == (0, True)
