"""Backward halving on tensors: the gradients of plain training on halves, bit for bit, and the loss of whole ones."""

import pytest
import torch
from spared import slow

from rpbench.config.loading import load
from rpbench.models.data import InPieces, SyntheticTokens
from rpbench.run.assemble import assemble
from rpbench.run.modes import train

SIZES = (
    "schedule=chimera",
    "model=tiny_gpt",
    "model.num_layers=4",
    "model.seq_len=8",
    "num_devices=4",
    "num_microbatches=4",
    "workload.microbatch_sequences=2",
    "dtype=float64",
    "verify=true",
)


def run(*words: str):
    request = load([*SIZES, *words])
    fields, _ = train.execute(request, assemble(request))
    return fields


@pytest.mark.parametrize(
    "words", [slow((("backend=virtual", "num_steps=2"),)), ("backend=cpu", "recompute=none")], ids=" ".join
)
def test_halves_train_as_whole_microbatches_do(words):
    halved, whole = run("schedule.backward_halving=true", *words), run(*words)
    assert halved["grad_max_abs_diff"] == halved["weight_max_abs_diff"] == 0.0
    assert halved["versions_as_reference"]
    assert halved["loss"] == pytest.approx(whole["loss"], rel=1e-12), "the same tokens in halves"


@pytest.mark.slow
def test_text_is_read_in_the_same_order():
    words = ("backend=virtual", "workload=prose", "workload.microbatch_sequences=2")
    assert run("schedule.backward_halving=true", *words)["loss"] == pytest.approx(run(*words)["loss"], rel=1e-12)


def test_pieces_are_the_sequences_of_a_microbatch():
    data = SyntheticTokens(vocab=37, seq_len=5, microbatch_sequences=6, seed=3)
    pieces = InPieces(data, 2)
    for step, number in ((0, 0), (1, 2)):
        halves = [pieces.microbatch(step, 2 * number + half) for half in (0, 1)]
        for which, whole in enumerate(data.microbatch(step, number)):
            assert torch.equal(torch.cat([half[which] for half in halves]), whole)
