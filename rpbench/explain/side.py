"""Side: one of two numbers that are compared, with its unit, and what a model says its seconds are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rpbench.registry import unknown_name
from rpbench.untrusted import positive
from rpbench.workload.architecture import Architecture
from rpbench.yaml_file import read_keys

DECLARED: Mapping[str, Mapping[str, str]] = read_keys(Path(__file__).with_name("words.yaml"))
CAUSES, UNITS, CONVENTIONS = DECLARED["causes"], DECLARED["units"], DECLARED["conventions"]
COMPUTATION = "computation"
AGAIN = "recomputation"
WAITS = ("partition", "bubble")  # they grow with the work


class Work(NamedTuple):
    """Work of a token and the machine that computes it.

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


RATES = ("tflops_per_device", "mfu")


@dataclass(frozen=True)
class Number:
    """A typed number.

    Args:
        unit: one of `UNITS`.
        flops: how a rate counts, one of `CONVENTIONS`.
        peak_flops_per_s: what an MFU is divided by; None for the 16-bit peak of the device.
    """

    unit: str
    value: float
    flops: str = "causal"
    peak_flops_per_s: float | None = None

    def device_seconds(self, num_devices: int, tokens_per_step: float, rate: Rate | None) -> float:
        """Device-seconds of a token.

        Raises:
            ValueError: for a rate where the run's FLOPs or the peak are not known.
        """
        if self.unit == "tokens_per_s":
            return num_devices / self.value
        if self.unit == "tokens_per_s_per_device":
            return 1 / self.value
        if self.unit == "step_time_s":
            return num_devices * self.value / tokens_per_step
        if rate is None:
            raise ValueError(
                f"{self.unit}={self.value:g}: FLOPs of the run or the peak of its device are not known; type "
                "tokens_per_s= instead"
            )
        return rate.flops / (self.value * (1e12 if self.unit == "tflops_per_device" else rate.peak))

    def rate(self, own: Architecture | None, seq_len: int, work: Work | None) -> Rate | None:
        """How the number counts FLOPs of a model, if it is a rate and the peak is known."""
        peak = self.peak_flops_per_s or (work.peak if work else None)
        if own is None or peak is None or self.unit not in RATES:
            return None
        return Rate(counted_flops(own, seq_len, self.flops), peak)


def number_of(words: Mapping[str, str]) -> tuple[Number, dict[str, str]]:
    """The number among typed words, and the other words: settings.

    Raises:
        ValueError: for none or several numbers, or one that cannot be.
    """
    given = [key for key in UNITS if key in words]
    if len(given) != 1:
        what = "no number" if not given else f"{len(given)} numbers, {' and '.join(given)},"
        among = " ".join(f"{key}={value}" for key, value in words.items())
        spellings = ", ".join(f"{name}= ({says})" for name, says in UNITS.items())
        raise ValueError(f"{what} among {among}: type one with its unit, of {spellings}")
    unit = given[0]
    value = positive(unit, words[unit])
    if unit == "mfu" and value > 1:
        raise ValueError(f"mfu={words[unit]}: a share of the peak, from 0 to 1; write {value / 100:g} for {value:g} %")
    flops = words.get("flops", "causal")
    if flops not in CONVENTIONS:
        raise ValueError(f"flops={flops}: {unknown_name('convention', flops, list(CONVENTIONS))}")
    peak = positive("peak_flops_per_s", words["peak_flops_per_s"]) if "peak_flops_per_s" in words else None
    used = (unit, "flops", "peak_flops_per_s")
    return Number(unit, value, flops, peak), {key: value for key, value in words.items() if key not in used}


def counted_flops(own: Architecture, seq_len: int, convention: str) -> float:
    """FLOPs of a token, forward and backward, as one of `CONVENTIONS` counts them."""
    layers, h = own.num_layers, own.hidden
    if convention == "causal":
        return own.flops_per_token(seq_len)
    if convention in ("6n", "palm"):
        squares = 12.0 * layers * own.heads * own.head_dim * seq_len if convention == "palm" else 0.0
        return 6.0 * own.total_parameters + squares
    passes, head = (96.0, 16.0) if convention == "megatron_recompute" else (72.0, 12.0)
    return passes * layers * h * h * (1 + seq_len / (6 * h) + own.vocab / (head * layers * h))
