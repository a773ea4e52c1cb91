"""Transfers of a run: the passes that `offload` asks for, what they take on the cluster, and what a record says."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.cost.table import CostTable
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.moved_objects import LINKS, carries
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.timeline import Timeline
from rpbench.ir.waits.moves import has_transfers
from rpbench.passes.offload import stream
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.shared_links.links import simulate_charged

OFFLOADS = ("none", "weights", "all", "auto")


def with_offload(offload: str, prefetch: int, schedule: Schedule) -> Schedule:
    """The schedule with the transfers that are asked for.

    Raises:
        ConfigError: for an unknown word, or a schedule whose weights stay where they are.
    """
    if offload not in OFFLOADS:
        raise ConfigError(f"offload={offload}: one of {', '.join(OFFLOADS)}")
    if prefetch < 0:
        raise ConfigError(f"prefetch={prefetch}: stages whose weights come ahead, 0 for none")
    if offload == "auto":
        offload = "all" if schedule.weights is Weights.STREAMED and not has_transfers(schedule) else "none"
    if offload == "none":
        return schedule
    if has_transfers(schedule):
        raise ConfigError(f"offload={offload}: {schedule.name} says by itself what it moves; leave offload=none")
    if schedule.weights is not Weights.STREAMED:
        raise ConfigError(
            f"offload={offload}: the weights of {schedule.name} stay on their devices; use offload=none, or a schedule "
            "whose weights follow the work, such as schedule=roundpipe"
        )
    return stream(schedule, prefetch=prefetch, activations=offload == "all")


def check_sizes(schedule: Schedule, sizes: ModelBytes | None) -> None:
    """Refuse transfers of a model whose bytes nobody knows.

    Raises:
        ConfigError: for a model without a shape.
    """
    if sizes is None and has_transfers(schedule):
        raise ConfigError(
            "the bytes of a transfer follow from the model: take one with a shape, such as model=qwen3_1p7b, "
            "or offload=none"
        )


def simulate_transfers(graph: Graph, costs: CostTable) -> tuple[Timeline, dict[str, Any]]:
    """The timeline of a schedule with transfers, with shared links where the cluster has them, and record fields.

    `transfer_exposed_s` is how much sooner the last computation would end if no transfer took any time, nor the host's
    optimizer where its bytes are charged.
    """
    timeline = simulate_charged(graph, costs)
    free = simulate_graph(graph, replace(costs, transfer_time=None))
    exposed = timeline.last_compute - free.last_compute
    return timeline, {"transfer_exposed_s": float(exposed) / timeline.units_per_second}


def transfer_bytes(
    schedule: Schedule | Analysis, sizes: ModelBytes | None, costs: CostTable, keeps: Collection[int] | None = None
) -> dict[str, Any]:
    """Record fields: bytes over each kind of link, per device; none for a schedule without transfers."""
    analysis = analysed(schedule)
    if sizes is None or not (carries(analysis.schedule) or costs.carry):
        return {}
    moved = moved_bytes(analysis, sizes, keeps, costs.carry)
    return {
        f"{link}_bytes": [sum(number for what, number in device.items() if what.startswith(link)) for device in moved]
        for link in LINKS
    }
