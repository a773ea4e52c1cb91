"""Spread: how far a prediction may be off, as deviations of its logarithm: a set's own, and what was never seen of it.

A set's own deviation is that of its given rows in the hold-out most like what is asked (`clusters_holdout.csv`, the
90th percentile of absolute errors over 1.645). What no given row of its framework has (a device, a size of machine,
a kind of number, the framework itself) adds its deviation, and the prediction's note says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from analysis.predictions.clusters.case import Case
from rpbench.yaml_file import read_keys


class Spread(NamedTuple):
    """A deviation, and what it rests on."""

    log_sd: float
    why: str


class Unseen(NamedTuple):
    """A deviation that adds to a set's own.

    Args:
        name: as a note says it.
        applies: to which rows.
        why: the deviation is what it is.
    """

    name: str
    log_sd: float
    applies: Callable[[Case], bool]
    why: str


STEP, MEMORY = (
    {name: Spread(*row) for name, row in table.items()}
    for table in read_keys(Path(__file__).with_suffix(".yaml")).values()
)


def _device(case: Case) -> str:
    return case.job.machine.device.name if case.job else ""


def _framework(case: Case) -> str:
    return case.job.software.name if case.job else ""


def _routed(case: Case) -> bool:
    return case.job is not None and case.job.architecture.experts is not None


def _on(set_name: str, *devices: str) -> Callable[[Case], bool]:
    return lambda case: case.set_name == set_name and _device(case) in devices


def _far(case: Case) -> bool:
    """InternEvo's owners on more than twice as many nodes as were seen."""
    if case.set_name != "internevo" or case.job is None:
        return False
    group = case.job.mesh.shard_group * case.job.mesh.tensor
    return case.job.mesh.sharing.what == "optimizer" and group > 256


UNSEEN = (
    Unseen(
        "experts: releases differ",
        0.22,
        lambda case: case.set_name in ("megatron_bridge", "nemo_automodel", "threads_and_readmes") and _routed(case),
        "Bridge without a device or a release",
    ),
    Unseen("device never seen", 0.07, _on("megatron_bridge", "b300", "gb300"), "as much as between given devices"),
    Unseen("device never seen", 0.06, _on("mlperf_training", "gb200", "b300", "gb300"), "as between given devices"),
    Unseen(
        "device and submitters' software never seen",
        0.20,
        _on("mlperf_training", "mi300x", "mi325x", "mi355x"),
        "kernels of another vendor",
    ),
    Unseen(
        "4 bits never seen on it",
        0.10,
        lambda case: case.job is not None and case.job.precision == "nvfp4",
        "Bridge's rows of 4 bits: up to 17 %",
    ),
    Unseen(
        "device never seen under it",
        0.08,
        lambda case: _device(case) == "gb200" and _framework(case).startswith("nemo_2"),
        "as between given devices",
    ),
    Unseen("few given rows", 0.08, lambda case: _framework(case) == "xla", "MaxText and Paxml without a size: 0.09"),
    Unseen("few given rows", 0.08, lambda case: _framework(case) == "nemo_tuned", "in sample up to 18 %"),
    Unseen(
        "model never seen",
        0.04,
        lambda case: case.set_name == "mlperf_training" and _framework(case) == "mlperf",
        "GPT-3 alone is given; DGX Cloud without a model: 0.036",
    ),
    Unseen(
        "adapters or pipelines never seen under it",
        0.14,
        lambda case: (
            case.set_name == "atorch_llama2"
            and case.job is not None
            and (case.job.adapters is not None or case.job.mesh.sharing.what == "optimizer")
        ),
        "a framework never seen",
    ),
    Unseen("size of the owners' group never seen", 0.15, _far, "hops of broadcasts, extrapolated eight times"),
    Unseen(
        "devices and sizes never seen",
        0.08,
        lambda case: case.set_name == "lohan_rtx4090",
        "13 B on one device alone is given",
    ),
    Unseen(
        "framework never seen",
        0.15,
        lambda case: case.set_name in ("threads_and_readmes", "primus_projection"),
        "AutoModel and torchtitan in the first round: 0.17 to 0.25",
    ),
    Unseen("framework seen elsewhere", 0.04, lambda case: case.set_name == "megatron_scaling", "first round"),
)


def unseen(case: Case) -> list[Unseen]:
    """The properties of a row that no given row has."""
    return [each for each in UNSEEN if each.applies(case)]


def step_log_sd(case: Case) -> float:
    """Deviation of the logarithm of a predicted step."""
    own = STEP[case.set_name].log_sd
    return float((own**2 + sum(each.log_sd**2 for each in unseen(case))) ** 0.5)


def memory_log_sd(case: Case) -> float:
    """Deviation of the logarithm of predicted bytes."""
    return MEMORY[case.set_name].log_sd
