"""Sequences cut into segments: bit for bit a plain loop with the same cuts, and nearly one without."""

from dataclasses import replace

import pytest
import torch
from cases import build
from spared import slow
from torch import nn
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.engine.reference import train_reference
from rpbench.engine.training import Training
from rpbench.models.attention import attend
from rpbench.passes.lower import split_backward
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Experts

GROUPED = replace(TINY, heads=4, key_value_heads=2, head_dim=4, inner=24, seq_len=11)
MODELS: dict[str, Architecture] = {
    "gpt": replace(TINY, family="gpt", gated=False, seq_len=8),
    "qwen3, tied": replace(GROUPED, family="qwen3", qk_norm=True, tied=True),
    "window and sinks": replace(
        GROUPED,
        family="gpt_oss",
        windows=(4, None),
        biases=True,
        attention_sinks=True,
        experts=Experts(4, 2, 24),
    ),
    "adapters": replace(GROUPED, family="llama", training_mode="lora", lora_rank=2),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_segments, grain", [slow((2, "stage")), (3, "layer"), slow((5, "stage"))])
def test_segments_compute_what_whole_sequences_do(model, num_segments, grain):
    schedule = build("seq1f1b", 2, 3, num_layers=3, num_steps=1, steps=True, num_segments=num_segments)
    workload = workload_of(schedule, MODELS[model])
    run = train(schedule, workload, recompute_grain=grain)
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0

    whole = build("1f1b", 2, 3, num_layers=3, num_steps=1, steps=True)
    groups = Training(workload, whole).groups
    plain = train_reference(workload, run.training.layout, groups, run.training.settings.optimizer)
    assert run.training.mean_loss(0) == pytest.approx(plain.losses[0], rel=1e-13)
    (found,) = run.training.gradients.by_step()
    assert found.keys() == plain.gradients[0].keys()
    for place, expected in plain.gradients[0].items():
        assert (found[place] - expected).abs().max() <= 1e-12 * expected.abs().max(), place


def test_attention_of_segments_is_attention_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=generator)
    for window in (None, 1, 3, 8, 20):
        for sink in (None, sinks):
            whole = attend(q, k, v, window, sink)
            parts = [
                attend(q[:, :, at:to], k[:, :, :to], v[:, :, :to], window, sink) for at, to in ((0, 2), (2, 3), (3, 9))
            ]
            torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-12, atol=1e-12)


def test_dropout_draws_again_in_every_segment():
    schedule = build("seq1f1b", 2, 2, num_layers=2, num_segments=2)
    run = train(schedule, workload_of(schedule, replace(TINY, dropout=0.3)))
    assert_same(run, reference_of(run, updates=False))


def test_what_segments_need_is_asked_for_before_work_begins():
    schedule = build("seq1f1b", 2, 4, num_segments=6)
    workload = workload_of(schedule)
    with pytest.raises(ValueError, match="6 segments of a sequence of 5 tokens: a segment holds at least 1"):
        Training(workload, schedule)
    schedule = build("seq1f1b", 2, 4, num_segments=2)
    with pytest.raises(ValueError, match=r"0I0\.1: gradients of keys and values pass between segments in whole"):
        Training(workload, split_backward(schedule))
    foreign = [workload.modules[0], *(nn.Identity() for _ in range(4)), workload.modules[-1]]
    with pytest.raises(ValueError, match="Identity runs whole sequences, the schedule cuts them into 2 segments"):
        Training(replace(workload, modules=foreign), schedule)
