"""Charges: the schedule that runs of an order, with everything in its lanes that takes time beside computing.

Streamed schedules move weights, gradients, boundary tensors and kept inputs over the host; methods that say themselves
what they move do that; of all others boundary tensors go over the links, and copies of a stage sum their gradients.
Everybody's optimizer steps.
"""

from collections.abc import Mapping
from typing import Any

from rpbench.cost.machine import Machine
from rpbench.ir.moves import has_transfers, moves_activations_alone
from rpbench.ir.schedule import Schedule, Weights
from rpbench.passes.boundary_lanes import send_over_links
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import shard, stream
from rpbench.registry import Entry


def with_everything(
    order: Schedule, entry: Entry, cluster: Machine, options: Mapping[str, Any], prefetch: int
) -> Schedule:
    """The order with steps and with all that it moves.

    Args:
        options: of the schedule; a method's own lowering reads them.
        prefetch: visits whose weights come ahead, where weights come for every visit.

    Raises:
        ScheduleError: if a link between devices has something beside boundary tensors and sums.
    """
    if entry.lower is not None:
        return entry.lower(order, prefetch=prefetch, **(entry.options | dict(options)))
    stepped = add_steps(order)
    if stepped.weights is Weights.STREAMED:
        return stepped if has_transfers(stepped) else stream(stepped, prefetch=prefetch, activations=True)
    return with_boundaries(stepped, cluster)


def with_boundaries(schedule: Schedule, cluster: Machine) -> Schedule:
    """The schedule with the sums over copies of a stage, and its boundary tensors as transfers.

    Streamed schedules, and methods that move weights or gradients themselves, have everything already.

    Raises:
        ScheduleError: if a link between devices has something beside boundary tensors, sums and activations.
    """
    if schedule.weights is Weights.STREAMED or (has_transfers(schedule) and not moves_activations_alone(schedule)):
        return schedule
    if schedule.placement and any(len(holders) > 1 for holders in schedule.placement):
        schedule = shard(schedule, parameters=None, gradients="step")
    return send_over_links(schedule, direct=cluster.intra_bytes_per_s is not None)
