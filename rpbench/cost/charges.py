"""Charges: the transfers that take time beside computing, one row each; all costs of transfers follow from this table.

A row names its bytes, whether all devices exchange them, and which actions carry them:

    in lanes          actions of their own on a link (`rpbench.ir.moved_objects` finds them); a pass may put them there
    on computations   kinds of computation that end with an exchange over a link, which blocks the device

The row gives its seconds on a link (`rpbench.cost.transfers`), the cause of a step they belong to, the bytes over each
link, and the buffers on a device. A new charge is a row here, and a pass where it has lanes.

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

if TYPE_CHECKING:  # it is read from YAML, which a browser lacks
    from rpbench.cost.hardware.machine import Machine


@dataclass(frozen=True)
class Charge:
    """One kind of object that is transferred.

    Args:
        bytes_of: bytes of a stage as a whole, of numbers or of arrays of stages alike.
        exchanged: whether it is a collective between devices: a cause of its own, at the pace that collectives reach.
        place: puts it into the lanes of a schedule with steps; None: generators and their passes do.
        ends: kinds of computation that end with it, if it has no actions of its own. It stretches them, and like them
            takes longer on a slower device; other transfers on the same link are not slowed down.
        lane: the link that these computations use.
    """

    bytes_of: Callable[[LayerSize, ModelBytes], Any]
    exchanged: bool = True
    place: Callable[[Schedule, "Machine"], Schedule] | None = None
    ends: frozenset[Kind] = frozenset()
    lane: str = "net"


def _sum_copies(schedule: Schedule, cluster: "Machine") -> Schedule:
    """Copies of a stage sum their gradients once a step."""
    copies = schedule.placement and any(len(holders) > 1 for holders in schedule.placement)
    return shard(schedule, parameters=None, gradients="step") if copies else schedule


def _send_boundaries(schedule: Schedule, cluster: "Machine") -> Schedule:
    return send_over_links(schedule, direct=cluster.intra_bytes_per_s is not None)


# By the `object` of their transfers (`Payload`), in the order in which they are put into lanes.
CHARGES: Mapping[str, Charge] = {
    "P": Charge(lambda stage, sizes: stage.weights),
    "G": Charge(lambda stage, sizes: stage.gradients, place=_sum_copies),
    "O": Charge(lambda stage, sizes: stage.optimizer),
    # Of layers that recompute; `StageBytes` knows which do.
    "A": Charge(lambda stage, sizes: stage.inputs or sizes.boundary),
    "boundary": Charge(lambda stage, sizes: sizes.boundary, exchanged=False, place=_send_boundaries),
    "sum": Charge(lambda stage, sizes: sizes.boundary),
    # Of shards of a vocabulary: hidden states come to all devices and what the embedding's rows make goes to the first
    # (HF); gradients go the other ways (HB). Each pair moves what an all-reduce of a boundary tensor does.
    "vocab": Charge(lambda stage, sizes: sizes.boundary, ends=frozenset(HEAD)),
}


def cause_of(payload: Payload) -> str:
    """The cause of a step that the time of a transfer belongs to."""
    if payload.lane == "host":
        return "optimizer"
    return "collectives" if is_collective(payload) else "transfers"


def is_collective(payload: Payload) -> bool:
    """Whether a transfer is an exchange between devices, at the pace that collectives reach."""
    return payload.lane == "net" and CHARGES[payload.object].exchanged


def computations_that_carry(schedule: Schedule) -> Mapping[tuple[Kind, int], tuple[Payload, ...]]:
    """The transfers at the end of computations, by kind and stage; of shards of a head, by shard: all-reduces."""
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
    """Refuse SSDs that the machine does not have: a ScheduleError with a way out."""
    if schedule.on_ssd and cluster.ssd is None:
        raise ScheduleError(
            f"{schedule.name} keeps states on SSDs, and cluster={cluster.name} has none: name them, as in "
            "cluster.ssd=2x_samsung_990_pro_4tb, or take schedule.ssd=none"
        )


# --- into the lanes of a schedule ----------------------------------------------------------------------------


def with_everything(
    order: Schedule, entry: Entry, cluster: "Machine", options: Mapping[str, Any], prefetch: int
) -> Schedule:
    """The order with steps and all transfers.

    Streamed schedules move weights, gradients, boundary tensors and saved inputs through the host. Methods with a
    lowering of their own use it.

    Args:
        options: of the schedule; a method's own lowering reads them.
        prefetch: visits whose weights come ahead, where weights come for every visit.

    Raises:
        ScheduleError: if a link between devices has more than boundary tensors and sums, or SSDs are missing.
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
    """The schedule with the transfers that every row of the table puts into lanes.

    Streamed schedules, and methods that move weights or gradients themselves, have everything already.

    Raises:
        ScheduleError: if a link between devices has more than boundary tensors, sums and activations.
    """
    if schedule.weights is Weights.STREAMED or (has_transfers(schedule) and not moves_activations_alone(schedule)):
        return schedule
    for charge in CHARGES.values():
        if charge.place is not None:
            schedule = charge.place(schedule, cluster)
    return schedule
