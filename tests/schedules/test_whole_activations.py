"""Whole activations that wait elsewhere: their bytes, what devices hold, and what a link hides."""

from dataclasses import replace

import pytest

from rpbench.config.loading import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import ModelBytes, model_bytes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis, peak_resident
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.run.recording import run
from rpbench.workload.architecture import Architecture

MODEL = Architecture("even", num_layers=8, hidden=16, heads=2, vocab=32, seq_len=8)


def whole() -> ModelBytes:
    return replace(model_bytes(MODEL, 16), keeps_activations=True)


def build(name: str, p: int, m: int, v: int = 1, **options) -> Schedule:
    cut = symmetric((8 // (p * v),) * (p * v))
    return entry(name).build(Shape(p, p * v, m), **options).with_partition(cut)


@pytest.mark.parametrize("name, v", [("bpipe", 1), ("pipe_offload", 2)])
def test_a_transfer_carries_all_activations_of_its_stage(name, v):
    """Counted from actions: layers of the stage times their activations, and the logits of the last stage."""
    schedule, sizes = build(name, 4, 12, v), whole()
    layers, last = 8 // (4 * v), 4 * v - 1
    for device, moved in enumerate(moved_bytes(schedule, sizes)):
        stored = [action for action in schedule.lanes[device].get("d2h", ()) if action.kind is Kind.STORE]
        logits = sizes.logits * sum(action.stage == last for action in stored)
        assert moved.get("d2h STORE:A", 0) == len(stored) * layers * sizes.layers[0].activations + logits
        assert moved.get("h2d LOAD:A", 0) == moved.get("d2h STORE:A", 0)


def test_pairs_share_whole_activations():
    """No rank of BPipe holds more than ceil((p + 2)/2) microbatches of them, where 1F1B has p on the first."""
    sizes = whole()
    each = sizes.layers[0].activations
    plain, paired = (
        [device["activations"] for device in classes_of(build(name, 8, 24), sizes, [0] * 8)]
        for name in ("1f1b", "bpipe")
    )
    assert plain[0] == 8 * each
    assert max(paired) <= 5 * each + sizes.logits
    assert sum(paired) < sum(plain) + 8 * each


@pytest.mark.parametrize("group_size, kept", [(None, 23), (8, 16), (4, 12)])
def test_orders_of_groups_hold_less_before_anything_moves(group_size, kept):
    shape = Shape(8, 16, 32)
    schedule = entry("pipe_offload").build(shape, share=0.0, group_size=group_size)
    assert max(peak_resident(Analysis(schedule))) == kept
    moved = entry("pipe_offload").build(shape, share=0.5, group_size=group_size)
    check(moved)
    assert max(peak_resident(Analysis(moved))) < 0.75 * kept
    assert max(peak_resident(Analysis(entry("pipe_offload").build(shape, group_size=group_size)))) < kept / 2


def test_a_record_of_whole_activations(tmp_path):
    request = ["schedule=bpipe", "model=tiny_gpt", "num_devices=8", "num_microbatches=8", "recompute=none"]
    (row,) = run(load([*request, f"results_dir={tmp_path}"]))
    assert row["status"] == "ok"
