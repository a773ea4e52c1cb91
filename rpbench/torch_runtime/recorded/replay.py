"""Replay: what a step's own durations explain of it, and where the rest of its time went.

The graph of a table is timed with the durations its actions had in that very step and messages that take no time. What
the step took longer is waiting for messages that were under way, issuing them, and torch's work between actions.
"""

import itertools
from dataclasses import dataclass

from rpbench.cost.table import CostTable
from rpbench.engine.measure.action_times import measured_costs
from rpbench.ir.checks.deadlock import execution_order
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.sim.longest_path import simulate
from rpbench.torch_runtime.recorded.outcome import Outcome


def replay_makespan(timeline: Timeline) -> float:
    """Seconds of a table's step if every action starts as soon as its rank and its inputs allow."""
    index = Index(timeline.schedule)
    ends = [0.0] * len(index.actions)
    lane_starts = {lane.start for lane in index.lanes}
    for number in execution_order(index, index.producers):
        waits = list(index.producers[number]) + ([] if number in lane_starts else [number - 1])
        began = max((ends[producer] for producer in waits), default=0.0)
        ends[number] = began + timeline.end[number] - timeline.start[number]
    return max(ends)


@dataclass(frozen=True)
class TimeParts:
    """Where the ranks' time of a step went, in rank-seconds: they sum to the ranks' spans.

    Args:
        computing: forwards and backwards.
        waiting: from an action's start to its computation's: mostly a message that is not there yet.
        messages: handing sends and receives to the transport.
        after: from a computation's end to its action's: hand-overs on the same rank, bookkeeping.
        between: from an action's end to the next one's start.
    """

    computing: float
    waiting: float
    messages: float
    after: float
    between: float


def time_parts(outcome: Outcome, step: int = -1) -> TimeParts:
    """The parts of a step of a table run."""
    computing = waiting = messages = after = between = 0.0
    for rank in range(outcome.request.num_pipeline_ranks):
        row = outcome.ran(rank, step)
        between += sum(later.start - earlier.end for earlier, later in itertools.pairwise(row))
        for own in row:
            if own.begun is None or own.done is None:
                messages += own.end - own.start
            else:
                waiting += own.begun - own.start
                computing += own.done - own.begun
                after += own.end - own.done
    return TimeParts(computing, waiting, messages, after, between)


def unexplained(wall_s: float, replay_s: float, parts: TimeParts, num_ranks: int) -> dict[str, float]:
    """What a step took longer than its replay, by name, in rank-seconds: they sum to `num_ranks` * (wall - replay).

    Args:
        wall_s: from the first rank's start of the step to the last one's end.

    Returns:
        late: waiting beyond what the replay waits - messages under way, and what a delay of another rank passes on;
        messages, after, between: as in `TimeParts`; outside: before a rank's first action and after its last.
    """
    idle_in_replay = num_ranks * replay_s - parts.computing
    inside = parts.computing + parts.waiting + parts.messages + parts.after + parts.between
    return {
        "late": parts.waiting - idle_in_replay,
        "messages": parts.messages,
        "after": parts.after,
        "between": parts.between,
        "outside": num_ranks * wall_s - inside,
    }


def profiled_costs(profile: Timeline, hop_s: float) -> CostTable:
    """Median times of every kind and stage, as torch's own split functions took them in a run.

    There the first stage's I does nothing and its W is the whole backward, and the members of an overlap run one after
    the other: both are in the times, so nothing is gained by an overlap.
    """
    return measured_costs(profile, recompute_ahead=False, hop_s=hop_s)


def predicted_makespan(schedule: Schedule, costs: CostTable) -> float:
    """Seconds of a step as the simulator has it."""
    return float(simulate(schedule, costs).makespan)
