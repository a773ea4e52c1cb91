"""Probes: small models of different shapes whose layers are timed as the engine runs them.

No experiment trains them. They differ in width, tokens and vocabulary, so that a layer's time can be divided into a
constant, its products, its element-wise kernels and its weights (`rpbench.mesh.layers.engine_kernels`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from rpbench.cost.hardware.measured import PARTS
from rpbench.engine.compute.stage import Graph, Shells, Stages, backward, input_gradient, weight_gradients
from rpbench.engine.measure.layer_times import time_stages
from rpbench.engine.measure.profiles import OneBatch
from rpbench.engine.measure.stopwatch import Stopwatch, Work
from rpbench.engine.state.gradients import Sum, Tensors
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.state.weights import Weights
from rpbench.engine.training import Settings
from rpbench.engine.workload import Workload, synthetic
from rpbench.ir.action import Kind
from rpbench.ir.partition import symmetric
from rpbench.models.data import Batch
from rpbench.workload.architecture import Architecture

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


# --- on an accelerator, where lanes are streams: the engine's own calls, one after another ---------------------------


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
        total, slope = Sum(), None if modules is head else torch.ones_like(x)

        def both() -> None:
            total.add(backward(run(modules, start)(), slope)[1])

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
    slope, total = torch.ones_like(x), Sum()

    def graph(stages: Stages) -> Graph:
        return stages.graph(layer, x, (0, 0), 0)

    def timed(work: Work) -> float:
        return watch.seconds(lambda: work)

    again = timed(lambda: graph(whole))
    backward_s = timed(lambda: total.add(backward(graph(whole), slope)[1])) - again
    first = timed(lambda: input_gradient(graph(split), slope))
    both = timed(lambda: total.add(weight_gradients(input_gradient(graph(split), slope)[1])))
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
