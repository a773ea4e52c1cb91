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
            handlers[action.kind](action, self._first + place, lambda: None)  # its inputs are there
            self._hand_on(training, action, start.num_steps)
        self.state = self.own(training.state())
        return self.state

    def _bring(self, training: Training, action: Action, step: int) -> None:
        """What an action needs from another rank."""
        if (across := self._across(action, -1)) is not None:
            forward, source, microbatch = across
            name = Tensor(step, "F" if forward else "B", source, microbatch)
            training.passes.put_boundary(forward, source, microbatch, self._receive(name))

    def _hand_on(self, training: Training, action: Action, step: int) -> None:
        """What another rank needs from an action."""
        if (across := self._across(action, 1)) is not None:
            forward, target, microbatch = across
            name = Tensor(step, "F" if forward else "B", action.stage, microbatch)
            tensor = training.passes.take_boundary(forward, action.stage, microbatch)
            self._send(self._plan.rank_of[target], name, tensor)

    def _across(self, action: Action, way: int) -> tuple[bool, int, int] | None:
        """Whether it is a forward, the stage before (-1) or behind (1), and the microbatch; None on the same rank."""
        forward, rank_of = action.kind is Kind.F, self._plan.rank_of
        other = action.stage + (way if forward else -way)
        is_pass = (forward or action.kind in BACKWARD) and action.microbatch is not None
        if not is_pass or not 0 <= other < len(rank_of) or rank_of[other] == self._rank:
            return None
        assert action.microbatch is not None
        return forward, other, action.microbatch
