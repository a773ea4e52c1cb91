"""Measured latency and bandwidth of each collective of a machine.

A collective over n ranks of a tensor of X bytes (the whole tensor gathered, reduced or exchanged) takes

    seconds = latency + volume X / bandwidth,     volume = (n - 1) / n, and twice that for an all-reduce

so the bandwidth is the "bus bandwidth" of NCCL's tests (PERFORMANCE.md), comparable with that of a link.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from rpbench.cost.arrays import Floats
from rpbench.cost.rings import ring_hops, volume
from rpbench.registry import unknown_name
from rpbench.untrusted import is_finite

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
RESAMPLED = 200  # bootstrap samples, for the intervals
INTERVAL = (5.0, 95.0)  # percentiles


@dataclass(frozen=True)
class CollectiveRate:
    """The measured rate of a collective.

    Raises ValueError for an unknown collective, fewer than 2 ranks, or an impossible number.
    """

    name: str  # one of `COLLECTIVES`
    num_ranks: int  # in the measurement
    bytes_per_s: float  # bus bandwidth; `_low` and `_high` are the ends of its 90 % interval
    bytes_per_s_low: float
    bytes_per_s_high: float
    latency_s: float  # of the whole collective; `_low` and `_high` likewise
    latency_s_low: float
    latency_s_high: float

    def __post_init__(self) -> None:
        where = f"cluster.collectives.{self.name}"
        if self.name not in COLLECTIVES:
            raise ValueError(f"cluster.collectives: {unknown_name('collective', self.name, list(COLLECTIVES))}")
        if type(self.num_ranks) is not int or self.num_ranks < 2:
            raise ValueError(f"{where}.num_ranks={self.num_ranks!r}: a whole number of at least 2")
        for name, least in (("bytes_per_s", 0.0), ("latency_s", -inf)):
            low, value, high = (getattr(self, f"{name}{end}") for end in ("_low", "", "_high"))
            if not all(is_finite(each) and each > least and each >= 0 for each in (low, value, high)):
                raise ValueError(f"{where}.{name}={value!r} ({low!r} to {high!r}): finite and above 0")
            if not low <= value <= high:
                raise ValueError(f"{where}.{name}={value!r} is not between its ends, {low!r} and {high!r}")

    def seconds(self, total_bytes: float, size: int) -> float:
        """Seconds of the collective over `size` ranks of this machine."""
        if size == 1:
            return 0.0
        latency = self.latency_s * ring_hops(size) / ring_hops(self.num_ranks)
        return latency + volume(self.name, size) * total_bytes / self.bytes_per_s

    def plain(self) -> dict[str, Any]:
        """Its figures by name, as in a cluster file."""
        return {key: value for key, value in vars(self).items() if key != "name"}


def collective_rates(values: Mapping[str, Mapping[str, Any]]) -> dict[str, CollectiveRate]:
    """The rates of a cluster file, by name of the collective; ValueError with the name of a wrong one."""
    found = {}
    for name, row in values.items():
        try:
            found[name] = CollectiveRate(name, **row)
        except TypeError as error:
            raise ValueError(f"cluster.collectives.{name}: {error}") from None
    return found


def fit_rate(name: str, num_ranks: int, samples: Mapping[int, Sequence[float]]) -> CollectiveRate:
    """Latency and bandwidth fitted to seconds of a collective, with bootstrap intervals.

    The fit minimises relative errors, so that small sizes decide the latency and large ones the bandwidth. For the
    intervals, repeats of every size are drawn again. Raises ValueError for fewer than two sizes, or seconds that are
    not above 0. `samples`: bytes of the tensor -> seconds of each repeat.
    """
    sizes = sorted(samples)
    if len(sizes) < 2:
        raise ValueError(f"{name}: a latency and a bandwidth need at least two sizes, not {len(sizes)}")
    if not all(is_finite(each) and each > 0 for size in sizes for each in samples[size]):
        raise ValueError(f"{name}: seconds that are not above 0 in {dict(samples)}")
    rng = np.random.default_rng(0)
    sent = volume(name, num_ranks) * np.array(sizes, float)
    latency, slope = _lines(sent, np.array([[np.median(samples[size]) for size in sizes]]))[0]
    drawn = [np.median(rng.choice(samples[size], (RESAMPLED, len(samples[size]))), axis=1) for size in sizes]
    low, high = np.percentile(_lines(sent, np.column_stack(drawn)), INTERVAL, axis=0)
    rates = (1 / slope, min(1 / slope, 1 / high[1]), max(1 / slope, 1 / low[1]))
    latencies = (latency, min(latency, low[0]), max(latency, high[0]))
    return CollectiveRate(name, num_ranks, *map(float, rates + latencies))


def _lines(sent: Floats, seconds: Floats) -> Floats:
    """Latency (at least 0) and seconds per byte, (rows, 2), by least squares of relative errors, from (rows, sizes)."""
    one, byte = 1 / seconds, sent / seconds
    aa, ab, bb = (one**2).sum(axis=1), (one * byte).sum(axis=1), (byte**2).sum(axis=1)
    determinant = aa * bb - ab**2
    latency = (bb * one.sum(axis=1) - ab * byte.sum(axis=1)) / determinant
    slope = (aa * byte.sum(axis=1) - ab * one.sum(axis=1)) / determinant
    impossible = (latency < 0) | (slope <= 0)
    without_latency = byte.sum(axis=1) / bb
    return np.column_stack([np.where(impossible, 0.0, latency), np.where(impossible, without_latency, slope)])
