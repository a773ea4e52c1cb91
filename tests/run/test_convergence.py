"""Training curves: a real text, the same batches for every method, and the methods of the comparison."""

import pytest

from analysis.exhibits.figures.own.convergence import BATCH, EXPERIMENTS, METHODS, ONE_BY_ONE
from rpbench.config.configuration import swept
from rpbench.config.loading import load

SIZES = ("backend=virtual", "model=tiny_gpt", "model.num_layers=4", "num_devices=2", "workload=prose")


def test_every_method_gets_as_many_tokens():
    assert [*swept("convergence", "schedule"), ONE_BY_ONE] == sorted(METHODS, key=lambda name: name == ONE_BY_ONE)
    for experiment in EXPERIMENTS:
        for name in swept(experiment, "schedule"):
            request = load([f"experiment={experiment}", f"schedule={name}"])
            assert request.num_microbatches * request.num_steps == 24 * BATCH, "as many tokens for everybody"
            assert request.schedule.chosen == name
            assert (request.model.num_layers, request.workload.name) == (4, "prose")


def test_a_point_is_a_batch_however_often_a_method_steps(rpbench):
    sizes = (*SIZES, "num_microbatches=4", "num_steps=3", "optimizer.learning_rate=0")
    flushed, stashed = (rpbench(f"schedule={name}", *sizes)[1][0] for name in ("1f1b", "pipedream"))
    assert (flushed["num_updates"], stashed["num_updates"]) == (3, 12)
    # Nothing is learnt at rate 0, so equal losses say that the batches are the same.
    assert stashed["loss_curve"] == pytest.approx(flushed["loss_curve"], rel=1e-6)
    assert len(flushed["loss_curve"]) == 3
    assert flushed["loss_curve"][-1] == pytest.approx(flushed["loss"])
    assert flushed["loss_curve_s"][-1] == pytest.approx(flushed["makespan_s"])
    assert flushed["loss_curve_s"] == sorted(flushed["loss_curve_s"])
    assert stashed["loss_curve_s"][-1] < flushed["loss_curve_s"][-1]


def test_a_text_is_learnt(rpbench):
    _, (row,), _ = rpbench(
        "schedule=pipedream", *SIZES, "num_microbatches=24", "optimizer.learning_rate=0.01", "verify=true"
    )
    assert row["loss_curve"][0] < 5.6
    assert row["loss"] < 4.5
    assert row["grad_max_abs_diff"] == 0.0


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["schedule=pipedream", "schedule.weight_stashing=false", "schedule.vertical_sync=true"],
            "which takes stashing",
        ),
        (["schedule=pipedream", "schedule.replicas=[1,2]"], "takes 3 devices, there are 2"),
        (["schedule=1f1b", "+schedule.vertical_sync=true"], "vertical_sync"),
        (["schedule=pipemare", "schedule.correction_decay=2"], "correction_decay=2"),
        (["schedule=pipemare", "schedule.num_sync_steps=-1"], "num_sync_steps=-1"),
        (["schedule=pipeoptim", "model.tied=true"], "set model.tied=false"),
        (["schedule=pipedream_2bw", "num_microbatches=1"], "must be as many as the 2 ranks"),
        (["schedule=1f1b", "model.vocab=100"], "a text file is read as bytes, which needs 256 tokens"),
        (["schedule=1f1b", "workload.text=novel"], "novel.txt: cannot be read"),
        (["schedule=1f1b", "optimizer=lion"], "unknown optimizer 'lion'"),
        (["schedule=1f1b", "optimizer.momentum=0.9"], "optimizer files that have it: sgd"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(arguments, expected, rpbench, tmp_path):
    status, rows, err = rpbench(*SIZES, "num_microbatches=4", *arguments)
    assert (status, rows) == (2, [])
    assert expected in err
    assert not list(tmp_path.rglob("events.jsonl"))
