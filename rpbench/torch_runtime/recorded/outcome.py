"""Outcome: the records of all ranks as the timelines that the simulator makes and the fields of a record.

A replay times a table's graph with the measured durations of its actions and messages that take no time. The rest of
the step is waiting for messages under way, issuing them, and torch's work between actions.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rpbench.cost.table import CostTable
from rpbench.engine.backends.virtual import replay_clock
from rpbench.engine.program import make_program
from rpbench.ir.action import Action
from rpbench.ir.timeline import Timeline
from rpbench.torch_runtime.request import TorchRequest


class Ran(NamedTuple):
    """One lowered action as a rank ran it; seconds on rank 0's clock.

    `begun` and `done` are the computation alone, None where there is none: the time before it is spent waiting.
    """

    action: Action
    start: float
    end: float
    begun: float | None
    done: float | None

    @property
    def wait_s(self) -> float:
        """Seconds between an action's start and its computation's."""
        return 0.0 if self.begun is None else self.begun - self.start


@dataclass(frozen=True)
class Outcome:
    """A finished request, with the answer that rank 0 gathered."""

    request: TorchRequest
    answer: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        return len(self.answer["ranks"][0]["steps"])

    @cached_property
    def losses(self) -> list[float]:
        """Mean loss of every step: a sum over data-parallel ranks; tensor-parallel ranks each have all of it."""
        ranks = self.answer["ranks"][:: self.request.tensor_parallel]
        parts = self.request.data_parallel if self.request.data_mode != "plain" else 1
        return [sum(rank["losses"][step] for rank in ranks) / parts for step in range(self.num_steps)]

    def ran(self, pipeline_rank: int, step: int = -1) -> list[Ran]:
        """The lowered actions of a pipeline rank in the order they ran, on the first of its processes."""
        moments = self.answer["ranks"][pipeline_rank * self.request.ranks_each]["steps"][step]["moments"]
        chains = self.request.lowered.chains
        theirs = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        ours = (moment for moment in moments if not moment[0].endswith(theirs) and "WAIT_SEND" not in moment[0])
        return [Ran(chains.action(token), *times) for token, *times in ours]

    @cached_property
    def rows_as_ours(self) -> bool:
        """Whether every rank ran our lowered row, action for action, in every step."""
        lowered = self.request.lowered
        return all(  # recorded tokens have no peers
            [ran.action for ran in self.ran(rank, step)] == [own._replace(peer=None) for own in lowered.row(rank)]
            for rank in range(lowered.num_ranks)
            for step in range(self.num_steps)
        )

    @property
    def hop_s(self) -> float:
        """Seconds one boundary tensor took from rank 0 to rank 1, by itself: half a round trip, median."""
        return float(self.answer["hop_s"])

    def wall_s(self, step: int = -1) -> float:
        """From the first rank's start of a step to the last one's end."""
        steps = [rank["steps"][step] for rank in self.answer["ranks"]]
        return max(own["ended"] for own in steps) - min(own["began"] for own in steps)

    def timeline(self, step: int = -1) -> Timeline:
        """When each action of the table computed, in seconds from the step's start, waiting left out.

        ValueError if the ranks did not run the table's rows, as with torch's own single-stage schedules.
        """
        lowered = self.request.lowered
        found = {ran.action: ran for rank in range(lowered.num_ranks) for ran in self.ran(rank, step)}
        actions = [action._replace(peer=None) for _, _, row in lowered.table.items() for action in row]
        missing = next((action for action in actions if action not in found), None)
        if missing is not None:
            raise ValueError(f"{missing} was not run: order_of={self.request.order_of} ran other rows than the table's")
        ran = [found[action] for action in actions]
        zero = min(own["steps"][step]["began"] for own in self.answer["ranks"])
        start = [(own.start if own.begun is None else own.begun) - zero for own in ran]
        end = [(own.end if own.done is None else own.done) - zero for own in ran]
        return Timeline(lowered.table, start, start, end, [0.0] * len(ran), 0.0)

    def fields(self) -> dict[str, Any]:
        timeline = self.timeline()
        ranks = self.answer["ranks"]
        found: dict[str, Any] = {
            "evidence": "measured",
            "makespan_s": timeline.makespan,
            "step_wall_s": self.wall_s(),
            "step_walls_s": [self.wall_s(step) for step in range(self.num_steps)],
            "wait_s": [sum(own.wait_s for own in self.ran(rank)) for rank in range(self.request.num_pipeline_ranks)],
            "loss": self.losses[-1],
            "losses": self.losses,
            "rows_as_ours": self.rows_as_ours,
            "table_digest": self.request.lowered.digest,
            "num_messages": self.request.lowered.schedule.num_actions - timeline.schedule.num_actions,
            "hosts": [rank["host"] for rank in ranks],
            "hop_s": self.hop_s,
            "clock_error_s": max(rank["offset_error_s"] for rank in ranks),
            "runtime_versions": dict(self.answer["versions"]),
        }
        if any(rank["peak_memory_bytes"] is not None for rank in ranks):
            found["gpu_peak_memory_bytes"] = [rank["peak_memory_bytes"] for rank in ranks]
        names = (
            "grad_max_abs_diff",
            "grad_max_rel_diff",
            "weight_max_abs_diff",
            "same_sums_grad_max_abs_diff",
            "same_sums_weight_max_abs_diff",
            "copies_max_abs_diff",
            "num_microbatches_verified",
        )
        return found | {name: self.answer[name] for name in names if name in self.answer}


def replay_makespan(timeline: Timeline) -> float:
    """Seconds of a table's step if every action starts as soon as its rank is free and its inputs are there."""
    took = [float(end - start) for start, end in zip(timeline.start, timeline.end, strict=True)]
    return float(replay_clock(make_program(timeline.schedule, CostTable({})), [0.0] * len(took), took).makespan)


@dataclass(frozen=True)
class TimeParts:
    """Where the ranks' time of a step went, in rank-seconds: they sum to the ranks' spans."""

    computing: float
    waiting: float  # from an action's start to its computation's: mostly a message that is not there yet
    messages: float  # handing sends and receives to the transport
    after: float  # from a computation's end to its action's: hand-overs on the same rank, bookkeeping
    between: float  # from an action's end to the next one's start


def time_parts(outcome: Outcome) -> TimeParts:
    """Where the time of the last step went."""
    computing = waiting = messages = after = between = 0.0
    for rank in range(outcome.request.num_pipeline_ranks):
        row = outcome.ran(rank)
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
    """The time of a step beyond its replay, by cause, in rank-seconds: they sum to `num_ranks` * (wall - replay).

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
