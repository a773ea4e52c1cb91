"""Mesh rules: what a run under a mesh cannot be asked for as well, and what to write instead."""

from collections.abc import Sequence
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.config.configuration import RunConfig
from rpbench.config.mesh.choice import MeshChoice

RECOMPUTED = {"all": "full", "none": "none"}  # the words of a run, in the words of meshes


def counted_cost(overrides: Sequence[str]) -> dict[str, Any]:
    """The cost of a run on a machine that names none.

    Raises:
        ConfigError: if `cost=unit` was asked for: its slots are no seconds, and links take seconds.
    """
    if "cost=unit" in overrides:
        raise ConfigError(
            "cost=unit under a mesh: its slots are no seconds, and the links of a machine take seconds; leave it out, "
            "or take cost=analytic or cost=constant"
        )
    return {"name": "analytic"}


def check_meshed(config: RunConfig, chosen: MeshChoice) -> None:
    """Refuse what a mesh has no model of.

    Raises:
        ConfigError: naming the key, the rule and the way out.
    """
    if chosen.machine is None:  # today's run
        return
    refused = {
        "schedule_file": (config.schedule_file, "a registered schedule is built for its pipeline; use schedule="),
        "tuning_budget": (config.tuning_budget, "plans are searched by rpbench plan mesh=search"),
    }
    for key, (value, way_out) in refused.items():
        if value is not None:
            raise ConfigError(f"{key}={value} under a mesh: {way_out}")
    if config.recompute not in RECOMPUTED:
        raise ConfigError(f"recompute={config.recompute} under a mesh: one of {', '.join(RECOMPUTED)}")
    if config.charge not in (None, "hops"):
        raise ConfigError(
            f"charge={config.charge} under a mesh: its links say what boundary tensors take; leave charge out"
        )
    if config.offload not in (None, "none"):
        raise ConfigError(
            f"offload={config.offload} under a mesh: nothing is moved to hosts there; leave it out, or take one host"
        )
    if config.cost.get("split_penalty", 1.0) != 1.0:
        raise ConfigError(
            f"cost.split_penalty={config.cost['split_penalty']} under a mesh: the framework's file in conf/software/ "
            "says what two halves of a backward cost; leave it out, or choose another software"
        )
    if config.cost.get("name") == "unit":
        raise ConfigError(
            "cost=unit under a mesh: its slots are no seconds, and links take seconds; take cost=analytic, or "
            "cost=constant"
        )
