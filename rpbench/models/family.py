"""Differences of model families beyond the flags of `Model`: activation and rotary scaling."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from rpbench.models.rotary import Llama3Scaling, Scaling, YarnScaling
from rpbench.workload.architecture import Family

# (up, gate) -> the input of the MLP's last matrix; gate is None in an MLP of two matrices.
Activation = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

SWIGLU_GAIN = 1.702
SWIGLU_LIMIT = 7.0


@dataclass(frozen=True)
class Traits:
    """The activation of the MLP, whether it needs a gate, and how rotary frequencies are stretched."""

    activation: Activation
    scaling: Scaling | None = None
    needs_gate: bool = False


def gelu(up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """GELU in the tanh form, as in GPT-2."""
    if gate is None:
        return functional.gelu(up, approximate="tanh")
    return functional.gelu(gate, approximate="tanh") * up


def silu(up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """SiLU, which makes a gated MLP a SwiGLU."""
    return functional.silu(up) if gate is None else functional.silu(gate) * up


def clamped_swiglu(up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), with gate at most 7 and up within 7; there is none without a gate.

    Source: public reference implementation of openai/gpt-oss-20b.
    """
    assert gate is not None
    gate = gate.clamp(max=SWIGLU_LIMIT)
    return (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1) * gate * torch.sigmoid(SWIGLU_GAIN * gate)


TRAITS: dict[Family, Traits] = {
    "gpt": Traits(gelu),
    "llama": Traits(silu, Llama3Scaling()),
    "qwen3": Traits(silu),
    "gpt_oss": Traits(clamped_swiglu, YarnScaling(), needs_gate=True),
}
