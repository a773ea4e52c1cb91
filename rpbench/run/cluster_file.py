"""Cluster file: the figures of a calibration as the YAML that `cluster=` takes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from math import log
from typing import Any

import numpy as np

from rpbench.config.loading import load
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.collective_rates import CollectiveRate
from rpbench.cost.hardware.machine import NUMBERS, Machine
from rpbench.cost.hardware.measured import HALVES, ISSUES_AHEAD, ON_HOST, PARTS, factor_name
from rpbench.engine.measure.calibration import SHORTEST_S, Calibration
from rpbench.mesh.layers.engine_kernels import counted, part_s
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import setting_of
from rpbench.records.provenance import hardware, now

Figures = dict[str, float | int]

WITHIN = 0.05  # least relative standard deviation of a measured figure: a machine is not always equally fast
NINE_OF_TEN = 1.645  # standard deviations to either side that hold 90 %


def cluster_of(
    name: str, found: Calibration, devices: Mapping[str, int], collectives: Sequence[CollectiveRate] = ()
) -> Machine:
    """The machine as `cost=analytic` sees it; ValueError if a probe took no time.

    `devices` has `num_devices`, and `device_memory_bytes` where devices have memory of their own.
    """
    figures = _figures(found, devices)
    measured = {"half_rate_width": found.rates.half_rate_width}
    counts = _counts(found, devices)
    for part, terms in PARTS.items():
        solved = _factors(part, found, counts[part], [times[part] for _, times in found.probes])
        measured |= {factor_name(part, term): factor for term, factor in zip(terms, solved, strict=True)}
    measured |= zip(HALVES, found.halves, strict=True)
    if found.issues_ahead:
        measured[ISSUES_AHEAD] = 1.0
    if layer_s := measured[factor_name("forward", "layer")]:
        figures["launch_s"] = layer_s
    source = f"python -m rpbench calibrate, {now()}"
    row = {"origin": "measured", "within": WITHIN, "source": source}
    declared = dict.fromkeys((*figures, *measured), row)
    for part, within in within_of(layers_of(found, devices)).items():
        declared |= dict.fromkeys((factor_name(part, term) for term in PARTS[part]), row | {"within": within})
    declared |= {each.name: row | {"within": round(_within(each), 4)} for each in collectives}
    rates = {each.name: each.plain() for each in collectives}
    return Machine(name=name, **figures, measured=measured, collectives=rates, declared=declared)  # type: ignore[arg-type]


def layers_of(found: Calibration, devices: Mapping[str, int]) -> list[dict[str, Any]]:
    """The shape of each probe, with measured and predicted seconds of each part of its work.

    A probe is predicted from the factors of the others alone. Raises ValueError with fewer than two probes, or if one
    took no time.
    """
    predicted: list[dict[str, float]] = [{} for _ in found.probes]
    for part, rows in _counts(found, devices).items():
        times = [took[part] for _, took in found.probes]
        for own, row in enumerate(rows):
            others = [[*column[:own], *column[own + 1 :]] for column in (rows, times)]
            solved = _factors(part, found, *others)
            numbers = {factor_name(part, term): factor for term, factor in zip(PARTS[part], solved, strict=True)}
            numbers[ISSUES_AHEAD] = float(found.issues_ahead)
            predicted[own][part] = part_s(part, dict(zip(PARTS[part], row, strict=True)), numbers)
    return [
        {
            "hidden": probe.model.hidden,
            "vocab": probe.model.vocab,
            "num_tokens": probe.num_tokens,
            "seconds": took,
            "predicted_s": each,
        }
        for (probe, took), each in zip(found.probes, predicted, strict=True)
    ]


def within_of(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Relative standard deviation of the factors of each part, from `layers_of`; a machine is not always equally fast.

    In nine of ten probes the prediction from the others is no further off than 1.645 of it. The smallest probe is not
    among them: its time is that of launches.
    """
    _, *larger = sorted(layers, key=lambda each: each["hidden"] * each["num_tokens"])
    found = {}
    for part in PARTS:
        off = [abs(log(max(each["predicted_s"][part], SHORTEST_S) / each["seconds"][part])) for each in larger]
        found[part] = round(max(WITHIN, float(np.quantile(off, 0.9)) / NINE_OF_TEN), 4)
    return found


def _factors(
    part: str, found: Calibration, counts: Sequence[Sequence[float]], times: Sequence[float]
) -> Sequence[float]:
    return (factors_ahead if found.issues_ahead and part not in ON_HOST else factors)(counts, times)


def _counts(found: Calibration, devices: Mapping[str, int]) -> dict[str, list[list[float]]]:
    """Part of the engine's work -> counts of its terms, a row a probe."""
    measured = {"half_rate_width": found.rates.half_rate_width}
    bare = Machine(name="bare", **_figures(found, devices), measured=measured)  # type: ignore[arg-type]
    cost = load(["cost=analytic"]).cost
    basis = make_basis(bare, cost.constants, cost.declared)
    counts = [counted(eager_kernels(setting_of(probe.model, probe.num_tokens, basis))) for probe, _ in found.probes]
    return {part: [[each[part][term] for term in terms] for each in counts] for part, terms in PARTS.items()}


def _within(rate: CollectiveRate) -> float:
    """Relative standard deviation of a bandwidth, from its 90 % interval."""
    return max(WITHIN, (rate.bytes_per_s_high - rate.bytes_per_s_low) / (2 * NINE_OF_TEN * rate.bytes_per_s))


def _figures(found: Calibration, devices: Mapping[str, int]) -> Figures:
    """The fields of a cluster; rates are as achieved, so all efficiencies but that of attention are 1."""
    rates = asdict(found.rates)
    rates.pop("half_rate_width")
    attention = rates.pop("attention_flops_per_s")
    if found.peer_bytes_per_s is not None:
        rates["intra_bytes_per_s"] = found.peer_bytes_per_s
    return {
        **rates,
        "matmul_efficiency": 1.0,
        "wide_matmul_efficiency": 1.0,
        "attention_efficiency": min(1.0, attention / rates["wide_matmul_flops_per_s"]),
        "memory_efficiency": 1.0,
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **devices,
    }


def to_text(cluster: Machine, first_line: str, foreign_cores: float | None) -> str:
    """The cluster as YAML; `first_line` names the command that wrote it."""
    machine = ", ".join(f"{key} {value}" for key, value in hardware().items() if isinstance(value, str | int))
    foreign = "" if foreign_cores is None else f"; other programs kept {foreign_cores:.2f} cores busy meanwhile"
    lines = [f"# {first_line}", f"# {machine}{foreign}", f"name: {cluster.name}", "published_name: null"]
    lines += [f"{key}: {_number(getattr(cluster, key))}" for key in NUMBERS]
    lines += ["ssd: null", "transfer_latency_s: 0.0", "device_speeds: null"]
    lines.append(
        "measured:   # constants of cost=analytic on this machine; rpbench/mesh/layers/engine_kernels.py says what of"
    )
    lines += [f"  {key}: {_number(value)}" for key, value in cluster.measured.items()]
    head = (
        "collectives:   # a tensor of X bytes: latency_s + volume X / bytes_per_s; "
        "rpbench/cost/hardware/collective_rates.py"
    )
    lines.append(head if cluster.collectives else "collectives: {}")
    lines += [f"  {key}: {_rates(row)}" for key, row in cluster.collectives.items()]
    lines.append("declared:")
    for key, row in cluster.declared.items():
        lines.append(f'  {key}: {{origin: {row["origin"]}, within: {row["within"]}, source: "{row["source"]}"}}')
    return "\n".join(lines) + "\n"


def _rates(row: Mapping[str, float | int]) -> str:
    return "{" + ", ".join(f"{key}: {_number(value)}" for key, value in row.items()) + "}"


def _number(value: float | int | None) -> str:
    if value is None:
        return "null"
    return str(value) if isinstance(value, int) else f"{value:.6e}"


def factors(counts: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """The factors f >= 0 that minimize sum_i (sum_j counts[i][j] * f[j] / times[i] - 1)^2; i is a probe, j a term.

    The terms are few, so every set of nonzero factors is tried (Lawson and Hanson, "Solving Least Squares Problems",
    1974, chapter 23). Raises ValueError without a probe, or if one took no time.
    """
    if not times or min(times) <= 0:
        raise ValueError(f"times of probes {list(times)}: at least 1, each above 0; measure again")
    table = np.asarray(counts, dtype=float) / np.asarray(times, dtype=float)[:, None]
    num_terms = table.shape[1]
    best, least = np.zeros(num_terms), float(len(times))
    for size in range(1, num_terms + 1):
        for chosen in map(list, combinations(range(num_terms), size)):
            found = np.linalg.lstsq(table[:, chosen], np.ones(len(times)), rcond=None)[0]
            left = float(((table[:, chosen] @ found - 1) ** 2).sum())
            if found.min() >= 0 and left < least:
                best, least = np.zeros(num_terms), left
                best[chosen] = found
    return [float(factor) for factor in best]


def factors_ahead(counts: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Factors where the first term, a layer, hides behind the others: times[i] is near max(f[0], sum_j of the rest).

    f[0] is the geometric mean of the n fastest probes; every n is tried. Raises ValueError as `factors` does.
    """
    if not times or min(times) <= 0:
        raise ValueError(f"times of probes {list(times)}: at least 1, each above 0; measure again")
    took, work = np.asarray(times, dtype=float), np.asarray(counts, dtype=float)[:, 1:]
    by_time, best, least = np.argsort(took), [0.0] * (1 + work.shape[1]), float("inf")
    for num in range(len(took) + 1):
        kept, others = by_time[:num], by_time[num:]
        layer = float(np.exp(np.log(took[kept]).mean())) if num else 0.0
        rest = [0.0] * work.shape[1]
        if work.shape[1] and len(others):
            rest = factors(work[others].tolist(), took[others].tolist())
        left = float(((np.maximum(layer, work @ np.array(rest)) / took - 1) ** 2).sum())
        if left < least:
            best, least = [layer, *rest], left
    return best
