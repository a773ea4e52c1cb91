"""Fits of a framework's constants to given rows and priors, by Gauss-Newton with Huber weights.

A fit minimises the sum of Huber losses of log(predicted / measured) / 0.04 over configurations and of squares of
log(constant / prior) / log-sd. A constant more than a factor of 3 from its prior is a sign of a missing mechanism.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from analysis.predictions.clusters.case import TABLES, Case, Model, Row, rows_of
from analysis.predictions.clusters.jobs import cases_of_row
from rpbench.cost.arrays import Floats
from rpbench.cost.hardware.device import CONF
from rpbench.mesh.job import Job
from rpbench.mesh.software import PRIORS, declared_software
from rpbench.yaml_file import read_keys

NOISE = 0.04  # of the logarithm of one measured step
HUBER = 1.5  # noises; the loss of larger residuals is linear
STEP = 0.02  # of a constant's logarithm, for derivatives
LONGEST = 0.7  # largest step of a constant's logarithm
ENOUGH = 2e-3  # the search ends at smaller steps
DAMPING = 1e-3
ITERATIONS = 12


@dataclass(frozen=True)
class Problem:
    """Constants that are fitted together."""

    name: str
    rows: tuple[str, ...]  # the sets of given rows
    softwares: tuple[str, ...]  # frameworks whose constants are fitted
    shared: tuple[str, ...]  # constants with one value for all of them
    own: tuple[str, ...] = ()  # constants with a value for each
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (constant, frameworks) with one value for some of them
    prior_from: str = ""  # a framework whose fitted constants are the priors here
    shrink: float = 0.5  # factor of the deviations of such priors
    heirs: tuple[str, ...] = ()  # frameworks without rows, which get the shared constants
    # deviations of logarithms of constants, other than those of `PRIORS`
    sds: Mapping[str, float] = field(default_factory=dict)
    axes: tuple[str, ...] = ()  # of `holdout.AXES`, along which groups of rows are left out


@dataclass(frozen=True)
class Parameter:
    """A fitted number and its frameworks."""

    constant: str
    softwares: tuple[str, ...]
    prior: float
    log_sd: float


@dataclass(frozen=True)
class Fitted:
    """The result of a fit: values by framework and constant, and each parameter's deviation after the fit."""

    values: dict[str, dict[str, float]]
    log_sd: tuple[float, ...]
    parameters: tuple[Parameter, ...]


def parameters_of(problem: Problem, known: Mapping[str, Mapping[str, float]]) -> tuple[Parameter, ...]:
    found = []
    own = [(constant, (each,)) for constant in problem.own for each in problem.softwares]
    for constant, group in (*((name, problem.softwares) for name in problem.shared), *own, *problem.parts):
        prior = declared_software(group[0]).constants[constant]
        sd = problem.sds.get(constant, PRIORS[constant].log_sd)
        if constant in known.get(problem.prior_from, {}):
            prior, sd = known[problem.prior_from][constant], sd * problem.shrink
        found.append(Parameter(constant, group, prior, sd))
    return tuple(found)


def fit(problem: Problem, cases: Sequence[Case], known: Mapping[str, Mapping[str, float]]) -> Fitted:
    """The constants of a problem from its cases; `known` are those of frameworks that were fitted before."""
    parameters = parameters_of(problem, known)
    chosen = [case for case in cases if case.fits and case.step_time_s and case.job]
    earlier = known.get(problem.prior_from, {})
    base = {name: {**declared_software(name).constants, **earlier} for name in problem.softwares}
    touched = [
        [row for row, case in enumerate(chosen) if case.job and case.job.software.name in each.softwares]
        for each in parameters
    ]

    def residuals(theta: Floats, of: Sequence[Case] = chosen) -> Floats:
        model, known = Model(_values(parameters, theta, base)), dict[tuple[Job | None, bool, int], float]()
        found = []
        for case in of:
            key = (case.job, case.early, case.repeats)  # repeats are predicted once
            if key not in known:
                known[key] = model.step_time_s(case)
            found.append(log(known[key] / case.measured_s))
        return np.array(found)

    def jacobian(theta: Floats, current: Floats) -> Floats:
        found = np.zeros((len(chosen), len(parameters)))
        for number, (rows, unit) in enumerate(zip(touched, np.eye(len(parameters)), strict=True)):
            moved = residuals(theta + STEP * unit, [chosen[row] for row in rows])
            found[rows, number] = (moved - current[rows]) / STEP
        return found

    log_sds = [each.log_sd for each in parameters]
    theta, normal = gauss_newton(residuals, jacobian, chosen, log_sds, ITERATIONS)
    deviations = np.sqrt(np.diag(np.linalg.inv(normal)))
    return Fitted(_values(parameters, theta, base), tuple(float(each) for each in deviations), parameters)


def gauss_newton(
    residuals: Callable[[Floats], Floats],
    jacobian: Callable[[Floats, Floats], Floats],
    cases: Sequence[Case],
    log_sds: Sequence[float],
    iterations: int,
) -> tuple[Floats, Floats]:
    """The logarithms of constants over priors at the minimum, and the matrix of the normal equations there.

    The residuals are log(predicted / measured) of the cases; the jacobian has their derivatives (cases, constants),
    from the logarithms and the residuals there. `log_sds` are deviations of the priors.
    """
    counts = Counter(case.configuration for case in cases)
    weights = np.array([1.0 / counts[case.configuration] for case in cases]) ** 0.5
    precision = np.array([1.0 / log_sd for log_sd in log_sds]) ** 2
    theta, normal = np.zeros(len(log_sds)), np.diag(precision)
    current = residuals(theta)
    for _ in range(iterations):
        scale = weights * np.sqrt(np.minimum(1.0, HUBER * NOISE / np.maximum(np.abs(current), 1e-9))) / NOISE
        scaled = jacobian(theta, current) * scale[:, None]
        normal = scaled.T @ scaled + np.diag(precision)
        gradient = scaled.T @ (current * scale) + precision * theta
        damped = normal + DAMPING * np.diag(np.diag(normal))
        step = np.clip(np.linalg.solve(damped, -gradient), -LONGEST, LONGEST)
        theta = theta + step
        current = residuals(theta)
        if np.max(np.abs(step)) < ENOUGH:
            break
    return theta, normal


def _values(
    parameters: Sequence[Parameter], theta: Floats, base: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: dict(values) for name, values in base.items()}
    for parameter, moved in zip(parameters, theta, strict=True):
        for name in parameter.softwares:
            found.setdefault(name, {})[parameter.constant] = parameter.prior * exp(moved)
    return found


SETS: tuple[str, ...] = tuple(TABLES["sets"])


def _as_problem(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return found | {"parts": tuple((constant, tuple(group)) for constant, group in row.get("parts", ()))}


PROBLEMS = tuple(
    Problem(name, **_as_problem(row)) for name, row in read_keys(Path(__file__).with_name("problems.yaml")).items()
)


def given(names: tuple[str, ...]) -> list[Case]:
    """All cases of these sets with given measurements."""
    return [case for name in names for row in rows_of("measured", name) for case in cases_of_row(row)]


def asked(name: str) -> list[Case]:
    """The cases of a set with withheld measurements."""
    return [case for row in rows_of("challenge", name) for case in cases_of_row(row)]


def cases_of(problem: Problem) -> list[Case]:
    """The given cases of a problem's frameworks."""
    return [case for case in given(problem.rows) if case.job and case.job.software.name in problem.softwares]


FILE: Path = CONF / "software" / "constants.csv"
# Constants of a device or a job, which heirs do not share.
NOT_INHERITED = frozenset({"inter", "step_s", "session", "jitter", "broadcast_s"})


def rows() -> list[Row]:
    known: dict[str, dict[str, float]] = {}
    found: list[Row] = []
    for problem in PROBLEMS:
        fitted = fit(problem, cases_of(problem), known)
        known |= fitted.values
        found += _found(problem, fitted)
    return found


def _found(problem: Problem, fitted: Fitted) -> Iterator[Row]:
    def row(name: str, constant: str, value: float, prior: float, sd_prior: float, log_sd: float, origin: str) -> Row:
        return {
            "software": name,
            "constant": constant,
            "value": f"{value:.6g}",
            "prior": f"{prior:.6g}",
            "log_sd_prior": f"{sd_prior:.3g}",
            "log_sd": f"{log_sd:.3g}",
            "origin": origin,
            "rows": " ".join(problem.rows),
            "meaning": PRIORS[constant].meaning,
        }

    sought = {(name, each.constant) for each in fitted.parameters for name in each.softwares}
    for parameter, log_sd in zip(fitted.parameters, fitted.log_sd, strict=True):
        heirs = problem.heirs if parameter.constant not in NOT_INHERITED else ()
        for name in (*parameter.softwares, *heirs):
            value = fitted.values[parameter.softwares[0]][parameter.constant]
            origin = "fitted" if name in parameter.softwares else f"as {parameter.softwares[0]}"
            yield row(name, parameter.constant, value, parameter.prior, parameter.log_sd, log_sd, origin)
    for name in problem.softwares if problem.prior_from else ():  # constants from another fit
        declared = declared_software(name).constants
        for constant, value in fitted.values[name].items():
            if (name, constant) not in sought and value != declared[constant]:
                log_sd = PRIORS[constant].log_sd
                yield row(name, constant, value, value, log_sd, log_sd, f"as {problem.prior_from}")
