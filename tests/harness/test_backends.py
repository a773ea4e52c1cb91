"""Backends behind the command line: the same schedule simulated, on a virtual clock, on threads, emulated."""

import json

import pytest

from rpbench.cli import dispatch

SIZES = ("model=tiny_gpt", "num_devices=5", "num_microbatches=10", "seed=3")


@pytest.fixture
def rpbench(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = dispatch(arguments)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


@pytest.mark.parametrize("backend, evidence", [("virtual", "simulated"), ("cpu", "measured")])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_roundpipe_trains_as_plain_training_does_bit_for_bit(backend, evidence, dtype, rpbench):
    status, (row,), _ = rpbench("schedule=roundpipe", f"backend={backend}", "verify=true", f"dtype={dtype}", *SIZES)
    assert status == 0
    assert (row["evidence"], row["status"]) == (evidence, "ok")
    assert row["grad_max_abs_diff"] == 0.0
    assert 5 < row["loss"] < 6.5  # random weights over 256 tokens: about log(256) = 5.55


def test_the_virtual_clock_tells_the_simulators_time(rpbench):
    rows = {name: rpbench("schedule=1f1b", f"backend={name}", *SIZES)[1][0] for name in ("sim", "virtual")}
    sequences, tokens = rows["sim"]["config"]["workload"]["microbatch_sequences"], 16
    assert rows["virtual"]["tokens_per_step"] == 10 * sequences * tokens
    assert rows["virtual"]["tokens_per_s"] == pytest.approx(10 * sequences * tokens / rows["sim"]["step_time_s"])
    for key in ("makespan_s", "bubble_makespan", "fill_s", "drain_s", "comm_exposed_s"):
        assert rows["virtual"][key] == pytest.approx(rows["sim"][key], abs=1e-9)


def test_real_time_carries_its_replay_and_what_else_ran(rpbench):
    _, (row,), _ = rpbench("schedule=1f1b", "backend=cpu", *SIZES)
    assert row["replay_makespan_s"] > 0
    assert row["foreign_cpu_share"] >= 0


def test_emulated_devices_take_about_the_modelled_time(rpbench):
    costs = ("cost=constant", "cost.forward_ms=5", "cost.input_grad_ms=5", "cost.weight_grad_ms=5")
    sizes = ("schedule=1f1b", "num_devices=4", "num_microbatches=8", *costs)
    simulated, emulated = (rpbench(f"backend={name}", *sizes)[1][0] for name in ("sim", "emulated"))
    assert emulated["evidence"] == "emulated"
    assert emulated["makespan_s"] >= simulated["makespan_s"]  # a sleep is never shorter


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["backend=cpu"], "take one with a shape"),
        (["backend=virtual", "model=tiny_gpt", "dtype=float12"], "dtype=float12"),
        (["backend=emulated", "backend.time_scale=0"], "backend.time_scale=0"),
        (["backend=gpu"], "unknown backend 'gpu'"),
    ],
    ids=["model", "dtype", "scale", "name"],
)
def test_what_a_backend_cannot_run_is_refused_before_anything_is_written(arguments, expected, rpbench, tmp_path):
    status, rows, err = rpbench(*arguments)
    assert (status, rows) == (2, [])
    assert expected in err
    assert not list(tmp_path.rglob("events.jsonl"))


@pytest.mark.parametrize("backend", ["virtual", "cpu"])
def test_float16_tells_its_last_scale_and_the_steps_it_skipped(backend, rpbench):
    status, (row,), _ = rpbench(
        "schedule=roundpipe",
        "schedule.asynchronous=true",
        f"backend={backend}",
        "backend.loss_scale=1048576",
        "dtype=float16",
        "verify=true",
        "model=tiny_gpt",
        "model.num_layers=4",
        "num_devices=2",
        "num_microbatches=2",
        "num_steps=4",
    )
    assert status == 0
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert row["num_skipped_steps"] >= 1
    assert row["loss_scale"] < 1048576
    status, rows, err = rpbench("backend=virtual", "backend.loss_scale=3", "model=tiny_gpt", "dtype=float16")
    assert (status, rows) == (2, [])
    assert "loss_scale=3.0: a power of two" in err
