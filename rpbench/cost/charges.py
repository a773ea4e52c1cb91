"""Charges: the transfers that take time, one row each; all costs of transfers follow from this table.

A row gives the bytes of an object, whether all devices exchange it, and the actions that transfer it:

    in lanes          actions of their own on a link (`rpbench.ir.moved_objects` finds them); a pass may put them there
    on computations   kinds of computation that end with an exchange over a link, which blocks the device

Seconds on a link (`rpbench.cost.transfers`), causes of a step, bytes over each link and buffers on a device follow. A
new charge is a row here, and a pass if it has actions of its own.

charge=hops    a boundary tensor takes a hop of the costs, the optimizer nothing, transfers what their bytes take
charge=bytes   all rows take what their bytes take
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rpbench.cost.footprint.sizes import LayerSize, ModelBytes
from rpbench.ir.action import HEAD, Kind
from rpbench.ir.moved_objects import Payload
from rpbench.ir.schedule import Schedule, ScheduleError, Weights
from rpbench.ir.waits.moves import has_transfers, moves_activations_alone
from rpbench.passes.boundary_lanes import send_over_links
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import shard, stream
from rpbench.registry import Entry
from rpbench.workload.counts import BYTES_PER_VALUE

if TYPE_CHECKING:  # machines are read from YAML, which the site's browser lacks
    from rpbench.cost.hardware.machine import Machine


@dataclass(frozen=True)
class Charge:
    """One kind of object that is transferred."""

    bytes_of: Callable[[LayerSize, ModelBytes], Any]  # bytes for a whole stage; numbers, or arrays of stages
    # whether it is a collective between devices: a cause of its own, at the bandwidth of collectives
    exchanged: bool = True
    # puts it into the lanes of a schedule with steps; None: generators and their passes do
    place: Callable[[Schedule, "Machine"], Schedule] | None = None
    # kinds of computation that end with it, if it has no actions of its own. It lengthens them, takes longer on a
    # slower device as they do, and does not slow down other transfers on the same link
    ends: frozenset[Kind] = frozenset()
    lane: str = "net"  # the link that these computations use


def _sum_copies(schedule: Schedule, cluster: "Machine") -> Schedule:
    """The schedule in which copies of a stage sum their gradients once a step."""
    copies = schedule.placement and any(len(holders) > 1 for holders in schedule.placement)
    return shard(schedule, parameters=None, gradients="step") if copies else schedule


# By the `object` of their transfers (`Payload`), in the order in which passes put them into lanes.
CHARGES: Mapping[str, Charge] = {
    "P": Charge(lambda stage, sizes: stage.weights),
    "G": Charge(lambda stage, sizes: stage.gradients, place=_sum_copies),
    "O": Charge(lambda stage, sizes: stage.optimizer),
    # Of stages that recompute all; `StageBytes` adds activations that are kept.
    "A": Charge(lambda stage, sizes: stage.inputs or sizes.boundary),
    "boundary": Charge(
        lambda stage, sizes: sizes.boundary,
        exchanged=False,
        place=lambda schedule, cluster: send_over_links(schedule, direct=cluster.intra_bytes_per_s is not None),
    ),
    "sum": Charge(lambda stage, sizes: sizes.boundary),
    # Of shards of a vocabulary: hidden states go to all devices and outputs of the embedding's shards to the first one
    # (HF); gradients go the other ways (HB). Each pair moves as much as an all-reduce of a boundary tensor.
    "vocab": Charge(lambda stage, sizes: sizes.boundary, ends=frozenset(HEAD)),
    # Of a tied matrix, before the step of stage 0 (`rpbench.cost.transfers.TIED`): its two devices sum their gradients.
    "tied": Charge(lambda stage, sizes: sizes.embedding.gradients * sizes.reduced_bytes // BYTES_PER_VALUE),
}


def cause_of(payload: Payload) -> str:
    """The cause of a step that the time of a transfer belongs to."""
    if payload.lane == "host":
        return "optimizer"
    return "collectives" if is_collective(payload) else "transfers"


def is_collective(payload: Payload) -> bool:
    """Whether a transfer is an exchange between devices, at the bandwidth of collectives."""
    return payload.lane == "net" and CHARGES[payload.object].exchanged


def computations_that_carry(schedule: Schedule) -> Mapping[tuple[Kind, int], tuple[Payload, ...]]:
    """The transfers at the end of computations, by kind and stage, or by kind and shard of a head (an all-reduce)."""
    shape, found = schedule.shape, dict[tuple[Kind, int], tuple[Payload, ...]]()
    for name, charge in CHARGES.items():
        for kind in charge.ends & schedule.plain_kinds:
            forward = kind in (Kind.F, Kind.R, Kind.HF)
            number, share = shape.num_stages if forward else shape.num_backward_stages, Fraction(1)
            if kind in HEAD:
                number, share = shape.num_head_shards, Fraction(2 * (shape.num_head_shards - 1), shape.num_head_shards)
            for stage in range(number):
                payload = Payload(name, stage, not forward, share, charge.lane)
                found[kind, stage] = (*found.get((kind, stage), ()), payload)
    return found


def check_ssd(schedule: Schedule, cluster: "Machine") -> None:
    """ScheduleError if the schedule needs SSDs and the machine has none."""
    if schedule.on_ssd and cluster.ssd is None:
        raise ScheduleError(
            f"{schedule.name} keeps states on SSDs, and cluster={cluster.name} has none: name them, as in "
            "cluster.ssd=2x_samsung_990_pro_4tb, or take schedule.ssd=none"
        )


def with_everything(
    order: Schedule, entry: Entry, cluster: "Machine", options: Mapping[str, Any], prefetch: int
) -> Schedule:
    """The order with steps and all transfers, by the method's own lowering if it has one.

    Streamed schedules move weights, gradients, boundary tensors and saved inputs through the host. Raises ScheduleError
    if a link between devices has more than boundary tensors and sums, or SSDs are missing.

    Args:
        options: of the schedule, for the method's own lowering.
        prefetch: visits whose weights are loaded ahead, where weights are loaded for every visit.
    """
    if entry.lower is not None:
        lowered = entry.lower(order, prefetch=prefetch, **(entry.options | dict(options)))
        check_ssd(lowered, cluster)
        return lowered
    stepped = add_steps(order)
    if stepped.weights is Weights.STREAMED:
        return stepped if has_transfers(stepped) else stream(stepped, prefetch=prefetch, activations=True)
    return with_charges(stepped, cluster)


def with_charges(schedule: Schedule, cluster: "Machine") -> Schedule:
    """The schedule with the transfers of every charge that has a pass.

    Streamed schedules, and methods that move weights or gradients themselves, have all transfers already. Raises
    ScheduleError if a link between devices has more than boundary tensors, sums and activations.
    """
    if schedule.weights is Weights.STREAMED or (has_transfers(schedule) and not moves_activations_alone(schedule)):
        return schedule
    for charge in CHARGES.values():
        if charge.place is not None:
            schedule = charge.place(schedule, cluster)
    return schedule
