"""Freezing in a request: `cost.max_freeze_ratio`, what it is refused with, and what a record says of it."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.ir.timeline import Timeline
from rpbench.run.assemble import Assembled
from rpbench.sim.freezing import check_freezable, freeze
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import step_time


def frozen(assembled: Assembled, max_ratio: float) -> tuple[Timeline, dict[str, Any]]:
    """The timeline with shortened backwards, and record fields.

    The request has passed `check_freezing`.
    """
    graph, costs = assembled.graph, assembled.costs
    found = freeze(graph, costs, max_ratio)
    fields = {
        "freeze_ratios": list(found.ratios),
        "freeze_ratio_of_stage": list(found.ratio_of_stage),
        "frozen_weight_gradients": found.fraction,
        "unfrozen_step_time_s": step_time(graph, found.plain) / found.plain.units_per_second,
        "freezing_proven": found.proven,
    }
    if assembled.transfers is not None:
        free = simulate_graph(graph, replace(costs, transfer_time=None), found.less)
        exposed = found.timeline.last_compute - free.last_compute
        fields["transfer_exposed_s"] = float(exposed) / free.units_per_second
    return found.timeline, fields


def check_freezing(assembled: Assembled, max_ratio: float) -> None:
    """Refuse what cannot be frozen, and a solver that is not there.

    Raises:
        ConfigError: without OR-tools.
        ScheduleError: for a schedule or costs that cannot be frozen.
    """
    check_freezable(assembled.graph, assembled.costs)
    if find_spec("ortools") is None:
        raise ConfigError(
            f'cost.max_freeze_ratio={max_ratio}: its linear program needs OR-tools; pip install -e ".[exact]", or '
            "leave it at 0"
        )
