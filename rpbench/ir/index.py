"""Index: the actions of a schedule by number, where each stands and what each waits for.

Actions are numbered 0, 1, 2, ... in the order of `Schedule.items()`: lane after lane, each from first to
last. Everything that walks a whole schedule (checks, replay, lowering) works on these numbers.
"""

from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from rpbench.ir.action import HEAD, RECV, SEND, STEPPING, SUMS, Action, Kind
from rpbench.ir.dependencies import names_versions, needs, stages_updated, version_read, window
from rpbench.ir.excerpt import broken
from rpbench.ir.schedule import Schedule, Shape

GRADIENT = (Kind.B, Kind.W, Kind.FB, Kind.HB)  # kinds that add to a weight gradient
# Kinds that stand once for each stage, microbatch and part.
_COUNTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.FB, Kind.WAIT, *HEAD}) | SEND | RECV | SUMS
USERS = frozenset({Kind.F, Kind.B, Kind.I, Kind.R, Kind.FB})  # kinds that use a tensor of another stage
# Kinds that may stand without a microbatch, as often as it pleases.
_ANYWHERE = frozenset(Kind) - _COUNTED - STEPPING - {Kind.OVERLAP}
_Options = tuple[tuple[list[int], int], ...]  # numbers of a kind, and where those of a stage and part begin


class Lane(NamedTuple):
    """A lane and the numbers of its actions, `start` to `stop` - 1."""

    device: int
    name: str
    start: int
    stop: int


class Index:
    """The actions of a schedule by number.

    Attributes:
        actions: by number.
        lanes: every lane of the schedule.
        lane_of: number of an action -> its place in `lanes`.
        steps: (backward stage, version) -> number of the STEP that publishes it.
        rollbacks: the same of the ROLLBACK that ends a step which went before its VALIDATE.
        validations: version -> number of the VALIDATE of its step.
        rests: (backward stage, version) -> number of the STEP_REST behind the window that ends with it.
        marked: numbers of the actions that name a version, an object, a peer or parts; most name none.

    Raises:
        ScheduleError: if an index is out of range, or an action stands twice.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.shape = schedule.shape
        self.actions: list[Action] = []
        self.lanes: list[Lane] = []
        self.lane_of: list[int] = []
        self.steps: dict[tuple[int, int], int] = {}
        self.rollbacks: dict[tuple[int, int], int] = {}
        self.validations: dict[int, int] = {}
        self.rests: dict[tuple[int, int], int] = {}
        self.marked: list[int] = []
        for place, (device, name, row) in enumerate(schedule.items()):
            start = len(self.actions)
            self.lanes.append(Lane(device, name, start, start + len(row)))
            self.actions += row
            self.lane_of += [place] * len(row)

        self._stages = _stage_ranges(self.shape)
        self._microbatches, self._parts = self.shape.total_microbatches, self.shape.num_parts
        stages = 1 + max(self.shape.num_stages, self.shape.num_backward_stages, self.shape.num_head_shards)
        self._size = stages * self._microbatches * self._parts
        self._numbers: dict[Kind, list[int]] = {}
        self._rules: dict[tuple[Kind, int, int, bool], list[tuple[str, _Options]]] = {}
        for number, action in enumerate(self.actions):
            kind, stage, microbatch, part, version, what, peer, sub = action
            if version is not None or what is not None or peer is not None or sub:
                self.marked.append(number)
            numbers = self._numbers.get(kind)
            if numbers is not None and not sub and microbatch is not None and stage in self._stages[kind]:
                place = (stage * self._microbatches + microbatch) * self._parts + part
                if 0 <= microbatch < self._microbatches and 0 <= part < self._parts and numbers[place] < 0:
                    numbers[place] = number  # as nearly all do; what follows also says what is wrong
                    continue
            elif (
                kind in _ANYWHERE
                and stage in self._stages[kind]
                and (microbatch is None or (0 <= microbatch < self._microbatches and 0 <= part < self._parts))
            ):
                continue
            for inside in sub or (action,):
                self._enter(inside, number)

    # --- where actions stand ---

    def device(self, number: int) -> int:
        return self.lanes[self.lane_of[number]].device

    def holds(self, kind: Kind) -> bool:
        """Whether any action is of a kind that is counted by microbatch."""
        return kind in self._numbers

    def numbers(self, kind: Kind) -> list[int]:
        """Numbers of the actions of a kind, at `place(stage, microbatch, part)`; -1 where there is none."""
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

    def gradients(self, stage: int, version: int) -> Iterator[int]:
        """The actions whose weight gradients the STEP of a backward stage to `version` adds up."""
        kinds = [self._numbers[kind] for kind in GRADIENT if kind in self._numbers]
        batch = window(self.shape, version)
        for place in range(self.place(stage, batch.start), self.place(stage, batch.stop)):
            for numbers in kinds:
                if numbers[place] >= 0:
                    yield numbers[place]

    def _enter(self, action: Action, number: int) -> None:
        kind, stage, microbatch, part, _, _, _, _ = action
        if stage not in self._stages[kind]:
            raise self._out_of_range(number, action, f"stage {stage}", self._stages[kind])
        if kind in STEPPING:
            self._enter_step(action, number)
            return
        if microbatch is None:
            if kind in _COUNTED:
                raise broken(self.schedule, f"{action} names no microbatch", [number])
            return
        if not 0 <= microbatch < self._microbatches:
            raise self._out_of_range(number, action, f"microbatch {microbatch}", range(self._microbatches))
        if not 0 <= part < self._parts:
            raise self._out_of_range(number, action, f"part {part}", range(self._parts))
        if kind in _COUNTED:
            numbers = self._numbers.get(kind)
            if numbers is None:
                numbers = self._numbers[kind] = [-1] * self._size
            place = (stage * self._microbatches + microbatch) * self._parts + part
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
        """For each action those it waits for, without the ones its lane puts before it anyway."""
        found: list[tuple[int, ...]] = [()] * len(self.actions)
        for kind, numbers in self._numbers.items():
            if not (self.steps and kind in (Kind.F, Kind.FB)):  # which may wait for a step as well
                self._find_producers(kind, numbers, found)
        for lane in self.lanes:
            for number in range(lane.start, lane.stop):
                action = self.actions[number]
                if action.sub or action.kind in STEPPING or (self.steps and action.kind in (Kind.F, Kind.FB)):
                    waits = (wait for part in action.sub or (action,) for wait, _ in self.waits_for(part))
                    found[number] = tuple([wait for wait in waits if not lane.start <= wait < number])
        return found

    def _find_producers(self, kind: Kind, numbers: list[int], found: list[tuple[int, ...]]) -> None:
        """Enter the producers of all actions of a kind, a stage at a time: in a large schedule every call counts."""
        lane_of = self.lane_of
        for stage in self._stages[kind]:
            for part in range(self._parts):
                own = self._of_stage(numbers, self.place(stage, 0, part))
                for _, options in self._rules_of(kind, stage, part, receives=True):
                    for number, producer in zip(own, self._best(options), strict=False):
                        if number >= 0 <= producer and (producer >= number or lane_of[producer] != lane_of[number]):
                            found[number] += (producer,)

    def _of_stage(self, numbers: list[int], first: int) -> list[int]:
        """The numbers of all microbatches of a stage and part, of which `first` is the first one's place."""
        return numbers[first : first + self._microbatches * self._parts : self._parts]

    def _best(self, options: _Options) -> list[int]:
        """For every microbatch the first of the options that is there, or -1; empty without options."""
        if not options:
            return []
        best = self._of_stage(*options[0])
        for numbers, first in options[1:]:
            if -1 in best:
                others = self._of_stage(numbers, first)
                best = [number if number >= 0 else other for number, other in zip(best, others, strict=True)]
        return best

    def waits_for(self, action: Action, *, receives: bool = True) -> list[tuple[int, str]]:
        """What a plain action waits for, each with "activation", "gradient" or "order" for what moves.

        `receives=False` looks behind RECVs, at what makes the tensor they bring.
        """
        kind, stage, microbatch, part, version, _, _, _ = action
        if kind in STEPPING:
            assert version is not None
            return list(self._step_waits_for(kind, stage, version))
        if microbatch is None:
            return []
        found, offset = [], microbatch * self._parts
        for moved, options in self._rules_of(kind, stage, part, receives):
            for numbers, start in options:
                if numbers[start + offset] >= 0:
                    found.append((numbers[start + offset], moved))
                    break
        if self.steps and kind in (Kind.F, Kind.FB):
            named = version if self.names_versions else None
            found += [(number, "order") for number in self._steps_read(kind, stage, microbatch, named)]
        return found

    def _step_waits_for(self, kind: Kind, stage: int, version: int) -> Iterator[tuple[int, str]]:
        """What a STEP, VALIDATE or ROLLBACK waits for; what a STEP_REST does follows from transfers."""
        if kind is Kind.STEP_REST:
            return
        if kind is Kind.VALIDATE:
            for other in range(self.shape.num_backward_stages):
                yield from ((number, "order") for number in self.gradients(other, version))
            return
        goes_ahead = (stage, version) in self.rollbacks
        if version in self.validations and (kind is Kind.ROLLBACK or not goes_ahead):
            yield self.validations[version], "order"
        if kind is Kind.ROLLBACK:
            if (stage, version) in self.steps:
                yield self.steps[stage, version], "order"
            return
        before = self.published(stage, version - 1)
        if before is not None:
            yield before, "order"
        yield from ((number, "gradient") for number in self.gradients(stage, version))

    def published(self, stage: int, version: int) -> int | None:
        """The action after which a backward stage has a version for good: its ROLLBACK, or its STEP."""
        return self.rollbacks.get((stage, version), self.steps.get((stage, version)))

    def tensors_between_devices(self) -> list[tuple[int, int, str]]:
        """(consumer, producer, what moves) of every tensor that crosses devices, consumers ascending.

        Of plain actions alone, all microbatches of a stage at a time; RECVs are looked behind.
        """
        found, device_of = [], [lane.device for lane in self.lanes]
        for kind, numbers in self._numbers.items():
            for stage in self._stages[kind] if kind in USERS else ():
                for part in range(self._parts):
                    own = self._of_stage(numbers, self.place(stage, 0, part))
                    for moved, options in self._rules_of(kind, stage, part, receives=False):
                        pairs = zip(own, self._best(options), strict=False) if moved != "order" else ()
                        found += [
                            (number, producer, moved)
                            for number, producer in pairs
                            if number >= 0 <= producer
                            and device_of[self.lane_of[number]] != device_of[self.lane_of[producer]]
                        ]
        return sorted(found, key=itemgetter(0))  # of one consumer in the order of the rules

    def _rules_of(self, kind: Kind, stage: int, part: int, receives: bool) -> list[tuple[str, _Options]]:
        """The rules of `dependencies.needs` as numbers to look up."""
        known = self._rules.get((kind, stage, part, receives))
        if known is not None:
            return known
        self._rules[kind, stage, part, receives] = found = [
            (
                need.input,
                tuple(
                    (self._numbers[option], self.place(other, 0, part + need.part_offset))
                    for option, other in need.options
                    if option in self._numbers and (receives or option not in RECV)
                ),
            )
            for need in needs(self.shape, kind, stage, part)
        ]
        return found

    def _steps_read(self, kind: Kind, stage: int, microbatch: int, named: int | None) -> Iterator[int]:
        """The STEPs that publish what a forward must read; none under a policy that reads what is newest."""
        version = version_read(self.schedule.policy, self.shape, microbatch, stage) if named is None else named
        if version:
            for updated in self.updated_by(kind, stage):
                number = self.published(updated, version)
                if number is not None:
                    yield number

    def updated_by(self, kind: Kind, stage: int) -> tuple[int, ...]:
        """The backward stages whose STEPs change the weights that an action of this kind and stage reads."""
        if kind is Kind.F and self.shape.separate_cuts:
            return self._forward_updates[stage]
        return (stage,)

    @cached_property
    def names_versions(self) -> bool:
        """Whether forwards name the version they read."""
        return names_versions(self.schedule)

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
