"""Terms that the tests of the contest share: the experiment of figure 10, and a small model."""

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.machine import machine as machine_named
from rpbench.mesh.plan_search.terms import terms_of
from rpbench.plan.contest.terms import Limits, Terms
from rpbench.workload.architecture import Architecture, architecture

CONF = Path(__file__).parents[1] / "conf"


@cache
def read(path: str) -> dict[str, Any]:
    """A configuration file as plain data, which nobody may change."""
    return OmegaConf.to_container(OmegaConf.load(CONF / path))  # type: ignore[return-value]


def terms(model: str = "qwen3_1p7b", cluster: str = "8x_rtx4090", **changes: Any) -> Terms:
    """The terms of experiment=figure10: 16 microbatches of four sequences, four steps, everything charged."""
    machine, costs = machine_named(cluster), read("cost/analytic.yaml")
    given: dict[str, Any] = {
        "num_devices": 8,
        "sequences_per_step": 64,
        "microbatches": (4,),
        "source": "published",
    } | changes
    return terms_of(
        architecture(model),
        machine,
        make_basis(machine, costs["constants"], costs["declared"]),
        **given,
    )


def small(limit_bytes: int | None = None, num_layers: int = 6, **changes: Any) -> Terms:
    """A few layers on two of the same devices: everything about it is fast."""
    machine, costs = machine_named("8x_rtx4090"), read("cost/analytic.yaml")
    given: dict[str, Any] = {
        "num_devices": 2,
        "sequences_per_step": 8,
        "microbatches": (1, 2),
        "limits": Limits(limit_bytes, None),
        "num_steps": 3,
    } | changes
    model = Architecture("small", num_layers=num_layers, hidden=1024, heads=8, vocab=32_000, seq_len=1024)
    return terms_of(model, machine, make_basis(machine, costs["constants"], costs["declared"]), **given)
