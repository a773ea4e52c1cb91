"""Families of models: activations, and rotary positions with their scaling.

Rotary pairs consist of one value of the first and one of the second half of a head, as in the published checkpoints.
Frequencies and angles are computed in float64 and rounded once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch.nn import functional

from rpbench.models.constants import constant, noted
from rpbench.workload.architecture import Family


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths above 8,192 tokens become 8 times longer, those below 2,048 stay, with a ramp between.

    Source: public configuration and reference code of Llama 3.1.
    """

    magnitude: ClassVar[float] = 1.0  # factor on every cosine and sine
    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The frequencies (D/2,) of a head of D values, stretched."""
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies with more than 32 turns in 4,096 tokens stay, those with less than one are divided by 32.

    The ramp between is linear in the index of the frequency, and its ends are not rounded.

    Source: Peng et al., "YaRN", ICLR'24, section 3.2 and equation 22; numbers of openai/gpt-oss-20b.
    """

    factor: float = 32.0
    most_turns: float = 32.0
    least_turns: float = 1.0
    original_length: int = 4096

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The frequencies (D/2,) of a head of D values and base `theta`, stretched."""
        first, last = (self._index(turns, len(frequencies), theta) for turns in (self.most_turns, self.least_turns))
        index = torch.arange(len(frequencies), dtype=frequencies.dtype)
        ramp = ((index - first) / (last - first)).clamp(0, 1)
        return frequencies * (1 - ramp + ramp / self.factor)

    def _index(self, turns: float, num: int, theta: float) -> float:
        """Index of the frequency with so many turns within the original length."""
        return num * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def magnitude(self) -> float:
        """Factor on every cosine and sine, which sharpens attention over the longer context."""
        return 0.1 * math.log(self.factor) + 1


Scaling = Llama3Scaling | YarnScaling  # stretches frequencies for longer contexts than those of the first training


@lru_cache(maxsize=64)
def rotary_table(
    head_dim: int, seq_len: int, theta: float, scaling: Scaling | None, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines, (S, D) each, a row per position: factors of a value and of its partner."""
    with constant(device):
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if scaling is not None:
            frequencies = scaling.stretch(frequencies, theta)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
        magnitude = scaling.magnitude if scaling else 1.0
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        whole = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
        return noted(whole[0].to(device, dtype)), noted(whole[1].to(device, dtype))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every pair of `x`, (B, A, S, D), by the angle of its position; a value's partner is half a head away.

    These are four operations on whole heads and four in backward; on halves they would be eight each way.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


# (up, gate) -> the input of the MLP's last matrix; gate is None in an MLP of two matrices.
Activation = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

SWIGLU_GAIN = 1.702
SWIGLU_LIMIT = 7.0


@dataclass(frozen=True)
class Traits:
    """The activation of the MLP, the scaling of rotary frequencies, and whether the activation needs a gate."""

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
    """(up + 1) * gate * sigmoid(1.702 gate), with gate at most 7 and up within 7; it needs a gate.

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
