"""Important columns at once, the rest late: bit for bit a plain loop, and other methods where the two are the same."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from spared import slow
from test_replicated_training import complete
from training_cases import MOE, TINY, Run, assert_same, reference_of, train, workload_of

from rpbench.config.loading import load
from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.reference import largest_difference
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.updates import selective_optimizer
from rpbench.engine.state.updates.selective_optimizer import important, num_important
from rpbench.engine.state.weights import Weights
from rpbench.ir.partition import symmetric
from rpbench.ir.policy import boundaries
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.run.assemble import assemble
from rpbench.run.modes.train import check_request

STEPS = 7
TOPK = Fraction(3, 10)
LINKS = ("d2h", "h2d")
SCALED = {"dtype": torch.float16, "loss_scaling": LossScaling(2.0**20, growth_steps=2)}


def of(name: str = "zenflow", devices: int = 1, each: int = 1, steps: int = STEPS, **options) -> Schedule:
    return complete(name, devices, 2, each, steps, **options)


def run_of(schedule: Schedule, *, real_time: bool = False, dtype=torch.float64, model=TINY, **options) -> Run:
    workload = workload_of(schedule, model, dtype)
    options = {"learning_rate": 1e-2} | options
    if real_time:
        with CpuBackend() as backend:
            return train(schedule, workload, backend=backend, **options)
    return train(schedule, workload, **options)


def assert_equal_weights(one: Run, other: Run) -> None:
    assert largest_difference(one.training.optimizer.masters, other.training.optimizer.masters) == 0.0
    assert one.training.passes.losses == other.training.passes.losses


def device_moments(optimizer) -> list[torch.Tensor]:
    """The moments on the devices, whatever parameter they belong to."""
    return [value for moments in optimizer._on_devices.values() for own in moments.values() for value in own.values()]


# --- against a plain loop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices, each, options, how",
    [
        slow((1, 2, {"topk": 0.3, "update_interval": 2}, {})),
        slow((1, 1, {"topk": 0.3, "update_interval": 2, "select_interval": 4}, {"dtype": torch.bfloat16})),
        (2, 2, {"topk": 0.3, "update_interval": 2, "num_warmup_steps": 1}, {"clip_norm": 0.5}),
        slow((1, 1, {"topk": 0.3, "update_interval": 2, "select_interval": 2}, SCALED)),
        slow((2, 1, {"topk": 0.3, "update_interval": 2, "select_interval": 4}, {"real_time": True})),
        slow((2, 1, {"topk": 0.3, "update_interval": 2, "select_interval": 4}, {"dtype": torch.bfloat16})),
        slow((1, 2, {"topk": 0.3, "update_interval": 3, "overlap": False}, {})),
        slow((3, 2, {"topk": 0.3, "update_interval": 1}, {"clip_norm": 0.5, "real_time": True})),
        slow((1, 2, {"topk": 0.3, "update_interval": 2, "select_interval": 2}, {"model": MOE})),
        slow((1, 1, {"topk": 0.3, "update_interval": 2}, {"name": "sgd", "momentum": 0.9})),
        slow((2, 2, {"topk": 0.1, "update_interval": 4, "num_warmup_steps": 2}, SCALED)),
        slow((2, 1, {"topk": 0.3, "update_interval": 2, "select_interval": 2}, {**SCALED, "real_time": True})),
    ],
)
def test_every_bit_is_that_of_a_plain_loop(devices, each, options, how):
    run = run_of(of(devices=devices, each=each, **options), **how)
    assert_same(run, reference_of(run))
    if "loss_scaling" in how:
        assert 0 < len(run.training.scaler.skipped) < STEPS


# --- where it is another method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, slow(2)])
def test_with_all_columns_it_is_plain_training(devices):
    run, other = run_of(of(devices=devices, topk=1, select_interval=4)), run_of(of("data_parallel", devices))
    assert_equal_weights(run, other)


@pytest.mark.parametrize("devices", [1, slow(2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_no_columns_and_an_interval_of_one_it_is_zero_offload(devices, overlap):
    run = run_of(of(devices=devices, topk=0, update_interval=1, overlap=overlap))
    other = run_of(of("zero_offload", devices, delayed_update=overlap))
    assert_equal_weights(run, other)
    moments = run.training.optimizer.moments(), other.training.optimizer.moments()
    assert moments[0].keys() == moments[1].keys()
    assert all(largest_difference(found, moments[1][place]) == 0.0 for place, found in moments[0].items())


@pytest.mark.slow
def test_a_warm_up_as_long_as_the_run_is_zero_offload():
    assert_equal_weights(
        run_of(of(num_warmup_steps=STEPS), dtype=torch.bfloat16), run_of(of("zero_offload"), dtype=torch.bfloat16)
    )


@pytest.mark.slow
def test_in_between_it_is_neither():
    """What the tests above would see if the choice made no difference."""
    found = [run_of(of(steps=3, topk=topk, update_interval=1)).training.optimizer.masters for topk in (0.0, 0.3, 1)]
    assert all(largest_difference(found[one], found[other]) > 0 for one, other in ((0, 1), (1, 2), (0, 2)))


# --- what is chosen -------------------------------------------------------------------------------------------------


def test_columns_with_the_largest_sums_are_important():
    gradient = torch.tensor([[1.0, -5.0, 2.0, 0.0], [-1.0, 0.0, 2.0, 4.0]])  # sums 2, 5, 4, 4
    for topk, columns in ((0.25, [1]), (0.5, [1, 2]), (0.75, [1, 2, 3]), (1, [0, 1, 2, 3]), (0.01, [1])):
        mask = important(gradient, gradient, Fraction(str(topk)))
        assert [column for column in range(4) if mask[:, column].all()] == columns
        assert int(mask.sum()) == 2 * len(columns)
    assert not important(gradient, gradient, Fraction(0)).any()
    assert important(gradient[0], gradient[0], Fraction(1, 4)).all(), "what is no matrix is always important"
    assert num_important(16, Fraction(3, 10)) == 4


@pytest.fixture
def versions(monkeypatch) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """(version, module) -> the weights that forwards of that version read."""
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name in ("publish", "rewrite"):
        monkeypatch.setattr(Weights, name, _noting(getattr(Weights, name), found))
    return found


def _noting(write, found):
    def noted(self, modules, version, masters):
        write(self, modules, version, masters)
        for module in modules:
            found[version, module] = {key: value.clone() for key, value in self._versions[module, version].items()}

    return noted


def test_the_rest_stays_until_its_boundary(versions):
    """S = 2: chosen columns move at every step; others for the first time with version 4, and at the end with 5."""
    training = run_of(of(steps=5, update_interval=2, topk=0.3)).training
    for module, layer in enumerate(training.workload.modules):
        for name, parameter in layer.named_parameters():
            mask = training.optimizer.chosen(training.layout.stage_of(module), 5)[module, name]
            assert float(mask.float().mean()) == (
                1 if mask.dim() == 1 else num_important(mask.shape[-1], TOPK) / mask.shape[-1]
            )
            assert torch.equal(training.optimizer.seen[module, name], training.optimizer.masters[module, name])
            weights = [parameter.detach(), *(versions[version, module][name] for version in range(1, 6))]
            for version, (old, new) in enumerate(pairwise(weights), start=1):
                moved = old != new
                assert bool(moved[mask].any()), (name, version)
                assert bool(moved[~mask].any()) == (version >= 4 and not mask.all()), (name, version)


def test_moments_begin_anew_with_a_choice():
    """Of seven steps the last choice is by the gradient of the fifth: devices have counted three."""
    run = run_of(of(update_interval=2, select_interval=4, topk=0.3))
    counts = {float(value) for value in device_moments(run.training.optimizer) if not value.dim()}
    assert counts == {3.0}
    once = run_of(of(update_interval=2, topk=0.3))
    assert {float(value) for value in device_moments(once.training.optimizer) if not value.dim()} == {7.0}


# --- bytes and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices, each", [(1, 2), slow((2, 1))])
def test_bytes_copied_and_kept(devices, each):
    """Down a step: of each matrix the columns that are not chosen. Up at a boundary: everything. Kept: two moments."""
    schedule = of(devices=devices, each=each, update_interval=2, topk=0.3)
    training = run_of(schedule, dtype=torch.bfloat16).training
    parameters = [p for module in training.workload.modules for p in module.parameters()]
    at_once = sum(
        p.numel() if p.dim() == 1 else p.numel() // p.shape[-1] * num_important(p.shape[-1], TOPK) for p in parameters
    )
    every = sum(p.numel() for p in parameters)
    moved = {lane: sum(n for (_, name), n in training.traffic.moved_bytes.items() if name == lane) for lane in LINKS}
    brings = sum(end.brings is not None for end in boundaries(schedule.late_rest, STEPS))
    assert moved == {"d2h": 2 * (every - at_once) * STEPS, "h2d": 2 * every * brings}
    assert sum(value.numel() for value in device_moments(training.optimizer) if value.dim()) == 2 * at_once


# --- what the comparison sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["choice", slow("order"), slow("moments")])
def test_a_fault_is_seen(fault, monkeypatch):
    """Columns chosen from the other end; sums of the host that lack a step; moments that are kept over a choice."""
    if fault == "choice":
        monkeypatch.setattr(
            selective_optimizer, "important", lambda g, like, k: important(None if g is None else -1 / g.abs(), like, k)
        )
    elif fault == "order":
        monkeypatch.setattr(selective_optimizer.SelectiveOptimizer, "_plain_of", _without_third)
    else:
        monkeypatch.setattr(selective_optimizer.SelectiveOptimizer, "_choose", _keeping_moments)
    run = run_of(of(update_interval=2, select_interval=2, topk=0.3))
    assert largest_difference(run.training.optimizer.masters, reference_of(run).masters) > 0


_plain_of, _choose = (getattr(selective_optimizer.SelectiveOptimizer, name) for name in ("_plain_of", "_choose"))


def _without_third(self, gradients, places, version, outcome):
    return {} if version == 3 else _plain_of(self, gradients, places, version, outcome)


def _keeping_moments(self, stage, version):
    kept = dict(self._on_devices)
    _choose(self, stage, version)
    self._on_devices.update(kept)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_shared_weights_are_refused():
    with pytest.raises(ValueError, match=r"zenflow chooses columns .* two stages share, .* use model.tied=false"):
        run_of(of(steps=1), model=replace(TINY, tied=True))


def test_shared_weights_are_refused_before_any_work():
    config = load(("schedule=zenflow", "backend=virtual", "model=tiny_gpt", "model.tied=true"))
    with pytest.raises(ValueError, match="two stages share"):
        check_request(config, assemble(config))


def test_a_run_in_two_halves_leaves_no_state():
    training = run_of(of(steps=2), keep_state=False).training
    with pytest.raises(ValueError, match="leaves no state to go on from"):
        training.state()


def test_a_rest_that_nobody_steps_is_refused():
    bare = add_steps(entry("zenflow").build(Shape(1, 2, 1, num_steps=5)).with_partition(symmetric((2, 2))))
    with pytest.raises(ValueError, match=r"zenflow has no LOAD:P: of 9/10 of the columns .* at \[4, 5\]; take"):
        run_of(bare)
