"""Watch: trains a plan through its failures; starts and ends one process a rank, and relays their messages.

A step is complete once every rank has done it and every holder has its copies. If a rank dies before, the others go
back to the last complete step, a new process replaces the lost rank with the copy of a holder, and the step is done
again. Where no holder is left, or states are in files alone, all ranks go back to their files. Every wait has the
plan's limit, and the processes end with the block that started them.
"""

import pickle
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from rpbench.engine.recovery.plan import START_S, Plan
from rpbench.engine.recovery.stage_process import Message, hear, say
from rpbench.engine.state.gradients import Tensors
from rpbench.ir.action import Kind
from rpbench.side_processes import Started, end_all, start

Said = tuple[Any, ...]


class RankDied(Exception):
    """A process is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class CannotRecover(RuntimeError):
    """No state is left to go on from, or a rank hung or raised."""


@dataclass(frozen=True)
class Return:
    """One recovery after a failure."""

    ranks: tuple[int, ...]  # the ranks that died
    step: int  # the step that was running, from 0
    source: str  # where the state came from: `memory` or `store`
    lost_steps: int  # complete steps that were repeated
    num_actions: tuple[int, ...]  # by rank, actions of the running step that had begun and were repeated
    num_microbatches: int  # microbatches of it that had begun at the first stage
    fetched_bytes: int  # bytes that went to another process, or came from files
    stop_s: float  # seconds from the detection until training went on


@dataclass(frozen=True)
class Result:
    """The masters of all stages after the last step, the recoveries, and how many actions began, each time counted."""

    masters: Tensors
    returns: tuple[Return, ...]
    num_actions: int


def train(plan: Plan) -> Result:
    """Train a plan to its end; raises CannotRecover if a state is lost, or a rank hangs or raises."""
    with Watch(plan) as watch:
        return watch.train()


class Watch:
    """A plan with its processes. Use it in a `with` block."""

    def __init__(self, plan: Plan) -> None:
        plan.workload(), plan.settings()  # refused here, not in every process
        self._plan = replace(plan, folder=str(Path(plan.folder).absolute()))  # processes work elsewhere
        self._all, self._deaths = range(plan.num_ranks), plan.deaths
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._processes: dict[int, Started] = {}
        self._said: set[Said] = set()
        self._epoch = 0  # failures so far; messages from before the last one are ignored
        self._num_steps, self._has_begun, self._stored = 0, False, 0  # complete steps, and those in files
        self._lost: set[int] = set()
        self._returns: list[Return] = []
        self._ran: Counter[int] = Counter()  # by rank, actions of the step that is running
        self._num_begun = self._num_actions = 0  # forwards of the first stage among them; actions of all steps
        self._bytes_read = self._bytes_given = 0  # since the last failure: from files, to processes in others' place
        self._masters: Tensors = {}

    def __enter__(self) -> Self:
        try:
            self._start(self._all)
        except BaseException:
            self._close(at_once=True)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close(at_once=exception[0] is not None)

    @property
    def pids(self) -> dict[int, int]:
        """By rank, of the processes that live now."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def train(self) -> Result:
        """Every step, through every failure; raises CannotRecover as `rpbench.engine.recovery.watch.train` does."""
        while True:
            try:
                if self._lost:
                    self._recover()
                if not self._has_begun:
                    self._go_back(self._all)  # everybody has copies of what training begins with
                    self._store()
                    self._has_begun = True
                if self._num_steps == self._plan.num_steps:
                    self._ask("result")
                    self._hear_all("state")
                    break
                self._step()
            except RankDied as died:
                self._lost.add(died.rank)
        return Result(dict(sorted(self._masters.items())), tuple(self._returns), self._num_actions)

    # --- steps ---

    def _step(self) -> None:
        self._ran.clear()
        self._num_begun = 0
        self._ask("step", self._num_steps)
        self._hear_all("done", self._num_steps)
        self._hear(self._copies(self._num_steps + 1, self._all))
        self._num_steps += 1
        self._store()

    def _store(self) -> None:
        """Have all ranks write their states to files when that is due."""
        if self._plan.store_every and self._num_steps % self._plan.store_every == 0:
            self._ask("store", self._num_steps)
            self._hear_all("kept", self._num_steps)
            self._stored = self._num_steps

    def _copies(self, step: int, among: Iterable[int]) -> set[Said]:
        """The messages by which holders among some ranks report their copies of other ranks' states."""
        return {
            ("holds", owner, holder, step)
            for owner, holders in enumerate(self._plan.holders)
            for holder in (set(holders) & set(among)) - {owner}
        }

    def _go_back(self, fresh: Iterable[int], *, from_file: bool = False) -> None:
        """Bring all ranks back to the last complete step, and send copies to restarted ranks."""
        self._ask("back", self._num_steps, tuple(fresh), from_file)
        self._hear_all("back", self._num_steps)
        self._hear(self._copies(self._num_steps, fresh))

    # --- failures ---

    def _recover(self) -> None:
        """Bring every rank back to one step."""
        began, step, lost = time.monotonic(), self._num_steps, tuple(sorted(self._lost))
        # Before training has begun, every process has the same weights by itself.
        givers = self._givers(lost) if self._has_begun else {}
        self._epoch += 1
        self._said.clear()
        self._bytes_read = self._bytes_given = 0
        for rank in self._processes.keys() - set(lost):
            self._tell(rank, "failed")
        self._deaths = tuple(death for death in self._deaths if death.rank not in lost or death.step > step)
        self._start(lost)
        if givers is None:
            self._num_steps = self._stored
            self._go_back(self._all, from_file=True)
            fetched = self._bytes_read
        else:
            for rank, giver in givers.items():
                self._tell(giver, "give", rank, step)
            self._hear({("holds", rank, rank, step) for rank in givers})
            fetched = self._bytes_given
            self._go_back(lost)
        self._lost.clear()
        self._returns.append(
            Return(
                lost,
                step,
                "store" if givers is None else "memory",
                step - self._num_steps,
                tuple(self._ran[rank] for rank in self._all),
                self._num_begun,
                fetched,
                time.monotonic() - began,
            )
        )

    def _givers(self, lost: tuple[int, ...]) -> dict[int, int] | None:
        """For each lost rank a living holder of its state; None: use files. CannotRecover if there are none either."""
        living = {rank: [each for each in self._plan.holders[rank] if each not in lost] for rank in lost}
        if self._plan.source == "memory" and all(living.values()):
            return {rank: holders[0] for rank, holders in living.items()}
        if not self._plan.store_every:
            rank = next(rank for rank, holders in living.items() if not holders)
            raise CannotRecover(
                f"rank {rank} and every holder of its state, {list(self._plan.holders[rank])}, are gone, and nothing "
                "is in files; keep more copies, or set store_every"
            )
        return None

    # --- the wire ---

    def _ask(self, word: str, *about: Any) -> None:
        for rank in self._connections:
            self._tell(rank, word, *about)

    def _tell(self, rank: int, word: str, *about: Any) -> None:
        self._pass_on(Message(word, self._epoch, rank, about))

    def _pass_on(self, message: Message) -> None:
        with suppress(OSError):  # it has died, which the next wait finds
            say(self._connections[message.to], message)

    def _hear_all(self, word: str, *about: Any) -> None:
        self._hear({(word, rank, *about) for rank in self._all})

    def _hear(self, wanted: set[Said], more_s: float = 0.0) -> None:
        """Wait until all `wanted` messages have come; pass on those for other ranks. Raises RankDied if a process is
        gone, CannotRecover if no message comes within the limit, or a rank raised.
        """
        limit_s = self._plan.stall_s + more_s
        while not wanted <= self._said:
            rank_of = {connection: rank for rank, connection in self._connections.items()}
            ready = wait(list(rank_of), timeout=limit_s)
            if not ready:
                missing = ", ".join(sorted(map(str, wanted - self._said)))
                raise CannotRecover(f"no rank said anything for {limit_s:g} s; missing: {missing}")
            for connection in ready:
                self._take(rank_of[connection])  # type: ignore[index]
        self._said -= wanted

    def _take(self, rank: int) -> None:
        try:
            message = hear(self._connections[rank])
        except (EOFError, OSError):
            raise RankDied(rank) from None
        if message.word == "error":
            raise CannotRecover(f"rank {rank}: {message.about[0]}")
        if message.word == "ran":
            action = self._plan.order.compute(rank)[message.about[1]]
            self._num_actions += 1
            self._ran[rank] += 1
            self._num_begun += action.kind is Kind.F and action.stage == 0
        elif message.epoch == self._epoch or message.word == "ready":
            if message.to >= 0:
                self._pass_on(message)
            else:
                self._note(rank, message)

    def _note(self, rank: int, message: Message) -> None:
        """Record a rank's message, and count its bytes."""
        word, about = message.word, message.about
        if word == "state":
            self._masters |= pickle.loads(message.body).masters
        elif word == "holds":
            rank, holder, step, size = about
            self._bytes_given += size if rank == holder else 0
            about = holder, step
        elif word == "back":
            step, size = about
            self._bytes_read += size
            about = (step,)
        self._said.add((word, rank, *about))

    # --- processes ---

    def _start(self, ranks: Iterable[int]) -> None:
        """Start or restart some ranks, and wait until they are ready."""
        for rank in ranks:
            if rank in self._processes:
                self._end(rank)
            here, there = Pipe()
            with there:
                self._processes[rank] = start(
                    ["rpbench.engine.recovery.stage_process"],
                    {},
                    stdin=there.fileno(),
                    stdout=1,
                    stderr=2,
                    imports=["torch._dynamo"],  # which optimizers import
                )
            self._connections[rank] = here
            with suppress(OSError):  # it has died, which the next wait finds
                here.send((self._plan, rank, tuple(death for death in self._deaths if death.rank == rank)))
        self._hear({("ready", rank) for rank in ranks}, START_S)
        for rank in ranks if self._epoch else ():
            self._tell(rank, "failed")  # which tells it the epoch

    def _end(self, rank: int) -> None:
        end_all([self._processes.pop(rank)], [], [self._connections.pop(rank)])

    def _close(self, *, at_once: bool) -> None:
        """End all processes; at once, or after their current work."""
        for rank, process in self._processes.items():
            if at_once:
                process.kill()
            self._tell(rank, "end")
        for rank in list(self._processes):
            self._end(rank)
