"""Seconds of one layer on one device of a mesh: kernels both ways, and the collectives inside."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple, get_args

from rpbench.cost.footprint.sizes import OPTIMIZER_BYTES, OPTIMIZER_BYTES_8
from rpbench.cost.hardware.basis import Basis, make_basis
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.layers.adapters import Adapters, adapted_experts, adapted_maps
from rpbench.mesh.layers.collectives import exchange_s, gather_s, reduce_s, ring_pass_s, scatter_s
from rpbench.mesh.layers.eager_kernels import EagerKernels, Load
from rpbench.mesh.layout import Mesh
from rpbench.mesh.placement import Group, Links, group_of, pipeline_inside, reached
from rpbench.mesh.software import Software
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Experts, Layer, mean_keys

# Products: the fraction of the rate that a matrix product reaches, by tiles, waves, alignment, thin and narrow sizes.
# Source: NVIDIA, Matrix multiplication background user's guide (tile and wave quantization, alignment).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
SPLIT_DEPTH = 2048  # inner values in each part of a split product
SPLIT_COST = 0.97
MAX_SPLIT = 16


@lru_cache(maxsize=65536)
def filled(m: int, n: int, k: int, units: int, batch: int = 1) -> float:
    """Fraction of the device's units that work on real outputs, with the best tile and split of k."""
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        inside = batch * m * n / (tiles * rows * columns)
        waves = _waves(tiles, units)
        split = min(MAX_SPLIT, k // SPLIT_DEPTH)
        if split > 1:
            waves = max(waves, *(SPLIT_COST * _waves(tiles * parts, units) for parts in range(2, split + 1)))
        best = max(best, rate * inside * waves)
    return best


def _waves(tiles: int, units: int) -> float:
    return tiles / (units * ceil(tiles / units))


@lru_cache(maxsize=65536)
def alignment(size: int) -> float:
    """Fraction of the rate that a 16-bit product reaches by the powers of two in one of its sizes."""
    for multiple, rate in ((64, 1.0), (32, 0.97), (16, 0.94), (8, 0.86), (4, 0.66), (2, 0.5)):
        if size % multiple == 0:
            return rate
    return 0.4


def efficiency(m: int, n: int, k: int, units: int, narrow: float, shallow: float, rows: tuple[int, ...] = ()) -> float:
    """Fraction of the rate of large aligned products of m x k and k x n values; `rows`: sizes that lie in a row in
    memory, which alone have to be aligned. Empty: n and k, those of a map's outputs and inputs for m tokens.
    """
    thin, aligned = min(m, n), min(map(alignment, rows or (n, k)))
    return filled(m, n, k, units) * aligned * (k / (k + shallow)) * (thin / (thin + narrow))


Recompute = Literal["none", "selective", "per_op", "full", "fitting"]  # fitting: as few layers as the memory allows
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
LAYERWISE = ("full", "fitting")
Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
BITS: dict[str, int] = {"bf16": 16, "fp8": 8, "mxfp8": 8, "nvfp4": 4}
# 16-bit passes that it takes to quantise a value; blocks are made in both orientations. Chosen from rows of
# Megatron-Bridge that differ in their format alone.
QUANTISED = {"bf16": 0.0, "fp8": 3.0, "mxfp8": 8.0, "nvfp4": 9.0}
PER_OP_SHARE = 0.45  # of a forward: every second product is kept
LAYER_KERNELS = {"unfused": 22, "flash1": 16, "flash2": 14, "flash3": 14}


class Seconds(NamedTuple):
    """Seconds of a layer (or of the head), one microbatch."""

    # forward, input_grad, weight_grad: kernels
    forward: float
    input_grad: float
    weight_grad: float
    recompute: float = 0.0  # kernels run again before the backward, collectives included
    # forward_exposed, backward_exposed: collectives that nothing hides
    forward_exposed: float = 0.0
    backward_exposed: float = 0.0
    host: float = 0.0  # of the interpreter, one way. It runs beside the device, so the longer of both counts.

    @property
    def forward_all(self) -> float:
        """The forward with its collectives."""
        return max(self.forward + self.forward_exposed, self.host)

    @property
    def backward_all(self) -> float:
        """The backward with its collectives, without recomputation."""
        return max(self.input_grad + self.weight_grad + self.backward_exposed, self.host)

    @property
    def waits(self) -> float:
        """Seconds by which the host takes longer than the device, both ways."""
        device = self.forward + self.forward_exposed + self.input_grad + self.weight_grad + self.backward_exposed
        return self.forward_all + self.backward_all - device

    @property
    def input_grad_all(self) -> float:
        """The gradient of the input of a split backward, with its collectives."""
        return max(self.input_grad + self.backward_exposed, self.host)


@dataclass(frozen=True)
class Setting:
    """The sizes, software and machine that the seconds of a layer depend on."""

    architecture: Architecture
    machine: Machine
    mesh: Mesh
    software: Software
    seq_len: int
    sequences: float = 1  # of a mean microbatch on one device of the data group, so they need not be whole
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    numbers: Basis | None = None  # figures of the machine and constants of the software, for kernels that are not tiled
    adapters: Adapters | None = None  # of a framework that fuses maps first; None: those of the architecture, if any

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are recomputed from their inputs: all, or those that do not fit."""
        return self.recompute in LAYERWISE

    @property
    def optimizer_share(self) -> float:
        """Bytes of the optimizer's state of a parameter over those with moments in 32 bits; the embedding has these."""
        if self.architecture.optimizer_bits == 32:
            return 1.0
        return 1.0 - (OPTIMIZER_BYTES - OPTIMIZER_BYTES_8) / self.software.optimizer_bytes

    @property
    def optimizer_traffic_share(self) -> float:
        """The same of the memory traffic of a step, which reads and writes the state."""
        saved = self.software.optimizer_bytes * (1.0 - self.optimizer_share)
        return 1.0 - 2.0 * saved / self.software.constants["optimizer_bytes"]

    @property
    def has_adapters(self) -> bool:
        """Whether adapters learn while the weights stay."""
        return self.adapters is not None or self.architecture.lora_rank is not None

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch on a device; tensor shards all have the same."""
        return int(self.sequences * self.seq_len) // self.mesh.context

    @property
    def links(self) -> Links:
        return reached(self.machine, self.software)

    @property
    def memory_rate(self) -> float:
        """Bytes a second that element-wise kernels reach."""
        return self.machine.device.memory_bytes_per_s * self.machine.device.sustained_memory

    @property
    def spread(self) -> int:
        """Devices that divide the element-wise work of a tensor group."""
        return self.mesh.tensor if self.mesh.sequence_parallel else 1

    def group(self, size: int, stride: int) -> Group:
        return group_of(size, stride, self.machine, self.links)

    def replica_group(self, size: int = 0) -> Group:
        """The devices with the same dense parameters, or the first `size` of them: data and context together."""
        mesh = self.mesh
        stride = min(mesh.stride("data"), mesh.stride("context")) if mesh.context > 1 else mesh.stride("data")
        return self.group(size or mesh.replicas, stride)

    def ends_group(self) -> Group:
        """The two devices with the same part of a pipeline's first and last stage."""
        apart = self.mesh.stride("pipeline") * (self.mesh.pipeline - 1)
        return self.group(2, 1 if pipeline_inside(self.mesh, self.machine) else apart)

    @cached_property
    def kinds(self) -> dict[Layer, Seconds]:
        return {layer: layer_seconds(self, layer) for layer in dict.fromkeys(self.architecture.layers)}

    @cached_property
    def head(self) -> Seconds:
        """Seconds of the output matrix and the loss."""
        return head_seconds(self)


class _Kernels:
    def __init__(self, setting: Setting) -> None:
        self.setting, self.c = setting, setting.software.constants
        gpu, bits = setting.machine.device, BITS[setting.precision]
        few = setting.microbatch_tokens / (setting.microbatch_tokens + self.c["tokens"])
        self.rate_16 = few * gpu.matmul_rate(16) * self.c["matmul"]
        self.rate = self.rate_16 if bits == 16 else few * gpu.matmul_rate(bits) * self.c["matmul_low"]
        self.units = gpu.multiprocessors
        self.bandwidth = setting.memory_rate

    def product(
        self, m: int, n: int, k: int, low: bool = True, out_bytes: float = 2.0, rows: tuple[int, ...] = ()
    ) -> float:
        """Seconds of one product, the larger of computing and moving; `rows`: as of `efficiency`."""
        rate = self.rate if low else self.rate_16
        share = efficiency(m, n, k, self.units, self.c["narrow"], self.c["shallow"], rows)
        moved = 2.0 * (m * k + n * k) + out_bytes * m * n
        return max(2.0 * m * n * k / (rate * share), moved / self.bandwidth) + self.c["launch_s"] / 3

    def three(self, m: int, n: int, k: int, low: bool = True) -> tuple[float, float, float]:
        """Seconds of a linear map: forward, gradient of its input, gradient of its weight."""
        accumulated = 2.0 * self.setting.software.accumulate_bytes
        # Tokens are never the row of a 16-bit matrix; products of fewer bits read copies in which they are. Outputs are
        # one too, and are left out: the constants were fitted without them.
        rows = () if low and self.setting.precision != "bf16" else (k,)
        weights = self.product(n, k, m, low, accumulated, rows)
        return self.product(m, n, k, low), self.product(m, k, n, low), weights

    def grouped(self, tokens: float, groups: int, n: int, k: int) -> float:
        """Seconds of products of `groups` experts with as many tokens each: never faster than reading the weights."""
        each = max(1, round(tokens / groups))
        share = filled(each, n, k, self.units, groups) * min(alignment(n), alignment(k))
        share *= (k / (k + self.c["shallow"])) * (each / (each + self.c["narrow"])) * self.c["grouped"]
        moved = 2.0 * groups * n * k + 2.0 * tokens * (n + k)
        return max(2.0 * tokens * n * k / (self.rate * share), moved / self.bandwidth) + self.c["launch_s"] / 3

    def elementwise(self, num_bytes: float) -> float:
        return num_bytes / self.bandwidth * self.c["elementwise"]


def layer_seconds(setting: Setting, layer: Layer) -> Seconds:
    """Seconds of one layer for one microbatch: kernels as the software has them, and collectives inside."""
    count = _tiled if setting.software.kernels == "tiled" else _counted
    forward, input_grad, weight_grad, attention, attention_back = count(setting, layer)
    tensor, tensor_back = _tensor_s(setting)
    ring, ring_back = _ring_s(setting, layer, attention, attention_back)
    sent = _dispatch_s(setting) if layer.routed else 0.0
    exposed = tensor + ring + sent
    again = _recomputed(setting, forward, attention, tensor, sent)
    host = setting.software.constants["dispatch_s"] if layer.routed and setting.mesh.expert > 1 else 0.0
    if setting.has_adapters and setting.software.kernels == "tiled":  # kernels that are counted have theirs
        beside = adapted_values(setting, layer) * 2.0 / setting.memory_rate
        forward, input_grad, weight_grad = forward + 2.0 * beside, input_grad + 2.0 * beside, beside
    return Seconds(forward, input_grad, weight_grad, again, exposed, tensor_back + ring_back + sent, host)


_Counted = tuple[float, float, float, float, float]  # forward, both halves of a backward; attention's core both ways


def _tiled(setting: Setting, layer: Layer) -> _Counted:
    """Seconds of the kernels of a layer, each product by its tiles."""
    kernels = _Kernels(setting)
    maps = _maps(kernels, layer)
    attention, attention_back = _attention(kernels, layer)
    element = kernels.elementwise(_element_bytes(setting, layer))
    experts = _experts(kernels) if layer.routed else (0.0, 0.0, 0.0)
    forward = maps[0] + attention + element + experts[0]
    input_grad = maps[1] + attention_back + 1.6 * element + experts[1]
    weight_grad = maps[2] + experts[2]
    num = LAYER_KERNELS[setting.software.attention] + 12 * layer.routed
    floor, waits = num * kernels.c["launch_s"], kernels.c["layer_s"]
    forward = max(forward, floor) + waits
    input_grad = max(input_grad, 1.3 * floor) + waits
    return forward, input_grad, weight_grad, attention, attention_back


def eager_kernels(setting: Setting) -> EagerKernels:
    """The kernels of software that runs operator by operator."""
    tokens, fused = setting.sequences * setting.seq_len / setting.mesh.context, setting.software.kernels == "fused"
    own, shards = setting.architecture, setting.mesh.tensor
    return EagerKernels(own, setting.seq_len, tokens, numbers_of(setting), shards=shards, fused=fused)


def numbers_of(setting: Setting) -> Basis:
    """The numbers that kernels are counted with: those given, or those of the machine's file and the software."""
    if setting.numbers is not None:
        return setting.numbers
    return make_basis(setting.machine, setting.software.numbers, setting.software.declared)


def _counted(setting: Setting, layer: Layer) -> _Counted:
    """Seconds of the kernels of a layer, all layers alike, operator by operator."""
    kernels = eager_kernels(setting)
    core = (Load(0.0, each.attention_flops) for each in (kernels.forward, kernels.input_grad()))
    attention, attention_back = (kernels.seconds(each) for each in core)
    return (*kernels.layer(), attention, attention_back)


def head_seconds(setting: Setting) -> Seconds:
    """Seconds of the output matrix and the loss for one microbatch, without recomputation."""
    if setting.software.kernels != "tiled":
        forward, backward = (part / setting.mesh.tensor for part in eager_kernels(setting).head())
        return Seconds(forward, backward / 2, backward / 2)
    kernels, mesh, own = _Kernels(setting), setting.mesh, setting.architecture
    rows, tokens = padded_vocab(setting) // mesh.tensor, setting.microbatch_tokens
    passes = 1 + own.num_prediction_layers
    forward, input_grad, weight_grad = kernels.three(tokens, rows, own.hidden, low=False)
    loss = tokens * rows * setting.software.loss_bytes / kernels.bandwidth * setting.software.constants["loss"]
    tensor = _one_sum_s(setting)
    return Seconds(
        passes * (forward + 0.5 * loss),
        passes * (input_grad + 0.5 * loss),
        0.0 if setting.has_adapters else passes * weight_grad,
        forward_exposed=passes * 0.5 * tensor,
        backward_exposed=passes * tensor,
    )


def padded_vocab(setting: Setting) -> int:
    """Rows of the vocabulary with its padding."""
    multiple = setting.software.pad_vocab * setting.mesh.tensor
    return ceil(setting.architecture.vocab / multiple) * multiple


def adapted_values(setting: Setting, layer: Layer) -> float:
    """16-bit values that adapters read and write, one way; products that narrow are bound by memory."""
    own, mesh = setting.architecture, setting.mesh
    beside = sum(k + 2 * n for k, n in adapted_maps(own, setting.adapters, layer, mesh.tensor))
    visited = sum(m.visits * (m.inputs + 2 * m.outputs) for m in adapted_experts(own, layer))
    return float(setting.microbatch_tokens * (beside + visited / mesh.expert_tensor))


def _maps(kernels: _Kernels, layer: Layer) -> tuple[float, float, float]:
    """Seconds of a layer's products without routed experts."""
    own, mesh = kernels.setting.architecture, kernels.setting.mesh
    maps = list(own.attention_maps())
    if not layer.routed:
        maps += own.mlp_maps(own.inner)
    elif own.experts and own.experts.shared_inner:
        maps += own.mlp_maps(own.experts.shared_inner)
    found = []
    spread_tokens = max(1, kernels.setting.microbatch_tokens // kernels.setting.spread)
    for inputs, outputs, cut_in, cut_out in maps:
        n = max(1, outputs // mesh.tensor) if cut_out else outputs
        k = max(1, inputs // mesh.tensor) if cut_in else inputs
        found.append(kernels.three(kernels.setting.microbatch_tokens if cut_in or cut_out else spread_tokens, n, k))
    if layer.routed and own.experts:
        found.append(kernels.three(spread_tokens, own.experts.total, own.hidden, low=False))
    return _summed(found)


def _summed(each: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    forward, input_grad, weight_grad = map(sum, zip(*each, strict=True))
    return forward, input_grad, weight_grad


def _attention(kernels: _Kernels, layer: Layer) -> tuple[float, float]:
    """Seconds of attention's core, forward and backward."""
    setting, own = kernels.setting, kernels.setting.architecture
    heads = own.heads / setting.mesh.tensor
    if setting.software.attention == "unfused":
        return _unfused(kernels, heads)
    keys = mean_keys(setting.seq_len, layer.window)
    flops = 2.0 * setting.microbatch_tokens * heads * (own.score_dim + own.value_dim) * keys
    if setting.mesh.context > 1 and not setting.software.zigzag:
        flops *= 2.0 * setting.mesh.context / (setting.mesh.context + 1)
    rate = setting.machine.device.attention_rate(setting.software.attention) * kernels.c["attention"]
    rate *= 2.0 * keys / (2.0 * keys + 1000.0)
    rate *= min(1.0, 0.85 + 0.15 * (own.score_dim - 64) / 64) if setting.software.attention != "flash1" else 1.0
    return flops / rate, 2.5 * flops / (0.85 * rate)


def _unfused(kernels: _Kernels, heads: float) -> tuple[float, float]:
    """Seconds of unfused attention, forward and backward: two batched products, and passes over all scores."""
    setting, own = kernels.setting, kernels.setting.architecture
    s, d = setting.seq_len, own.head_dim
    batch = max(1, round(setting.sequences * heads))
    share = d / (d + 64) * alignment(d) ** kernels.c["head_alignment"] * filled(s, s, d, kernels.units, batch)
    flops = 4.0 * batch * s * s * d
    scores = setting.software.softmax_passes * batch * s * s * 2.0
    softmax = kernels.elementwise(scores)
    products = flops / (kernels.rate_16 * share)
    return products + softmax, 2.0 * products + 1.3 * softmax


def _element_bytes(setting: Setting, layer: Layer) -> float:
    own, tokens = setting.architecture, setting.microbatch_tokens
    hidden = 2.0 * own.hidden * setting.software.passes / setting.spread
    inner, extra = float(own.inner), 0.0
    if layer.routed and own.experts:
        inner = own.experts.shared_inner + own.experts.active * own.experts.inner
        extra = (12.0 + 4.0 * own.biases) * own.experts.active * own.hidden / setting.mesh.tensor
    added = 2 * (1 + own.gated) if layer.routed and own.biases else 0  # biases of experts are no part of their products
    mlp = 2.0 * ((5 if own.gated else 2) + added) * inner / setting.mesh.tensor
    quantised = QUANTISED[setting.precision] * 2.0 * (own.hidden / setting.spread + inner / setting.mesh.tensor)
    return tokens * (hidden + mlp + extra + quantised)


def _experts(kernels: _Kernels) -> tuple[float, float, float]:
    """Products of routed experts: forward, gradient of the input, gradient of the weights."""
    setting, own, mesh = kernels.setting, kernels.setting.architecture, kernels.setting.mesh
    assert own.experts is not None
    pairs = setting.microbatch_tokens * own.experts.active * mesh.expert_tensor / mesh.tensor * kernels.c["imbalance"]
    groups = max(1, own.experts.total // mesh.expert)
    found = []
    for inputs, outputs, cut_in, cut_out in own.mlp_maps(own.experts.inner):
        n = outputs // mesh.expert_tensor if cut_out else outputs
        k = inputs // mesh.expert_tensor if cut_in else inputs
        both = kernels.grouped(pairs, groups, n, k), kernels.grouped(pairs, groups, k, n)
        found.append((*both, _grouped_weights(kernels, pairs, groups, n, k)))
    return _summed(found)


def _grouped_weights(kernels: _Kernels, pairs: float, groups: int, n: int, k: int) -> float:
    """Seconds of experts' weight gradients: the product's inner size is an expert's tokens, its output is added up."""
    each = max(1, round(pairs / groups))
    share = filled(n, k, each, kernels.units, groups) * (each / (each + kernels.c["shallow"])) * kernels.c["grouped"]
    moved = 2.0 * kernels.setting.software.accumulate_bytes * groups * n * k + 2.0 * pairs * (n + k)
    return max(2.0 * pairs * n * k / (kernels.rate * share), moved / kernels.bandwidth)


def _recomputed(setting: Setting, forward: float, attention: float, tensor: float, sent: float) -> float:
    if setting.recomputes_layers:
        return setting.software.recompute * setting.software.constants["again"] * forward + tensor + sent
    if setting.recompute == "per_op":  # gathers are repeated with the products that need them, scatters are not
        return PER_OP_SHARE * (forward - attention) + 0.5 * tensor
    return attention if setting.recompute == "selective" and setting.software.attention == "unfused" else 0.0


# --- collectives ---------------------------------------------------------------------------------------------


def _one_sum_s(setting: Setting) -> float:
    """One all-reduce of a boundary tensor over the tensor group, or a gather and a scatter of it."""
    group = setting.group(setting.mesh.tensor, setting.mesh.stride("tensor"))
    size = 2.0 * setting.microbatch_tokens * setting.architecture.hidden
    return gather_s(size, group) + scatter_s(size, group) if setting.mesh.sequence_parallel else reduce_s(size, group)


def _tensor_s(setting: Setting) -> tuple[float, float]:
    """Exposed seconds of tensor parallelism: two sums each way."""
    if setting.mesh.tensor == 1:
        return 0.0, 0.0
    exposed = 2.0 * _one_sum_s(setting) * (1.0 - setting.software.hidden_tensor)
    return exposed, exposed


def _ring_s(setting: Setting, layer: Layer, attention: float, attention_back: float) -> tuple[float, float]:
    """Exposed seconds of the ring of keys and values: its time beyond 0.9 times that of attention's core."""
    if setting.mesh.context == 1:
        return 0.0, 0.0
    own = setting.architecture
    width = own.key_value_heads * (own.score_dim + own.value_dim) / min(setting.mesh.tensor, own.key_value_heads)
    block = 2.0 * setting.microbatch_tokens * width
    if layer.window is not None:
        block *= min(1.0, layer.window * setting.mesh.context / setting.seq_len)
    group = setting.group(setting.mesh.context, setting.mesh.stride("context"))
    once = ring_pass_s(block, group)
    return max(0.0, once - 0.9 * attention), max(0.0, 2.0 * once - 0.9 * attention_back)


def _dispatch_s(setting: Setting) -> float:
    """Exposed seconds of dispatch and combine, one way."""
    own, mesh = setting.architecture, setting.mesh
    if own.experts is None or (mesh.expert == 1 and mesh.expert_tensor == 1):
        return 0.0
    # experts are dealt to neighbours, shards of one expert innermost
    group = setting.group(mesh.expert, mesh.expert_tensor)
    values = setting.microbatch_tokens / mesh.tensor * own.experts.active * own.hidden
    shards = setting.group(mesh.expert_tensor, 1)
    joined = 2.0 * values * mesh.expert_tensor  # gathered by the shards of an expert, and reduced again
    copies = _distinct_nodes(own.experts, group) / own.experts.active if setting.software.deduplicates else 1.0
    sent = exchange_s(setting.software.dispatch_bytes * values, group, copies_outside=copies)
    back = exchange_s(2.0 * values, group, copies_outside=copies)
    inside = gather_s(joined, shards) + scatter_s(joined, shards)
    return (sent + back + inside) * (1.0 - setting.software.hidden_expert)


def _distinct_nodes(experts: Experts, group: Group) -> float:
    """Expected number of nodes with a token's experts if all choices are equally likely, within the routing's limit."""
    nodes = max(1, group.size // group.here)
    each = experts.total / nodes
    missed = prod((experts.total - each - number) / (experts.total - number) for number in range(experts.active))
    return min(nodes * (1.0 - max(0.0, missed)), experts.node_limit or nodes)
