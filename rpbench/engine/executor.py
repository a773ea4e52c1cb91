"""Executor: hands every action of a program to the handler of its kind, on a backend that keeps the time."""

from collections.abc import Callable, Mapping
from typing import Protocol

from rpbench.engine.program import Program
from rpbench.ir.action import Action, Kind, parts_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.timeline import Timeline

Gate = Callable[[], None]
"""Called once by a handler, between recomputation and backward; returns when the gradient is there."""

Handler = Callable[[Action, int, Gate], None]
"""Does an action; the number is its place in the schedule."""

Perform = Callable[[int, Gate], None]


class ActionFailed(RuntimeError):
    """An action raised; the message shows its place in the schedule, the cause is what it raised."""


class Backend(Protocol):
    """Runs every action once: after the one before it in its lane, and after all that it waits for."""

    def run(self, program: Program, perform: Perform) -> Timeline:
        """When each action ran; ActionFailed if one raised, ScheduleError if no lane can move."""


def execute(program: Program, handlers: Mapping[Kind, Handler], backend: Backend) -> Timeline:
    """Run a program; raises as `Backend.run` does, and ScheduleError for an action without a handler."""
    check_kinds(program, handlers)

    def perform(number: int, gate: Gate) -> None:
        for part in parts_of(program.actions[number]):
            handlers[part.kind](part, number, gate)

    return backend.run(program, perform)


def check_kinds(program: Program, handlers: Mapping[Kind, Handler]) -> None:
    """Refuse (ScheduleError) an action without a handler."""
    for number, action in enumerate(program.actions):
        for part in parts_of(action):
            if part.kind not in handlers:
                rule = f"{action}: this engine does not run {part.kind.name}"
                raise broken(program.schedule, rule, [number], way_out="use mode=simulate")


def failed(program: Program, number: int, error: BaseException) -> ActionFailed:
    """The error of an action that raised, with its row."""
    lane = program.lanes[program.index.lane_of[number]]
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    rule = f"{program.actions[number]} failed on device {lane.device}, lane {lane.name}: {what}"
    return ActionFailed(str(broken(program.schedule, rule, [number])))
