"""Experts in one product, against one expert and one token at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shapes import GPT_OSS, QWEN3_MOE, varied
from torch.nn import functional

from rpbench.models.layers import Experts
from rpbench.models.linear import Layout, Padded, Ragged, group, has_grouped_product

FLOAT32_GROUPS = pytest.mark.skipif(
    not has_grouped_product(torch.device("cpu"), torch.float32),
    reason="this torch has no grouped product for float32 on the CPU",
)


def naive(experts: Experts, tokens: torch.Tensor, clamped: bool) -> torch.Tensor:
    """tokens (T, H), one by one."""
    rows = []
    for token in tokens:
        shares = torch.softmax(experts.router(token), -1)
        best = shares.topk(experts.num_active)
        row = torch.zeros_like(token)
        for share, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            gate, up = (through(part, token, expert) for part in (experts.gate, experts.up))
            if clamped:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                inner = functional.silu(gate) * up
            row = row + share * through(experts.down, inner, expert)
        rows.append(row)
    return torch.stack(rows)


def through(part: Any, x: torch.Tensor, expert: int) -> torch.Tensor:
    y = part.weight[expert] @ x
    if part.bias is not None:
        y = y + part.bias[expert]
    if part.adapter is not None:
        y = y + part.adapter.scale * part.adapter.lora_b[expert] @ (part.adapter.lora_a[expert] @ x)
    return y


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-4, marks=FLOAT32_GROUPS)]
)
def test_experts_equal_a_loop(family: str, dtype: torch.dtype, tolerance: float, lora_rank: int | None) -> None:
    model = QWEN3_MOE if family == "qwen3_moe" else GPT_OSS
    if lora_rank:
        model = replace(model, training_mode="lora", lora_rank=lora_rank)
    experts = varied(model, dtype)[1].mlp
    assert isinstance(group(torch.zeros(1, 1).long(), 3, experts.widths, dtype), kind_of(dtype))
    x = torch.randn(2, 9, model.hidden, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    upstream = torch.randn(2, 9, model.hidden, dtype=dtype, generator=torch.Generator().manual_seed(2))
    inputs = [x, *(p for p in experts.parameters() if p.requires_grad)]
    outputs = [experts(x), naive(experts, x.flatten(0, 1), family == "gpt_oss").view_as(x)]
    assert (outputs[0] - outputs[1]).abs().max() <= tolerance * outputs[1].abs().max()
    batched, looped = (torch.autograd.grad(y, inputs, upstream) for y in outputs)
    for ours, theirs in zip(batched, looped, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def kind_of(dtype: torch.dtype) -> type[Layout]:
    return Padded if dtype == torch.float64 else Ragged


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Distinct experts of every token, often leaving some expert without any; and the number of experts."""
    num_experts = draw(st.integers(1, 6))
    popular = draw(st.integers(1, num_experts))
    k = draw(st.integers(1, popular))
    rows = draw(st.lists(st.permutations(range(popular)), min_size=1, max_size=9))
    return torch.tensor([row[:k] for row in rows]), num_experts


@pytest.mark.parametrize("kind", [Padded, Ragged])
@given(routing=routings())
def test_layouts_keep_every_row_with_its_expert(kind: type[Layout], routing: tuple[torch.Tensor, int]) -> None:
    chosen, num_experts = routing
    layout = kind(chosen, num_experts)
    tokens = torch.arange(1.0, len(chosen) + 1).unsqueeze(1)
    rows = layout.pack(tokens)
    assert rows.shape == (layout.num_rows, 1)
    assert torch.equal(layout.unpack(rows), tokens.unsqueeze(1).expand(-1, chosen.shape[1], -1))
    assert (rows != 0).sum() == chosen.numel()  # each once, and zeros elsewhere
    experts = torch.arange(float(num_experts)).unsqueeze(1)
    assert torch.equal(layout.unpack(layout.spread(experts)).squeeze(-1), chosen.float())


@given(routing=routings())
def test_ragged_blocks_are_aligned_never_empty_and_fill_the_buffer(routing: tuple[torch.Tensor, int]) -> None:
    """Grouped kernels on a GPU want all three, which the CPU would not notice."""
    layout = Ragged(*routing)
    starts, ends = layout.starts.tolist(), layout.ends.tolist()
    assert starts == [0, *ends[:-1]]
    assert all(end - start >= 8 and end % 8 == 0 for start, end in zip(starts, ends, strict=True))
    assert ends[-1] == layout.num_rows
    assert layout.ends.dtype == torch.int32


@FLOAT32_GROUPS
@given(routing=routings())
def test_layouts_give_the_same_products_and_gradients(routing: tuple[torch.Tensor, int]) -> None:
    chosen, num_experts = routing
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(-8, 9, (len(chosen), 4), generator=generator).float().requires_grad_()
    weight = torch.randint(-8, 9, (num_experts, 8, 4), generator=generator).float().requires_grad_()
    bias = torch.randint(-8, 9, (num_experts, 8), generator=generator).float().requires_grad_()
    results = []
    for layout in (Padded(chosen, num_experts), Ragged(chosen, num_experts)):
        y = layout.unpack(layout.linear(layout.pack(tokens), weight) + layout.spread(bias))
        results.append([y, *torch.autograd.grad(y, (tokens, weight, bias), y.detach())])
    for padded, ragged in zip(*results, strict=True):
        assert torch.equal(padded, ragged)  # small whole numbers: every sum is exact
    untouched = [expert for expert in range(num_experts) if expert not in chosen]
    assert not results[0][2][untouched].any()


def test_rows_that_a_grouped_product_cannot_take_are_padded() -> None:
    chosen = torch.tensor([[0], [1]])
    assert isinstance(group(chosen, 2, (8, 5), torch.float32), Padded)  # 20 bytes a row
    assert isinstance(group(chosen, 2, (8, 4), torch.float64), Padded)
    assert not has_grouped_product(torch.device("cpu"), torch.float64)
