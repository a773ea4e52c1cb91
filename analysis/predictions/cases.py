"""Cases of the paper's tables, built from the configuration files."""

from functools import cache

from analysis.records.paper import PUBLISHED_MODELS
from rpbench.config.request import load
from rpbench.cost.basis import Basis
from rpbench.cost.machine import Machine
from rpbench.predict import SYSTEMS
from rpbench.predict.case import Case
from rpbench.predict.settings import published_settings
from rpbench.run.modes.predict import basis_of
from rpbench.workload.architecture import Architecture

# Machines of the paper, by the name of their configuration.
PLATFORMS = {"8x_rtx4090": "8x-rtx4090-24gb", "8x_a800": "8x-a800-80gb-sxm"}

# Machines whose settings are published and whose pace is not: RoundPipe alone, without the model with few experts.
CROSS_PLATFORMS = {"8x_w7800": "8x-amd-w7800", "8x_ascend_910b": "8x-ascend-910b"}
CROSS_MODELS = ("qwen3_1p7b", "llama31_8b", "qwen3_32b", "qwen3_235b_lora")

# Where the layers of published models were timed.
MEASURED_ON = "8x_rtx4090"


@cache
def model_of(name: str) -> Architecture:
    """A model by the name of its configuration."""
    model = load([f"model={name}"]).model
    assert model is not None  # it has a shape
    return model


@cache
def cluster_of(name: str) -> Machine:
    """A machine by the name of its configuration."""
    return load([f"cluster={name}"]).cluster


@cache
def declared_basis(cluster: str) -> Basis:
    """The declared constants on a machine."""
    return basis_of(cluster_of(cluster), load(["cost=analytic"]).cost)


def case_of(system: str, cluster: str, model: str, num_devices: int = 8, basis: Basis | None = None) -> Case:
    """A system's published run of a model on devices of a machine."""
    basis = basis or declared_basis(cluster)
    shape = model_of(model)
    memory = basis["device_memory_bytes"]
    settings = published_settings(system, cluster_of(cluster).published_name, shape.published_name, memory)
    return Case(system, shape, basis, settings, num_devices, measured_on=declared_basis(MEASURED_ON))


def cross_cells() -> list[tuple[str, str, str]]:
    """(system, machine, model) of the runs on other vendors' machines."""
    return [("roundpipe", cluster, model) for cluster in CROSS_PLATFORMS for model in CROSS_MODELS]


def cells() -> list[tuple[str, str, str]]:
    """(system, machine, model) of the throughput tables, in the order of the published one."""
    return [(system, cluster, model) for cluster in PLATFORMS for system in SYSTEMS for model in PUBLISHED_MODELS]
