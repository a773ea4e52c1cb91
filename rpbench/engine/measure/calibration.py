"""Calibration: the rates of a machine's devices, from single operators and from layers of probes on the engine.

Products, attention, memory, copies and the optimizer are timed on all devices at once, as in a run: they share memory
and caches.

Probes are small models of different shapes whose layers are timed as the engine runs them. No experiment trains them.
They differ in width, tokens and vocabulary, so that a layer's time can be divided into a constant, its products, its
element-wise kernels and its weights (`rpbench.mesh.layers.engine_kernels`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import NamedTuple

import torch
from torch.nn import functional

from rpbench.cost.hardware.measured import PARTS
from rpbench.engine.backends.accelerator import place, summed_in_16_bits
from rpbench.engine.compute.stage import Graph, Shells, Stages, backward, input_gradient, weight_gradients
from rpbench.engine.measure.layer_times import time_stages
from rpbench.engine.measure.profiles import OneBatch
from rpbench.engine.measure.stopwatch import AcceleratorStopwatch, CoreStopwatch, ForeignLoad, Made, Stopwatch, Work
from rpbench.engine.state.gradients import Sum, Tensors
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.state.weights import Weights
from rpbench.engine.training import Settings
from rpbench.engine.workload import Workload, synthetic
from rpbench.ir.action import Kind
from rpbench.ir.partition import symmetric
from rpbench.models.data import Batch
from rpbench.workload.architecture import Architecture


class Sizes(NamedTuple):
    """Sizes of the timed operators: large enough that a launch is a small part of the time."""

    width: int = 1024  # of the square products
    copy_bytes: int = 64 * 2**20  # of the tensors that are copied and added
    attention: tuple[int, int, int, int] = (4, 8, 512, 64)  # sequences, heads, tokens, and the width of a head


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


# --- probes, on cores ------------------------------------------------------------------------------------------------

SEED = 0
SHORTEST_S = 1e-6  # the least time of any work
_EACH_ALONE = symmetric((0, 1, 0))  # embedding, layer and head a stage each
MICROBATCHES = 2  # of each device and step


class Probe(NamedTuple):
    """A model and the tokens of one microbatch of it."""

    model: Architecture
    num_tokens: int


def _probe(hidden: int, heads: int, vocab: int, tokens: int, sequences: int = 1) -> Probe:
    model = Architecture(
        "probe", num_layers=1, hidden=hidden, heads=heads, vocab=vocab, gated=False, seq_len=tokens // sequences
    )
    return Probe(model, tokens)


# A core does about 1e11 FLOP/s, a GPU a thousand times as many.
ON_CORES = (
    _probe(32, 2, 64, 16),
    _probe(96, 3, 40960, 96),
    _probe(160, 5, 49152, 48),
    _probe(192, 6, 20480, 160),
    _probe(320, 8, 16384, 64),
    _probe(320, 8, 6144, 192),
    _probe(448, 8, 12288, 80),
)
ON_ACCELERATORS = (
    _probe(32, 2, 64, 16),
    _probe(768, 12, 49152, 1024),
    _probe(768, 12, 16384, 6144, 6),
    _probe(1536, 12, 32768, 1024),
    _probe(1536, 12, 24576, 4096, 4),
    _probe(2560, 20, 16384, 3072, 3),
    _probe(2560, 20, 8192, 12288, 6),
    _probe(4096, 32, 16384, 8192, 4),
)

# Layers whose backward is split as well; their vocabularies do not matter.
HALVED_ON_CORES = (_probe(192, 6, 512, 96), _probe(320, 8, 512, 128))
HALVED_ON_ACCELERATORS = (_probe(1536, 12, 512, 8192, 4), _probe(4096, 32, 512, 8192, 4))

# For simulated accelerators, whose times mean nothing.
DRY, HALVED_DRY = (ON_ACCELERATORS[0], _probe(48, 3, 96, 32, 2)), (_probe(32, 2, 64, 32, 2),)

Times = dict[str, float]  # part of the engine's work -> seconds
Shares = tuple[float, float]  # of both halves over a whole backward; what one half adds to recomputation is its own


def probe_on_cores(probe: Probe, num_devices: int) -> Times:
    """Seconds of each part of a probe on the engine, with every core busy."""
    settings = Settings(OptimizerSettings())
    times = time_stages(_workload(probe), settings, _EACH_ALONE, num_devices, MICROBATCHES)
    embedding, layer, head = range(len(_EACH_ALONE.forward))
    found = {
        "forward": times[Kind.F, layer][1],
        "recompute": times[Kind.B, layer][0],
        "backward": times[Kind.B, layer][1],
        "head_forward": times[Kind.F, head][1],
        "head_backward": times[Kind.B, head][1],
        "embedding_forward": times[Kind.F, embedding][1],
        "embedding_backward": sum(times[Kind.B, embedding]),
        "step": times[Kind.STEP, layer][1],
        "head_step": times[Kind.STEP, head][1],
        "embedding_step": times[Kind.STEP, embedding][1],
    }
    return {part: max(found[part], SHORTEST_S) for part in PARTS}


def halves_on_cores(probe: Probe, num_devices: int) -> Shares:
    """Times of the halves of a layer's backward, as fractions of the whole, with every core busy."""
    workload, settings, layer = _workload(probe), Settings(OptimizerSettings()), 1
    whole, halves = (
        time_stages(workload, settings, _EACH_ALONE, num_devices, MICROBATCHES, in_halves=split)
        for split in (False, True)
    )
    again, backward_s = whole[Kind.B, layer]
    return (sum(halves[Kind.I, layer]) - again) / backward_s, halves[Kind.W, layer][1] / backward_s


def _workload(probe: Probe, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Workload:
    sequences, name = probe.num_tokens // probe.model.seq_len, str(dtype).removeprefix("torch.")
    return synthetic(probe.model, sequences, name, SEED, MICROBATCHES, device)


# --- probes on an accelerator, where lanes are streams: the engine's own calls, one after another ----------------


def probe_on_accelerator(probe: Probe, watch: Stopwatch) -> Times:
    """Seconds of each part of a probe on one accelerator, and of its steps on the host."""
    workload = _workload(probe, watch.dtype, watch.device)
    batch = Batch(*(each.to(watch.device) for each in workload.batch(0)))
    workload = Workload(workload.modules, OneBatch(batch), workload.num_microbatches, SEED)
    stages = Stages(workload, Weights(workload, {}), Shells(workload.modules))
    embedding, layer, head = (range(module, module + 1) for module in (0, 1, len(workload.modules) - 1))
    x = stages.graph(embedding, batch.tokens, (0, 0), 0).end.detach()

    def timed(work: Work) -> float:
        return max(watch.seconds(lambda: work), SHORTEST_S)

    def keep(modules: range, start: torch.Tensor) -> Work:
        return lambda: stages.keep(modules, start, (0, 0), 0, lambda module, value: None)

    def run(modules: range, start: torch.Tensor) -> Callable[[], Graph]:
        return lambda: stages.graph(modules, start, (0, 0), 0)

    def there_and_back(modules: range, start: torch.Tensor) -> float:
        """Seconds of a backward behind its forward, with the sum that its gradients are added to."""
        total, grad = Sum(), None if modules is head else torch.ones_like(x)

        def both() -> None:
            total.add(backward(run(modules, start)(), grad)[1])

        return max(timed(both) - timed(run(modules, start)), SHORTEST_S)

    return {
        "forward": timed(keep(layer, x)),
        "recompute": timed(run(layer, x)),
        "backward": there_and_back(layer, x),
        "head_forward": timed(run(head, x)),
        "head_backward": there_and_back(head, x),
        "embedding_forward": timed(keep(embedding, batch.tokens)),
        "embedding_backward": there_and_back(embedding, batch.tokens),
        "step": _step_s(stages, layer, watch),
        "head_step": _step_s(stages, head, watch),
        "embedding_step": _step_s(stages, embedding, watch),
    }


def halves_on_accelerator(probe: Probe, watch: Stopwatch) -> Shares:
    """Times of the halves of a layer's backward, as fractions of the whole, on one accelerator."""
    workload = _workload(probe, watch.dtype, watch.device)
    whole, split = (
        Stages(workload, Weights(workload, {}), Shells(workload.modules), splits=splits) for splits in (False, True)
    )
    layer, hidden = range(1, 2), probe.model.hidden
    shape = probe.num_tokens // probe.model.seq_len, probe.model.seq_len, hidden
    x = torch.randn(*shape, device=watch.device, dtype=watch.dtype)
    grad, total = torch.ones_like(x), Sum()

    def graph(stages: Stages) -> Graph:
        return stages.graph(layer, x, (0, 0), 0)

    def timed(work: Work) -> float:
        return watch.seconds(lambda: work)

    again = timed(lambda: graph(whole))
    backward_s = timed(lambda: total.add(backward(graph(whole), grad)[1])) - again
    first = timed(lambda: input_gradient(graph(split), grad))
    both = timed(lambda: total.add(weight_gradients(input_gradient(graph(split), grad)[1])))
    backward_s = max(backward_s, SHORTEST_S)
    return (first - again) / backward_s, (both - first) / backward_s


def _step_s(stages: Stages, modules: range, watch: Stopwatch) -> float:
    """Seconds of AdamW on the masters of some modules and of the copies for the devices to read."""
    masters: Tensors = {
        (module, name): leaf.detach().to("cpu", torch.float32, copy=True)
        for module in modules
        for name, leaf in stages.weights.leaves(module, 0).items()
    }
    optimizer = OptimizerSettings().make(masters.values())
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    fresh = [torch.empty_like(master, dtype=watch.dtype) for master in masters.values()]

    def step() -> None:
        optimizer.step()
        for copy, master in zip(fresh, masters.values(), strict=True):
            copy.copy_(master)

    return max(watch.seconds_on_host(lambda: step), SHORTEST_S)


# --- both of them ----------------------------------------------------------------------------------------------------

Told = Callable[[str], None]

DEVICES = ("cpu", "accelerator")


@dataclass(frozen=True)
class Calibration:
    """Measurements of a machine's devices."""

    rates: Rates
    probes: Sequence[tuple[Probe, Times]]  # with the seconds that the parts of the engine's work took
    halves: Shares  # times of the two halves of a split backward, as fractions of the whole
    foreign_cores: float | None  # cores that other programs kept busy meanwhile; None where the system does not say
    peer_bytes_per_s: float | None = None  # from one accelerator to another; None where there is no other
    issues_ahead: bool = False  # whether the host issues work ahead of the devices


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
