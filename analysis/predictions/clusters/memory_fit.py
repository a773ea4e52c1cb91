"""Fitting what a source counts as memory: traits of a framework from given rows, and priors that no row has seen.

The sum that is made least is that of `analysis.predictions.clusters.fit`, of bytes instead of seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from analysis.predictions.clusters.case import Case, Model
from analysis.predictions.clusters.fit import DAMPING, ENOUGH, HUBER, LONGEST, NOISE, STEP, Floats
from rpbench.mesh.software import PRIORS, Prior, Software

# What one would say of a framework before any of its rows is seen.
TRAITS: Mapping[str, Prior] = {
    "scale": Prior(1.0, 0.3, "bytes that the source prints over those of tensors: fragments, or another count"),
    "reserve_bytes": Prior(2e9, 1.5, "of contexts and libraries: what `machine.reserved_memory_bytes` assumes"),
    "logit_bytes": Prior(8.0, 0.3, "of a logit: a copy in fp32 and its gradient"),
    "imbalance": PRIORS["imbalance"],
}
ITERATIONS = 8
BALANCED = 1.0  # of a reader that declares it: release-sized models whose routers are trained
Traits = dict[str, float]


@dataclass
class TraitModel(Model):
    """Bytes with traits on trial."""

    traits: Mapping[str, float] | None = None

    def software(self, known: Software) -> Software:
        """That framework with the traits on trial."""
        values = dict(self.traits or {})
        imbalance = values.pop("imbalance", None)
        found = replace(known, **values)  # type: ignore[arg-type]
        if imbalance is None or known.constants["imbalance"] == BALANCED:
            return found
        return found.with_constants({"imbalance": imbalance})


def fit_traits(names: Sequence[str], cases: Sequence[Case]) -> Traits:
    """The traits with which the cases' bytes are met best."""
    chosen = [case for case in cases if case.memory_bytes]
    counts = Counter(case.configuration for case in chosen)
    weights = np.array([1.0 / counts[case.configuration] for case in chosen]) ** 0.5
    precision = np.array([1.0 / TRAITS[name].log_sd for name in names]) ** 2
    theta = np.zeros(len(names))
    for _ in range(ITERATIONS):
        current = _residuals(names, theta, chosen)
        columns = [(_residuals(names, theta + STEP * unit, chosen) - current) / STEP for unit in np.eye(len(names))]
        scale = weights * np.sqrt(np.minimum(1.0, HUBER * NOISE / np.maximum(np.abs(current), 1e-9))) / NOISE
        scaled = np.column_stack(columns) * scale[:, None]
        normal = scaled.T @ scaled + np.diag(precision)
        gradient = scaled.T @ (current * scale) + precision * theta
        step = np.clip(np.linalg.solve(normal + DAMPING * np.diag(np.diag(normal)), -gradient), -LONGEST, LONGEST)
        theta = theta + step
        if np.max(np.abs(step)) < ENOUGH:
            break
    return _values(names, theta)


def _values(names: Sequence[str], theta: Floats) -> Traits:
    return {name: TRAITS[name].value * exp(moved) for name, moved in zip(names, theta, strict=True)}


def _residuals(names: Sequence[str], theta: Floats, cases: Sequence[Case]) -> Floats:
    model = TraitModel(traits=_values(names, theta))
    return np.array([log(model.memory_bytes(case) / case.memory_bytes) for case in cases if case.memory_bytes])
