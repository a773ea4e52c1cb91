"""Checkpoints through the command line, and how bad ones are refused."""

import shutil
from functools import partial

import pytest

SIZES = (
    "model=tiny_gpt",
    "model.num_layers=4",
    "num_devices=2",
    "num_microbatches=2",
    "workload.microbatch_sequences=1",
)


@pytest.fixture
def rpbench(rpbench):
    return partial(rpbench, *SIZES)


@pytest.mark.parametrize(
    "backend, schedule",
    [("virtual", ("schedule=1f1b",)), ("cpu", ("schedule=roundpipe", "schedule.asynchronous=true"))],
    ids=["1f1b", "roundpipe-asynchronous"],
)
def test_a_run_goes_on_bit_for_bit(backend, schedule, rpbench):
    common = (*schedule, f"backend={backend}", "optimizer.learning_rate=0.01")
    _, (straight,), _ = rpbench(*common, "num_steps=5")
    status, _, _ = rpbench(*common, "num_steps=2", "checkpoint.save_to=c")
    assert status == 0
    status, (resumed,), _ = rpbench(*common, "num_steps=3", "checkpoint.resume_from=c", "verify=true")
    assert status == 0
    assert resumed["loss"] == straight["loss"]
    assert resumed["grad_max_abs_diff"] == resumed["weight_max_abs_diff"] == 0.0
    assert resumed["versions_as_reference"]
    _, (fresh,), _ = rpbench(*common, "num_steps=3")
    assert fresh["loss"] != resumed["loss"]


def test_another_file_by_the_same_name_is_another_run(rpbench):
    rpbench("backend=virtual", "num_steps=2", "checkpoint.save_to=c")
    resume = ("backend=virtual", "num_steps=2", "checkpoint.resume_from=c")
    _, (one,), _ = rpbench(*resume)
    rpbench("backend=virtual", "num_steps=3", "checkpoint.save_to=c")
    _, (other,), _ = rpbench(*resume)
    assert one["run_id"] != other["run_id"]
    assert one["loss"] != other["loss"]


def test_a_text_is_known_by_its_bytes(rpbench, tmp_path):
    text = ("backend=virtual", "num_steps=2", "workload=text")
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    rpbench(*text, "workload.path=a.txt", "checkpoint.save_to=c")
    (tmp_path / "a.txt").rename(tmp_path / "moved.txt")
    (tmp_path / "a.txt").write_bytes(bytes(range(255, -1, -1)))
    assert rpbench(*text, "workload.path=moved.txt", "checkpoint.resume_from=c")[0] == 0
    status, rows, err = rpbench(*text, "workload.path=a.txt", "checkpoint.resume_from=c")
    assert (status, rows) == (2, [])
    assert "c was saved with workload=" in err


def test_steps_before_the_stop_count_as_read(rpbench):
    unseen = ("backend=virtual", "workload=unseen_prose", "workload.microbatch_sequences=160", "model.seq_len=128")
    small = ("schedule=gpipe", "model.num_layers=2", "model.hidden=8", "model.heads=2")
    assert rpbench(*unseen, *small, "num_steps=2", "checkpoint.save_to=c")[0] == 0
    status, rows, err = rpbench(*unseen, *small, "num_steps=3", "checkpoint.resume_from=c")
    assert (status, rows) == (2, [])
    assert "5 steps of 320 sequences of 128 tokens need" in err


def test_bad_checkpoints_are_refused_before_any_work(rpbench, tmp_path):
    rpbench("backend=virtual", "num_steps=2", "checkpoint.save_to=c")
    shutil.copytree(tmp_path / "c", tmp_path / "torn")
    torn = next((tmp_path / "torn").glob("data-*/*.distcp"))
    torn.write_bytes(torn.read_bytes()[:-1])
    before = set((tmp_path / "results").iterdir())
    for arguments, words in [
        (("checkpoint.resume_from=none",), "none: cannot be read (there is no such checkpoint)"),
        (("checkpoint.resume_from=c/checkpoint.json",), "it is no folder; name one that checkpoint.json lies in"),
        (("checkpoint.resume_from=torn",), "torn is torn"),
        (("checkpoint.resume_from=c", "model.hidden=64"), "c was saved with model="),
        (("checkpoint.resume_from=c", "dtype=float64"), "saved with dtype=float32, this run has dtype=float64"),
        (("checkpoint.resume_from=c", "num_microbatches=4"), "saved with num_microbatches=2"),
        (("checkpoint.resume_from=c", "optimizer=sgd"), "saved with optimizer={'name': 'adamw'"),
        (("checkpoint.save_to=results", "num_steps=2"), "is left alone; name a new folder"),
        (("checkpoint.save_to=d",), "num_steps=2 or more"),
        (("checkpoint.save_to=nowhere/d", "num_steps=2"), "is no folder that can be written"),
        (("checkpoint.save_to=/proc/x", "num_steps=2"), "/proc is no folder that can be written"),
    ]:
        status, rows, err = rpbench("backend=virtual", *arguments)
        assert (status, rows) == (2, []), arguments
        assert words in err
        assert len(err.splitlines()) <= 3
    status, _, err = rpbench("checkpoint.resume_from=c")
    assert status == 2
    assert "checkpoint.resume_from=c: mode=simulate has no state" in err
    assert set((tmp_path / "results").iterdir()) == before
