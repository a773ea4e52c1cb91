"""Ragged batches: sequences of unequal lengths are trained without padding, and every token counts as much."""

from dataclasses import replace

import pytest
import torch
from cases import SPARED, build
from torch.func import functional_call
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.config.loading import load
from rpbench.engine.workload import Workload
from rpbench.models.attention import Attention
from rpbench.models.build import build_model
from rpbench.models.data import Ragged, SyntheticTokens
from rpbench.run.assemble import assemble
from rpbench.run.modes.train import execute
from rpbench.workload.architecture import Architecture

# Of two sequences each: some packed, one of equal ones, one as whole sequences are.
LENGTHS = ((5, 2), (3, 3), (1, 4), (5, 5), (2, 1), (4, 5))
ALONE = tuple((length,) for length in (5, 2, 4, 3, 2, 5, 3))  # what is cut into segments is not packed


def ragged(workload: Workload, lengths: tuple[tuple[int, ...], ...]) -> Workload:
    """The same training on the beginnings of its sequences, as many microbatches in turn."""
    window = workload.num_microbatches
    lengths = tuple(lengths[number % len(lengths)] for number in range(window))
    data = workload.data
    if len(lengths[0]) == 1:
        data = SyntheticTokens(data.vocab, data.shape[1] - 1, 1, data.seed)
    return replace(workload, data=Ragged(data, lengths), lengths=lengths)


@pytest.mark.parametrize("name", SPARED)
def test_gradients_equal_plain_training_bit_for_bit(name):
    schedule = build(name, 2, 6, num_steps=2)
    run = train(schedule, ragged(workload_of(schedule), ALONE if schedule.shape.num_segments > 1 else LENGTHS))
    assert_same(run, reference_of(run))


@pytest.mark.parametrize(
    "model",
    [
        TINY,
        replace(TINY, seq_len=9, windows=(3, None), attention_sinks=True, key_value_heads=1),
        replace(TINY, family="llama", gated=True, qk_norm=True),
    ],
    ids=["plain", "windows and sinks", "llama"],
)
def test_gradients_equal_those_of_the_sequences_one_by_one(model: Architecture):
    """One sum over the tokens of all sequences, each run alone: the graph knows nothing of packing or microbatches."""
    schedule = build("1f1b", 2, 6)
    workload = ragged(workload_of(schedule, model), LENGTHS)
    run = train(schedule, workload)
    layers = build_model(replace(model, num_layers=schedule.partition.num_layers), dtype=torch.float64)
    weights = dict(layers.named_parameters())
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for number, lengths in enumerate(LENGTHS):
        whole = workload.data.data.microbatch(0, number)
        for row, length in enumerate(lengths):
            logits = functional_call(layers, weights, (whole.tokens[row : row + 1, :length],))
            total = total + torch.nn.functional.cross_entropy(logits[0], whole.labels[row, :length], reduction="sum")
            num_tokens += length
    loss = total / num_tokens
    expected = torch.autograd.grad(loss, list(weights.values()))
    (found,) = run.training.gradients.by_step()
    assert run.training.mean_loss(0) == pytest.approx(float(loss.detach()), abs=1e-12)
    for (name, _), gradient in zip(weights.items(), expected, strict=True):
        module, _, own = name.partition(".")
        torch.testing.assert_close(found[int(module), own], gradient, rtol=0, atol=1e-12)


def test_lengths_of_the_model_change_nothing_but_last_bits():
    """Lengths that say what is so anyway: the same gradients, though the loss is weighted another way."""
    schedule = build("1f1b", 2, 6)
    plain = train(schedule, workload_of(schedule))
    same = train(schedule, ragged(workload_of(schedule), ((5, 5),)))
    for one, other in zip(plain.training.gradients.by_step(), same.training.gradients.by_step(), strict=True):
        for place, gradient in one.items():
            torch.testing.assert_close(other[place], gradient, rtol=1e-14, atol=0)


def test_packed_sequences_see_none_of_each_other():
    attention = Attention(TINY, 0).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 7, TINY.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, _ = attention(x, (), (4, 3))
    for rows in (slice(0, 4), slice(4, 7)):
        torch.testing.assert_close(whole[:, rows], attention(x[:, rows])[0], rtol=0, atol=1e-12)
    assert not torch.allclose(whole[:, 4:], attention(x)[0][:, 4:])


def test_packed_sequences_are_not_cut_into_segments():
    schedule = build("seq1f1b", 2, 6)
    with pytest.raises(ValueError, match=r"packs unequal ones into a microbatch.*microbatch_sequences=1"):
        train(schedule, ragged(workload_of(schedule), LENGTHS))


@pytest.mark.parametrize("backend", ["virtual", "cpu"])
def test_a_run_says_how_many_tokens_it_had(backend):
    words = [f"backend={backend}", "model=tiny_gpt", "schedule=zb_auto", "num_devices=2", "num_microbatches=4"]
    words += ["workload.microbatch_sequences=2", "workload.lengths=[16,4,9,9,1,2,3,12]", "dtype=float64", "verify=true"]
    request = load(words)
    assembled = assemble(request)
    fields, _ = execute(request, assembled)
    assert fields["grad_max_abs_diff"] == fields["weight_max_abs_diff"] == 0
    assert assembled.tokens_per_step == 56
    assert fields["loss_curve"] == pytest.approx([fields["loss"]])


def test_a_profile_is_kept_of_whole_sequences():
    words = ["model=tiny_gpt", "cost=profiled", "schedule=1f1b", "num_devices=2", "num_microbatches=2"]
    words += ["workload.microbatch_sequences=1"]
    whole, short = (assemble(load([*words, *more])) for more in ([], ["workload.lengths=[16,4]"]))
    assert short.profile == whole.profile, "measured once a process"
    assert short.costs.each[0].work == whole.costs.work, "its first microbatch is whole"
    assert short.costs.each[1].work != whole.costs.work
