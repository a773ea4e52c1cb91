"""Calibration: the rates of a machine's devices, from single operators and from layers of probes on the engine.

Products, attention, memory, copies and the optimizer are timed on all devices at once, as in a run: they share memory
and caches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import NamedTuple

import torch
from torch.nn import functional

from rpbench.engine.backends.accelerator import place, summed_in_16_bits
from rpbench.engine.measure.probes import (
    DRY,
    HALVED_DRY,
    HALVED_ON_ACCELERATORS,
    HALVED_ON_CORES,
    ON_ACCELERATORS,
    ON_CORES,
    Probe,
    Shares,
    Times,
    halves_on_accelerator,
    halves_on_cores,
    probe_on_accelerator,
    probe_on_cores,
)
from rpbench.engine.measure.stopwatch import AcceleratorStopwatch, CoreStopwatch, ForeignLoad, Made, Stopwatch


class Sizes(NamedTuple):
    """Sizes of the timed operators: large enough that a launch is a small part of the time.

    Args:
        width: of the square products.
        copy_bytes: of the tensors that are copied and added.
        attention: sequences, heads, tokens, and the width of a head.
    """

    width: int = 1024
    copy_bytes: int = 64 * 2**20
    attention: tuple[int, int, int, int] = (4, 8, 512, 64)


# A product of cores takes a millisecond there; on an accelerator it would be over before it is launched.
OF_CORES, OF_ACCELERATORS = Sizes(), Sizes(8192, 256 * 2**20, (4, 16, 4096, 128))
THIN_TOKENS = 64  # of the thin ones, whose other sizes are those of a small layer


@dataclass(frozen=True)
class Rates:
    """Measured rates of one device, in the units of the names; `host_bytes_per_s` is that of all devices together.

    `copy_bytes_per_s` is one way while the other way is busy too; the same where the device is the host.
    """

    matmul_flops_per_s: float
    wide_matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    copy_bytes_per_s: float
    host_bytes_per_s: float
    half_rate_width: float


def measure_rates(watch: Stopwatch, sizes: Sizes) -> Rates:
    width, copy_bytes, attention = sizes
    fast, exact = (_product_rate(watch, width, fast=fast) for fast in (True, False))
    up, down, both = _copy_rates(watch, copy_bytes)
    return Rates(
        matmul_flops_per_s=fast,
        wide_matmul_flops_per_s=exact,
        attention_flops_per_s=_attention_rate(watch, *attention),
        memory_bytes_per_s=_memory_rate(watch, copy_bytes),
        host_to_device_bytes_per_s=up,
        device_to_host_bytes_per_s=down,
        copy_bytes_per_s=both,
        host_bytes_per_s=_optimizer_rate(watch, copy_bytes),
        half_rate_width=_half_rate_width(watch, width, fast),
    )


def _random(watch: Stopwatch, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=watch.device, dtype=watch.dtype)


def _product_s(watch: Stopwatch, rows: int, width: int) -> float:
    """Seconds of a (rows, width) x (width, width) product."""

    def made() -> Callable[[], object]:
        left, right, out = (_random(watch, num, width) for num in (rows, width, rows))
        return lambda: torch.mm(left, right, out=out)

    return watch.seconds(made)


def _product_rate(watch: Stopwatch, width: int, *, fast: bool) -> float:
    """FLOP/s of a square product; `fast` sums in 16 bits where the device can."""
    with summed_in_16_bits(fast and watch.dtype is torch.float16):
        return 2 * width**3 / _product_s(watch, width, width)


def _half_rate_width(watch: Stopwatch, width: int, rate: float) -> float:
    """The smallest dimension at which a product reaches half the rate, from that of a thin one; at least 1."""
    thin = min(THIN_TOKENS, width)
    return max(1.0, thin * (_product_s(watch, thin, width) * rate / (2 * thin * width**2) - 1))


def _attention_rate(watch: Stopwatch, batch: int, heads: int, tokens: int, width: int) -> float:
    """FLOP/s of causal attention, counting only the keys the mask leaves."""

    def made() -> Callable[[], object]:
        q, k, v = (_random(watch, batch, heads, tokens, width) for _ in range(3))
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return 2 * batch * heads * tokens * tokens * width / watch.seconds(made)


def _memory_rate(watch: Stopwatch, num_bytes: int) -> float:
    """Bytes read and written per second by an addition of large tensors."""

    def made() -> Callable[[], object]:
        left, right, out = (torch.randn(num_bytes // 4, device=watch.device) for _ in range(3))
        return lambda: torch.add(left, right, out=out)

    return 3 * num_bytes / watch.seconds(made)


def _copy_rates(watch: Stopwatch, num_bytes: int) -> tuple[float, float, float]:
    """Bytes per second from pinned host memory to the device, back, and one way while both are busy."""

    def host() -> torch.Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, pin_memory=watch.pins)

    def there() -> torch.Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, device=watch.device)

    up, down = _copying(host, there), _copying(there, host)
    alone = num_bytes / watch.seconds(up), num_bytes / watch.seconds(down)
    return (*alone, min(*alone, num_bytes / watch.seconds_together(up, down)))


def _copying(source: Callable[[], torch.Tensor], target: Callable[[], torch.Tensor]) -> Made:
    def made() -> Callable[[], object]:
        origin, end = source(), target()
        return lambda: end.copy_(origin, non_blocking=True)

    return made


def peer_rate(watch: Stopwatch, num_bytes: int) -> float | None:
    """Bytes per second from the first accelerator to the second; None where there is one."""
    if torch.accelerator.device_count() < 2:
        return None

    first, second = (partial(torch.ones, num_bytes, dtype=torch.uint8, device=place(number)) for number in range(2))
    return num_bytes / watch.seconds(_copying(first, second))


def _optimizer_rate(watch: Stopwatch, num_bytes: int) -> float:
    """Bytes of optimizer state per second that Adam moves on the host: 28 a parameter (four reads, three writes)."""
    num = num_bytes // 16

    def made() -> Callable[[], object]:
        weight = torch.nn.Parameter(torch.randn(num))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return optimizer.step

    return watch.num_workers * 28 * num / watch.seconds_on_host(made)


Told = Callable[[str], None]

DEVICES = ("cpu", "accelerator")


@dataclass(frozen=True)
class Calibration:
    """Measurements of a machine's devices.

    Args:
        probes: with the seconds that the parts of the engine's work took.
        halves: times of the two halves of a split backward, as fractions of the whole.
        foreign_cores: cores that other programs kept busy meanwhile; None where the system does not say.
        peer_bytes_per_s: from one accelerator to another; None where there is no other.
        issues_ahead: whether the host issues work ahead of the devices.
    """

    rates: Rates
    probes: Sequence[tuple[Probe, Times]]
    halves: Shares
    foreign_cores: float | None
    peer_bytes_per_s: float | None = None
    issues_ahead: bool = False


def check_device(device: str) -> None:
    """Refuse a device that is not there: a ValueError unless it is `cpu`, or `accelerator` where torch finds one."""
    if device not in DEVICES:
        raise ValueError(f"device={device}: one of {', '.join(DEVICES)}")
    if device == "accelerator" and not torch.accelerator.is_available():
        raise ValueError("device=accelerator: torch finds no accelerator on this machine; use device=cpu, or dry=1")


def calibrate_cores(
    num_devices: int, tell: Told, probes: Sequence[Probe] = ON_CORES, sizes: Sizes = OF_CORES
) -> Calibration:
    """Calibrate devices that are threads with one core each; `tell` gets a line before each thing that is measured."""
    with ForeignLoad() as foreign:
        tell(f"rates of {num_devices} cores at once")
        with CoreStopwatch(num_devices) as watch:
            rates = measure_rates(watch, sizes)
        found = []
        for probe in probes:
            tell(f"layers of width {probe.model.hidden} on {probe.num_tokens} tokens")
            found.append((probe, probe_on_cores(probe, num_devices)))
        tell("backwards in halves")
        halves = _mean(halves_on_cores(probe, num_devices) for probe in HALVED_ON_CORES)
    return Calibration(rates, found, halves, foreign.cores)


def calibrate_accelerators(
    tell: Told,
    probes: Sequence[Probe] = ON_ACCELERATORS,
    halved: Sequence[Probe] = HALVED_ON_ACCELERATORS,
    sizes: Sizes = OF_ACCELERATORS,
) -> Calibration:
    """Calibrate the first accelerator, and its link to the second."""
    with ForeignLoad() as foreign, AcceleratorStopwatch() as clock:
        tell("rates of the accelerator and its links")
        rates, peer, found = measure_rates(clock, sizes), peer_rate(clock, sizes.copy_bytes), []
        for probe in probes:
            tell(f"layers of width {probe.model.hidden} on {probe.num_tokens} tokens")
            found.append((probe, probe_on_accelerator(probe, clock)))
        tell("backwards in halves")
        halves = _mean(halves_on_accelerator(probe, clock) for probe in halved)
    return Calibration(rates, found, halves, foreign.cores, peer, issues_ahead=True)


def calibrate_dry(tell: Told) -> Calibration:
    """`calibrate_accelerators` at tiny sizes, for simulated accelerators: its numbers mean nothing."""
    return calibrate_accelerators(tell, DRY, HALVED_DRY, Sizes(64, 2**14))


def _mean(shares: Iterable[Shares]) -> Shares:
    """The mean of each half, at least 0: a device may hide one half behind the other."""
    firsts, seconds = zip(*shares, strict=True)
    return max(0.0, mean(firsts)), max(0.0, mean(seconds))
