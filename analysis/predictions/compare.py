"""Predictions beside the published figures, cell by cell, and what would explain a miss."""

from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from operator import attrgetter
from typing import NamedTuple

from analysis.records.published import A800, OUR_MODELS, PUBLISHED_MODELS, RTX4090, rows
from rpbench.config.loading import load
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import NUMBERS, machine
from rpbench.predict import SYSTEMS, Prediction, predict
from rpbench.predict.case import Case
from rpbench.predict.prediction import STEP_TOKENS, longest_sequence
from rpbench.predict.settings import published_settings
from rpbench.run.modes.predict import basis_of
from rpbench.workload.architecture import architecture

# Our names of machines -> the paper's.
PLATFORMS = {"8x_rtx4090": RTX4090, "8x_a800": A800}
# Machines with published settings but no published throughput, for RoundPipe on some models.
CROSS_PLATFORMS = {"8x_w7800": "8x-amd-w7800", "8x_ascend_910b": "8x-ascend-910b"}
CROSS_MODELS = ("qwen3_1p7b", "llama31_8b", "qwen3_32b", "qwen3_235b_lora")
KNOWN = "8x_rtx4090"  # the machine with timed layers, whose measurements were known first


@cache
def declared_basis(cluster: str = KNOWN) -> Basis:
    return basis_of(machine(cluster), load(["cost=analytic"]).cost)


def case_of(system: str, cluster: str, model: str, num_devices: int = 8, basis: Basis | None = None) -> Case:
    """A system's published run of a model."""
    basis = basis or declared_basis(cluster)
    shape = architecture(model)
    memory = basis["device_memory_bytes"]
    settings = published_settings(system, machine(cluster).published_name, shape.published_name, memory)
    return Case(system, shape, basis, settings, num_devices, measured_on=declared_basis())


@dataclass(frozen=True)
class Cell:
    table: str  # throughput or max_seq_len
    system: str
    model: str
    cluster: str = KNOWN

    @property
    def key(self) -> str:
        """The name of the cell in `cells` of a declaration."""
        return f"{self.table}/{self.system}/{PLATFORMS[self.cluster]}/{PUBLISHED_MODELS[self.model]}"


def cell_of(key: str) -> Cell:
    table, system, platform, published = key.split("/")
    cluster = next(name for name, known in PLATFORMS.items() if known == platform)
    return Cell(table, system, OUR_MODELS[published], cluster)


def published_value(cell: Cell) -> tuple[str, float | None]:
    """Status and value of a published cell: tokens per second, or 1,024 tokens."""
    column = "tokens_per_s" if cell.table == "throughput" else "max_seq_len_published_k"
    name = cell.table if cell.cluster == KNOWN else f"{cell.table}_a800"
    keys = {"platform": PLATFORMS[cell.cluster], "model": PUBLISHED_MODELS[cell.model]}
    row = next(rows(name, system=cell.system, **keys), None)
    return (row["status"], float(row[column]) if row[column] else None) if row else ("not stated", None)


def predicted(cell: Cell, basis: Basis | None = None, *, with_interval: bool = False) -> Prediction:
    """The prediction of a cell's throughput run."""
    case = case_of(cell.system, cell.cluster, cell.model, basis=_on(cell, basis))
    return predict(case, with_interval=with_interval)


def error(cell: Cell, basis: Basis | None = None) -> float | None:
    """Predicted over published, less 1; None where one of them has no value."""
    _, known = published_value(cell)
    if known is None:
        return None
    if cell.table == "max_seq_len":
        case = case_of(cell.system, cell.cluster, cell.model, basis=_on(cell, basis))
        found: float | None = longest_sequence(case) / STEP_TOKENS
    else:
        found = predicted(cell, basis).tokens_per_s
    return found / known - 1 if found else None


def _on(cell: Cell, basis: Basis | None) -> Basis | None:
    """The given constants for a cell's machine; with its own figures if the given ones are of another machine."""
    own = declared_basis(cell.cluster)
    if basis is None or basis.cluster_name == own.cluster_name:
        return basis
    shared = {name: value for name, value in basis.values.items() if name not in NUMBERS}
    return with_values(own, shared)


def log_error(cell: Cell, basis: Basis) -> float:
    """Logarithm of predicted over published, which fits minimise; ValueError if one has no value."""
    off = error(cell, basis)
    if off is None:
        raise ValueError(f"{cell.key} has no value on one side: it cannot be fitted on")
    return log(1 + off)


def with_values(basis: Basis, values: dict[str, float]) -> Basis:
    return replace(basis, values={**basis.values, **values}, read=set())


def throughput_cells(*clusters: str) -> list[Cell]:
    """Every cell of figure 10, or of figures 10 and 12 for both machines."""
    return [
        Cell("throughput", system, model, cluster)
        for cluster in clusters or (KNOWN,)
        for system in SYSTEMS
        for model in PUBLISHED_MODELS
    ]


LIMIT, LEAST_EFFECT = 0.15, 0.05  # error of a miss; sensitivity of a constant that may explain it


class Lever(NamedTuple):
    """A constant with the factor that would close the gap, also in deviations of the constant."""

    constant: str
    factor: float
    deviations: float


class Miss(NamedTuple):
    """A cell that is off, the terms of its step in seconds, and its levers, the most plausible one first."""

    cell: Cell
    error: float
    terms: dict[str, float]
    lacking_s: float
    levers: tuple[Lever, ...]


def explain(cell: Cell) -> Miss | None:
    """The miss of a throughput cell; None if a value is missing or the error is within the limit."""
    found = predicted(cell, with_interval=True)
    _, known = published_value(cell)
    if found.tokens_per_s is None or known is None or abs(found.tokens_per_s / known - 1) <= LIMIT:
        return None
    assert found.sensitivity is not None
    assert found.terms is not None
    gap, declared = log(known / found.tokens_per_s), found.case.basis.declared
    moves = {name: gap / effect for name, effect in found.sensitivity.items() if abs(effect) >= LEAST_EFFECT}
    levers = [Lever(name, exp(min(50, move)), abs(move) / declared[name].within) for name, move in moves.items()]
    levers.sort(key=attrgetter("deviations"))
    lacking = found.case.tokens_per_step / known - sum(found.terms.values())
    return Miss(cell, found.tokens_per_s / known - 1, dict(found.terms), lacking, tuple(levers))


def miss_rows(cells: list[Cell]) -> list[dict[str, str]]:
    """A row for each of the three most plausible levers of every miss."""
    return [
        {
            "system": miss.cell.system,
            "model": miss.cell.model,
            "platform": PLATFORMS[miss.cell.cluster],
            "error": f"{miss.error:.4f}",
            "missing_s": f"{miss.lacking_s:.3f}",
            "terms_s": "; ".join(f"{name} {seconds:.2f}" for name, seconds in miss.terms.items() if seconds),
            "constant": lever.constant,
            "factor": f"{lever.factor:.3f}",
            "deviations": f"{lever.deviations:.2f}",
        }
        for miss in filter(None, map(explain, cells))
        for lever in miss.levers[:3]
    ]


def misses_text(cells: list[Cell]) -> str:
    lines = []
    for miss in filter(None, map(explain, cells)):
        terms = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in miss.terms.items() if seconds)
        where = f"{miss.cell.system} {miss.cell.model}, {PLATFORMS[miss.cell.cluster]}"
        lines.append(f"{where}: {miss.error:+.1%}; {terms}; {miss.lacking_s:+.2f} s missing")
        lines += [
            f"    {lever.constant} x {lever.factor:.2f}, {lever.deviations:.1f} of its deviations"
            for lever in miss.levers[:3]
        ]
    return "\n".join(lines) or f"no cell is off by more than {LIMIT:.0%}"
