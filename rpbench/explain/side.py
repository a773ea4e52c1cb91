"""Side: one of two numbers that are compared, and what a model says its seconds are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# What a device's seconds go to. Computation is split further where both sides know their work (`Work`).
COMPUTATION = "computation"
AGAIN = "recomputation"
WAITS = ("partition", "bubble")  # they grow with the work
CAUSES: Mapping[str, str] = {
    "shape": "FLOPs of a token: products and causal attention, nothing recomputed",
    "FLOP convention": "FLOPs that the printed rate counts, over those",
    "device": "16-bit matrix peak of the device",
    "peak definition": "peak that the printed rate divides by, over that",
    "dtype": "pace of products in the number's precision over 16 bits with sums in fp32",
    "kernels": "share of the peak that kernels reach: sizes of products, microbatch, software",
    COMPUTATION: "forwards and backwards",
    "recomputation": "forwards that run once more, with the collectives inside them",
    "partition": "the busiest device's work over the mean",
    "bubble": "waiting of devices for one another: filling, draining, order",
    "transfers": "boundary tensors, and what streams between devices and host, where nothing hides it",
    "collectives": "tensor, context, expert and data parallelism, where nothing hides it",
    "optimizer": "updates, and what an update on the host holds up",
    "late updates": "what updates that are one step late save: negative seconds",
    "interpreter": "loops over experts that a device waits for",
    "overheads": "launches of a microbatch, norm and logging of a step, jitter of many nodes",
}


class Work(NamedTuple):
    """What a token asks for and where it is computed.

    Args:
        flops: of a token, forward and backward: products and causal attention, nothing recomputed.
        peak: 16-bit FLOP/s of the device, dense, sums in fp32; None where the costs are not of a device.
        dtype_gain: seconds of the computation in 16 bits with sums in fp32 over those in the number's precision.
    """

    flops: float
    peak: float | None
    dtype_gain: float = 1.0


class Rate(NamedTuple):
    """How a FLOP rate counts.

    Args:
        flops: of a token that it counts.
        peak: FLOP/s that it is divided by.
    """

    flops: float
    peak: float


@dataclass(frozen=True)
class Side:
    """A number and its causes.

    Args:
        label: what it is called.
        seconds: device-seconds of one unit, as the number says.
        evidence: how the number is known.
        causes: device-seconds of one unit by cause, as a model says; they add up to its prediction.
        model: how the causes are known.
        unit: what is produced: a token, or a microbatch of a model without sequences.
        clock: what time is counted in: `s`, or `slots` of `cost=unit`.
        rate: how a FLOP rate of it counts, where that is not as `work` does.
        settings: what is known of the run, for people.
        notes: what had to be assumed.
    """

    label: str
    seconds: float
    evidence: str
    causes: Mapping[str, float]
    model: str
    unit: str = "token"
    clock: str = "s"
    work: Work | None = None
    rate: Rate | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def predicted(self) -> float:
        """Device-seconds of one unit by the model."""
        return sum(self.causes.values())
