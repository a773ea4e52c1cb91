"""The fits, in order, as `problems.yaml` declares them: which rows give which constants of which framework."""

from pathlib import Path
from typing import Any

from analysis.predictions.clusters.case import Case, rows_of
from analysis.predictions.clusters.fit import Problem
from analysis.predictions.clusters.jobs import cases_of_row
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
