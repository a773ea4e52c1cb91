"""Errors of cells without which everything was fitted: a whole model, system or platform is left out.

Each fitted constant is fitted on the remaining cells that depend on it. Without any, it takes the value and deviation
from before any of its cells was seen (`Known.prior`). A model's corrections, which come from the timings of its layers,
are left out with the model: it takes the mean of similar models. The RTX 4090, with all timings of layers, cannot be
left out.

A fit makes the sum of the cells' logarithmic errors, weighted by their sensitivity to the constant, 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import copysign, exp, inf, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

from analysis.predictions import compare
from analysis.records.published import EXPERTS, PUBLISHED_MODELS
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.declared import Declared
from rpbench.cost.hardware.machine import NUMBERS
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layers.eager_kernels import PARTS, correction_name
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.workload.architecture import architecture
from rpbench.yaml_file import read_keys

# In the order of their fits, which use earlier ones.
FITTED = ("host_bytes_per_s", "expert_pass_s", "collective_bytes_per_s", "tensor_logit_bytes")
# On the A800: its own figures, and constants of both machines that depend on its cells.
FITTED_THERE = ("matmul_efficiency", "host_bytes_per_s", "deepspeed_gradient_bytes", "kept_dispatch_bytes")
_RANGE, _HALVINGS = 4.0, 12


def corrections(basis: Basis) -> dict[str, float]:
    """Measured over counted time of every model's parts, and the extra bytes of layers with experts."""
    none = {name: 1.0 for name in basis.values if name.endswith("_correction")}
    plain = compare.with_values(basis, none | {"expert_bytes": 0.0, "stacked_expert_bytes": 0.0})
    found: dict[str, float] = {}
    for name, published in PUBLISHED_MODELS.items():
        model, times = architecture(name), published_times(published)
        measured = _parts(times, 1 / times.units_per_second)
        counted = _parts(times_of(setting_of(model, published_tokens_per_microbatch(published), plain)), 1.0)
        found |= {correction_name(published, part): measured[part] / counted[part] for part in PARTS}
        if model.experts is not None:
            del found[correction_name(published, "backward")]
            extra_s = measured["backward"] - counted["backward"]
            kind = "stacked_expert_bytes" if model.family == "gpt_oss" else "expert_bytes"
            found[kind] = extra_s * plain.memory_rate / model.layer_parameters
    return found


def _parts(times: LayerTimes, unit_s: float) -> dict[str, float]:
    values = (times.forward[0], times.backward[0], times.head_forward, times.head_backward)
    return {part: value * unit_s for part, value in zip(PARTS, values, strict=True)}


def fit(name: str, cells: Sequence[compare.Cell], basis: Basis) -> float:
    """The value of a constant at which the weighted errors of the cells add up to 0.

    Weights are sensitivities, as in least squares. Lengths come in steps: their weights are equal, and the value is the
    middle of the range that fits. Raises ValueError if no value is within a factor of four of the declared one.
    """
    declared_value, errors = basis.values[name], partial(_errors, name, cells, basis)
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


def _errors(name: str, cells: Sequence[compare.Cell], basis: Basis, value: float) -> list[float]:
    """Logarithmic errors of the cells with another value of a constant."""
    varied = compare.with_values(basis, {name: value})
    return [compare.log_error(cell, varied) for cell in cells]


def _edge(is_above: Callable[[float], bool], around: float, name: str) -> float:
    """The smallest value for which a condition holds, by bisection."""
    low, high = around / _RANGE, around * _RANGE
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (low, middle) if is_above(middle) else (middle, high)
    if low == around / _RANGE or high == around * _RANGE:
        raise ValueError(f"{name}: no value between {around / _RANGE:g} and {around * _RANGE:g} meets its cells")
    return sqrt(low * high)


def fitted(basis: Basis, names: Iterable[str] = FITTED) -> dict[str, float]:
    """Constants refitted, each on the cells of its declaration and with those before it."""
    found: dict[str, float] = {}
    for name in names:
        cells = [compare.cell_of(key) for key in basis.declared[name].cells]
        found[name] = fit(name, cells, compare.with_values(basis, found))
    return found


def refit_text() -> str:
    """A line for each constant with its declared and refitted value."""
    basis = compare.declared_basis()
    lines = [f"{'constant':44s} {'declared':>12s} {'again':>12s}  origin and cells"]
    other = compare.declared_basis("8x_a800")
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


A800 = "8x_a800"
ALONE = 0.15  # deviation of a correction from a single other model
# A fit starts a factor STEP around the declared value and takes SECANTS steps of the secant method, each at most MOST
# (logarithms). A constant to which all cells are less sensitive than LEAST is not fitted.
STEP, SECANTS, MOST, LEAST = 1.15, 2, 1.0, 0.05


class Known(NamedTuple):
    """A constant of a machine, the throughput cells that depend on it, and its value and deviation before these."""

    name: str
    cluster: str
    cells: tuple[compare.Cell, ...]
    prior: float
    within: float


def _known(name: str, cluster: str, cells: Sequence[Mapping[str, Any]], prior: float, within: float) -> Known:
    """A constant of `holdout.yaml`; cells have systems, models (default: all) and machines (default: its own)."""
    found = tuple(
        compare.Cell("throughput", system, model, each)
        for some in cells
        for each in some.get("machines", (cluster,))
        for system in some["systems"]
        for model in some.get("models", PUBLISHED_MODELS)
    )
    return Known(name, cluster, found, prior, within)


KNOWN_BY = tuple(_known(**row) for row in read_keys(Path(__file__).with_suffix(".yaml"))["known_by"])


class Left(NamedTuple):
    """Constants of every machine, fitted without some cells; the names of those at their priors."""

    bases: Mapping[str, Basis]
    untold: tuple[str, ...]


def without(leaves_out: Callable[[compare.Cell], bool], model: str = "") -> Left:
    """The constants fitted without some cells, and without a model's corrections."""
    bases = {cluster: _without_corrections(compare.declared_basis(cluster), model) for cluster in compare.PLATFORMS}
    untold = []
    for known in KNOWN_BY:
        kept = tuple(cell for cell in known.cells if not leaves_out(cell) and compare.published_value(cell)[1])
        value = _fitted(known, kept, tuple(sorted(bases[known.cluster].values.items()))) if kept else None
        if value is None:
            untold.append(f"{known.name} ({known.cluster})")
        for cluster in (known.cluster,) if known.name in NUMBERS else tuple(bases):
            basis = compare.with_values(bases[cluster], {known.name: known.prior if value is None else value})
            bases[cluster] = _less_sure(basis, {known.name: known.within}) if value is None else basis
    return Left(MappingProxyType(bases), tuple(untold))


@cache
def _fitted(known: Known, kept: tuple[compare.Cell, ...], values: tuple[tuple[str, float], ...]) -> float | None:
    """A constant fitted on some cells with other `values`; None if they hardly depend on it.

    Least squares of logarithmic errors by the secant method: they are nearly linear in the constant's logarithm, so two
    steps leave less than a hundredth.
    """
    basis = compare.with_values(compare.declared_basis(known.cluster), dict(values))
    errors = partial(_errors, known.name, kept, basis)
    middle = log(basis.values[known.name])
    points = [middle - log(STEP), middle + log(STEP)]
    found = [errors(exp(at)) for at in points]
    weights = [above - below for below, above in zip(*found, strict=True)]
    if max(map(abs, weights)) < LEAST * 2 * log(STEP):
        return None
    offs = [sum(weight * error for weight, error in zip(weights, each, strict=True)) for each in found]
    for _ in range(SECANTS):
        step = -offs[1] * (points[1] - points[0]) / (offs[1] - offs[0] or inf)
        points = [points[1], points[1] + max(-MOST, min(MOST, step))]
        again = errors(exp(points[1]))
        offs = [offs[1], sum(weight * error for weight, error in zip(weights, again, strict=True))]
    return exp(points[1])


def _without_corrections(basis: Basis, model: str) -> Basis:
    """Replace a model's corrections by the geometric mean of those of the other models with, or without, experts.

    Their deviation is that of these, or `ALONE` for a single one.
    """
    if not model:
        return basis
    own = architecture(model)
    like = [architecture(other) for other in PUBLISHED_MODELS if other != model]
    like = [other for other in like if (other.experts is not None) == (own.experts is not None)]
    found, within = {}, {}
    for part in PARTS:
        name = correction_name(own.published_name or "", part)
        names = (correction_name(other.published_name or "", part) for other in like)
        others = [log(basis.values[other]) for other in names if other in basis.values]
        if name in basis.values:
            found[name], within[name] = exp(fmean(others)), stdev(others) if len(others) > 1 else ALONE
    return _less_sure(compare.with_values(basis, found), within)


def _less_sure(basis: Basis, within: Mapping[str, float]) -> Basis:
    """The same constants, some of them assumed with other deviations."""
    changed = {
        name: Declared("assumed", f"left out: {basis.declared[name].source}", deviation)
        for name, deviation in within.items()
    }
    return replace(basis, declared={**basis.declared, **changed})


def expert_rows() -> list[dict[str, str]]:
    """RoundPipe's errors on models with experts; an expert's launches are fitted on the other one or at their prior."""
    (known,) = (each for each in KNOWN_BY if (each.name, each.cluster) == ("expert_pass_s", compare.KNOWN))
    found, basis = [], compare.declared_basis()
    for model in EXPERTS:
        kept = tuple(cell for cell in known.cells if cell.model != model)
        value = _fitted(known, kept, tuple(sorted(basis.values.items()))) if kept else None
        varied = compare.with_values(basis, {known.name: value or known.prior})
        off = compare.error(compare.Cell("throughput", "roundpipe", model), varied)
        found.append({"constant": known.name, "model": model, "error": f"{off:.4f}"})
    return found


def rows(cells: Sequence[compare.Cell]) -> list[dict[str, str]]:
    """A row for each cell and axis."""
    groups = dict.fromkeys((axis, getattr(cell, axis)) for axis in ("model", "system", "cluster") for cell in cells)
    groups.pop(("cluster", compare.KNOWN), None)
    return [row for axis, name in groups for row in _rows_without(axis, name, cells)]


def _rows_without(axis: str, name: str, cells: Sequence[compare.Cell]) -> Iterator[dict[str, str]]:
    """The cells of one `model`, `system` or `cluster`, predicted by fits without them."""
    left = without(lambda cell: getattr(cell, axis) == name, name if axis == "model" else "")
    for cell in cells:
        _, known = compare.published_value(cell)
        if getattr(cell, axis) != name or known is None:
            continue
        said = compare.predicted(cell, left.bases[cell.cluster], with_interval=True)
        if said.tokens_per_s and said.low and said.high:
            yield {
                "held_out": "platform" if axis == "cluster" else axis,
                "name": name,
                "system": cell.system,
                "model": cell.model,
                "platform": compare.PLATFORMS[cell.cluster],
                "error": f"{said.tokens_per_s / known - 1:.4f}",
                "low_ratio": f"{said.low / said.tokens_per_s:.4f}",
                "high_ratio": f"{said.high / said.tokens_per_s:.4f}",
                "kept_constants": ", ".join(left.untold),
            }


def text(cells: Sequence[compare.Cell]) -> str:
    lines = ["everything fitted without the model, system or platform; errors of its own cells"]
    made = rows(cells)
    for axis, name in dict.fromkeys((row["held_out"], row["name"]) for row in made):
        own = [row for row in made if (row["held_out"], row["name"]) == (axis, name)]
        prior = f" (at its prior: {own[0]['kept_constants']})" if own[0]["kept_constants"] else ""
        lines.append(
            f"{axis} {name:16s} " + ", ".join(f"{_label(row)} {float(row['error']):+.1%}" for row in own) + prior
        )
    return "\n".join(lines)


def _label(row: Mapping[str, str]) -> str:
    named = {"model": "system", "system": "model"}.get(row["held_out"])
    short = "A800" if row["platform"] == compare.PLATFORMS[A800] else "4090"
    return f"{row[named]} {short}" if named else f"{row['system']} {row['model']}"
