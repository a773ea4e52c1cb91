"""Side: one of two numbers that are compared, with its unit, and its seconds by cause according to a model."""

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
    """Work of a token and the machine that computes it."""

    flops: float  # of a token, forward and backward: products and causal attention, without recomputation
    peak: float | None  # dense 16-bit FLOP/s of the device with sums in fp32; None where costs are not of a device
    dtype_gain: float = 1.0  # seconds in 16 bits with sums in fp32 over those in the number's precision


class Rate(NamedTuple):
    """How a FLOP rate counts."""

    flops: float  # counted for a token
    peak: float  # FLOP/s that an MFU is divided by


@dataclass(frozen=True)
class Side:
    label: str
    seconds: float  # device-seconds of one unit by the number
    evidence: str  # how the number is known
    causes: Mapping[str, float]  # device-seconds of one unit by cause; their sum is the model's prediction
    model: str  # how the causes are known
    unit: str = "token"  # or a microbatch, of a model without sequences
    clock: str = "s"  # or `slots` of `cost=unit`
    work: Work | None = None
    rate: Rate | None = None  # where a FLOP rate counts otherwise than `work`
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, for people
    notes: tuple[str, ...] = ()  # assumptions

    @property
    def predicted(self) -> float:
        """Device-seconds of one unit by the model."""
        return sum(self.causes.values())

    @property
    def pace_unit(self) -> str:
        return f"{'tokens' if self.unit == 'token' else 'microbatches'}/{'s' if self.clock == 's' else 'slot'}"


RATES = ("tflops_per_device", "mfu")


@dataclass(frozen=True)
class Number:
    unit: str  # one of `UNITS`
    value: float
    flops: str = "causal"  # how a rate counts, one of `CONVENTIONS`
    peak_flops_per_s: float | None = None  # that an MFU is divided by; None for the 16-bit peak of the device

    def device_seconds(self, num_devices: int, tokens_per_step: float, rate: Rate | None) -> float:
        """Device-seconds of a token; ValueError for a FLOP rate without the run's FLOPs or the peak."""
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
        """How the number counts FLOPs, if it is a FLOP rate and the peak is known."""
        peak = self.peak_flops_per_s or (work.peak if work else None)
        if own is None or peak is None or self.unit not in RATES:
            return None
        return Rate(counted_flops(own, seq_len, self.flops), peak)


def number_of(words: Mapping[str, str]) -> tuple[Number, dict[str, str]]:
    """The number among typed words, and the other words; ValueError for none or several numbers, or a wrong one."""
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
    """FLOPs of a token, forward and backward, by one of `CONVENTIONS`."""
    layers, h = own.num_layers, own.hidden
    if convention == "causal":
        return own.flops_per_token(seq_len)
    if convention in ("6n", "palm"):
        squares = 12.0 * layers * own.heads * own.head_dim * seq_len if convention == "palm" else 0.0
        return 6.0 * own.total_parameters + squares
    passes, head = (96.0, 16.0) if convention == "megatron_recompute" else (72.0, 12.0)
    return passes * layers * h * h * (1 + seq_len / (6 * h) + own.vocab / (head * layers * h))
