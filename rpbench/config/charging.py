"""Charging: which transfers take time in a run, `charge=hops` or `charge=bytes` (`rpbench.cost.charges`)."""

from collections.abc import Mapping
from typing import Any

from rpbench.config.choices import ConfigError, CostConfig, Mode, Simulate
from rpbench.config.configuration import RunConfig
from rpbench.config.keys import MOVES
from rpbench.cost.hardware.machine import Machine
from rpbench.registry import Entry

CONSTANTS = ("optimizer_bytes", "adam_bytes")  # cost constants: traffic of the optimizer for one parameter
WORDS = ("hops", "bytes")


def charged_as(config: RunConfig, mode: Mode, entry: Entry, cluster: Machine, cost: CostConfig) -> dict[str, str]:
    """`charge` and `offload` of a run: as requested; by default everything that can be is charged.

    A schedule whose weights follow its work then moves them (`offload=all`); others move nothing.
    """
    charge = config.charge
    if charge is None:
        is_possible = isinstance(mode, Simulate) and config.tuning_budget is None
        stays = entry.separate_cuts and config.offload in ("none", "weights")
        in_bytes = is_possible and not stays and _known(config.model, cluster, cost)
        charge = "bytes" if in_bytes else "hops"
    moves = charge == "bytes" and entry.separate_cuts
    return {"charge": charge, "offload": config.offload or ("all" if moves else "none")}


def _known(model: Mapping[str, Any], cluster: Machine, cost: CostConfig) -> bool:
    """Whether the model's bytes, the machine's bandwidths and the optimizer's traffic are known."""
    machine = all(getattr(cluster, name) is not None for name in MOVES)
    known = cost.name == "analytic" or all(name in cost.constants for name in CONSTANTS)
    return machine and "hidden" in model and known


def check_charge(charge: str, offload: str, entry: Entry, mode: Mode) -> None:
    if charge not in WORDS:
        raise ConfigError(f"charge={charge}: one of {', '.join(WORDS)}")
    if charge == "hops":
        return
    if not isinstance(mode, Simulate):
        raise ConfigError(f"charge=bytes with mode={mode.name}: bytes are charged in simulation; use mode=simulate")
    if entry.separate_cuts and offload not in ("all", "auto"):
        raise ConfigError(
            f"charge=bytes with offload={offload}: the weights of {entry.name} follow its work, and their way counts; "
            "use offload=all, or charge=hops"
        )
