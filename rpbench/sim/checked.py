"""A schedule checked and made a graph in one go: the graph's compiled order shows at once that no lane stands still."""

from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.check import check_versions, checked_actions
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.ir.versions import Versions
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.plain import passes, plain_columns


def checked_graph(schedule: Schedule | Analysis) -> tuple[Graph, Versions]:
    """The graph of a schedule, and the weight versions its actions read.

    The same as `rpbench.ir.check.check` and `build_graph` one after the other, for a fraction of the time: edges of the
    graph are those the checks walk along, and a plain schedule is checked on its columns.

    Raises:
        ScheduleError: as `check`, with the table.
    """
    analysis = analysed(schedule)
    columns = plain_columns(analysis.schedule)
    if columns is None:
        checked_actions(analysis)
    try:
        graph = build_graph(analysis, columns)
    except ScheduleError:
        _ = checked_actions(analysis).rounds  # shows which parts of an OVERLAP, or which lanes, wait for each other
        raise
    if columns is None:
        check_versions(analysis)
    return graph, analysis.versions


def check_graph(graph: Graph) -> Versions:
    """The weight versions that the actions of a graph read, after all checks of its schedule.

    Raises:
        ScheduleError: as `rpbench.ir.check.check`, with the table.
    """
    if not passes(graph.schedule, graph.columns):
        check_versions(checked_actions(graph.analysis))
    return graph.analysis.versions
