"""The fits, in order, as `problems.yaml` declares them, and the constants that they find.

`write` puts those into `conf/software/constants.csv` with origin, prior and deviation.
"""

from pathlib import Path
from typing import Any

from analysis.predictions import tables
from analysis.predictions.clusters.case import Case, rows_of
from analysis.predictions.clusters.fit import Fitted, Problem, fit
from analysis.predictions.clusters.jobs import cases_of_row
from rpbench.cost.hardware.device import CONF
from rpbench.mesh.software import PRIORS, declared_software
from rpbench.yaml_file import read_keys

SETS = (
    "bloom_a100_topologies",
    "vtrain_multi",
    "megatron_scaling",
    "zero_bubble_table4",
    "vocab_stage_times",
    "llm_foundry_fsdp",
    "internevo",
    "torchtitan",
    "simumax_b200",
    "megatron_bridge",
    "megatron_ci_golden",
    "nemo_automodel",
    "primus_projection",
    "dgxc_benchmarking",
    "mlperf_training",
    "atorch_llama2",
    "xtuner_h800",
    "threads_and_readmes",
    "peft_method_comparison",
    "torchtune_memory",
    "lohan_rtx4090",
)


def _read(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return found | {"parts": tuple((constant, tuple(group)) for constant, group in row.get("parts", ()))}


PROBLEMS = tuple(Problem(name, **_read(row)) for name, row in read_keys(Path(__file__).with_suffix(".yaml")).items())


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
    rows = [row for problem, fitted in zip(PROBLEMS, fits().values(), strict=True) for row in _found(problem, fitted)]
    return tables.write(FILE, rows)


def _found(problem: Problem, fitted: Fitted) -> list[dict[str, str]]:
    found = []
    sought = {(name, each.constant) for each in fitted.parameters for name in each.softwares}
    for parameter, log_sd in zip(fitted.parameters, fitted.log_sd, strict=True):
        heirs = problem.heirs if parameter.constant not in NOT_INHERITED else ()
        for name in (*parameter.softwares, *heirs):
            value = fitted.values[parameter.softwares[0]][parameter.constant]
            origin = "fitted" if name in parameter.softwares else f"as {parameter.softwares[0]}"
            found.append(
                _constant(name, parameter.constant, value, parameter.prior, parameter.log_sd, log_sd, origin, problem)
            )
    for name in problem.softwares if problem.prior_from else ():  # what came from another fit, not sought again
        declared = declared_software(name).constants
        for constant, value in fitted.values[name].items():
            if (name, constant) not in sought and value != declared[constant]:
                sd = PRIORS[constant].log_sd
                found.append(_constant(name, constant, value, value, sd, sd, f"as {problem.prior_from}", problem))
    return found


def _constant(
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
