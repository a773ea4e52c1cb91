"""Closed forms behind figures 2, 3, 5 and 14: recompute or reload, ideal bubble, device balance, cost.

Published values stand in `analysis/published/`.

Source: "Efficient Training on Multiple Consumer GPUs with RoundPipe", arXiv 2604.27085, figures 2 (section 2.1.1), 3
(section 2.3), 5 (section 3.3) and 14 (section 5.5); formulas as in its artifact.
"""

from math import ceil, floor

from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import BYTES_PER_VALUE, Convention


def recompute_time_s(
    model: Architecture, num_tokens: int, flops_per_s: float, convention: Convention = "artifact"
) -> float:
    """Seconds to repeat one layer's forward at `flops_per_s` (figure 2)."""
    return model.layer_forward_flops(num_tokens, convention) / flops_per_s


def reload_time_s(
    model: Architecture, num_tokens: int, link_bytes_per_s: float, convention: Convention = "artifact"
) -> float:
    """Seconds to load the activations of one layer from host memory (figure 2)."""
    return model.layer_activation_bytes(num_tokens, convention) / link_bytes_per_s


def ideal_bubble_fraction(num_layers: int, num_devices: int, num_microbatches: int) -> float:
    """Bubble of an interleaved pipeline of equal layers, one layer a stage, without a head (figure 3).

    (p - 1) / (ceil(L / p) * m + p - 1) with p devices, L layers and m microbatches. The figure has p = 8 and m = 16.
    """
    fill = num_devices - 1
    return fill / (ceil(num_layers / num_devices) * num_microbatches + fill)


def operational_intensity(model: Architecture, num_sequences: int, convention: Convention = "artifact") -> float:
    """FLOPs of one layer per byte uploaded for it: its weights, all experts, and its input (figure 5).

    The convention `artifact` counts the weights of the matrices alone: no router, biases and norms.
    """
    flops, weight_bytes, input_bytes = _intensity_terms(model, convention)
    return num_sequences * flops / (weight_bytes + num_sequences * input_bytes)


def smallest_compute_bound_batch(
    model: Architecture, threshold_flop_per_byte: float, convention: Convention = "artifact"
) -> int | None:
    """Fewest sequences whose operational intensity exceeds the threshold; None if no batch does (figure 5).

    n * F / (W + n * A) > t solved for n. The intensity grows with n towards F / A: no batch exceeds a higher threshold.
    """
    flops, weight_bytes, input_bytes = _intensity_terms(model, convention)
    margin = flops - threshold_flop_per_byte * input_bytes
    if margin <= 0:
        return None
    return floor(threshold_flop_per_byte * weight_bytes / margin) + 1


def cost_usd_per_billion_tokens(price_usd_per_hour: float, tokens_per_s: float) -> float:
    """US dollars to train on 1e9 tokens (figure 14)."""
    return price_usd_per_hour / (tokens_per_s * 3600) * 1e9


def _intensity_terms(model: Architecture, convention: Convention) -> tuple[float, float, int]:
    """FLOPs per sequence, bytes of the weights, bytes of the input per sequence."""
    tokens = model.seq_len
    flops = model.layer_forward_flops(tokens, convention) + model.router_forward_flops(tokens)
    if convention == "artifact":
        weights = model.layer_matrix_weights(model.experts.total if model.experts else None, convention)
    else:
        weights = model.layer_parameters
    return flops, BYTES_PER_VALUE * weights, model.boundary_bytes(tokens)
