"""Usual charge: what takes time where a request leaves it open: everything, if model, machine and costs say enough."""

from collections.abc import Mapping
from typing import Any

from rpbench.config.choices import CostConfig, Mode, Simulate
from rpbench.config.configuration import RunConfig
from rpbench.config.files.keys import MOVES
from rpbench.cost.machine import Machine
from rpbench.registry import Entry

CONSTANTS = ("optimizer_bytes", "adam_bytes")  # of the costs: traffic of the optimizer for one parameter


def charged_as(config: RunConfig, mode: Mode, entry: Entry, cluster: Machine, cost: CostConfig) -> dict[str, str]:
    """`charge` and `offload` of a run, as asked for; where they are not, everything that can be is charged.

    A schedule whose weights follow its work moves them then (`offload=all`), and others move nothing.
    """
    charge = config.charge
    if charge is None:
        open_to_it = isinstance(mode, Simulate) and config.tuning_budget is None and config.schedule_file is None
        stays = entry.separate_cuts and config.offload in ("none", "weights")
        can_be = open_to_it and not stays and not entry.shards_head and _known(config.model, cluster, cost)
        charge = "bytes" if can_be else "hops"
    moves = charge == "bytes" and entry.separate_cuts
    return {"charge": charge, "offload": config.offload or ("all" if moves else "none")}


def _known(model: Mapping[str, Any], cluster: Machine, cost: CostConfig) -> bool:
    """Whether bytes and paces are known: of the model, the machine and the optimizer."""
    machine = all(getattr(cluster, name) is not None for name in MOVES)
    return machine and "hidden" in model and all(name in cost.constants for name in CONSTANTS)
