"""Freezing in a request: `cost.max_freeze_ratio`, what it is refused with, and what a record says of it."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rpbench.cost.transfers import TransferTimes
from rpbench.harness.assemble import Assembled
from rpbench.harness.choices import ConfigError
from rpbench.ir.timeline import Timeline
from rpbench.sim.freezing import check_freezable, freeze
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import step_time


def frozen(assembled: Assembled, max_ratio: float) -> tuple[Timeline, dict[str, Any]]:
    """The timeline with shortened backwards, and record fields.

    The request has passed `check_freezing`.
    """
    graph, costs = assembled.graph, assembled.costs
    found, plain = freeze(graph, costs, max_ratio), simulate_graph(graph, costs)
    fields = {
        "freeze_ratios": list(found.ratios),
        "freeze_ratio_of_stage": list(found.ratio_of_stage),
        "frozen_weight_gradients": found.fraction,
        "unfrozen_step_time_s": step_time(graph, plain) / plain.units_per_second,
    }
    if assembled.transfers is not None:
        free = simulate_graph(graph, replace(costs, transfer_time=None), found.less)
        fields["transfer_exposed_s"] = _seconds(found.timeline) - _seconds(free)
    return found.timeline, fields


def check_freezing(assembled: Assembled, max_ratio: float) -> None:
    """Refuse what a linear program over the graph cannot say, and a solver that is not there.

    Raises:
        ConfigError: if links are shared, so that no longest path says when a batch ends; or without OR-tools.
        ScheduleError: for a schedule or costs that cannot be frozen.
    """
    check_freezable(assembled.graph, assembled.costs)
    times = assembled.costs.transfer_time
    if isinstance(times, TransferTimes) and assembled.graph.cargo and times.cluster.shares_links:
        raise ConfigError(
            f"cost.max_freeze_ratio={max_ratio}: devices of cluster {assembled.cluster.name} share links, and how long "
            "a transfer takes depends on all others; use charge=hops, or a cluster without shared links"
        )
    if find_spec("ortools") is None:
        raise ConfigError(
            f'cost.max_freeze_ratio={max_ratio}: its linear program needs OR-tools; pip install -e ".[exact]", or '
            "leave it at 0"
        )


def _seconds(timeline: Timeline) -> float:
    """When the last computation ends."""
    last = max(timeline.device_span(device)[1] for device in range(timeline.schedule.shape.num_ranks))
    return float(last) / timeline.units_per_second
