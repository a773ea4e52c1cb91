"""Constants that follow from published figures, worked out again: corrections by division, others by bisection.

A fitted constant is set so that its cells are met on average: the logarithms of predicted over published, each times
what the constant does to it, add up to 0.
"""

from collections.abc import Callable, Iterable, Sequence
from math import copysign, sqrt

from analysis.predictions.compare import Cell, cell_of, declared, declared_basis, log_error, model_of, with_values
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layers.eager_kernels import PARTS, correction_name
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.workload.architecture import Architecture

# In the order of their fits: a later one may rest on an earlier.
FITTED = ("host_bytes_per_s", "expert_pass_s", "collective_bytes_per_s", "tensor_logit_bytes")
# On the A800: its own figures, and constants of both machines that its cells tell.
FITTED_THERE = ("matmul_efficiency", "host_bytes_per_s", "deepspeed_gradient_bytes", "kept_dispatch_bytes")
_RANGE, _HALVINGS = 4.0, 12


def corrections(basis: Basis) -> dict[str, float]:
    """Measured over counted time of every model's parts, and the surplus of layers with experts in bytes."""
    expert_bytes = {"expert_bytes": 0.0, "stacked_expert_bytes": 0.0}
    plain = with_values(basis, {name: 1.0 for name in basis.values if name.endswith("_correction")} | expert_bytes)
    found: dict[str, float] = {}
    for name in PUBLISHED_MODELS:
        found |= _corrections_of(model_of(name), plain)
    return found


def _corrections_of(model: Architecture, plain: Basis) -> dict[str, float]:
    published = model.published_name or ""
    times = published_times(published)
    measured = _parts(times, 1 / times.units_per_second)
    counted = _parts(times_of(setting_of(model, published_tokens_per_microbatch(published), plain)), 1.0)
    found = {correction_name(published, part): measured[part] / counted[part] for part in PARTS}
    if model.experts is not None:
        del found[correction_name(published, "backward")]
        rate = plain["memory_bytes_per_s"] * plain["memory_efficiency"]
        name = "stacked_expert_bytes" if model.family == "gpt_oss" else "expert_bytes"
        found[name] = (measured["backward"] - counted["backward"]) * rate / model.layer_parameters
    return found


def _parts(times: LayerTimes, unit_s: float) -> dict[str, float]:
    values = (times.forward[0], times.backward[0], times.head_forward, times.head_backward)
    return {part: value * unit_s for part, value in zip(PARTS, values, strict=True)}


def fit(name: str, cells: Sequence[Cell], basis: Basis) -> float:
    """The value of a constant at which the cells are met on average, the more sensitive ones counting for more, as in
    least squares; of lengths, which come in steps, all count alike, and the value is the middle of those that do.

    Raises:
        ValueError: if none is within a factor of four of the declared value.
    """

    declared_value = basis.values[name]

    def errors(value: float) -> list[float]:
        varied = with_values(basis, {name: value})
        return [log_error(cell, varied) for cell in cells]

    more, less = errors(declared_value * 1.1), errors(declared_value / 1.1)
    weights = [up - down for up, down in zip(more, less, strict=True)]
    smooth = all(cell.table == "throughput" for cell in cells)
    if not smooth:
        weights = [copysign(1.0, sum(weights))] * len(cells)

    def off(value: float) -> float:
        return sum(weight * error for weight, error in zip(weights, errors(value), strict=True))

    edge = _edge(lambda value: off(value) > 0, declared_value, name)
    if smooth:
        return edge
    return sqrt(edge * _edge(lambda value: off(value) >= 0, declared_value, name))


def _edge(is_above: Callable[[float], bool], around: float, name: str) -> float:
    """Where a condition begins to hold."""
    low, high = around / _RANGE, around * _RANGE
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (low, middle) if is_above(middle) else (middle, high)
    if low == around / _RANGE or high == around * _RANGE:
        raise ValueError(f"{name}: no value between {around / _RANGE:g} and {around * _RANGE:g} meets its cells")
    return sqrt(low * high)


def fitted(basis: Basis, names: Iterable[str] = FITTED) -> dict[str, float]:
    """Constants refitted, each on the cells its declaration names and with those before it."""
    found: dict[str, float] = {}
    for name in names:
        cells = [cell_of(key) for key in basis.declared[name].cells]
        found[name] = fit(name, cells, with_values(basis, found))
    return found


def text() -> str:
    """Declared and refitted values, a constant a line."""
    basis = declared()
    lines = [f"{'constant':44s} {'declared':>12s} {'again':>12s}  origin and cells"]
    other = declared_basis("8x_a800")
    for found, of in (({**corrections(basis), **fitted(basis)}, basis), (fitted(other, FITTED_THERE), other)):
        for name, value in found.items():
            origin = of.declared[name]
            cells = ", ".join(origin.cells)
            lines.append(f"{name:44s} {of.values[name]:12.5g} {value:12.5g}  {origin.origin} {cells}")
    lines.append("")
    lines += [
        f"{name:44s} {basis.values[name]:12.5g} {'':12s}  {origin.origin}: {origin.source}"
        for name, origin in sorted(basis.declared.items())
        if origin.origin != "fitted" and not name.endswith("_correction") and name in basis.values
    ]
    return "\n".join(lines)
