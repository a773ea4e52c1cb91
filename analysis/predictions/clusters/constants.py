"""Constants: all fits in their order, written to `conf/software/constants.csv` with origin, prior and deviation."""

from pathlib import Path

from analysis.predictions import tables
from analysis.predictions.clusters.fit import Fitted, Problem, fit
from analysis.predictions.clusters.problems import PROBLEMS, cases_of
from rpbench.cost.device import CONF
from rpbench.mesh.software import PRIORS, declared_software

FILE: Path = CONF / "software" / "constants.csv"
# Those of a device or of a job, not of the framework that an heir shares.
NOT_INHERITED = frozenset({"inter", "step_s", "session", "jitter", "broadcast_s"})


def fits(leave_out: frozenset[str] = frozenset()) -> dict[str, Fitted]:
    """Every problem's fit, by name.

    Args:
        leave_out: ids of rows that are not to be seen.
    """
    known: dict[str, dict[str, float]] = {}
    found = {}
    for problem in PROBLEMS:
        cases = [case for case in cases_of(problem) if case.id not in leave_out]
        found[problem.name] = fit(problem, cases, known)
        known |= found[problem.name].values
    return found


def write() -> int:
    """Write the file; returns the number of constants."""
    rows = [row for problem, fitted in zip(PROBLEMS, fits().values(), strict=True) for row in _rows(problem, fitted)]
    return tables.write(FILE, rows)


def _rows(problem: Problem, fitted: Fitted) -> list[dict[str, str]]:
    found = []
    sought = {(name, each.constant) for each in fitted.parameters for name in each.softwares}
    for parameter, log_sd in zip(fitted.parameters, fitted.log_sd, strict=True):
        heirs = problem.heirs if parameter.constant not in NOT_INHERITED else ()
        for name in (*parameter.softwares, *heirs):
            value = fitted.values[parameter.softwares[0]][parameter.constant]
            origin = "fitted" if name in parameter.softwares else f"as {parameter.softwares[0]}"
            found.append(
                _row(name, parameter.constant, value, parameter.prior, parameter.log_sd, log_sd, origin, problem)
            )
    for name in problem.softwares if problem.prior_from else ():  # what came from another fit, not sought again
        declared = declared_software(name).constants
        for constant, value in fitted.values[name].items():
            if (name, constant) not in sought and value != declared[constant]:
                sd = PRIORS[constant].log_sd
                found.append(_row(name, constant, value, value, sd, sd, f"as {problem.prior_from}", problem))
    return found


def _row(
    name: str, constant: str, value: float, prior: float, sd: float, after: float, origin: str, problem: Problem
) -> dict[str, str]:
    return {
        "software": name,
        "constant": constant,
        "value": f"{value:.6g}",
        "prior": f"{prior:.6g}",
        "log_sd_prior": f"{sd:.3g}",
        "log_sd": f"{after:.3g}",
        "origin": origin,
        "rows": " ".join(problem.rows),
        "meaning": PRIORS[constant].meaning,
    }
