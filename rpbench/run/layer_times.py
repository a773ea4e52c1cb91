"""Layer times of a request: what every layer of its model takes, from the source that `cost=` names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from rpbench.config.choices import ConfigError, CostConfig
from rpbench.config.keys import LAYERS, check_figures
from rpbench.config.request import Request
from rpbench.cost.constant import constant_times, unit_times
from rpbench.cost.hardware.basis import Basis, make_basis
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.pieces import between, mean_times, of_lengths, of_piece, of_segments
from rpbench.cost.profiled import read_profile
from rpbench.cost.published import TIMED_ON, published_times
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layers.layer_seconds import Setting
from rpbench.mesh.layers.layer_times import penalised, pipeline_setting, times_of, with_halves
from rpbench.mesh.software import Software, usual_software
from rpbench.records.provenance import usable_cores
from rpbench.workload.architecture import Architecture


def layer_times(request: Request, num_layers: int) -> LayerTimes:
    """Times of the layers on the cluster's devices, the mean over microbatches of unequal lengths.

    `num_layers` counts for a request without a model. Raises ConfigError if the source lacks something it needs.
    """
    each = microbatch_times(request, num_layers)
    return mean_times(each) if each else _of_devices(request, _SOURCES[request.cost.name](request, num_layers))


def microbatch_times(request: Request, num_layers: int) -> tuple[LayerTimes, ...]:
    """The layer times of every microbatch of a step; empty where all have the same length."""
    lengths, found = request.workload.by_microbatch, dict[tuple[int, ...], LayerTimes]()
    if not lengths:
        return ()
    counted = request.cost.name == "analytic"
    num_tokens = request.tokens_per_microbatch or sum(map(sum, lengths)) / len(lengths)
    whole = None if counted else _SOURCES[request.cost.name](request, num_layers)
    measures = request.cost.name == "profiled" and request.cost.profile is None
    line = _through_shortest(request, num_layers, lengths, whole) if measures and whole else lambda times: times
    for own in dict.fromkeys(lengths):
        if whole is None:
            times = _counted(request, num_layers, own)
        else:
            times = line(of_lengths(whole, request.model, own, num_tokens))
        found[own] = _of_devices(request, times)
    return tuple(found[own] for own in lengths)


def _through_shortest(
    request: Request, num_layers: int, lengths: Sequence[tuple[int, ...]], whole: LayerTimes
) -> Callable[[LayerTimes], LayerTimes]:
    """Maps times scaled by FLOPs onto the line through two measurements: full sequences and the shortest."""
    model, sequences = request.model, request.workload.microbatch_sequences
    assert model is not None  # a profile needs one
    length = max(1, round(min(map(sum, lengths)) / sequences))
    if length == model.seq_len:
        return lambda times: times
    short = _profiled(replace(request, model=replace(model, seq_len=length)), num_layers)
    scaled = of_lengths(whole, model, (length,) * sequences, sequences * model.seq_len)
    return lambda times: between(short, whole, times, scaled)


def _of_devices(request: Request, times: LayerTimes) -> LayerTimes:
    """The times with recomputation, device speeds, frozen layers and the settings of `cost` applied."""
    if request.recompute == "none":
        times = replace(times, recompute=[0] * times.num_layers)
    speeds = request.cluster.speeds_of(request.num_devices)
    times = penalised(times, request.cost.split_penalty)
    times = times if request.model is None else times.frozen(request.model.frozen_layers)
    return replace(times, overlap_gain=request.cost.overlap_gain, speeds=speeds)


def check_published(request: Request) -> None:
    """Raise ConfigError for published timings on another machine; a cluster without rates passes."""
    cluster = request.cluster
    if request.cost.name != "published" or cluster.published_name == TIMED_ON or cluster.matmul_flops_per_s is None:
        return
    raise ConfigError(
        f"cost=published with cluster={cluster.name}: the published timings are of an RTX 4090; use cost=analytic, "
        f"which counts for {cluster.name}, take cluster=8x_rtx4090, or say that its devices are the same: "
        f"cluster.published_name={TIMED_ON}"
    )


def _constant(request: Request, num_layers: int) -> LayerTimes:
    cost = request.cost
    times = constant_times(
        num_layers,
        request.num_devices,
        forward_ms=cost.forward_ms,
        input_grad_ms=cost.input_grad_ms,
        weight_grad_ms=cost.weight_grad_ms,
        recompute_ms=cost.recompute_ms,
        hop_ms=cost.hop_ms,
        head_share=cost.head_share,
    )
    return of_piece(times, request.pieces)


def _published(request: Request, num_layers: int) -> LayerTimes:
    check_published(request)
    return _halved(request, published_times((request.model and request.model.published_name) or ""))


def _halved(request: Request, times: LayerTimes) -> LayerTimes:
    """Layer times with both halves of every backward, under `cost.split_backward`."""
    return with_halves(times, request.model) if request.cost.split_backward and request.model else times


def setting_of(request: Request, lengths: Sequence[int] = ()) -> Setting:
    """The basis of `cost=analytic` for the layers of a request: its software on devices of its machine.

    `lengths` are those of a microbatch's sequences: kernels are counted for their tokens in sequences of one length,
    sum of squares over sum, whose tokens attend to as many keys. Raises ConfigError without a model or a needed figure.
    """
    model, cost, cluster = request.model, request.cost, request.cluster
    if model is None:
        raise ConfigError("cost=analytic follows from a model's shape; choose one, as in model=qwen3_1p7b")
    known = request.software or usual_software(cluster.measured)
    if known.kernels in ("eager", "fused") or (cluster.gpu is None and known.kernels == "tiled"):
        check_figures(cluster, LAYERS, "cost=analytic")
    numbers = numbers_on(cluster, cost, known)
    tokens = request.tokens_per_microbatch or 0
    if lengths:
        tokens = sum(lengths)
        model = replace(model, seq_len=round(sum(length * length for length in lengths) / tokens))
    return pipeline_setting(model, cluster, request.num_devices, known, tokens, numbers)


def _counted(request: Request, num_layers: int, lengths: Sequence[int] = ()) -> LayerTimes:
    setting, segments = setting_of(request, lengths), request.schedule.num_segments
    times = times_of(setting)
    if segments == 1:
        return times
    return of_segments(times, times_of(replace(setting, sequences=setting.sequences / segments)), segments)


def numbers_on(cluster: Machine, cost: CostConfig, known: Software | None) -> Basis:
    """The numbers behind `cost=analytic` on a cluster; `cost.constants` go before those of a named software."""
    if known is None:
        return make_basis(cluster, cost.constants, cost.declared)
    return make_basis(cluster, {**known.numbers, **cost.constants}, {**known.declared, **cost.declared})


def _profiled(request: Request, num_layers: int) -> LayerTimes:
    """Measured once a process for the same arguments, or read from the file of an earlier run."""
    model, profile = request.model, request.cost.profile
    if model is None:
        raise ConfigError("cost=profiled measures the layers of a model; choose one, as in model=mid_gpt")
    if profile is not None:
        times = read_profile(Path(profile))
        if times.num_layers != model.num_layers:
            raise ConfigError(
                f"cost.profile={profile} is of {times.num_layers} layers, model={model.name} has "
                f"{model.num_layers}; leave cost.profile null to measure this one"
            )
        return _halved(request, times)
    # More threads than cores would only wait for each other.
    threads = min(request.num_devices, usable_cores())
    sequences, per_device = request.workload.microbatch_sequences, request.cost.microbatches_per_device
    return _halved(request, _measured(model, sequences, request.dtype, request.seed, threads, per_device))


@cache
def _measured(
    model: Architecture, sequences: int, dtype: str, seed: int, num_devices: int, microbatches_per_device: int
) -> LayerTimes:
    from rpbench.engine.backends.threads import one_thread
    from rpbench.engine.measure.layer_times import time_layers  # torch, only where no profile is read from a file
    from rpbench.engine.training import Settings
    from rpbench.engine.workload import synthetic

    with one_thread():
        workload = synthetic(model, sequences, dtype, seed, num_microbatches=1)
        return time_layers(workload, Settings(), num_devices, microbatches_per_device)


_SOURCES: Mapping[str, Callable[[Request, int], LayerTimes]] = {
    "unit": lambda request, num_layers: of_piece(unit_times(num_layers), request.pieces),
    "constant": _constant,
    "published": _published,
    "analytic": _counted,
    "profiled": _profiled,
}
