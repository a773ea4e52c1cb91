"""Layer times: the seconds of every layer of a setting, as `LayerTimes` for schedules and simulators."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic
from rpbench.ir.schedule import Shape
from rpbench.mesh.layers.collectives import reduce_s
from rpbench.mesh.layers.eager_kernels import input_share
from rpbench.mesh.layers.engine_kernels import engine_times
from rpbench.mesh.layers.layer_seconds import Seconds, Setting, eager_kernels, numbers_of, padded_vocab
from rpbench.mesh.layout import Mesh, check_shards
from rpbench.mesh.placement import hop_bytes_per_s, pipeline_inside
from rpbench.mesh.software import Software, software
from rpbench.workload.architecture import Architecture


def setting_of(model: Architecture, num_tokens: float, numbers: Basis, framework: str = "roundpipe") -> Setting:
    """A microbatch of `num_tokens` on one device, counted with these numbers; recomputed if a run says so."""
    where, known, seq_len = Machine(numbers.cluster_name), software(framework), model.seq_len  # all is in the numbers
    return Setting(model, where, Mesh(), known, seq_len, num_tokens / seq_len, recompute="full", numbers=numbers)


def pipeline_setting(
    model: Architecture, machine: Machine, num_devices: int, known: Software, num_tokens: float, numbers: Basis
) -> Setting:
    """A microbatch of `num_tokens` in a pipeline on devices of a machine; recomputed if a run says so."""
    node = machine.devices_per_node or num_devices  # a pipeline may leave devices of its last node to others
    where = machine.with_devices(num_devices if num_devices < node else -(-num_devices // node) * node)
    mesh, seq_len = Mesh(pipeline=num_devices), model.seq_len
    return Setting(model, where, mesh, known, seq_len, num_tokens / seq_len, "bf16", "full", numbers)


def times_of(setting: Setting) -> LayerTimes:
    """Seconds of one microbatch through each layer of a model; ValueError if a figure of the machine is missing."""
    uncut, uncut_along = (_uncut(setting, along_sequence=each) for each in (False, True))
    return replace(_times_of(setting), uncut=uncut, uncut_along=uncut_along)


def _times_of(setting: Setting) -> LayerTimes:
    hop, own = hop_s(setting), setting.architecture
    if setting.software.kernels == "engine":
        return engine_times(eager_kernels(setting), hop).frozen(own.frozen_layers)
    kinds, split = setting.kinds, setting.software.split_penalty
    layers = [kinds[kind] for kind in own.layers[: own.num_layers]]
    if setting.software.kernels == "tiled":
        more = sum(kinds[kind].forward for kind in own.layers[own.num_layers :])  # layers that predict further tokens
        share = 1 + more / sum(layer.forward for layer in layers)
        layers = [Seconds(*(share * part for part in layer)) for layer in layers] if more else layers
    times = as_times(layers, setting.head, hop, each=lost_s(setting), split=split).frozen(own.frozen_layers)
    if setting.software.kernels != "tiled":
        return times
    plain, along = (_shards(setting, along_sequence=each) for each in (False, True))
    beside = setting.software.constants["beside"]
    return replace(times, rank_loss=lost_s(setting), beside=beside, shards=plain, shards_along=along)


def _uncut(setting: Setting, *, along_sequence: bool) -> str:
    """Why layers cannot be cut into tensor shards on all devices of a setting; empty if they can."""
    devices = setting.mesh.num_devices
    shape = Shape(devices, 1, 1, num_parts=devices, tensor_parallel=True, sequence_parallel=along_sequence)
    try:
        check_shards(shape, setting.architecture)
    except ValueError as error:
        return str(error)
    return ""


def _shards(setting: Setting, *, along_sequence: bool) -> tuple[float, ...]:
    """Seconds of a device's shards times the devices, over those of whole layers: forwards, backwards, head.

    Empty if layers cannot be cut like this, or there is one device.
    """
    devices = setting.mesh.num_devices
    if devices == 1 or _uncut(setting, along_sequence=along_sequence):
        return ()
    whole = replace(setting, mesh=Mesh())
    cut = replace(setting, mesh=Mesh(tensor=devices, sequence_parallel=along_sequence))
    kernels = [_kernels_s(each) for each in (cut, whole)]
    return tuple(devices * one / other for one, other in zip(*kernels, strict=True))


def _kernels_s(setting: Setting) -> tuple[float, float, float]:
    """Seconds of the kernels of all layers' forwards, of their backwards and of the head, one microbatch."""
    counted = [(count, setting.kinds[kind]) for kind, count in Counter(setting.architecture.layers).items()]
    forward = sum(count * layer.forward for count, layer in counted)
    backward = sum(count * (layer.input_grad + layer.weight_grad) for count, layer in counted)
    return forward, backward, setting.head.forward + setting.head.input_grad + setting.head.weight_grad


def optimizer_traffic(setting: Setting) -> OptimizerTraffic:
    """The traffic of a step beside its microbatches."""
    numbers, constants = numbers_of(setting), setting.software.constants
    on_host = numbers["optimizer_bytes"]
    if setting.software.kernels == "tiled":
        return OptimizerTraffic(
            on_host,
            constants["optimizer_bytes"],
            setting.memory_rate,
            constants["step_s"],
            constants["beside"],
            tied_s(setting),
            setting.machine.hop_latency_s,
            setting.software.hidden_tensor,
        )
    return OptimizerTraffic(on_host, numbers["adam_bytes"], numbers.memory_rate)


def tied_s(setting: Setting) -> float:
    """Seconds of reducing a tied matrix's gradients over the two ends of a pipeline; 0 without a pipeline."""
    own, mesh = setting.architecture, setting.mesh
    if not own.tied or setting.has_adapters or mesh.pipeline == 1:
        return 0.0
    size = setting.software.gradient_bytes * padded_vocab(setting) * own.hidden / mesh.tensor
    return reduce_s(size, setting.ends_group())


def lost_s(setting: Setting) -> float:
    """Seconds that a rank loses with each microbatch, per layer and way; 0 unless kernels are tiled."""
    if setting.software.kernels != "tiled":
        return 0.0
    ways = 2 * len(setting.architecture.layers)
    return setting.software.constants["microbatch_s"] * setting.mesh.pipeline / ways


def as_times(
    layers: Sequence[Seconds], head: Seconds, hop: float, *, each: float = 0.0, split: float = 1.0
) -> LayerTimes:
    """The seconds of layers and head as `LayerTimes`; a layer loses `each` seconds in a forward, and in a backward.

    A split backward's kernels take `split` times those of a whole one.
    """
    return LayerTimes(
        forward=[layer.forward_all + each for layer in layers],
        recompute=[layer.recompute for layer in layers],
        backward=[layer.backward_all + each for layer in layers],
        input_grad=[split * layer.input_grad_all + each for layer in layers],
        weight_grad=[split * layer.weight_grad for layer in layers],
        head_forward=head.forward_all,
        head_backward=head.backward_all,
        head_input_grad=head.input_grad + head.backward_exposed,
        head_weight_grad=head.weight_grad,
        hop=hop,
    )


def hop_s(setting: Setting) -> float:
    """Seconds of a boundary tensor from one stage to the next; 0 without a link.

    Eager software, this project's engine, and any software on devices without a link to each other send it down to the
    host, then up.
    """
    own, mesh, machine = setting.architecture, setting.mesh, setting.machine
    if setting.software.kernels != "tiled":
        size = own.boundary_bytes(setting.sequences * setting.seq_len / mesh.context) / mesh.tensor
        return 2 * size / numbers_of(setting).get("copy_bytes_per_s", float("inf"))
    if mesh.pipeline == 1:
        return 0.0
    links, inside = setting.links, pipeline_inside(mesh, machine)
    pace = hop_bytes_per_s(machine, links, inside=inside)
    sent = own.boundary_bytes(setting.microbatch_tokens) / mesh.tensor
    gathered = 0.0 if mesh.sequence_parallel else sent * (mesh.tensor - 1) / links.intra_bytes_per_s
    return sent / pace + gathered + (5e-6 if inside else 15e-6)


def with_halves(times: LayerTimes, own: Architecture) -> LayerTimes:
    """The same times with both halves of every backward; a frozen head has no weight gradient."""
    share, head = input_share(own), 1.0 if own.lora_rank else 0.5
    return replace(
        times,
        input_grad=[share * time for time in times.backward],
        weight_grad=[(1 - share) * time for time in times.backward],
        head_input_grad=head * times.head_backward,
        head_weight_grad=(1 - head) * times.head_backward,
    )


def penalised(times: LayerTimes, penalty: float) -> LayerTimes:
    """The times with the halves of a backward taking `penalty` times a whole one: 1.02 to 1.04 in runs of others."""
    if penalty == 1:
        return times
    halves = ("input_grad", "weight_grad")
    layers: dict[str, Any] = {name: [penalty * time for time in getattr(times, name)] for name in halves}
    return replace(times, **layers, **{f"head_{name}": penalty * getattr(times, f"head_{name}") for name in halves})
