"""Stage step: a rank's row of one optimizer step, on the engine, with tensors that come from and go to other ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from rpbench.engine.recovery.plan import Plan
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.weights import masters_of
from rpbench.engine.training import Settings, Training
from rpbench.ir.action import BACKWARD, Action, Kind


class Tensor(NamedTuple):
    """The name of what a stage hands to a neighbour: an activation (`F`) or its gradient (`B`) of a microbatch."""

    step: int
    way: str
    stage: int
    microbatch: int


Send = Callable[[int, Tensor, torch.Tensor], None]
Receive = Callable[[Tensor], torch.Tensor]
Tell = Callable[[int], None]


class StageStep:
    """A rank that trains its stages.

    Args:
        send: to a rank.
        receive: waits for what another rank has sent.

    Attributes:
        state: of its own stages, after `state.num_steps` steps.
    """

    def __init__(self, plan: Plan, rank: int, send: Send, receive: Receive) -> None:
        self._plan, self._rank, self._send, self._receive = plan, rank, send, receive
        self._workload = plan.workload()
        self._settings = Settings(plan.settings(), keep_state=True)
        rows = [len(plan.order.compute(each)) for each in range(plan.num_ranks)]
        self._row, self._first = plan.order.compute(rank), sum(rows[:rank])
        self._begun = masters_of(self._workload)  # of all stages; those of others never change here
        self.state = self.own(State(0, self._begun, {}))

    def own(self, state: State) -> State:
        """The part of a state that belongs to this rank's stages."""
        layout = Training(self._workload, self._plan.order, self._settings).layout
        stages = [stage for stage, rank in enumerate(self._plan.rank_of) if rank == self._rank]
        modules = {module for stage in stages for module in layout.backward[stage]}
        return replace(
            state,
            masters={place: value for place, value in state.masters.items() if place[0] in modules},
            moments={place: value for place, value in state.moments.items() if place[0] in modules},
        )

    def run(self, tell: Tell) -> State:
        """The step that follows the state; `tell` hears of each action, by its place in the row, before it runs."""
        start = replace(self.state, masters=self._begun | self.state.masters)
        training = Training(self._workload, self._plan.order, self._settings, start)
        handlers = training.handlers
        for place, action in enumerate(self._row):
            tell(place)
            self._bring(training, action, start.num_steps)
            handlers[action.kind](action, self._first + place, _pass)
            self._hand_on(training, action, start.num_steps)
        self.state = self.own(training.state())
        return self.state

    def _bring(self, training: Training, action: Action, step: int) -> None:
        """What an action needs from another rank."""
        name = _input_of(action, len(self._plan.rank_of) - 1, step)
        if name is not None and self._plan.rank_of[name.stage] != self._rank:
            training.passes.put_boundary(name.way == "F", name.stage, name.microbatch, self._receive(name))

    def _hand_on(self, training: Training, action: Action, step: int) -> None:
        """What another rank needs from an action."""
        last = len(self._plan.rank_of) - 1
        up, down = action.kind is Kind.F and action.stage < last, action.kind in BACKWARD and action.stage > 0
        if not (up or down):
            return
        to = self._plan.rank_of[action.stage + (1 if up else -1)]
        if to != self._rank:
            assert action.microbatch is not None
            name = Tensor(step, "F" if up else "B", action.stage, action.microbatch)
            self._send(to, name, training.passes.take_boundary(up, action.stage, action.microbatch))


def _input_of(action: Action, last: int, step: int) -> Tensor | None:
    """The tensor of another stage that an action begins with."""
    if action.kind is Kind.F and action.stage > 0:
        assert action.microbatch is not None
        return Tensor(step, "F", action.stage - 1, action.microbatch)
    if action.kind in BACKWARD and action.stage < last:
        assert action.microbatch is not None
        return Tensor(step, "B", action.stage + 1, action.microbatch)
    return None


def _pass() -> None:
    """The gate of an action whose inputs are there before it begins."""
