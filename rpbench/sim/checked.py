"""A schedule checked and made a graph in one go: the graph's compiled order shows at once that no lane stands still."""

from rpbench.ir.check import checked_index, checked_versions
from rpbench.ir.deadlock import execution_rounds
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.ir.versions import Versions
from rpbench.sim.graph import Graph, build_graph


def checked_graph(schedule: Schedule) -> tuple[Graph, Versions]:
    """The graph of a schedule, and the weight versions its actions read.

    The same as `rpbench.ir.check.check` and `build_graph` one after the other, for a fraction of the time: edges of the
    graph are those the checks walk along.

    Raises:
        ScheduleError: as `check`, with the table.
    """
    index = checked_index(schedule)
    try:
        graph = build_graph(schedule, index)
    except ScheduleError:
        execution_rounds(index)  # shows which lanes wait for each other
        raise
    # Only where there are optimizer steps does it matter when an action runs.
    return graph, checked_versions(index, execution_rounds(index) if index.steps else ())
