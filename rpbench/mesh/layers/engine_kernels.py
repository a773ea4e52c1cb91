"""Engine kernels: layer times on this project's own engine, from the figures that `rpbench calibrate` has measured.

A device's work is counted as for eager kernels, in seconds at the machine's own rates:

    layer      1: the time of a layer that does not depend on its size - interpreter, launches, the action around it;
               where an accelerator works behind the host, only the part that its work does not hide
    products   FLOPs of matrix products and attention
    traffic    bytes of element-wise kernels
    weights    bytes of the gradients that are added up, or of the optimizer's step

Every part of the engine's work (`PARTS`) takes a factor times each of these. The engine itself measured the factors on
probe layers, with as many workers busy as there are devices. They hold the effects that counts leave out: caches,
allocations, slow exponentials. The engine's head makes its gradients in its one forward (`rpbench.models.loss`). The
embedding is counted with the first layer, and steps are separate work. A split backward takes longer than a whole one.
"""

from collections.abc import Mapping

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.measured import HALVES, ISSUES_AHEAD, ON_HOST, PARTS, TERMS, factor_name
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layers.eager_kernels import EagerKernels, Load

# Bytes of fp32 values that pass through memory for one parameter.
ADDED_BYTES = 12  # adding a gradient: two reads, one write
PUBLISHED_BYTES = 8  # a new version for the devices to read: one read, one write

Terms = Mapping[str, float]  # term -> seconds


def engine_times(kernels: EagerKernels, hop_s: float) -> LayerTimes:
    """Seconds of one microbatch through each layer, steps included; ValueError without calibration or a figure."""
    counts, numbers, num_layers = counted(kernels), kernels.numbers, len(kernels.own.layers)
    took = {part: part_s(part, counts[part], numbers) for part in PARTS}
    input_grad, weight_grad = (numbers[half] * took["backward"] for half in HALVES)
    embedding = took["embedding_backward"] / 2

    def per_layer(of_one: float, embedding: float = 0.0) -> tuple[float, ...]:
        return (of_one + embedding, *[of_one] * (num_layers - 1))

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
        hop=hop_s,
    )


def part_s(part: str, counts: Terms, numbers: Basis | Mapping[str, float]) -> float:
    """Seconds of a part of the engine's work: the sum of its terms.

    If work is issued ahead, it is the term `layer` or the sum of all others, whichever is longer.
    """
    layer, *work = (numbers[factor_name(part, term)] * counts[term] for term in PARTS[part])
    if numbers.get(ISSUES_AHEAD, 0.0) and part not in ON_HOST:
        return max(layer, sum(work))
    return layer + sum(work)


def counted(kernels: EagerKernels) -> dict[str, Terms]:
    """Part -> term -> counted seconds at the machine's rates; 1 for the term `layer`."""
    own, forward = kernels.own, kernels.forward
    inputs, weights = kernels.input_grad(), kernels.weight_grad()
    both = Load(
        inputs.matmul_flops + weights.matmul_flops,
        inputs.attention_flops + weights.attention_flops,
        inputs.memory_bytes,
    )
    head, back = kernels.head_forward(), kernels.head_backward()
    narrow = 1 + kernels.numbers["half_rate_width"] / min(own.hidden, max(1.0, kernels.tokens))
    whole_head = Load((head.matmul_flops + back.matmul_flops) * narrow, 0.0, head.memory_bytes)
    trained, rows = own.trainable_layer_parameters, 0 if own.lora_rank else own.vocab * own.hidden
    loads: dict[str, tuple[Load, float, float]] = {  # the load, gradient values added, parameters stepped
        "forward": (forward, 0, 0),
        "recompute": (forward, 0, 0),
        "backward": (both, trained, 0),
        "head_forward": (whole_head, rows, 0),
        "head_backward": (Load(0.0), rows, 0),
        "embedding_forward": (Load(0.0), 0, 0),
        "embedding_backward": (Load(0.0), rows, 0),
        "step": (Load(0.0), 0, trained),
        "head_step": (Load(0.0), 0, rows),
        "embedding_step": (Load(0.0), 0, 0 if own.tied else rows),
    }
    return {part: _terms(kernels, *of_part) for part, of_part in loads.items()}


def _terms(kernels: EagerKernels, load: Load, added: float, stepped: float) -> Terms:
    numbers = kernels.numbers
    products = kernels.seconds(load._replace(memory_bytes=0.0))
    traffic = kernels.seconds(Load(0.0, 0.0, load.memory_bytes))
    weights = added and ADDED_BYTES * added / numbers.memory_rate
    if stepped:
        weights = (numbers["adam_bytes"] + PUBLISHED_BYTES) * stepped / numbers["host_bytes_per_s"]
    return dict(zip(TERMS, (1.0, products, traffic, weights), strict=True))
