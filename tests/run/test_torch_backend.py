"""backend=torch as a run: its record, and what is refused before a rank starts."""

import pytest

from rpbench.config.loading import load
from rpbench.records import record
from rpbench.run.training.torch_backend import _prepare, _request

RUN = ("backend=torch", "model=tiny_gpt", "num_devices=2", "num_microbatches=4")


@pytest.mark.parametrize(
    "words, expected",
    [
        (("schedule=v_half",), "set recompute=none"),
        (("schedule=v_half", "recompute=none", "model=abstract"), "take one with a shape"),
        (("schedule=pipedream", "recompute=none"), "pipedream"),
        (("schedule=v_half", "recompute=none", "backend.data_mode=ddp"), "data_mode=ddp"),
        (("schedule=v_half", "recompute=none", "backend.stall_s=0"), "stall_s=0"),
        (("schedule=v_half", "recompute=none", "dtype=bfloat16"), "dtype=bfloat16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_torch_cannot_do_is_refused_first(words, expected, rpbench, tmp_path):
    status, rows, err = rpbench(*RUN, *words)
    assert (status, rows) == (2, [])
    assert expected in err
    assert not list(tmp_path.rglob("record.json"))


def test_a_step_has_the_tokens_of_all_replicas():
    """Each process of a rank has microbatches of its own: 2 x 4 of 4 sequences of 16 tokens."""
    request = load([*RUN, "schedule=1f1b", "recompute=none", "backend.data_parallel=2"])
    asked, assembled = _request(request)
    assert asked.num_microbatches == 8
    assert assembled.tokens_per_step == request.tokens_per_step == 512


def test_every_step_updates():
    request = load([*RUN, "schedule=1f1b", "recompute=none", "num_steps=3"])
    assert _prepare(request).opening["num_updates"] == 3


def test_a_sweep_under_torchrun_is_refused(rpbench, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, rows, err = rpbench("-m", *RUN, "schedule=v_half,zb_v", "recompute=none")
    assert (status, rows) == (2, [])
    assert "every rank would sweep for itself" in err


@pytest.mark.slow
def test_a_run_that_loses_its_numbers_leaves_a_record_that_says_when(rpbench, tmp_path):
    status, (row,), err = rpbench(
        *RUN, "schedule=1f1b", "recompute=none", "num_steps=4", "optimizer=sgd", "optimizer.learning_rate=1e30"
    )
    assert (status, row["status"]) == (1, "failed")
    assert row["reason"].startswith("the loss of step ")
    assert row["reason"].endswith("lower optimizer.learning_rate")
    assert "Traceback" not in err
    assert record.read(tmp_path / "results" / row["run_id"]) == row


@pytest.mark.slow
def test_a_run_on_ranks_of_its_own(rpbench):
    status, (row,), err = rpbench(
        *RUN, "schedule=v_half", "recompute=none", "dtype=float64", "verify=true", "num_steps=2"
    )
    assert (status, row["status"], row["evidence"]) == (0, "ok", "measured")
    assert row["rows_as_ours"]
    assert row["grad_max_abs_diff"] == 0
    assert row["step_time_s"] >= row["replay_makespan_s"] > 0
    assert "slots" not in err
