"""Rates of the machine at hand: products, attention, memory, host copies, optimizer, launches, and a probe's layers.

On a CPU a device is a thread with one core, and times are that thread's CPU time, so that other load on the machine
does not enter. On a CUDA device they are wall-clock times between synchronisations. Every figure is the least of
several repeats.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional

from rpbench.cost.model import Model
from rpbench.models.build import build_layer

# A model that no experiment trains, large enough that no cache holds its layers.
PROBE = Model(name="probe", num_layers=1, hidden=320, heads=8, vocab=8192, gated_mlp=False, seq_len=192)
PROBE_SEQUENCES = 4
_REPEATS = 5
_COPY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Measured:
    """What was measured, in the units of the names; the probe's parts are seconds of one microbatch."""

    matmul_flops_per_s: float
    wide_matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    host_bytes_per_s: float
    launch_s: float
    forward_s: float
    backward_s: float
    head_forward_s: float
    head_backward_s: float


def measure_machine(device: str, width: int = 1024) -> Measured:
    """Measure a device: `cpu`, or `cuda` for the first GPU.

    Args:
        width: of the square products.

    Raises:
        ValueError: for a device that is not there.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA device; use device=cpu")
    with _one_thread():
        narrow = torch.float16 if device == "cuda" else torch.float32
        layer, head = _layer_s(device, narrow), _head_s(device, narrow)
        return Measured(
            matmul_flops_per_s=_product_rate(device, narrow, width, fast=True),
            wide_matmul_flops_per_s=_product_rate(device, narrow, width, fast=False),
            attention_flops_per_s=_attention_rate(device, narrow),
            memory_bytes_per_s=_memory_rate(device),
            copy_bytes_per_s=_copy_rate(device),
            host_bytes_per_s=_optimizer_rate(),
            launch_s=_launch_s(device, narrow),
            forward_s=layer[0],
            backward_s=layer[1],
            head_forward_s=head[0],
            head_backward_s=head[1],
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds(device: str, work: Callable[[], object]) -> float:
    """Least time of several repeats, after one that warms up."""
    work()
    times = []
    for _ in range(_REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        clock = time.perf_counter if device == "cuda" else time.thread_time
        began = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return min(times)


def _product_rate(device: str, dtype: torch.dtype, width: int, *, fast: bool) -> float:
    """FLOP/s of a square product; `fast` sums in 16 bits where the device can."""
    allowed = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = fast and device == "cuda"
    try:
        left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        return 2 * width**3 / _seconds(device, lambda: left @ right)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = allowed


def _attention_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, counting only the keys the mask leaves."""
    batch, heads, tokens, width = PROBE_SEQUENCES, PROBE.heads, 512, 64
    q, k, v = (torch.randn(batch, heads, tokens, width, device=device, dtype=dtype) for _ in range(3))
    took = _seconds(device, lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return 2 * batch * heads * tokens * tokens * width / took


def _memory_rate(device: str) -> float:
    """Bytes read and written per second by an addition of large tensors."""
    left, right = (torch.randn(_COPY_BYTES // 4, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 3 * _COPY_BYTES / _seconds(device, lambda: torch.add(left, right, out=out))


def _copy_rate(device: str) -> float:
    """Bytes per second from pinned host memory to the device; within memory where the device is the host."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    source.fill_(1)
    return _COPY_BYTES / _seconds(device, lambda: target.copy_(source))


def _optimizer_rate() -> float:
    """Bytes of optimizer state per second that Adam moves on the host: 28 a parameter (four reads, three writes)."""
    weight = torch.nn.Parameter(torch.randn(_COPY_BYTES // 16))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.Adam([weight], fused=True)
    return 28 * weight.numel() / _seconds("cpu", lambda: optimizer.step())


def _launch_s(device: str, dtype: torch.dtype) -> float:
    """Seconds of one layer with next to nothing to do."""
    small = Model(name="launches", num_layers=1, hidden=16, heads=1, vocab=16, gated_mlp=False, seq_len=1)
    layer = build_layer(small, 1, dtype=dtype, device=device)
    x = torch.randn(1, 1, small.hidden, device=device, dtype=dtype)
    with torch.no_grad():
        return _seconds(device, lambda: layer(x))


def _layer_s(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the probe layer's forward, and of its backward."""
    layer = build_layer(PROBE, 1, dtype=dtype, device=device)
    shape = PROBE_SEQUENCES, PROBE.seq_len, PROBE.hidden
    x = torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
    inputs = [x, *layer.parameters()]

    def both() -> object:
        end = layer(x)
        return torch.autograd.grad(end, inputs, torch.ones_like(end))

    with torch.no_grad():
        forward = _seconds(device, lambda: layer(x))
    return forward, max(forward, _seconds(device, both) - forward)


def _head_s(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the probe head's forward with the loss, and of what its gradients take beyond that."""
    head = build_layer(PROBE, 2, dtype=dtype, device=device)
    shape = PROBE_SEQUENCES, PROBE.seq_len, PROBE.hidden
    x = torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
    labels = torch.zeros(shape[:2], dtype=torch.long, device=device)
    inputs = [x, *head.parameters()]
    with torch.no_grad():
        forward = _seconds(device, lambda: head(x, labels))
    both = _seconds(device, lambda: torch.autograd.grad(head(x, labels), inputs))
    return forward, max(forward, both - forward)
