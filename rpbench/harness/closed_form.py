"""The roofline backend: closed forms of a model on a cluster, as record fields. Evidence: derived."""

from typing import Any

from rpbench.cost.hardware import Cluster
from rpbench.cost.model import CONVENTIONS, Convention, Model
from rpbench.cost.roofline import (
    ideal_bubble_fraction,
    operational_intensity,
    recompute_time_s,
    reload_time_s,
    smallest_compute_bound_batch,
)
from rpbench.harness.config import BackendConfig, ConfigError, RunConfig, WorkloadConfig, typed
from rpbench.registry import unknown_name

# Sequences per upload at which figure 5 draws the intensity.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def closed_forms(config: RunConfig) -> dict[str, Any]:
    """Times, intensities and the ideal bubble of the configured model, cluster and workload.

    Raises:
        ValueError: if the model or the cluster lacks the numbers a formula needs.
    """
    convention = _convention(config)
    if config.model["name"] == "abstract":
        raise ConfigError("backend=roofline needs a model with a shape; choose one, as in model=qwen3_1p7b")
    model, cluster = Model(**config.model), Cluster(**config.cluster)
    if cluster.matmul_flops_per_s is None or cluster.host_to_device_bytes_per_s is None:
        raise ConfigError(
            f"backend=roofline needs the rates of a machine, cluster={cluster.name} has none; try 8x_rtx4090"
        )
    tokens = typed(WorkloadConfig, config.workload).microbatch_sequences * model.seq_len
    recompute = recompute_time_s(model, tokens, cluster.matmul_flops_per_s, convention)
    reload = reload_time_s(model, tokens, cluster.host_to_device_bytes_per_s, convention)
    ridge = cluster.matmul_flops_per_s / cluster.host_to_device_bytes_per_s
    return {
        "convention": convention,
        "recompute_s": recompute,
        "reload_s": reload,
        "reload_over_recompute": reload / recompute,
        "ideal_bubble": ideal_bubble_fraction(model.num_layers, config.num_devices, config.num_microbatches),
        "batch_sequences": list(BATCHES),
        "intensity_flop_per_byte": [operational_intensity(model, batch, convention) for batch in BATCHES],
        "ridge_flop_per_byte": ridge,
        "smallest_compute_bound_batch": smallest_compute_bound_batch(model, ridge, convention),
        "total_parameters": model.total_parameters,
        "trainable_parameters": model.trainable_parameters,
        "forward_flops_per_token": model.forward_flops(1, convention),
    }


def _convention(config: RunConfig) -> Convention:
    name = typed(BackendConfig, config.backend).convention
    for convention in CONVENTIONS:
        if name == convention:
            return convention
    raise ConfigError(unknown_name("backend.convention", name, list(CONVENTIONS)))
