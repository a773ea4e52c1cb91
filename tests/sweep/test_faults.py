"""Faults through the command line: what is said, what is written, with which exit status, and what is left running."""

import json
import threading

import pytest
import torch

from rpbench.cli import dispatch
from rpbench.engine.compute.forward_backward import Passes
from rpbench.models.layers import Head

MODEL = ("model=tiny_gpt", "model.num_layers=4", "workload.microbatch_sequences=1")
SIZES = (*MODEL, "num_devices=2", "num_microbatches=2")


@pytest.fixture
def rpbench(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = dispatch(("backend=cpu", *SIZES, *arguments))
        out, err = capsys.readouterr()
        written = [json.loads(path.read_text()) for path in tmp_path.glob("results/*/record.json")]
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("device")]
        assert not left
        return status, [json.loads(line) for line in out.splitlines()], err, written

    return run


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_worker_that_raises_fails_the_run(phase, rpbench, monkeypatch):
    real = getattr(Passes, phase)

    def broken(self, action, number, gate):
        if action.microbatch == 1:
            raise ZeroDivisionError("injected")
        real(self, action, number, gate)

    monkeypatch.setattr(Passes, phase, broken)
    status, rows, err, (record,) = rpbench("schedule=1f1b")
    assert (status, rows) == (1, [record])
    assert "failed on device" in err
    assert record["status"] == "failed"
    assert "ZeroDivisionError: injected" in record["reason"]


def test_a_loss_that_is_not_a_number_fails_the_run(rpbench, monkeypatch):
    real = Head.forward
    monkeypatch.setattr(Head, "forward", lambda *arguments: real(*arguments) * torch.nan)
    status, _, err, (record,) = rpbench("schedule=roundpipe")
    assert status == 1
    assert "the loss of microbatch" in err
    assert record["status"] == "failed"
    assert "is nan; lower learning_rate" in record["reason"]


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried")],
    ids=["python", "torch"],
)
def test_a_host_without_memory_is_a_verdict(error, rpbench, monkeypatch):
    def broken(self, action, number, gate):
        raise error

    monkeypatch.setattr(Passes, "backward", broken)
    status, (row,), err, (record,) = rpbench("schedule=1f1b")
    assert status == 0
    assert row["status"] == record["status"] == "oom"
    assert "failed on device 1" in row["reason"]
    assert str(error) in row["reason"]
    assert ": oom, " in err


@pytest.mark.parametrize("schedule", ["1f1b", "roundpipe"])
@pytest.mark.parametrize("backend", ["virtual", "cpu"])
def test_a_device_without_memory_is_a_verdict(backend, schedule, rpbench):
    chosen = (f"schedule={schedule}", f"backend={backend}")
    _, (free,), _, _ = rpbench(*chosen, "backend.device_memory_bytes=1000000000", "verify=true")
    assert free["grad_max_abs_diff"] == 0.0, "counting changes nothing"
    most = max(free["held_memory_bytes"])
    status, (row,), _, _ = rpbench(*chosen, "backend.device_memory_bytes=100000")
    assert (status, row["status"], row["evidence"]) == (0, "oom", None)
    assert "and has 100000;" in row["reason"]
    status, (row,), _, _ = rpbench(*chosen, f"backend.device_memory_bytes={int(most * 0.9)}")
    assert row["status"] == "oom"
    assert "failed on device" in row["reason"]
    assert row["reason"].rpartition(" are ")[2] in ("weights", "gradients", "activations")


def test_a_text_file_is_trained_on(rpbench, tmp_path):
    text = ("workload=text", "workload.path=words.txt", "backend=virtual")
    (tmp_path / "words.txt").write_text("a" * 2000)
    status, (row,), _, _ = rpbench(*text, "num_steps=6", "optimizer.learning_rate=0.03", "verify=true")
    assert status == 0
    assert row["workload"] == "text"
    assert row["grad_max_abs_diff"] == 0.0
    assert row["loss"] < 2, "there is one letter to learn"
    (tmp_path / "words.txt").write_text("ab" * 1000)
    _, (other,), _, _ = rpbench(*text, "num_steps=6", "optimizer.learning_rate=0.03", "verify=true")
    assert other["run_id"] != row["run_id"]


def test_text_files_that_do_not_do_are_refused(rpbench, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "words.txt").write_text("a" * 2000)
    for arguments, words in [
        ((), "name it by workload.path=FILE"),
        (("workload.path=none.txt",), "none.txt: cannot be read (there is no such file)"),
        (("workload.path=short.txt",), "short.txt has 9 bytes: a batch of 2 microbatches"),
        (("workload.path=words.txt", "model.vocab=100"), "model.vocab=100: a text file is read as bytes"),
    ]:
        status, rows, err, written = rpbench("workload=text", *arguments)
        assert (status, rows, written) == (2, [], [])
        assert words in err
