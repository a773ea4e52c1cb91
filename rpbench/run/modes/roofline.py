"""mode=roofline: closed forms of a model on a cluster. Nothing is simulated. Evidence: derived."""

from typing import Any

from rpbench.config.choices import ConfigError, Roofline
from rpbench.config.request import Request
from rpbench.cost import roofline
from rpbench.registry import unknown_name
from rpbench.run.recording import Outcome, Work
from rpbench.workload.counts import CONVENTIONS

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences per upload, as in figure 5


def prepare(request: Request) -> Work:
    """The closed forms of a model; ValueError if model or cluster lacks a number."""
    mode, model, cluster = request.mode_as(Roofline), request.given_model, request.cluster
    convention: Any = mode.convention  # one of them, as checked here
    if convention not in CONVENTIONS:
        raise ConfigError(unknown_name("mode.convention", mode.convention, list(CONVENTIONS)))
    if cluster.matmul_flops_per_s is None or cluster.host_to_device_bytes_per_s is None:
        raise ConfigError(
            f"mode=roofline needs the rates of a machine, cluster={cluster.name} has none; try 8x_rtx4090"
        )
    tokens = request.workload.microbatch_sequences * model.seq_len
    recompute = roofline.recompute_time_s(model, tokens, cluster.matmul_flops_per_s, convention)
    reload = roofline.reload_time_s(model, tokens, cluster.host_to_device_bytes_per_s, convention)
    ridge = cluster.matmul_flops_per_s / cluster.host_to_device_bytes_per_s
    fields: dict[str, Any] = {
        "evidence": "derived",
        "convention": convention,
        "recompute_s": recompute,
        "reload_s": reload,
        "reload_over_recompute": reload / recompute,
        "ideal_bubble": roofline.ideal_bubble_fraction(model.num_layers, request.num_devices, request.num_microbatches),
        "batch_sequences": list(BATCHES),
        "intensity_flop_per_byte": [roofline.operational_intensity(model, batch, convention) for batch in BATCHES],
        "ridge_flop_per_byte": ridge,
        "smallest_compute_bound_batch": roofline.smallest_compute_bound_batch(model, ridge, convention),
        "total_parameters": model.total_parameters,
        "trainable_parameters": model.trainable_parameters,
        "forward_flops_per_token": model.forward_flops(1, convention),
    }
    return Work({}, lambda: Outcome(fields))
