"""Rates of a machine: products, attention, memory, copies, the optimizer, by operators that do one thing each.

What is timed is done by all devices at once, as in a run: they share memory and caches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from rpbench.engine.backends.accelerator import place, summed_in_16_bits
from rpbench.engine.measure.stopwatch import Stopwatch


class Sizes(NamedTuple):
    """Of what is timed: large enough that a launch is a small part of it.

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
    """What was measured of one device, in the units of the names; `host_bytes_per_s` is of all together.

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
    """Measure the rates of a device."""
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


def _product_rate(watch: Stopwatch, width: int, *, fast: bool) -> float:
    """FLOP/s of a square product; `fast` sums in 16 bits where the device can."""
    with summed_in_16_bits(fast and watch.dtype is torch.float16):

        def made() -> Callable[[], object]:
            left, right, out = (_random(watch, width, width) for _ in range(3))
            return lambda: torch.mm(left, right, out=out)

        return 2 * width**3 / watch.seconds(made)


def _half_rate_width(watch: Stopwatch, width: int, rate: float) -> float:
    """The smallest dimension at which a product reaches half the rate, from that of a thin one; at least 1."""
    thin = min(THIN_TOKENS, width)

    def made() -> Callable[[], object]:
        left, right, out = _random(watch, thin, width), _random(watch, width, width), _random(watch, thin, width)
        return lambda: torch.mm(left, right, out=out)

    return max(1.0, thin * (watch.seconds(made) * rate / (2 * thin * width**2) - 1))


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

    def up() -> Callable[[], object]:
        source, target = host(), there()
        return lambda: target.copy_(source, non_blocking=True)

    def down() -> Callable[[], object]:
        source, target = there(), host()
        return lambda: target.copy_(source, non_blocking=True)

    alone = num_bytes / watch.seconds(up), num_bytes / watch.seconds(down)
    return (*alone, min(*alone, num_bytes / watch.seconds_together(up, down)))


def peer_rate(watch: Stopwatch, num_bytes: int) -> float | None:
    """Bytes per second from the first accelerator to the second; None where there is one."""
    if torch.accelerator.device_count() < 2:
        return None

    def made() -> Callable[[], object]:
        source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=place(number)) for number in range(2))
        return lambda: target.copy_(source, non_blocking=True)

    return num_bytes / watch.seconds(made)


def _optimizer_rate(watch: Stopwatch, num_bytes: int) -> float:
    """Bytes of optimizer state per second that Adam moves on the host: 28 a parameter (four reads, three writes)."""
    num = num_bytes // 16

    def made() -> Callable[[], object]:
        weight = torch.nn.Parameter(torch.randn(num))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return optimizer.step

    return watch.num_workers * 28 * num / watch.seconds_on_host(made)
