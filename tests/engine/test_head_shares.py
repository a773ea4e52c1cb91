"""Devices that share the head: against the uncut loss, on their own rows, and with a checkpoint of a whole head."""

from dataclasses import replace

import pytest
import torch
from cases import build
from spared import slow, spared
from torch.nn.functional import cross_entropy
from training_cases import MOE, TINY, assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.compute.head_shards import HeadShards
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.reference import largest_difference
from rpbench.engine.shards.cut import cut_head
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule
from rpbench.models.build import build_model
from rpbench.workload.architecture import Architecture

TIED = replace(TINY, tied=True)
MODELS = {"gpt": TINY, "llama": replace(TINY, family="llama"), "qwen3_moe": MOE, "tied": TIED}
NORM = 5  # the module behind four layers; shares follow it


def schedule_of(num_devices: int = 3, **options) -> Schedule:
    return build("vocab_parallel", num_devices, 4, chunks=1, **options)


# --- the same training ---


@pytest.mark.parametrize("name", spared(MODELS, lambda name: name in ("qwen3_moe", "tied")))
def test_training_is_that_of_the_uncut_loss_but_for_the_last_bits(name: str):
    """Against torch's own loop and loss; 37 rows on three devices are shares of different sizes."""
    schedule, model = schedule_of(num_steps=3), MODELS[name]
    workload = workload_of(schedule, model)
    run = train(schedule, workload, learning_rate=1e-2)
    plain = build_model(model, dtype=torch.float64)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for step, gradients in enumerate(run.training.gradients.by_step()):
        adamw.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for microbatch in range(4):
            tokens, labels = workload.data.microbatch(step, microbatch)
            loss += cross_entropy(plain(tokens).flatten(0, 1), labels.flatten()) / 4
        loss.backward()
        assert run.training.mean_loss(step) == pytest.approx(loss.item(), rel=1e-12)
        rows = torch.cat([gradients[share, "weight"] for share in run.training.workload.shards])
        if model.tied:
            rows = rows + torch.cat([gradients[0, f"rows.{share}"] for share in range(3)])
        assert_near(rows, plain[NORM].weight.grad)
        assert_near(gradients[NORM, "norm.scale"], plain[NORM].norm.scale.grad)
        for name, parameter in plain[1].named_parameters():
            assert_near(gradients[1, name], parameter.grad)
        adamw.step()
    for (module, name), master in run.training.state().masters.items():
        torch.testing.assert_close(master, plain[module].get_parameter(name).detach(), rtol=0, atol=1e-9)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within 1e-12 of the largest value."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * wanted.abs().max().item())


def test_a_share_that_is_left_out_shows(monkeypatch):
    schedule = schedule_of()
    leave = HeadShards.leave

    def without_the_first(self, segment):
        self._grads[segment][0].zero_()
        return leave(self, segment)

    monkeypatch.setattr(HeadShards, "leave", without_the_first)
    run = train(schedule, workload_of(schedule))
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, updates=False))


def test_a_loss_that_is_not_finite_is_shown_where_it_is_known():
    schedule = schedule_of()
    workload = workload_of(schedule)
    with torch.no_grad():
        workload.modules[-1].weight[-1] = torch.inf
    with pytest.raises(
        ActionFailed, match=r"2HB0 failed on device 2, lane compute: .* the loss of microbatch 0 is nan"
    ):
        train(schedule, workload)


# --- who has what ---


def test_every_device_has_its_rows_with_their_gradients_and_nothing_is_left():
    schedule = schedule_of(num_steps=2)
    run = train(schedule, workload_of(schedule))
    training = run.training
    shares = {module: len(training.workload.parameter((module, "weight"))) for module in training.workload.shards}
    assert shares == {6: 12, 7: 12, 8: 13}
    for stage, module in enumerate(shares):
        owned = {place for place in training.gradients.total(stage, 2) if place[0] > NORM}
        assert owned == {(module, "weight")}
    assert training.passes.num_left == 0


def test_no_device_holds_as_much_as_one_with_the_whole_head():
    """A vocabulary as large as the rest: rows, their gradients and what waits between a share's halves are counted."""
    model, peaks = replace(TINY, vocab=2000), {}
    for name in ("1f1b", "vocab_parallel"):
        schedule = build(name, 4, 4, chunks=1)
        run = train(schedule, workload_of(schedule, model), device_memory_bytes=10**9)
        peaks[name] = run.training.memory.peak_bytes
    whole = 2 * 8 * model.vocab * model.hidden  # embedding or head, with its gradient
    assert peaks["1f1b"][-1] > whole
    assert max(peaks["vocab_parallel"][1:]) < 0.9 * peaks["1f1b"][-1]
    assert min(peaks["vocab_parallel"]) > whole / 4


# --- checkpoints are of the model ---


def go(name: str, num_devices: int, num_steps: int, start: State | None = None, model: Architecture = TIED) -> Training:
    schedule = build(name, num_devices, 4, chunks=1, num_steps=num_steps, steps=True)
    optimizer = OptimizerSettings(1e-2, clip_norm=0.5)
    training = Training(workload_of(schedule, model), schedule, Settings(optimizer, keep_state=True), start)
    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training


@pytest.mark.parametrize("model", [slow(TINY), TIED], ids=["apart", "tied"])
@pytest.mark.slow
def test_what_shares_have_saved_goes_on_with_other_shares_and_with_a_whole_head(model):
    straight, begun = go("vocab_parallel", 3, 4, model=model).state(), go("vocab_parallel", 3, 2, model=model).state()
    places = go("1f1b", 3, 2, model=model).state()
    assert begun.masters.keys() == places.masters.keys()
    assert begun.moments.keys() == places.moments.keys()
    again = go("vocab_parallel", 3, 2, begun, model).state()
    assert largest_difference(again.masters, straight.masters) == 0.0
    for place, moments in straight.moments.items():
        assert largest_difference(again.moments[place], moments) == 0.0
    for name, num_devices in (("vocab_parallel", 2), ("1f1b", 3)):
        other = go(name, num_devices, 2, begun, model).state()
        assert 0 < largest_difference(other.masters, straight.masters) < 1e-9


# --- what cannot be ---


def test_what_a_shared_head_cannot_be_asked_for_is_refused():
    schedule = schedule_of()
    workload = workload_of(schedule)
    with pytest.raises(ValueError, match="policy latest leaves it to the order which version a share reads"):
        cut_head(workload, replace(schedule, policy=Policy.LATEST))
    with pytest.raises(ValueError, match="the engine runs one stage on each device"):
        cut_head(workload, replace(schedule, shape=replace(schedule.shape, num_stages=6, num_backward_stages=6)))
    with pytest.raises(ValueError, match="recompute=except_last: the last stage of vocab_parallel does other work"):
        train(schedule, workload, recompute="except_last")
    small = replace(TINY, vocab=2)
    with pytest.raises(ValueError, match="a vocabulary of 2 in 3 shares"):
        Training(workload_of(schedule, small), schedule)
