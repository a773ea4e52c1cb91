"""mode=simulate: times of a schedule from given costs, without tensors. Evidence: simulated, or predicted."""

from typing import Any

from rpbench.config.request import Request
from rpbench.records.record import Record
from rpbench.run.assemble import Assembled
from rpbench.run.freezing import check_freezing, frozen
from rpbench.run.offloading import simulate_transfers
from rpbench.run.recording import Fields, Outcome, Work, recorded
from rpbench.run.scheduled import assembled_of, scheduled
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import measure


def records(request: Request) -> list[Record]:
    """The record of a simulation.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    return [recorded(request, prepare)]


def prepare(request: Request) -> Work:
    """The work of a simulation, checked; nothing is written.

    Raises:
        ValueError: if the request is wrong.
    """
    if request.mesh is not None and request.mesh.machine is not None:
        from rpbench.run.mesh_run import prepare as prepared  # the packages of meshes, for runs that have one

        return prepared(request)
    assembled, max_ratio = assembled_of(request), request.cost.max_freeze_ratio
    if max_ratio:
        check_freezing(assembled, max_ratio)
    in_slots = request.cost.name == "unit"
    return scheduled(
        request,
        assembled,
        lambda: _simulated(assembled, max_ratio, in_slots=in_slots),
        lambda error: isinstance(error, MemoryError),
    )


def _simulated(assembled: Assembled, max_freeze_ratio: float, *, in_slots: bool) -> Outcome:
    graph, costs = assembled.graph, assembled.costs
    more: dict[str, Any] = {}
    if max_freeze_ratio:
        timeline, more = frozen(assembled, max_freeze_ratio)
    elif assembled.transfers is None:
        timeline = simulate_graph(graph, costs)
    else:
        timeline, more = simulate_transfers(graph, costs)
    fields = measure(graph, timeline, costs, switch_after_last_forward=assembled.switch_after_last_forward)
    slots = _slots(fields) if in_slots else {}
    return Outcome({"evidence": assembled.evidence, **fields, **more, **slots}, timeline)


def _slots(fields: Fields) -> Fields:
    """Bubbles in chunk slots, where every F, I and W of a chunk takes one: time less the work of a device."""
    work = sum(fields["busy_s"]) / len(fields["busy_s"])
    return {"bubble_slots": fields["makespan_s"] - work, "bubble_span_slots": fields["span_s"] - work}
