"""A configuration run on the engine: what its record says."""

import pytest
import torch
from spared import slow

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.engine import verification
from rpbench.run.assemble import assemble
from rpbench.run.modes import train
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import measure

SMALL = ("model=tiny_gpt", "model.num_layers=6", "workload.microbatch_sequences=1", "verify=true")


def run(backend: str, *overrides: str):
    """The record fields and the timeline of a request."""
    request = load([f"backend={backend}", *overrides])
    assembled = assemble(request)
    train.check_request(request, assembled)
    return *train.execute(request, assembled), assembled


def test_the_virtual_backend_agrees_with_the_simulator_and_with_plain_training():
    fields, timeline, assembled = run(
        "virtual", "schedule=roundpipe", "num_devices=5", "num_microbatches=10", "dtype=float64", *SMALL
    )
    assert fields["grad_max_abs_diff"] == 0.0
    assert fields["weight_max_abs_diff"] == 0.0
    assert fields["versions_as_reference"]
    assert fields["evidence"] == "simulated"
    assert fields["loss"] == pytest.approx(5.5, abs=0.2), "log(256), as nothing has been learnt"
    graph = build_graph(assembled.schedule)
    simulated = measure(graph, simulate_graph(graph, assembled.costs), assembled.costs, switch_after_last_forward=True)
    for key, value in simulated.items():
        assert fields[key] == pytest.approx(value, abs=1e-9), key
    assert timeline.makespan == pytest.approx(simulated["makespan_s"], abs=1e-9)


@pytest.mark.parametrize("schedule", [slow("1f1b"), "roundpipe"])
def test_the_cpu_backend_measures(schedule):
    fields, timeline, _ = run(
        "cpu", f"schedule={schedule}", "num_devices=2", "num_microbatches=4", "num_steps=3", *SMALL
    )
    assert fields["grad_max_abs_diff"] == fields["weight_max_abs_diff"] == 0.0
    assert fields["evidence"] == "measured"
    assert fields["replay_makespan_s"] > 0
    assert 0 < fields["makespan_s"] <= timeline.makespan  # without the last optimizer step on the host
    assert fields["comm_total_s"] == fields["comm_exposed_s"] == 0
    idle = fields["fill_s"] + fields["switch_s"] + fields["drain_s"] + fields["intra_s"]
    assert idle == pytest.approx(fields["idle_s"])
    assert 0 < fields["bubble_makespan"] < 1


def test_stale_weights_are_verified_against_stale_weights():
    fields, _, _ = run(
        "virtual",
        "schedule=roundpipe",
        "schedule.asynchronous=true",
        "num_devices=3",
        "num_microbatches=4",
        "num_steps=4",
        *SMALL,
    )
    assert fields["grad_max_abs_diff"] == fields["weight_max_abs_diff"] == 0.0
    assert fields["versions_as_reference"]


def test_a_gradient_that_is_off_by_one_bit_shows(monkeypatch):
    real = verification.train_reference

    def off(*args, **options):
        found = real(*args, **options)
        gradient = found.gradients[0][3, "mlp.up.weight"]
        gradient.view(-1)[5] = torch.nextafter(gradient.view(-1)[5], torch.tensor(1.0))
        return found

    monkeypatch.setattr(verification, "train_reference", off)
    fields, _, _ = run("virtual", "schedule=1f1b", "num_devices=2", "num_microbatches=2", *SMALL)
    assert 0 < fields["grad_max_abs_diff"] < 1e-6


def test_the_emulated_backend_sleeps():
    fields, _, assembled = run(
        "emulated", "schedule=gpipe", "num_devices=4", "num_microbatches=4", "cost=constant",
        "cost.forward_ms=2", "cost.input_grad_ms=2", "cost.weight_grad_ms=1", "cost.hop_ms=0.5",
    )  # fmt: skip
    graph = build_graph(assembled.schedule)
    ideal = measure(graph, simulate_graph(graph, assembled.costs), assembled.costs, switch_after_last_forward=False)
    assert fields["evidence"] == "emulated"
    assert fields["makespan_s"] >= ideal["makespan_s"]
    assert fields["comm_data_s"] == pytest.approx(ideal["comm_data_s"])
    assert "loss" not in fields


def test_requests_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="backend=virtual trains tensors, which model=abstract does not have"):
        run("virtual", "num_devices=2")
    with pytest.raises(ConfigError, match="dtype=float8: one of float64, float32, bfloat16, float16"):
        run("virtual", "num_devices=2", "dtype=float8", "model=tiny_gpt")
    with pytest.raises(ConfigError, match=r"GB of host memory .* free"):
        run("cpu", "num_devices=2", "model=qwen3_235b_lora")
