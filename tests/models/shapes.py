"""Small models of every family, and ways to run them."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rpbench.models import build_model
from rpbench.models.data import generator_for
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Experts

_SMALL = Architecture(
    "small", num_layers=3, hidden=24, heads=6, vocab=61, key_value_heads=2, head_dim=8, inner=40, seq_len=11
)

GPT = replace(_SMALL, family="gpt", gated=False, key_value_heads=6, head_dim=4, norm_eps=1e-5)
LLAMA = replace(_SMALL, family="llama", rope_theta=500_000.0)
QWEN3 = replace(_SMALL, family="qwen3", qk_norm=True, tied=True, rope_theta=1e6, norm_eps=1e-6)
QWEN3_MOE = replace(QWEN3, tied=False, experts=Experts(7, 3, 20))
GPT_OSS = replace(
    _SMALL,
    family="gpt_oss",
    experts=Experts(5, 2, 40),
    windows=(4, None),
    biases=True,
    attention_sinks=True,
    rope_theta=150_000.0,
)
FAMILIES = {"gpt": GPT, "llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}


def varied(model: Architecture, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The model with weights far from their start, so that biases, norms, sinks and adapters matter.

    Returned as Any, because tests reach into layers by name.
    """
    layers = build_model(model, seed=seed, dtype=dtype)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            noise = torch.empty(parameter.shape).normal_(std=0.3, generator=generator_for("vary", name))
            parameter.add_(noise.to(dtype))
    return layers


def batch(model: Architecture, num_sequences: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, (B, S) each."""
    shape = (num_sequences, model.seq_len)
    generator = generator_for("batch")
    return (
        torch.randint(model.vocab, shape, generator=generator),
        torch.randint(model.vocab, shape, generator=generator),
    )


def loss_and_gradients(
    layers: nn.Sequential, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of one plain step, and the gradient of every trainable parameter."""
    loss = layers[-1](layers[:-1](tokens), labels)
    trainable = {name: parameter for name, parameter in layers.named_parameters() if parameter.requires_grad}
    return loss.detach(), dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))
