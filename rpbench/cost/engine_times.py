"""Layer times on this project's own engine, from the figures that `python -m rpbench calibrate` has measured.

What a device is asked for is counted as in `rpbench.cost.operators`, in seconds at the machine's own rates:

    layer      1: what a layer takes however little there is to do - interpreter, launches, the action around it
    products   FLOPs of matrix products and attention
    traffic    bytes of element-wise kernels
    weights    bytes of the gradients that are added up, or of the optimizer's step

Every part of the engine's work - see `PARTS` - takes so many times each of these. The factors were measured on probe
layers, by the engine itself, with as many workers busy as there are devices. They hold what counts leave out: caches,
allocations, how slow an exponential is. The engine's head makes its gradients in its forward and runs it once
(`rpbench.models.loss`); its embedding is counted with the first layer, its steps are work of their own. A backward
that is split takes longer in all than a whole one.
"""

from collections.abc import Mapping

from rpbench.cost.analytic import hop_s, seconds
from rpbench.cost.basis import Basis
from rpbench.cost.measured import HALVES, PARTS, TERMS, factor_name
from rpbench.cost.operators import Load, head_backward, head_forward, layer_forward, layer_input_grad, layer_weight_grad
from rpbench.cost.table import LayerTimes
from rpbench.workload.architecture import Architecture

# Bytes of fp32 values that pass through memory for one parameter.
ADDED_BYTES = 12  # adding a gradient: two reads, one write
PUBLISHED_BYTES = 8  # a new version for the devices to read: one read, one write

Terms = Mapping[str, float]  # term -> seconds


def engine_times(model: Architecture, num_tokens: float, basis: Basis) -> LayerTimes:
    """Seconds of one microbatch through each layer, steps included.

    Raises:
        ValueError: if the machine was not calibrated, or one of its figures is missing.
    """
    counts = counted(model, num_tokens, basis)
    took = {part: sum(basis[factor_name(part, term)] * counts[part][term] for term in PARTS[part]) for part in PARTS}
    input_grad, weight_grad = (basis[half] * took["backward"] for half in HALVES)
    embedding = took["embedding_backward"] / 2

    def per_layer(of_one: float, embedding: float = 0.0) -> tuple[float, ...]:
        return (of_one + embedding, *[of_one] * (model.num_layers - 1))

    return LayerTimes(
        forward=per_layer(took["forward"], took["embedding_forward"]),
        recompute=per_layer(took["recompute"]),
        backward=per_layer(took["backward"], took["embedding_backward"]),
        head_forward=took["head_forward"],
        head_backward=took["head_backward"],
        input_grad=per_layer(input_grad, embedding),
        weight_grad=per_layer(weight_grad, embedding),
        head_input_grad=took["head_backward"] / 2,
        head_weight_grad=took["head_backward"] / 2,
        step=per_layer(took["step"], took["embedding_step"]),
        head_step=took["head_step"],
        hop=hop_s(model, num_tokens, basis),
    )


def counted(model: Architecture, num_tokens: float, basis: Basis) -> dict[str, Terms]:
    """Part -> term -> what is counted, in seconds at the machine's rates; 1 for the layer itself."""
    forward = layer_forward(model, num_tokens, basis)
    inputs, weights = (grad(model, num_tokens, basis) for grad in (layer_input_grad, layer_weight_grad))
    both = Load(
        inputs.matmul_flops + weights.matmul_flops,
        inputs.attention_flops + weights.attention_flops,
        inputs.memory_bytes,
    )
    head, slopes = head_forward(model, num_tokens, basis), head_backward(model, num_tokens, basis)
    whole_head = Load(
        (head.matmul_flops + slopes.matmul_flops) * _narrowness(model, num_tokens, basis), 0.0, head.memory_bytes
    )
    trained, rows = model.trainable_layer_parameters, 0 if model.lora_rank else model.vocab * model.hidden
    return {
        "forward": _terms(forward, basis),
        "recompute": _terms(forward, basis),
        "backward": _terms(both, basis, added=trained),
        "head_forward": _terms(whole_head, basis, added=rows),
        "head_backward": _terms(Load(0.0), basis, added=rows),
        "embedding_forward": _terms(Load(0.0), basis),
        "embedding_backward": _terms(Load(0.0), basis, added=rows),
        "step": _terms(Load(0.0), basis, stepped=trained),
        "head_step": _terms(Load(0.0), basis, stepped=rows),
        "embedding_step": _terms(Load(0.0), basis, stepped=0 if model.tied else rows),
    }


def _narrowness(model: Architecture, num_tokens: float, basis: Basis) -> float:
    """How often the head's products count because few tokens or a small width make them slow."""
    return 1 + basis["half_rate_width"] / min(model.hidden, max(1.0, num_tokens))


def _terms(load: Load, basis: Basis, added: float = 0, stepped: float = 0) -> Terms:
    """The terms of a load, of so many gradient values that are added and parameters that are stepped."""
    products = seconds(load._replace(memory_bytes=0.0), basis, "eager")
    traffic = seconds(Load(0.0, 0.0, load.memory_bytes), basis, "eager")
    weights = added and ADDED_BYTES * added / (basis["memory_bytes_per_s"] * basis["memory_efficiency"])
    if stepped:
        weights = (basis["adam_bytes"] + PUBLISHED_BYTES) * stepped / basis["host_bytes_per_s"]
    return dict(zip(TERMS, (1.0, products, traffic, weights), strict=True))
