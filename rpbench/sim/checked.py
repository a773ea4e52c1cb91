"""A schedule checked and made a graph together: the graph's compiled order shows that every lane can run.

Large schedules are mostly plain: they hold computations and moves of activations to and from the host, but no step, no
communication and no version. `rpbench.ir.checks.check.checked_actions` of a plain schedule can be decided by counting
on columns. For all other schedules, and for plain ones with a fault, those checks go over the actions and show the one
that is wrong.
"""

import numpy as np

from rpbench.ir.action import MOVES, Kind
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.checks.check import check_versions, checked_actions, gaps
from rpbench.ir.checks.versions import Versions
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights
from rpbench.sim.columns import ArrayRows, Columns, among, read_columns
from rpbench.sim.graph import Graph, build_graph, kept_edges

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.FB)


def checked_graph(schedule: Schedule | Analysis) -> tuple[Graph, Versions]:
    """The graph of a schedule, and the weight versions its actions read.

    The result is that of `rpbench.ir.checks.check.check` and `build_graph`, in a fraction of the time: the edges are
    found once for both, and a plain schedule is checked on its columns. ScheduleError as of `check`, with the table.
    """
    analysis = analysed(schedule)
    rows = plain_rows(analysis.schedule)
    if rows is None:
        checked_actions(analysis)
        _ = analysis.transfer_edges  # refuses a piece whose number no column can hold
    try:
        graph = build_graph(analysis, rows)
    except ScheduleError:
        _ = checked_actions(analysis).rounds  # shows which parts of an OVERLAP, or which lanes, wait for each other
        raise
    if rows is None:
        check_versions(analysis)
    return graph, analysis.versions


def check_graph(graph: Graph) -> Versions:
    """The weight versions that the actions of a graph read, after all checks of its schedule; raises as they do."""
    if _plain_rows(graph.schedule, graph.columns) is None:
        check_versions(checked_actions(graph.analysis))
    return graph.analysis.versions


# --- plain schedules ---


def plain_rows(schedule: Schedule) -> ArrayRows | None:
    """The rows of a schedule that is plain and passes all checks of its actions; None for any other.

    Its graph shows whether its lanes can run, and whether parts of an OVERLAP can run together.
    """
    if not schedule.kinds <= {*_KINDS, *MOVES, Kind.OVERLAP}:
        return None
    try:
        return _plain_rows(schedule, read_columns(schedule))
    except (TypeError, OverflowError):  # a microbatch that is not named, or a number out of any range
        return None


def _plain_rows(schedule: Schedule, columns: Columns) -> ArrayRows | None:
    shape = schedule.shape
    may_pass = (
        _is_on_its_lane(schedule, columns)
        and not (shape.tensor_parallel or shape.num_head_shards or shape.keeps_every > 1)
        and schedule.late_rest is None
        and schedule.policy is not Policy.SELECTIVE
        and columns.is_bare
        and all(columns.sub.values())
        and _in_range(shape, columns)
        and _are_as_many_as_needed(shape, columns)
        and _is_placed(schedule, columns)
    )
    rows = ArrayRows(schedule, columns) if may_pass else None
    return rows if rows is not None and rows.stand_once and not any(gaps(rows)) else None


def _is_on_its_lane(schedule: Schedule, columns: Columns) -> bool:
    """Whether computations stand on lane compute, and all else is moves of activations that wait on the host."""
    names = [lane for _, lane, _ in schedule.items()]
    if all(name == "compute" for name in names):
        return schedule.kinds.isdisjoint(MOVES)
    on_compute = np.repeat([name == "compute" for name in names], np.diff(columns.lane_start))
    return np.array_equal(on_compute, ~among(columns.kind, MOVES)) and kept_edges(schedule, columns) is not None


def _in_range(shape: Shape, columns: Columns) -> bool:
    """Whether kinds are plain, and stages, microbatches and parts are those of the shape."""
    kind, stage, index, part, _ = columns.plain
    if not len(kind):
        return False
    first, stop = np.zeros(len(Kind), np.int32), np.zeros(len(Kind), np.int32)  # stages of a kind; of others none
    stop[[Kind.B, Kind.I, Kind.W, Kind.R]] = shape.num_backward_stages - shape.fused
    stop[list(MOVES)] = shape.num_backward_stages
    stop[Kind.F] = shape.num_stages
    if shape.fused:
        first[Kind.FB], stop[Kind.FB] = shape.num_backward_stages - 1, shape.num_backward_stages
    return bool(
        ((first[kind] <= stage) & (stage < stop[kind])).all()
        and 0 <= index.min() <= index.max() < shape.total_microbatches
        and 0 <= part.min() <= part.max() < shape.num_parts
    )


def _are_as_many_as_needed(shape: Shape, columns: Columns) -> bool:
    """Whether the numbers of forwards and backwards are right; asked before tables of the shape's size are made."""
    present = np.bincount(columns.plain[0], minlength=len(Kind))
    a_stage = shape.total_microbatches * shape.num_parts
    backwards = present[[Kind.B, Kind.I, Kind.FB]].sum()
    return bool(present[Kind.F] == shape.num_stages * a_stage and backwards == shape.num_backward_stages * a_stage)


def _is_placed(schedule: Schedule, columns: Columns) -> bool:
    """Whether each action stands on a device that may hold its stage, together with all that need its weights."""
    shape, placement = schedule.shape, schedule.placement
    _, stage, index, _, owner = columns.plain
    device = columns.device[owner]
    if placement:
        if shape.separate_cuts or len(placement) != shape.num_stages:
            return False
        holds = np.zeros((shape.num_stages, shape.num_ranks), bool)
        for held, holders in enumerate(placement):
            holds[held, [holder for holder in holders if 0 <= holder < shape.num_ranks]] = True
        if not holds[stage, device].all():
            return False
    if schedule.weights is Weights.STREAMED:
        return shape.num_parts == 1
    if shape.separate_cuts:
        return False
    if placement and all(len(holders) == 1 for holders in placement):
        return True
    # All actions of a stage and microbatch meet on one device.
    places = stage.astype(np.int64) * shape.total_microbatches + index
    home = np.zeros(int(places.max(initial=-1)) + 1, np.int32)
    home[places] = device  # of any one of them
    return bool((home[places] == device).all())
