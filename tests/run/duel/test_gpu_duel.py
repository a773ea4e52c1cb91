"""The duel on accelerators: who is refused, absent or lost, what a verdict says, and a dry one from end to end."""

from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch_duel_rows import start_of

from baselines.systems import released
from baselines.systems.case import Case
from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.engine.layout import layout_of
from rpbench.engine.reference import largest_difference, train_reference
from rpbench.engine.stream_order.machine import Machine
from rpbench.ir.partition import symmetric
from rpbench.records import record
from rpbench.run.modes import gpu_duel
from rpbench.run.modes.duel import run as duel_run
from rpbench.run.modes.duel import starts
from rpbench.run.modes.duel.contenders import gpu_contenders
from rpbench.run.modes.duel.findings import verdict_fields
from rpbench.run.modes.duel.starts import play
from rpbench.run.modes.duel.teams import Sample, SystemTeam
from rpbench.run.modes.gpu_duel import records

DRY = ("experiment=gpu_duel", "backend.dry_accelerators=2", "model=tiny_gpt", "model.num_layers=2", "model.hidden=16",
       "model.vocab=32", "model.seq_len=8", "num_microbatches=2", "chunks_per_device=2", "dtype=float32",
       "mode.num_starts=1", "mode.parity_seq_len=4")  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        ("backend=cpu", "mode=gpu_duel is played on accelerators: set backend=device"),
        ("mode.budget_s=0", r"mode\.budget_s=0\.0: a number above 0"),
        ("dtype=float16", "dtype=float16 with mode=gpu_duel: float32 or bfloat16"),
        ("model.tied=true", r"set model\.tied=false model\.dropout=0"),
        ("optimizer=sgd", "optimizer=sgd with mode=gpu_duel: adamw"),
        ("optimizer.clip_norm=1", "adamw, without clip_norm"),
        ("offload=none", "backend=device"),
    ],
)
def test_what_not_all_can_train_alike_is_refused_before_any_work(change, said, tmp_path):
    asked = [each for each in DRY if not change.startswith("backend=") or not each.startswith("backend.")]
    with pytest.raises(ConfigError, match=said):
        records(load([*asked, change, f"results_dir={tmp_path}"]))
    assert list(tmp_path.iterdir()) == []


def rows(seconds, absent=()):
    """contender -> record of a duel that never ran."""
    found = {}
    for place, each in enumerate(gpu_contenders("roundpipe")):
        draws = [Random(100 * place + start) for start in range(2)]
        found[each.name] = {
            "contender": each.name, "status": "not applicable" if each.name in absent else "ok", "num_devices": 1,
            "starts": [{"num_cores": 8}] * 2,
            "runs": [start_of(place, seconds.get(each.name, 1.0), draw, num_turns=60) for draw in draws],
            "config": {"mode": {"half_width": 0.02, "num_starts": 2}},
        }  # fmt: skip
    return found


def test_verdicts_are_over_our_own_engine():
    found = verdict_fields(rows({"fsdp2": 1.5, "zero_offload": 0.8}, absent=["released"]), "alone")
    assert {name: each["verdict"] for name, each in found.items()} == {
        "own": "no difference shown", "own_twin": "no difference shown", "fsdp2": "slower", "zero_offload": "faster"
    }  # fmt: skip
    assert found["fsdp2"]["over_own"] == pytest.approx(1.5, rel=5e-3)
    assert found["fsdp2"]["over_own_low"] < found["fsdp2"]["over_own"] < found["fsdp2"]["over_own_high"]
    alone = verdict_fields(rows({}, absent=["own_twin"]), "alone")
    assert {(each["verdict"], each["verdict_reason"]) for each in alone.values()} == {("no verdict", "alone")}


class Failing:
    tolerance = 0.0

    def __init__(self, log, fails_at=None):
        self._log, self._fails_at = log, fails_at

    def run(self):
        self._log.append(self)
        if len(self._log) == self._fails_at:
            raise RuntimeError("out of memory\nmore words")
        return Sample(1.0, None, 2.0, 1.0, None)


def test_who_fails_is_lost_and_the_others_go_on():
    logs, lost = {name: [] for name in "abR"}, {}
    teams = {name: Failing(logs[name], 3 if name == "b" else None) for name in "abR"}
    runs = play(teams, lambda: "abR", 99.0, lambda runs: True, lost=lost)
    assert lost == {"b": "RuntimeError: out of memory"}
    assert {name: len(log) for name, log in logs.items()} == {"a": 6, "b": 3, "R": 6}
    assert [run.name for run in runs] == ["R", *"aR" * 5]


class Library:
    """The interface of the released library that the adapter speaks to, computing at once and on the processor."""

    class RoundPipeRunConfig:
        def __init__(self, num_microbatch):
            self.num_microbatch = num_microbatch

    class RoundPipe(nn.Module):
        def __init__(self, model, optim_dtype, name):
            super().__init__()
            self.model = model
            named = {each: p for each, p in self.named_parameters() if p.requires_grad}
            self.masters = {each: nn.Parameter(p.to(optim_dtype, copy=True)) for each, p in named.items()}

        def optim_named_parameters(self):
            return iter(self.masters.items())

        def forward_backward(self, input_args, loss_fn, run_config):
            (tree,), total = input_args, 0.0
            self.zero_grad()
            for state in zip(*(each.chunk(run_config.num_microbatch) for each in tree), strict=True):
                for layer in self.model:
                    state = layer.forward(state)
                loss = loss_fn(state, None)
                loss.backward()
                total += loss.detach()
            return total

        def step(self, step_fn, is_async):
            assert not is_async
            for name, parameter in self.named_parameters():
                if name in self.masters:
                    self.masters[name].grad = parameter.grad.to(self.masters[name].dtype)
            step_fn()
            with torch.no_grad():
                for name, master in self.masters.items():
                    self.get_parameter(name).copy_(master)


def test_the_adapter_of_the_released_library_trains_as_plain_training_does(monkeypatch):
    monkeypatch.setattr(released, "require", lambda package, needs_cuda: Library)
    shape = {"name": "tiny", "family": "gpt", "num_layers": 2, "hidden": 16, "heads": 2, "vocab": 32, "seq_len": 8}
    case = Case("released", shape, num_microbatches=3, num_steps=2, microbatch_sequences=2, dtype="float64")
    system = released.Released(case)
    system.train()
    window = range(case.num_microbatches)
    groups = {(0, step + 1): (tuple(step * 3 + each for each in window),) for step in range(2)}
    expected = train_reference(case.workload(), layout_of(symmetric((2,))), groups, case.settings(), num_steps=2)
    assert largest_difference(system.gradients(), expected.gradients[-1]) < 1e-12
    assert largest_difference(system.weights(), expected.masters) < 1e-12
    assert system.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.slow
def test_a_dry_duel_leaves_a_record_of_everybody_and_keeps_what_others_found(tmp_path, monkeypatch):
    request = load([*DRY, f"results_dir={tmp_path}"])
    found = {row["contender"]: row for row in records(request)}
    assert list(found) == [each.name for each in gpu_contenders("roundpipe")]
    for name in ("own", "own_twin", "fsdp2"):
        row = found[name]
        assert (row["status"], row["evidence"], row["verdict"]) == ("ok", "dry", "no verdict")
        assert row["verdict_reason"] == "dry: made-up accelerators have no pace"
        assert row["device_grad_max_rel_diff"] <= (1e-5 if name == "fsdp2" else 0.0)
        assert not {"runs", "makespan_s", "step_time_s"} & {key for key, value in row.items() if value is not None}
        assert record.read(tmp_path / row["run_id"]) == row
    assert found["own"]["order_findings"] == []
    for name, package in (("zero_offload", "deepspeed>=0.19"), ("released", "roundpipe>=0.1.1")):
        if found[name]["status"] == "not applicable":  # as where it is not installed
            assert f"pip install '{package}'" in found[name]["reason"] or "needs a CUDA" in found[name]["reason"]
    assert [row["started_at"] for row in records(request)] == [row["started_at"] for row in found.values()]

    def broken(team):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(duel_run, "start_apart", starts.play_start)
    monkeypatch.setattr(SystemTeam, "run", broken)
    again = {row["contender"]: row for row in records(load([*DRY, "force=true", f"results_dir={tmp_path}"]))}
    assert (again["fsdp2"]["status"], again["fsdp2"]["reason"]) == ("failed", "RuntimeError: the device is gone")
    assert again["own"]["status"] == again["own_twin"]["status"] == "ok"


@pytest.mark.slow
def test_on_accelerators_that_are_taken_for_real_everything_is_timed(tmp_path, monkeypatch):
    """The machine of streams around the whole duel; ranks of FSDP2 are processes, which do not see it."""
    monkeypatch.setattr(duel_run, "start_apart", starts.play_start)
    real = [each for each in DRY if not each.startswith("backend.")]
    with Machine(1):
        made = records(load([*real, "mode.budget_s=0.01", f"results_dir={tmp_path}"]))
    found = {row["contender"]: row for row in made}
    for name in ("own", "own_twin"):
        row = found[name]
        assert (row["status"], row["evidence"], row["verdict"]) == ("ok", "measured", "no verdict")
        assert "comparisons of at least 30" in row["verdict_reason"] or "starts of at least 2" in row["verdict_reason"]
        assert row["device_grad_max_rel_diff"] == 0.0
        assert row["step_time_s"] * row["tokens_per_s"] == pytest.approx(row["tokens_per_step"])
        assert {len(start["wall_s"]) for start in row["runs"]} <= {1, 2}
    assert found["fsdp2"]["status"] == "failed"
    assert "privateuseone" in found["fsdp2"]["reason"]


def test_only_the_first_run_of_ours_has_a_warm_up_run_before_it(monkeypatch):
    """As of every other contender, whose allocator is empty before each of its runs."""
    warm_ups = []

    def ran(request, assembled, **given):
        warm_ups.append(request.backend.num_warmup_runs)
        return SimpleNamespace(training=SimpleNamespace(workload="the same"), wall_s=1.0)

    monkeypatch.setattr(gpu_duel, "run_accelerated", ran)
    team = gpu_duel.AcceleratorTeam(load([*DRY, "backend.num_warmup_runs=2"]), None)
    assert [team.run().wall_s for _ in range(3)] == [1.0] * 3
    assert warm_ups == [2, 0, 0]
