"""Compiler passes that add communication and optimizer steps to ordered compute actions, or split backward in two."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from rpbench.ir.action import RECV, SEND, Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.versions import lane_reads
from rpbench.ir.communication import Hop, hops
from rpbench.ir.schedule import Row, Schedule, ScheduleError, Weights
from rpbench.ir.waits.edges import names_versions

# --- communication ------------------------------------------------------------------------------------------


def lower_communication(schedule: Schedule, lane: str = "compute") -> Schedule:
    """Add the SEND and RECV of every tensor that crosses devices; neighbours on one device need none.

    After the actions of each round every sender writes its SEND and, at once, the peer's RECV. So all lanes agree with
    one common order in which every SEND is followed by its RECV, and no lane can block for good, not even where a SEND
    waits for the peer (rendezvous). On lane compute, communication stands between the compute actions, as
    torch.distributed.pipelining has it; lane net is its own. ScheduleError if the schedule holds some already, or
    cannot run.
    """
    if lane not in ("compute", "net"):
        raise ValueError(f"lane={lane!r}: communication goes to the lane 'compute' or 'net'")
    analysis = Analysis(schedule)
    index = analysis.index
    if any(map(index.holds, SEND | RECV)):
        raise ScheduleError("the schedule holds SEND or RECV already: lower it once, or start from its compute rows")
    leaving: dict[int, list[Hop]] = {}
    for hop in hops(index):
        leaving.setdefault(hop.producer, []).append(hop)

    rows = [{name: list[Action]() for name, _ in row} for row in schedule.rows]
    rounds = analysis.rounds
    for _, together in groupby(sorted(range(len(rounds)), key=rounds.__getitem__), key=rounds.__getitem__):
        numbers = list(together)
        for number in numbers:
            rows[index.device(number)][index.lanes[index.lane_of[number]].name].append(index.actions[number])
        for hop in (hop for number in numbers for hop in leaving.get(number, ())):
            rows[index.device(hop.producer)].setdefault(lane, []).append(hop.send)
            rows[index.device(hop.consumer)].setdefault(lane, []).append(hop.receive)
    return with_rows(schedule, rows)


# --- optimizer steps ----------------------------------------------------------------------------------------


def add_steps(schedule: Schedule, lane: str | None = None) -> Schedule:
    """Add STEP@version for every backward stage and every window of `num_microbatches` microbatches.

    A step comes after the last weight gradient of its window, on the device that ran it. Where a stage has replicas
    that are never flushed, forwards get the version they read: they wait for the steps of another lane. By default
    steps stand on lane compute, right after that gradient, where weights are bound to a device, and on lane host where
    they are streamed. ScheduleError if the schedule holds steps already or lacks a gradient; or cannot run, where the
    last of several lanes or the order on the host is asked for.
    """
    if lane not in (None, "compute", "host"):
        raise ValueError(f"lane={lane!r}: steps go to the lane 'compute' or 'host'")
    lane = lane or ("compute" if schedule.weights is Weights.BOUND else "host")
    analysis = Analysis(schedule)
    index = analysis.index
    if index.steps:
        raise ScheduleError("the schedule holds STEP actions already: add them once")
    following: dict[int, list[Action]] = {}  # gradient -> the steps it completes
    for version in range(1, schedule.shape.num_steps + 1):
        for stage in range(schedule.shape.num_backward_stages):
            gradients = index.gradients(stage, version)
            if not gradients:
                raise ScheduleError(f"no weight gradient of stage {stage} for version {version}: run check() first")
            last = _last(analysis, gradients)
            following.setdefault(last, []).append(Action(Kind.STEP, stage, version=version))

    rows = [{name: list(row) for name, row in lanes} for lanes in schedule.rows]
    if lane == "compute":
        for number in sorted(following, reverse=True):  # from behind, so that places before it stay
            place = index.lanes[index.lane_of[number]]
            behind = number - place.start + 1
            rows[place.device][place.name][behind:behind] = following[number]
    else:
        rounds = analysis.rounds
        # Version by version, so that on one host no step waits behind one that needs what it publishes.
        due = sorted(
            (step.version, rounds[number], number, step) for number, steps in following.items() for step in steps
        )
        for _, _, number, step in due:
            rows[index.device(number)].setdefault("host", []).append(step)
    stepped = with_rows(schedule, rows)
    return _name_versions(stepped) if names_versions(stepped) and lane == "compute" else stepped


def _last(analysis: Analysis, numbers: Sequence[int]) -> int:
    """The last of some actions to run; those of one lane run in the order of their numbers."""
    lane_of = analysis.index.lane_of
    if len({lane_of[number] for number in numbers}) == 1:
        return max(numbers)
    return max(numbers, key=lambda number: (analysis.rounds[number], number))


def _name_versions(schedule: Schedule) -> Schedule:
    """The schedule with the version that every forward reads."""
    read = lane_reads(schedule).forward

    def named(action: Action) -> Action:
        if action.kind is not Kind.F or action.microbatch is None:
            return action
        return action._replace(version=read[action.stage, action.microbatch])

    return each_row(schedule, lambda _, row: map(named, row))


# --- backward in two pieces ---------------------------------------------------------------------------


def split_backward(schedule: Schedule) -> Schedule:
    """The schedule with every B replaced by I and, right after it, W."""
    halves = (Kind.I, Kind.W)
    return each_row(
        schedule,
        lambda _, row: [
            piece
            for action in row
            for piece in ([action._replace(kind=kind) for kind in halves] if action.kind is Kind.B else [action])
        ],
    )


def each_row(schedule: Schedule, change: Callable[[str, Row], Iterable[Action]]) -> Schedule:
    """The schedule with every row changed; `change` takes the name of its lane and the row."""
    return with_rows(schedule, [{lane: change(lane, row) for lane, row in lanes} for lanes in schedule.rows])


def with_rows(schedule: Schedule, rows: Iterable[Mapping[str, Iterable[Action]]]) -> Schedule:
    """The schedule with these rows, by lane, of every device."""
    lanes = ({lane: tuple(row) for lane, row in lanes.items()} for lanes in rows)
    return replace(schedule, rows=tuple(lanes))  # type: ignore[arg-type]  # any form of a row will do
