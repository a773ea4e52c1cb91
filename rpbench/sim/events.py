"""Event loop for streamed stages, whose devices are chosen while the schedule runs.

A job is one stage run for the microbatches of one round, as in `rpbench.schedules.roundpipe`. Dealing the jobs anew
gives a Schedule with other rows, which is checked, timed and drawn like any other.

    round_robin    job k of a round on device (c + k) mod p: the order the generator wrote; nothing to deal
    earliest_free  the same rotation, but every round begins on the device that is free first (the artifact)
    dynamic        a free device takes the ready job that is furthest on its way; no device waits while work is ready

Under every rule, a round is dealt only when the step that makes its weights is over: dealt before, it could stand
before the jobs that make them.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rpbench.cost.table import CostTable, Number
from rpbench.ir.action import Action, Kind
from rpbench.ir.policy import STEPS_BEHIND
from rpbench.ir.schedule import Row, Schedule, ScheduleError, Weights
from rpbench.ir.waits.edges import Key, key, needs
from rpbench.registry import check_known

RULES = ("round_robin", "earliest_free", "dynamic")


def deal(schedule: Schedule, costs: CostTable, rule: str) -> Schedule:
    """The same work on rows dealt by `rule`; ValueError for an unknown one, or for stages bound to their devices."""
    check_known("dispatch", rule, RULES)
    if rule == "round_robin":
        return schedule
    if schedule.weights is not Weights.STREAMED:
        raise ScheduleError(
            f"dispatch={rule}: the stages of {schedule.name} are bound to their devices; "
            "use dispatch=round_robin, or schedule=roundpipe"
        )
    rounds = _rounds(schedule)
    floor = _Floor(schedule, costs)
    if rule == "earliest_free":
        for jobs in rounds:
            first = min(range(floor.num_devices), key=lambda device: (floor.free[device], device))
            for number, job in enumerate(jobs):
                floor.run(job, (first + number) % floor.num_devices)
    else:
        steps = [(jobs[0][0].microbatch or 0) // schedule.shape.num_microbatches for jobs in rounds]
        _deal_dynamically(floor, rounds, steps, STEPS_BEHIND.get(schedule.policy, len(rounds)))
    return replace(schedule, rows=tuple({"compute": tuple(row)} for row in floor.rows))


def _rounds(schedule: Schedule) -> list[list[Row]]:
    """The jobs of every round in the order of their way through the model: forwards up, then backwards down."""
    first_of = _first_of_round(schedule)
    jobs: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for device in range(schedule.shape.num_ranks):
        for action in schedule.compute(device):
            jobs[first_of[action.microbatch or 0], _depth(schedule, action)].append(action)
    rounds: dict[int, list[Row]] = defaultdict(list)
    for (first, _), actions in sorted(jobs.items()):
        rounds[first].append(tuple(actions))
    return [rounds[first] for first in sorted(rounds)]


def _first_of_round(schedule: Schedule) -> dict[int, int]:
    """First microbatch of each microbatch's round: a round is one unbroken run of stage 0's forwards in a step."""
    each = schedule.shape.num_microbatches
    first_of = {}
    for device in range(schedule.shape.num_ranks):
        first: int | None = None
        for action in schedule.compute(device):
            if (action.kind, action.stage) != (Kind.F, 0):
                first = None
                continue
            number = action.microbatch or 0
            if first is None or number % each == 0:
                first = number
            first_of[number] = first
    return first_of


def _depth(schedule: Schedule, action: Action) -> int:
    """The place of an action on the way through the model: forward stages up, then backward stages down."""
    shape = schedule.shape
    if action.kind is Kind.F:
        return action.stage
    return shape.num_stages + shape.num_backward_stages - 1 - action.stage


class _Floor:
    """The devices: the actions that each has run, when it is free, and when every action ended."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        self.shape = schedule.shape
        self.costs = costs
        self.num_devices = schedule.shape.num_ranks
        self.rows: list[list[Action]] = [[] for _ in range(self.num_devices)]
        self.free: list[Number] = [0] * self.num_devices
        self.ended: dict[Key, tuple[Number, int]] = {}  # end and device

    def run(self, job: Row, device: int, not_before: Number = 0) -> Number:
        """Run a job's actions one after another on a device; return when the device is free."""
        free = max(self.free[device], not_before)
        for action in job:
            early, late = self._inputs(action, device)
            work = self.costs.of_action(action, device, self.shape.num_parts)
            free = max(max(free, early) + work.pre, late) + work.main
            self.ended[key(action)] = (free, device)
        self.rows[device] += job
        self.free[device] = free
        return free

    def _inputs(self, action: Action, device: int) -> tuple[Number, Number]:
        """When the inputs of a whole action are there, and when those of its main phase alone are."""
        early: Number = 0
        late: Number = 0
        for need in needs(self.shape, action.kind, action.stage, action.part):
            ready = self._ready(need.options, action, device)
            backward = action.kind in (Kind.B, Kind.I)
            if (backward and self.costs.recompute_ahead) or (action.kind is Kind.FB and self.costs.fused_ahead):
                late = max(late, ready)
            else:
                early = max(early, ready)
        return early, late

    def _ready(self, options: Sequence[tuple[Kind, int]], action: Action, device: int) -> Number:
        for kind, stage in options:
            found = self.ended.get((kind, stage, -1 if action.microbatch is None else action.microbatch, action.part))
            if found is not None:
                return found[0] + (self.costs.at(action.microbatch).hop if found[1] != device else 0)
        raise ScheduleError(f"{action} is dealt before {options[0][1]}{options[0][0].name}{action.microbatch} has run")


def _deal_dynamically(floor: _Floor, rounds: list[list[Row]], steps: Sequence[int], behind: int) -> None:
    """Let every free device take the job that is furthest on its way among those that can begin.

    A job can begin when the first microbatch of the job before it is done: the rest arrives while it runs. The
    first job of a round can begin when the step that makes its weights is over. Ties go to the older round. Free
    devices with nothing to take wait for the next such moment.

    A round has its jobs in the order they are on their way, and its optimizer step, from 0; its weights may lack the
    updates of `behind` steps (`rpbench.ir.policy.STEPS_BEHIND`).
    """
    ready: list[tuple[int, int, int]] = []  # (-depth, round, depth), a heap
    coming: list[tuple[Number, int, int]] = []  # (when, round, depth), a heap
    left = [0] * (steps[-1] + 1)  # jobs of each step
    over: list[Number] = [0] * len(left)  # when the jobs of each step that have run are done
    for number, step in enumerate(steps):
        left[step] += len(rounds[number])
        if step <= behind:
            heapq.heappush(coming, (0, number, 0))
    devices: list[tuple[Number, int]] = [(0, device) for device in range(floor.num_devices)]
    heapq.heapify(devices)
    while any(left):
        now, device = heapq.heappop(devices)
        while coming and coming[0][0] <= now:
            _, number, depth = heapq.heappop(coming)
            heapq.heappush(ready, (-depth, number, depth))
        if not ready:  # this device looks again when the next job can begin
            heapq.heappush(devices, (coming[0][0], device))
            continue
        _, number, depth = heapq.heappop(ready)
        job, step = rounds[number][depth], steps[number]
        free = floor.run(job, device, now)
        heapq.heappush(devices, (free, device))
        left[step], over[step] = left[step] - 1, max(over[step], free)
        if depth + 1 < len(rounds[number]):
            heapq.heappush(coming, (floor.ended[key(job[0])][0], number, depth + 1))
        if not left[step]:
            for later, its_step in enumerate(steps):
                if its_step == step + 1 + behind:
                    heapq.heappush(coming, (over[step], later, 0))
