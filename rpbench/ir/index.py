"""Index: the actions of a schedule by number, where each stands and what each waits for.

Actions are numbered 0, 1, 2, ... in the order of `Schedule.items()`: lane after lane, each from first to
last. Checks, replay and lowering work on these numbers.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from rpbench.ir.action import HEAD, STEPPING, SUMS, Action, Kind
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.waits.edges import COUNTED, edges_of, stages_updated, window
from rpbench.ir.waits.edges import GRADIENT as GRADIENT

# Kinds that may lack a microbatch and may repeat.
_ANYWHERE = frozenset(Kind) - COUNTED - STEPPING - {Kind.OVERLAP}
_UNNAMED = (None, None, None, ())  # no version, object, peer or parts


class Lane(NamedTuple):
    """A lane and the numbers of its actions, `start` to `stop` - 1."""

    device: int
    name: str
    start: int
    stop: int


class Index:
    """The actions of a schedule by number; ScheduleError if an index is out of range, or an action stands twice."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.shape = schedule.shape
        self.actions: list[Action] = []
        self.lanes: list[Lane] = []
        self.lane_of: list[int] = []  # number of an action -> its place in `lanes`
        self.steps: dict[tuple[int, int], int] = {}  # (backward stage, version) -> number of the STEP that publishes it
        self.rollbacks: dict[tuple[int, int], int] = {}  # -> the ROLLBACK that ends a step made before its VALIDATE
        self.validations: dict[int, int] = {}  # version -> number of the VALIDATE of its step
        self.rests: dict[tuple[int, int], int] = {}  # -> the STEP_REST for the window that ends with that version
        self.marked: list[int] = []  # actions that name a version, an object, a peer or parts; most name none
        for place, (device, name, row) in enumerate(schedule.items()):
            start = len(self.actions)
            self.lanes.append(Lane(device, name, start, start + len(row)))
            self.actions.extend(row)
            self.lane_of += [place] * len(row)

        self._stages = _stage_ranges(self.shape)
        self._microbatches, self._parts = self.shape.total_microbatches, self.shape.num_parts
        stages = 1 + max(self.shape.num_stages, self.shape.num_backward_stages, self.shape.num_head_shards)
        self._size = stages * self._microbatches * self._parts
        self._numbers: dict[Kind, list[int]] = {}
        for lane in self.lanes:
            actions = self.actions[lane.start : lane.stop]
            if _ANYWHERE.issuperset(map(itemgetter(0), actions)):
                self._read_transfers(lane, actions)
            else:
                self._read(lane, actions)

    def _read(self, lane: Lane, row: Sequence[Action]) -> None:
        """Enter the actions of a lane."""
        stages, known, marked = self._stages, self._numbers, self.marked
        num_microbatches, num_parts = self._microbatches, self._parts
        for number, action in enumerate(row, start=lane.start):
            kind, stage, microbatch, part, version, what, peer, sub = action
            if version is not None or what is not None or peer is not None or sub:
                marked.append(number)
            numbers = known.get(kind)
            if numbers is not None and not sub and microbatch is not None and stage in stages[kind]:
                place = (stage * num_microbatches + microbatch) * num_parts + part
                if 0 <= microbatch < num_microbatches and 0 <= part < num_parts and numbers[place] < 0:
                    numbers[place] = number  # nearly all actions end here; `_enter` also says what is wrong
                    continue
            elif (
                kind in _ANYWHERE
                and stage in stages[kind]
                and (microbatch is None or (0 <= microbatch < num_microbatches and 0 <= part < num_parts))
            ):
                continue
            for inside in sub or (action,):
                self._enter(inside, number)

    def _read_transfers(self, lane: Lane, row: Sequence[Action]) -> None:
        """Enter the actions of a lane that has only kinds of `_ANYWHERE`; many places hold one object, read once."""
        distinct = dict(zip(map(id, row), row, strict=True))
        for action in distinct.values():
            kind, stage, microbatch, part = action[:4]
            in_range = microbatch is None or (0 <= microbatch < self._microbatches and 0 <= part < self._parts)
            if not in_range or stage not in self._stages[kind]:
                self._enter(action, lane.start + [each is action for each in row].index(True))
        named = {key for key, action in distinct.items() if action[4:] != _UNNAMED}
        if len(named) == len(distinct):
            self.marked += range(lane.start, lane.stop)
        elif named:
            self.marked += (number for number, key in enumerate(map(id, row), start=lane.start) if key in named)

    # --- where actions stand ---

    def device(self, number: int) -> int:
        return self.lanes[self.lane_of[number]].device

    def holds(self, kind: Kind) -> bool:
        """Whether any action is of a kind that is counted by microbatch."""
        return kind in self._numbers

    def numbers(self, kind: Kind) -> list[int]:
        """Numbers of the actions of a kind by `place(stage, microbatch, part)`; -1 if there is none."""
        return self._numbers.get(kind) or [-1] * self._size

    def place(self, stage: int, microbatch: int, part: int = 0) -> int:
        return (stage * self._microbatches + microbatch) * self._parts + part

    def find(self, action: Action) -> int:
        """The number of the action of that kind, stage, microbatch and part, or -1."""
        assert action.microbatch is not None
        return self.at(action.kind, action.stage, action.microbatch, action.part)

    def at(self, kind: Kind, stage: int, microbatch: int, part: int = 0) -> int:
        """The number of the action of a kind, stage, microbatch and part, or -1."""
        found = self._numbers.get(kind)
        return -1 if found is None else found[(stage * self._microbatches + microbatch) * self._parts + part]

    def gradients(self, stage: int, version: int) -> list[int]:
        """The actions whose weight gradients the STEP of a backward stage to `version` adds up."""
        kinds = [self._numbers[kind] for kind in GRADIENT if kind in self._numbers]
        batch = window(self.shape, version)
        places = range(self.place(stage, batch.start), self.place(stage, batch.stop))
        return [numbers[place] for place in places for numbers in kinds if numbers[place] >= 0]

    def _enter(self, action: Action, number: int) -> None:
        kind, stage, microbatch, part, _, _, _, _ = action
        if stage not in self._stages[kind]:
            raise self._out_of_range(number, action, f"stage {stage}", self._stages[kind])
        if kind in STEPPING:
            self._enter_step(action, number)
            return
        if microbatch is None:
            if kind in COUNTED:
                raise broken(self.schedule, f"{action} names no microbatch", [number])
            return
        if not 0 <= microbatch < self._microbatches:
            raise self._out_of_range(number, action, f"microbatch {microbatch}", range(self._microbatches))
        if not 0 <= part < self._parts:
            raise self._out_of_range(number, action, f"part {part}", range(self._parts))
        if kind in COUNTED:
            numbers = self._numbers.get(kind)
            if numbers is None:
                numbers = self._numbers[kind] = [-1] * self._size
            place = self.place(stage, microbatch, part)
            if numbers[place] >= 0:
                raise self._twice(action, numbers[place], number)
            numbers[place] = number

    def _enter_step(self, action: Action, number: int) -> None:
        kind, stage, version = action.kind, action.stage, action.version
        if version is None or not 1 <= version <= self.shape.num_steps:
            versions = range(1, self.shape.num_steps + 1)
            raise self._out_of_range(number, action, f"version {version}", versions)
        if kind is Kind.VALIDATE:
            before = self.validations.setdefault(version, number)
        else:
            known = {Kind.STEP: self.steps, Kind.STEP_REST: self.rests}.get(kind, self.rollbacks)
            before = known.setdefault((stage, version), number)
        if before != number:
            raise self._twice(action, before, number)

    def _out_of_range(self, number: int, action: Action, what: str, allowed: range) -> Exception:
        bounds = f"{allowed.start} to {allowed.stop - 1}" if allowed else "none in this shape"
        rule = f"{action}: {what} is out of range for {action.kind.name}: {bounds}"
        return broken(self.schedule, rule, [number])

    def _twice(self, action: Action, first: int, second: int) -> Exception:
        return broken(self.schedule, f"{action} stands twice; an action runs once", sorted({first, second}))

    # --- what actions wait for ---

    @cached_property
    def producers(self) -> list[tuple[int, ...]]:
        """For each action those it waits for, without transfers and those that its lane puts before it anyway."""
        found, lane_of = [()] * len(self.actions), self.lane_of  # type: list[tuple[int, ...]], list[int]
        for edges in edges_of(self):
            for producer, number in zip(edges.producers, edges.consumers, strict=True):
                if number >= 0 <= producer and (producer >= number or lane_of[producer] != lane_of[number]):
                    found[number] += (producer,)
        return found

    # --- rows, as `rpbench.ir.waits.edges.Rows` describes them ---

    @property
    def kinds(self) -> list[Kind]:
        return [*self._numbers, *([Kind.STEP] if self.steps else [])]

    def row(self, kind: Kind, stage: int, part: int = 0) -> list[int] | None:
        """The numbers of a kind, stage and part by microbatch, or of a STEP, VALIDATE or ROLLBACK by version."""
        if kind in COUNTED:
            numbers, first = self._numbers.get(kind), self.place(stage, 0, part)
            if numbers is None or stage not in self._stages[kind]:
                return None
            return numbers[first : first + self._microbatches * self._parts : self._parts]
        versions = range(self.shape.num_steps + 1)
        if kind is Kind.VALIDATE:
            return [self.validations.get(version, -1) for version in versions] if self.validations else None
        known = self.steps if kind is Kind.STEP else self.rollbacks
        return [known.get((stage, version), -1) for version in versions] if known else None

    def first(self, rows: Sequence[list[int]]) -> list[int]:
        best = rows[0]
        for row in rows[1:]:
            if -1 in best:
                best = [number if number >= 0 else other for number, other in zip(best, row, strict=True)]
        return best

    def indices(self, places: Sequence[int]) -> Sequence[int]:
        return places

    def take(self, row: list[int], places: Sequence[int]) -> list[int]:
        return [row[place] for place in places]

    def action(self, number: int) -> Action:
        return self.actions[number]

    def gap(self, kind: Kind, stage: int) -> int | None:
        numbers = self._of_stage(kind, stage)
        return numbers.index(-1) if -1 in numbers else None

    def gap_of_backwards(self, stage: int) -> int | None:
        places = zip(*(self._of_stage(kind, stage) for kind in (Kind.B, Kind.I, Kind.W)), strict=True)
        faults = (place for place, (b, i, w) in enumerate(places) if (b < 0) != (i >= 0) or (i < 0) != (w < 0))
        return next(faults, None)

    def _of_stage(self, kind: Kind, stage: int) -> list[int]:
        return self.numbers(kind)[self.place(stage, 0) : self.place(stage + 1, 0)]

    def published(self, stage: int, version: int) -> int | None:
        """The action after which a version of a backward stage is final: its ROLLBACK, or else its STEP."""
        return self.rollbacks.get((stage, version), self.steps.get((stage, version)))

    def updated_by(self, kind: Kind, stage: int) -> tuple[int, ...]:
        """The backward stages whose STEPs change the weights that an action of this kind and stage reads."""
        if kind is Kind.F and self.shape.separate_cuts:
            return self._forward_updates[stage]
        return (stage,)

    @cached_property
    def _forward_updates(self) -> list[tuple[int, ...]]:
        return [stages_updated(self.schedule, stage) for stage in range(self.shape.num_stages)]


def _stage_ranges(shape: Shape) -> dict[Kind, range]:
    """The stages each kind may name."""
    forward, backward = shape.num_stages, shape.num_backward_stages
    ranges = dict.fromkeys(Kind, range(max(forward, backward)))
    ranges.update(dict.fromkeys(STEPPING, range(backward)))
    ranges[Kind.F] = ranges[Kind.WAIT] = range(forward)
    # With separate cuts the last forward stage sends to the top backward stage, as if to a next stage.
    ranges[Kind.SEND_F] = range(forward - (not shape.separate_cuts))
    ranges[Kind.RECV_F] = range(1, forward + shape.separate_cuts)
    ranges[Kind.SEND_B] = range(1, backward)
    ranges[Kind.RECV_B] = range(backward - 1)
    ranges.update(dict.fromkeys((Kind.B, Kind.I, Kind.W, Kind.R), range(backward - shape.fused)))
    ranges.update(dict.fromkeys(HEAD, range(shape.num_head_shards)))
    ranges[Kind.FB] = range(backward - 1, backward) if shape.fused else range(0)
    if shape.tensor_parallel:  # a backward recomputes by itself, where devices meet
        ranges[Kind.R] = range(0)
    else:
        ranges.update(dict.fromkeys(SUMS, range(0)))
    return ranges
