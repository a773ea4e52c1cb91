"""Charging: what takes time beside computing, and the schedule with everything in its lanes that does.

Where a request leaves it open, `rpbench.config.usual_charge` takes bytes if they are known.

charge=hops    a boundary tensor takes a hop of the costs, the optimizer nothing, transfers what their bytes take
charge=bytes   all of it takes what its bytes take: boundary tensors over the links of the devices, sums over copies
               of a stage, the optimizer over the memory where it works
"""

from rpbench.config.choices import ConfigError, Simulate
from rpbench.config.files.keys import MOVES, check_figures
from rpbench.config.request import Request
from rpbench.config.usual_charge import CONSTANTS
from rpbench.cost.machine import Machine
from rpbench.cost.sizes import ModelBytes
from rpbench.cost.traffic import OptimizerTraffic, Traffic
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.plan.contest.charges import with_boundaries

CHARGES = ("hops", "bytes")


def check_charge(request: Request) -> None:
    """Refuse what cannot be charged.

    Raises:
        ConfigError: for an unknown word, or a request whose transfers nobody has named.
    """
    charge, offload, entry = request.charge, request.offload, request.entry
    if charge not in CHARGES:
        raise ConfigError(f"charge={charge}: one of {', '.join(CHARGES)}")
    if charge == "hops":
        return
    if not isinstance(request.mode, Simulate):
        raise ConfigError(
            f"charge=bytes with mode={request.mode.name}: bytes are charged in simulation; use mode=simulate"
        )
    if entry.separate_cuts and offload not in ("all", "auto"):
        raise ConfigError(
            f"charge=bytes with offload={offload}: the weights of {entry.name} follow its work, and their way counts; "
            "use offload=all, or charge=hops"
        )
    if entry.shards_head:
        raise ConfigError(
            f"charge=bytes: the sums of {entry.name} over shares of the head have no bytes; use charge=hops"
        )


def with_charges(schedule: Schedule, cluster: Machine) -> Schedule:
    """The schedule with the sums over copies of a stage, and its boundary tensors as transfers.

    Raises:
        ConfigError: if a link between devices has something beside boundary tensors, sums and activations.
    """
    try:
        return with_boundaries(schedule, cluster)
    except ScheduleError as error:
        raise ConfigError(f"charge=bytes: {error}; use charge=hops, which leaves the optimizer out") from None


def traffic_of(request: Request, sizes: ModelBytes, *, boundaries: bool) -> Traffic:
    """What is charged for the transfers of a run.

    Args:
        boundaries: whether boundary tensors are among the transfers of a run that charges hops.

    Raises:
        ConfigError: if the costs or the cluster lack a figure.
    """
    cost, cluster = request.cost, request.cluster
    if request.charge == "hops":
        return Traffic(sizes, cluster, boundaries)
    check_figures(cluster, MOVES, "charge=bytes")
    for name in CONSTANTS:
        if name not in cost.constants:
            raise ConfigError(
                f"charge=bytes: cost={cost.name} has no constants.{name}, the optimizer's traffic for one parameter; "
                f"use cost=published or analytic, or add +cost.constants.{name}=NUMBER"
            )
    pace = (cluster.memory_bytes_per_s or 0) * (cluster.memory_efficiency or 0)
    optimizer = OptimizerTraffic(cost.constants["optimizer_bytes"], cost.constants["adam_bytes"], pace)
    return Traffic(sizes, cluster, optimizer=optimizer)
