"""Hold-outs of memory: every given row predicted by fits without its model, size, machine or length.

The fit is that of `analysis.predictions.clusters.fit`, of `TRAITS` and bytes, for given runs with printed memory.

Choices made by hand on given rows (`analysis/predictions/clusters.md`: workspaces, which container keeps scores, bytes
of summed gradients) are not made again without a group, so these errors are a lower bound.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

import numpy as np

from analysis.predictions import tables
from analysis.predictions.clusters.case import TABLES, Case, Model
from analysis.predictions.clusters.fit import STEP, gauss_newton, given
from analysis.predictions.clusters.holdout import Axis, left_out, length, of_job
from analysis.predictions.clusters.writing import out_of_memory
from rpbench.cost.arrays import Floats
from rpbench.mesh.software import PRIORS, Prior, Software

# Priors: the traits of a framework before any of its rows is seen.
TRAITS: Mapping[str, Prior] = {
    "scale": Prior(1.0, 0.3, "bytes that the source prints over those of tensors: fragments, or another count"),
    "reserve_bytes": Prior(2e9, 1.5, "of contexts and libraries: what `machine.reserved_memory_bytes` assumes"),
    "logit_bytes": Prior(8.0, 0.3, "of a logit: a copy in fp32 and its gradient"),
    "imbalance": PRIORS["imbalance"],
}
ITERATIONS = 8
BALANCED = 1.0  # frameworks that declare it ran released models, whose routers are trained
Traits = dict[str, float]


@dataclass
class TraitModel(Model):
    """A model with other traits of all frameworks, as a fit tries them."""

    traits: Mapping[str, float] | None = None

    def software(self, known: Software) -> Software:
        values = dict(self.traits or {})
        imbalance = values.pop("imbalance", None)
        found = replace(known, **values)  # type: ignore[arg-type]
        if imbalance is None or known.constants["imbalance"] == BALANCED:
            return found
        return found.with_constants({"imbalance": imbalance})


def fit_traits(names: Sequence[str], cases: Sequence[Case]) -> Traits:
    """The traits that fit the cases' bytes best."""
    chosen = [case for case in cases if case.memory_bytes]

    def residuals(theta: Floats) -> Floats:
        model = TraitModel(traits=_traits(names, theta))
        return np.array([log(model.memory_bytes(case) / (case.memory_bytes or 0)) for case in chosen])

    def jacobian(theta: Floats, current: Floats) -> Floats:
        return np.column_stack([(residuals(theta + STEP * unit) - current) / STEP for unit in np.eye(len(names))])

    log_sds = [TRAITS[name].log_sd for name in names]
    theta, _ = gauss_newton(residuals, jacobian, chosen, log_sds, ITERATIONS)
    return _traits(names, theta)


def _traits(names: Sequence[str], theta: Floats) -> Traits:
    return {name: TRAITS[name].value * exp(moved) for name, moved in zip(names, theta, strict=True)}


FILE = tables.FOLDER / "clusters_memory.csv"
PAGE = tables.FOLDER.parents[1] / "docs" / "predictions.md"

AXES = {
    "model": of_job(lambda job: f"{job.architecture.hidden} x {job.architecture.num_layers}"),
    "length": length,
    "mesh": of_job(lambda job: f"tensor {job.mesh.tensor}, pipeline {job.mesh.pipeline}, expert {job.mesh.expert}"),
    "machine": of_job(lambda job: job.machine.device.name),
    "row": lambda case: case.id,
}


@dataclass(frozen=True)
class Part:
    """Rows that are judged together."""

    name: str  # in the tables
    set: str  # the file of the rows
    traits: tuple[str, ...]  # fitted on them, if any
    axes: tuple[Axis, ...]  # groupings; every group is left out once
    target: float | None = None  # largest median of the absolute error of withheld rows
    experts: bool | None = None  # only models with experts, or only those without; None for both

    def cases(self) -> list[Case]:
        """The given rows with printed memory or a printed verdict."""
        cases = [case for case in given((self.set,)) if case.job and (case.memory_bytes or case.verdict)]
        return [each for each in cases if self.experts in (None, each.modelled.architecture.experts is not None)]


PARTS = tuple(
    Part(**row | {"traits": tuple(row["traits"]), "axes": tuple((name, AXES[name]) for name in row["axes"])})
    for row in TABLES["parts"]
)


def rows() -> Iterator[dict[str, str]]:
    """Every given row of every part, predicted without its group of each axis."""
    for part in PARTS:
        for held_out, inside, others in left_out(part.cases(), part.axes):
            if seen := [case for case in others if case.memory_bytes and case.fits]:
                model = TraitModel(traits=fit_traits(part.traits, seen)) if part.traits else TraitModel()
                for case in inside:
                    yield _row(part, held_out, case, model)


def _row(part: Part, held_out: str, case: Case, model: Model) -> dict[str, str]:
    predicted, printed = model.memory_bytes(case), case.memory_bytes
    return {
        "part": part.name,
        "held_out": held_out,
        "id": case.id,
        "configuration": case.configuration,
        "memory_bytes": f"{printed:.6g}" if printed else "",
        "fitted_bytes": f"{Model().memory_bytes(case):.6g}",
        "predicted_bytes": f"{predicted:.6g}",
        "error": f"{predicted / printed - 1:.4f}" if printed else "",
        "verdict": case.verdict or "ok",
        "predicted_verdict": "oom" if out_of_memory(case, model) else "ok",
    }


def table_text(table: Sequence[Mapping[str, str]]) -> str:
    """Absolute errors of each part, medians over rows and over configurations, and counts of runs out of memory.

    The table has a given row once for each axis.
    """
    heads = "given rows | rows (configurations) | fitted | held out | by configuration | 90 % | target | false OOM"
    found = ((part, [row for row in table if row["part"] == part.name]) for part in PARTS)
    return tables.markdown(heads, (_cells(part, own) for part, own in found))


def _cells(part: Part, table: Sequence[Mapping[str, str]]) -> list[str]:
    printed = [row for row in table if row["memory_bytes"]]
    errors = sorted(abs(float(row["error"])) for row in printed)
    fitted = [abs(float(row["fitted_bytes"]) / float(row["memory_bytes"]) - 1) for row in printed]
    names = sorted({row["configuration"] for row in printed})
    each = [median(abs(float(row["error"])) for row in printed if row["configuration"] == name) for name in names]
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    dead = {row["id"] for row in table if row["verdict"] == "oom"}
    called = {row["id"] for row in table if row["predicted_verdict"] == "oom"}
    return [
        part.name,
        f"{len({row['id'] for row in printed})} ({len(names)})",
        *(f"{100 * value:.1f} %" for value in (median(fitted), median(errors), median(each), p90)),
        f"{100 * part.target:.3g} %" if part.target else "-",
        f"{len(called - dead)}" + (f"; {len(called & dead)} of {len(dead)} found" if dead else ""),
    ]
