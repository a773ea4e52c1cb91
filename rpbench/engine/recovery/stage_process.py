"""Stage process: a rank that trains its stages, keeps copies of others' states in its memory, and can be killed.

A step runs the rank's row of one optimizer step on the engine, with tensors from and to other ranks. A thread receives
all messages, so that no sender waits, and stores copies as they arrive. If a message that the main thread needs does
not come within the plan's limit, the process ends with an error. A message about a failure ends the wait: the rank goes
back to the step it is told, and reports it. The process ends when the watching process is gone.

Messages are bytes, with tensors pickled by value: multiprocessing would pass a tensor in memory that both ends map, and
that is gone with a killed sender.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from rpbench.engine.recovery.plan import START_S, Death, Plan
from rpbench.engine.state import checkpoint
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
    """A rank that trains its stages, their `state` after the steps so far, and what passes between ranks."""

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
        handlers, passes = training.handlers, training.passes
        for place, action in enumerate(self._row):
            tell(place)
            forward, microbatch = action.kind is Kind.F, action.microbatch or 0
            name = partial(Tensor, start.num_steps, "F" if forward else "B", microbatch=microbatch)
            if (source := self._across(action, -1)) is not None:
                passes.put_boundary(forward, source, microbatch, self._receive(name(stage=source)))
            handlers[action.kind](action, self._first + place, lambda: None)  # its inputs are there
            if (target := self._across(action, 1)) is not None:
                tensor = passes.take_boundary(forward, action.stage, microbatch)
                self._send(self._plan.rank_of[target], name(stage=action.stage), tensor)
        self.state = self.own(training.state())
        return self.state

    def _across(self, action: Action, way: int) -> int | None:
        """The stage before (-1) or behind (1) a forward or backward on another rank; None where there is none."""
        rank_of, other = self._plan.rank_of, action.stage + (way if action.kind is Kind.F else -way)
        is_pass = action.kind is Kind.F or action.kind in BACKWARD
        return other if is_pass and 0 <= other < len(rank_of) and rank_of[other] != self._rank else None


class Message(NamedTuple):
    """A message between a rank and the watching process."""

    word: str
    epoch: int = 0  # the number of failures before it; messages of earlier epochs are ignored
    to: int = -1  # the rank it is for; -1: the watching process
    about: tuple[Any, ...] = ()  # the word's arguments, plain data
    body: bytes = b""  # tensors, pickled by value


def say(connection: "Connection[Any, Any]", message: Message) -> None:
    connection.send_bytes(pickle.dumps(tuple(message)))


def hear(connection: "Connection[Any, Any]") -> Message:
    """The next message; raises EOFError or OSError if the other end is gone."""
    return Message(*pickle.loads(connection.recv_bytes()))


def bytes_of(state: State) -> int:
    moments = (value for found in state.moments.values() for value in found.values())
    tensors: list[torch.Tensor] = [*state.masters.values(), *moments]
    return sum(tensor.nbytes for tensor in tensors)


class Interrupted(Exception):
    """Another rank has failed: the step is over."""


class StageProcess:
    """A rank that answers the messages of the watching process."""

    def __init__(self, connection: "Connection[Any, Any]", plan: Plan, rank: int, deaths: tuple[Death, ...]) -> None:
        self._connection, self._plan, self._rank, self._deaths = connection, plan, rank, deaths
        self._words: SimpleQueue[Message] = SimpleQueue()
        self._tensors: dict[Tensor, torch.Tensor] = {}
        self._lock, self._saying = threading.Lock(), threading.Lock()
        self._copies: dict[tuple[int, int], State] = {}  # (owner, step) -> its state after so many steps
        self._epoch = 0
        self._stage = StageStep(plan, rank, self._send, self._receive)
        self._put(rank, self._stage.state)
        threading.Thread(target=self._listen, daemon=True).start()

    def serve(self) -> None:
        words: dict[str, Callable[..., None]] = {
            "step": self._step,
            "back": self._back,
            "give": self._give,
            "store": self._store,
            "result": lambda: self._say("state", body=pickle.dumps(self._stage.state)),
        }
        self._say("ready")
        while (asked := self._next()).word != "end":
            try:
                words[asked.word](*asked.about)
            except Interrupted:
                continue  # what to do about it comes next

    # --- what is asked for ---

    def _step(self, step: int) -> None:
        """Run one step, and send a copy of the new state to every holder."""
        with self._lock:
            self._copies = {place: state for place, state in self._copies.items() if place[1] >= step}

        def tell(place: int) -> None:
            if Death(self._rank, step, place) in self._deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            self._say("ran", step, place)

        state = self._stage.run(tell)
        self._put(self._rank, state)
        self._spread(state, self._plan.holders[self._rank])
        self._say("done", step)

    def _back(self, step: int, fresh: Collection[int], from_file: bool) -> None:
        """Go back to the own copy of a step, or its file, and send copies to restarted ranks."""
        self._tensors.clear()
        if from_file:
            self._put(self._rank, checkpoint.load(file_of(self._plan, self._rank, step), self._plan.subject))
        state = self._stage.state = self._copies[self._rank, step]
        self._spread(state, set(fresh) & set(self._plan.holders[self._rank]))
        self._say("back", step, bytes_of(state) if from_file else 0)

    def _give(self, owner: int, step: int) -> None:
        """Send the copy of a lost rank's state to the process that replaces it."""
        self._say("copy", owner, step, to=owner, body=pickle.dumps(self._copies[owner, step]))

    def _store(self, step: int) -> None:
        checkpoint.save(file_of(self._plan, self._rank, step), self._stage.state, self._plan.subject)
        self._say("kept", step)

    # --- the wire ---

    def _say(self, word: str, *about: Any, to: int = -1, body: bytes = b"") -> None:
        with self._saying:
            say(self._connection, Message(word, self._epoch, to, about, body))

    def _listen(self) -> None:
        """Take what comes, until the other end is gone."""
        try:
            while True:
                self._take(hear(self._connection))
        finally:
            os._exit(1)

    def _take(self, message: Message) -> None:
        if message.word == "copy":
            owner, step = message.about
            state = pickle.loads(message.body)
            self._put(owner, state)
            with self._saying:
                about = owner, self._rank, step, bytes_of(state)
                say(self._connection, Message("holds", message.epoch, about=about))
        else:
            self._words.put(message)

    def _next(self) -> Message:
        while True:
            message = self._word(time.monotonic() + self._plan.stall_s + START_S, "anything")
            if message.word not in ("tensor", "failed"):
                return message

    def _receive(self, name: Tensor) -> torch.Tensor:
        deadline = time.monotonic() + self._plan.stall_s
        while name not in self._tensors:
            if self._word(deadline, str(name)).word == "failed":
                raise Interrupted
        return self._tensors.pop(name)

    def _word(self, deadline: float, what: str) -> Message:
        """The next message of this epoch, or of a failure; stores tensors. TimeoutError if none comes in time."""
        while True:
            try:
                message = self._words.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise TimeoutError(f"rank {self._rank} waited too long for {what}") from None
            if message.word == "failed":
                self._epoch = message.epoch
            if message.epoch != self._epoch:
                continue
            if message.word == "tensor":
                self._tensors[Tensor(*message.about)] = pickle.loads(message.body)
            return message

    def _send(self, to: int, name: Tensor, tensor: torch.Tensor) -> None:
        self._say("tensor", *name, to=to, body=pickle.dumps(tensor.detach().clone()))

    # --- copies ---

    def _put(self, owner: int, state: State) -> None:
        with self._lock:
            self._copies[owner, state.num_steps] = state

    def _spread(self, state: State, holders: Collection[int]) -> None:
        for holder in sorted(holders):
            if holder != self._rank:
                self._say("copy", self._rank, state.num_steps, to=holder, body=pickle.dumps(state))


def file_of(plan: Plan, rank: int, step: int) -> Path:
    return Path(plan.folder) / f"rank{rank}-step{step}.pt"


def main() -> int:
    """Run a process to its end, and report an error. Its stdin is the connection to the watching process."""
    torch.set_num_threads(1)
    connection: Connection[Any, Any] = Connection(0)
    try:
        StageProcess(connection, *connection.recv()).serve()
    except BaseException as error:
        say(connection, Message("error", about=(f"{type(error).__name__}: {error}",)))
        raise
    return 0
