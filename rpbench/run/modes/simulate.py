"""mode=simulate: times of a schedule from given costs, without tensors. Evidence: simulated, or predicted."""

from importlib.util import find_spec
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.config.request import Request
from rpbench.ir.timeline import Timeline
from rpbench.run.assemble import Assembled, exposed_s
from rpbench.run.recording import Outcome, Work
from rpbench.run.scheduled import assembled_of, scheduled
from rpbench.sim.freezing import check_freezable, freeze
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import step_time
from rpbench.sim.shared_links import simulate_charged


def _frozen(assembled: Assembled, max_ratio: float) -> tuple[Timeline, dict[str, Any]]:
    """The timeline with backwards shortened by `cost.max_freeze_ratio`, and record fields."""
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
        fields["transfer_exposed_s"] = exposed_s(found.timeline, graph, costs, found.less)
    return found.timeline, fields


def prepare(request: Request) -> Work:
    """The work of a simulation, checked; nothing is written."""
    if request.meshed is not None:
        from rpbench.run.mesh_run import prepare as prepared  # the packages of meshes, for runs that have one

        return prepared(request)
    assembled, max_ratio = assembled_of(request), request.cost.max_freeze_ratio
    if max_ratio:
        check_freezable(assembled.graph, assembled.costs)
        if find_spec("ortools") is None:
            raise ConfigError(
                f'cost.max_freeze_ratio={max_ratio}: its linear program needs OR-tools; pip install -e ".[exact]", or '
                "leave it at 0"
            )
    return scheduled(request, assembled, lambda: _simulated(request, assembled))


def _simulated(request: Request, assembled: Assembled) -> Outcome:
    graph, costs = assembled.graph, assembled.costs
    more: dict[str, Any] = {}
    if request.cost.max_freeze_ratio:
        timeline, more = _frozen(assembled, request.cost.max_freeze_ratio)
    elif assembled.transfers is None:
        timeline = simulate_graph(graph, costs)
    else:
        timeline = simulate_charged(graph, costs)
        more = {"transfer_exposed_s": exposed_s(timeline, graph, costs)}
    fields = assembled.metrics(timeline, costs, graph)
    if request.cost.name == "unit":  # in slots: every F, I and W of a chunk takes one
        work = sum(fields["busy_s"]) / len(fields["busy_s"])
        more |= {"bubble_slots": fields["makespan_s"] - work, "bubble_span_slots": fields["span_s"] - work}
    return Outcome({"evidence": assembled.evidence, **fields, **more}, timeline)
