"""Terms of a model on a machine: the input of a search, with the seconds of a microbatch of any size."""

from collections.abc import Sequence
from dataclasses import replace

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.pieces import combined
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layer_bytes import sizes_of
from rpbench.mesh.layers.layer_seconds import Setting
from rpbench.mesh.layers.layer_times import optimizer_traffic, pipeline_setting, setting_of, times_of, with_halves
from rpbench.mesh.placement import with_collectives
from rpbench.mesh.software import Software, usual_software
from rpbench.plan.contest.terms import Limits, Source, Terms, Timed, default_microbatches
from rpbench.workload.architecture import Architecture


def terms_of(
    model: Architecture,
    cluster: Machine,
    # figures and constants of `cost=analytic` on that machine; published times are scaled by it to other microbatches
    basis: Basis,
    *,
    num_devices: int,
    sequences_per_step: int,
    microbatches: Sequence[float] | None = None,  # sizes to choose from; None: those of `default_microbatches`
    source: Source = "analytic",
    limits: Limits | None = None,  # None: the usable memory of the machine's devices and its host
    num_steps: int = 4,
    known: Software | None = None,  # the software; None: that of a run that names none
) -> Terms:
    """Terms of a model on a machine; ValueError if a figure is missing, or there are no published times."""
    if limits is None:
        limits = Limits(cluster.usable_memory_bytes, cluster.host_memory_bytes)
    basis["host_bytes_per_s"]  # raises if it is missing: the host's optimizer cannot be charged without it
    kernels = known or usual_software(cluster.measured)
    if source == "analytic":
        cluster = with_collectives(cluster, kernels)

    def setting(sequences: float) -> Setting:
        return pipeline_setting(model, cluster, num_devices, kernels, sequences * model.seq_len, basis)

    return Terms(
        model,
        cluster,
        published_source(model, basis) if source == "published" else (lambda size: times_of(setting(size))),
        optimizer_traffic(setting_of(model, model.seq_len, basis) if source == "published" else setting(1)),
        num_devices,
        sequences_per_step,
        tuple(default_microbatches(sequences_per_step, num_devices) if microbatches is None else microbatches),
        num_steps,
        limits,
        source=source,
        may_be_few=microbatches is None,
        sized=None if source == "published" else (lambda size: sizes_of(setting(size), round(size * model.seq_len))),
    )


def published_source(model: Architecture, basis: Basis) -> Timed:
    """Published times, with halves of backward in the ratio of FLOPs; ValueError for a model without any.

    Times of other sizes scale like counted times (derived).
    """
    name = model.published_name or ""
    measured, tokens = published_times(name), published_tokens_per_microbatch(name)
    measured = with_halves(measured, model)
    counted = times_of(setting_of(model, tokens, basis))

    def times(sequences: float) -> LayerTimes:
        if sequences * model.seq_len == tokens:
            return measured
        now = times_of(setting_of(model, sequences * model.seq_len, basis))
        found = combined(lambda time, new, old: time * new / old, measured, now, counted)
        return replace(found, hop=measured.hop * sequences * model.seq_len / tokens)

    return times
