"""Fitting: constants of a framework from given rows and priors, by Gauss-Newton with Huber weights.

The fit minimises a sum: of Huber losses of log(predicted / measured) / 0.04, over configurations, and of squares of
log(constant / prior) / log-sd. A constant beyond a factor of 3 from its prior is a sign of a missing mechanism.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.predictions.clusters.case import TABLES, Case, Model, rows_of
from analysis.predictions.clusters.jobs import cases_of_row
from rpbench.cost.hardware.device import CONF
from rpbench.mesh.job import Job
from rpbench.mesh.software import PRIORS, declared_software
from rpbench.yaml_file import read_keys

NOISE = 0.04  # of one measured step, as a logarithm
HUBER = 1.5  # noises beyond which a row pulls no harder
STEP = 0.02  # of a constant's logarithm, for derivatives
LONGEST = 0.7  # step of a constant's logarithm
ENOUGH = 2e-3  # steps below which the search ends
DAMPING = 1e-3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Constants that are fitted together.

    Args:
        name: of the problem.
        rows: the sets whose rows are given.
        softwares: frameworks whose constants are sought.
        shared: constants that all of them share.
        own: constants that each has for itself.
        parts: (constant, frameworks) where some of them share one.
        prior_from: a problem's software whose fitted constants are the priors here.
        shrink: of the priors' deviations where they come from another fit.
        heirs: frameworks without rows, which get the shared constants.
        sds: deviations of the logarithms of constants, where they are not those of `PRIORS`.
        axes: of `holdout.AXES`, along which groups of rows are left out.
    """

    name: str
    rows: tuple[str, ...]
    softwares: tuple[str, ...]
    shared: tuple[str, ...]
    own: tuple[str, ...] = ()
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    prior_from: str = ""
    shrink: float = 0.5
    heirs: tuple[str, ...] = ()
    sds: Mapping[str, float] = field(default_factory=dict)
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """One number that is sought, and the frameworks it belongs to."""

    constant: str
    softwares: tuple[str, ...]
    prior: float
    log_sd: float


@dataclass(frozen=True)
class Fitted:
    """The result of a fit.

    Args:
        values: by framework and constant.
        log_sd: of each parameter after the fit, propagated.
        parameters: what was sought, in order.
    """

    values: dict[str, dict[str, float]]
    log_sd: tuple[float, ...]
    parameters: tuple[Parameter, ...]

    @property
    def model(self) -> Model:
        return Model(self.values)


def parameters_of(problem: Problem, known: Mapping[str, Mapping[str, float]]) -> tuple[Parameter, ...]:
    """The numbers a problem seeks, with their priors."""
    found = []
    own = [(constant, (each,)) for constant in problem.own for each in problem.softwares]
    for constant, group in (*((name, problem.softwares) for name in problem.shared), *own, *problem.parts):
        prior = declared_software(group[0]).constants[constant]
        sd = problem.sds.get(constant, PRIORS[constant].log_sd)
        if constant in known.get(problem.prior_from, {}):
            prior, sd = known[problem.prior_from][constant], sd * problem.shrink
        found.append(Parameter(constant, group, prior, sd))
    return tuple(found)


def fit(
    problem: Problem, cases: Sequence[Case], known: Mapping[str, Mapping[str, float]], iterations: int = 12
) -> Fitted:
    """The constants of a problem from its cases; `known` are those of frameworks that were fitted before."""
    parameters = parameters_of(problem, known)
    chosen = [case for case in cases if case.fits and case.step_time_s and case.job]
    earlier = known.get(problem.prior_from, {})
    base = {name: {**declared_software(name).constants, **earlier} for name in problem.softwares}
    precision = np.array([1.0 / each.log_sd for each in parameters]) ** 2
    counts = Counter(case.configuration for case in chosen)
    weights = np.array([1.0 / counts[case.configuration] for case in chosen]) ** 0.5
    touched = [
        [row for row, case in enumerate(chosen) if case.job and case.job.software.name in each.softwares]
        for each in parameters
    ]

    def residuals(theta: Floats, of: Sequence[Case] = chosen) -> Floats:
        return _residuals(of, Model(_values(parameters, theta, base)))

    def jacobian(theta: Floats, current: Floats) -> Floats:
        """Derivatives of the logarithms of the rows' errors by those of the constants, (rows, constants)."""
        found = np.zeros((len(chosen), len(parameters)))
        for number, (rows, unit) in enumerate(zip(touched, np.eye(len(parameters)), strict=True)):
            moved = residuals(theta + STEP * unit, [chosen[row] for row in rows])
            found[rows, number] = (moved - current[rows]) / STEP
        return found

    theta = np.zeros(len(parameters))  # logarithms of the constants over their priors
    current, normal = residuals(theta), np.diag(precision)
    for _ in range(iterations):
        step, normal = next_step(jacobian(theta, current), current, weights, precision, theta)
        theta = theta + step
        current = residuals(theta)
        if np.max(np.abs(step)) < ENOUGH:
            break
    deviations = np.sqrt(np.diag(np.linalg.inv(normal)))
    return Fitted(_values(parameters, theta, base), tuple(float(each) for each in deviations), parameters)


def next_step(
    jacobian: Floats, residuals: Floats, weights: Floats, precision: Floats, theta: Floats
) -> tuple[Floats, Floats]:
    """The damped step of the constants' logarithms, and the matrix of the normal equations."""
    scale = weights * np.sqrt(np.minimum(1.0, HUBER * NOISE / np.maximum(np.abs(residuals), 1e-9))) / NOISE
    scaled = jacobian * scale[:, None]
    normal = scaled.T @ scaled + np.diag(precision)
    gradient = scaled.T @ (residuals * scale) + precision * theta
    damped = normal + DAMPING * np.diag(np.diag(normal))
    return np.clip(np.linalg.solve(damped, -gradient), -LONGEST, LONGEST), normal


def _values(
    parameters: Sequence[Parameter], theta: Floats, base: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: dict(values) for name, values in base.items()}
    for parameter, moved in zip(parameters, theta, strict=True):
        for name in parameter.softwares:
            found.setdefault(name, {})[parameter.constant] = parameter.prior * exp(moved)
    return found


def _residuals(cases: Sequence[Case], model: Model) -> Floats:
    known: dict[tuple[Job | None, bool, int], float] = {}
    found = []
    for case in cases:
        assert case.step_time_s is not None
        key = (case.job, case.early, case.repeats)  # repeated runs are timed once
        if key not in known:
            known[key] = model.step_time_s(case)
        found.append(log(known[key] / case.step_time_s))
    return np.array(found)


SETS: tuple[str, ...] = tuple(TABLES["sets"])


def _as_problem(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return found | {"parts": tuple((constant, tuple(group)) for constant, group in row.get("parts", ()))}


PROBLEMS = tuple(
    Problem(name, **_as_problem(row)) for name, row in read_keys(Path(__file__).with_name("problems.yaml")).items()
)


def given(names: tuple[str, ...]) -> list[Case]:
    """All cases of these sets whose answers are given."""
    return [case for name in names for row in rows_of("measured", name) for case in cases_of_row(row)]


def asked(name: str) -> list[Case]:
    """The cases of a set whose answers are withheld."""
    return [case for row in rows_of("challenge", name) for case in cases_of_row(row)]


def cases_of(problem: Problem) -> list[Case]:
    """The given cases of a problem's frameworks."""
    return [case for case in given(problem.rows) if case.job and case.job.software.name in problem.softwares]


FILE: Path = CONF / "software" / "constants.csv"
# Those of a device or of a job, not of the framework that an heir shares.
NOT_INHERITED = frozenset({"inter", "step_s", "session", "jitter", "broadcast_s"})


def fits(leave_out: frozenset[str] = frozenset()) -> dict[str, Fitted]:
    """Every problem's fit, by name, without the rows of some ids."""
    known: dict[str, dict[str, float]] = {}
    found = {}
    for problem in PROBLEMS:
        cases = [case for case in cases_of(problem) if case.id not in leave_out]
        found[problem.name] = fit(problem, cases, known)
        known |= found[problem.name].values
    return found


def rows() -> list[dict[str, str]]:
    return [row for problem, fitted in zip(PROBLEMS, fits().values(), strict=True) for row in _found(problem, fitted)]


def _found(problem: Problem, fitted: Fitted) -> list[dict[str, str]]:
    found = []
    sought = {(name, each.constant) for each in fitted.parameters for name in each.softwares}
    for parameter, log_sd in zip(fitted.parameters, fitted.log_sd, strict=True):
        heirs = problem.heirs if parameter.constant not in NOT_INHERITED else ()
        for name in (*parameter.softwares, *heirs):
            value = fitted.values[parameter.softwares[0]][parameter.constant]
            origin = "fitted" if name in parameter.softwares else f"as {parameter.softwares[0]}"
            deviations = (parameter.log_sd, log_sd)
            found.append(_constant(name, parameter.constant, value, parameter.prior, deviations, origin, problem))
    for name in problem.softwares if problem.prior_from else ():  # what came from another fit, not sought again
        declared = declared_software(name).constants
        for constant, value in fitted.values[name].items():
            if (name, constant) not in sought and value != declared[constant]:
                deviations = (PRIORS[constant].log_sd,) * 2
                found.append(_constant(name, constant, value, value, deviations, f"as {problem.prior_from}", problem))
    return found


def _constant(
    name: str, constant: str, value: float, prior: float, deviations: tuple[float, float], origin: str, problem: Problem
) -> dict[str, str]:
    """A row of the file; deviations are those before and after the fit."""
    return {
        "software": name,
        "constant": constant,
        "value": f"{value:.6g}",
        "prior": f"{prior:.6g}",
        "log_sd_prior": f"{deviations[0]:.3g}",
        "log_sd": f"{deviations[1]:.3g}",
        "origin": origin,
        "rows": " ".join(problem.rows),
        "meaning": PRIORS[constant].meaning,
    }
