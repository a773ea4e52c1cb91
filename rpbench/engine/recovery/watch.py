"""Watch: starts the ranks of a plan, passes on what they send, and brings training back when one of them is killed.

A step counts once every rank has done it and every holder has its copies. If a rank is gone before, the others go back
to the last step that counts, a new process takes the lost rank's place with the copy of a holder, and the step begins
anew. Where nobody holds a copy, or states are kept in files alone, all go back to their files. Every wait has the
plan's limit, and whatever happens the processes end with the block that started them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from rpbench.engine.recovery.plan import START_S, Plan
from rpbench.engine.recovery.stage_process import main
from rpbench.engine.recovery.wire import Message, hear, say, unpacked
from rpbench.engine.state.gradients import Tensors
from rpbench.ir.action import Kind

GRACE_S = 5.0


class RankDied(Exception):
    """A process is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class CannotRecover(RuntimeError):
    """No state is left to go on from, or a rank hung or raised."""


@dataclass(frozen=True)
class Return:
    """How training came back after a failure.

    Args:
        ranks: that died.
        step: that was running, counted from 0.
        source: where the state came from: `memory` or `store`.
        lost_steps: that had counted and were done again.
        num_actions: of the step that was running, by rank, that had begun and were done again.
        num_microbatches: of it that had begun at the first stage.
        fetched_bytes: that crossed to another process, or came from files.
        stop_s: from when it was known until training went on.
    """

    ranks: tuple[int, ...]
    step: int
    source: str
    lost_steps: int
    num_actions: tuple[int, ...]
    num_microbatches: int
    fetched_bytes: int
    stop_s: float


@dataclass(frozen=True)
class Result:
    """What came of a plan.

    Args:
        masters: of all stages, after the last step.
        returns: one for each failure, in order.
        num_actions: that began in all, those that were done again counted each time.
    """

    masters: Tensors
    returns: tuple[Return, ...]
    num_actions: int


@dataclass
class _Ears:
    """What ranks have said since it was last asked for."""

    said: set[tuple[Any, ...]] = field(default_factory=set)
    bytes_read: int = 0
    bytes_given: Counter[int] = field(default_factory=Counter)  # by new owner
    masters: Tensors = field(default_factory=dict)


def train(plan: Plan) -> Result:
    """Train a plan to its end.

    Raises:
        CannotRecover: if a state is lost, or a rank hangs or raises.
    """
    with Watch(plan) as ranks:
        return ranks.train()


class Watch:
    """The processes of a plan. Use it in a `with` block.

    Attributes:
        pids: by rank, of those that live now.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._epoch, self._ears = plan, 0, _Ears()
        plan.workload(), plan.settings()  # refused here, not in every process
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["torch"])
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._processes: dict[int, Any] = {}
        self._deaths = plan.deaths
        self._num_steps, self._has_begun = 0, False
        self._stored: int | None = None  # the newest step in files
        self._ran: Counter[int] = Counter()  # rank -> its actions of the step that is running
        self._num_begun = self._num_actions = 0  # of it, forwards of the first stage; actions of all steps
        self._lost: set[int] = set()
        self._returns: list[Return] = []

    def __enter__(self) -> Self:
        try:
            self._start(range(self._plan.num_ranks))
        except BaseException:
            self.close(at_once=True)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(at_once=exception[0] is not None)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def train(self) -> Result:
        """Every step, through every failure.

        Raises:
            CannotRecover: as of `rpbench.engine.recovery.watch.train`.
        """
        while True:
            try:
                if self._lost:
                    self._recover()
                if not self._has_begun:
                    self._begin()
                if self._num_steps == self._plan.num_steps:
                    self._ask("result", ())
                    self._hear_all("state", ())
                    break
                self._step()
            except RankDied as died:
                self._lost.add(died.rank)
        return Result(dict(sorted(self._ears.masters.items())), tuple(self._returns), self._num_actions)

    # --- steps ---

    def _begin(self) -> None:
        """Let everybody have copies of what training begins with."""
        self._ask("share", ())
        self._hear(self._copies(range(self._plan.num_ranks), 0))
        if self._plan.store_every:
            self._store()
        self._has_begun = True

    def _step(self) -> None:
        step = self._num_steps
        self._ran.clear()
        self._num_begun = 0
        self._ask("step", (step,))
        self._hear_all("done", (step,))
        self._hear(self._copies(range(self._plan.num_ranks), step + 1))
        self._num_steps += 1
        self._ask("commit", (step + 1,))
        if self._plan.store_every and self._num_steps % self._plan.store_every == 0:
            self._store()

    def _store(self) -> None:
        self._ask("store", (self._num_steps,))
        self._hear_all("kept", (self._num_steps,))
        self._stored = self._num_steps

    def _copies(self, owners: Iterable[int], step: int, with_: Iterable[int] | None = None) -> set[tuple[Any, ...]]:
        """What is said once the holders of some states, or those of `with_` among them, have them."""
        there = set(range(self._plan.num_ranks) if with_ is None else with_)
        holders = self._plan.holders
        return {("holds", owner, holder, step) for owner in owners for holder in set(holders[owner]) & there - {owner}}

    # --- failures ---

    def _recover(self) -> None:
        """Bring every rank back to one step."""
        began, step, lost = time.monotonic(), self._num_steps, tuple(sorted(self._lost))
        self._epoch += 1
        self._ears = _Ears()
        givers = self._givers(lost) if self._has_begun else {}  # every process begins with the same weights by itself
        for rank in self._processes.keys() - self._lost:
            self._tell(rank, "failed", ())
        self._start(lost)
        if givers is None:
            fetched = self._from_store()
        else:
            fetched = self._from_memory(givers)
        self._lost.clear()
        self._returns.append(
            Return(
                lost,
                step,
                "store" if givers is None else "memory",
                step - self._num_steps,
                tuple(self._ran[rank] for rank in range(self._plan.num_ranks)),
                self._num_begun,
                fetched,
                time.monotonic() - began,
            )
        )

    def _givers(self, lost: tuple[int, ...]) -> dict[int, int] | None:
        """For each lost rank one that lives and holds its state; None where files are to be read.

        Raises:
            CannotRecover: if there are no files either.
        """
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

    def _from_memory(self, givers: dict[int, int]) -> int:
        step, lost = self._num_steps, tuple(givers)
        for rank, giver in givers.items():
            self._tell(giver, "give", (rank, step))
        self._hear({("holds", rank, rank, step) for rank in lost})
        fetched = sum(self._ears.bytes_given.values())
        self._ask("back", (step, lost))
        self._hear_all("back", (step,))
        self._hear(self._copies(range(self._plan.num_ranks), step, with_=lost))
        return fetched

    def _from_store(self) -> int:
        assert self._stored is not None  # the first thing that is done
        self._num_steps = self._stored
        self._ask("read", (self._stored,))
        self._hear_all("back", (self._stored,))
        self._hear(self._copies(range(self._plan.num_ranks), self._stored))
        return self._ears.bytes_read

    # --- processes and the wire ---

    def _start(self, ranks: Iterable[int]) -> None:
        """Start ranks, those that died anew; a death happens once."""
        fresh = tuple(ranks)
        for rank in fresh:
            if rank in self._processes:
                self._end(rank)
                self._deaths = tuple(
                    death for death in self._deaths if (death.rank, death.step) != (rank, self._num_steps)
                )
            here, there = self._context.Pipe()
            own = tuple(death for death in self._deaths if death.rank == rank)
            process = self._context.Process(target=main, args=(there, self._plan, rank, own), daemon=True)
            process.start()
            there.close()
            self._connections[rank], self._processes[rank] = here, process
        self._hear({("ready", rank) for rank in fresh}, START_S)
        for rank in fresh if self._epoch else ():
            self._tell(rank, "failed", ())  # which tells it the epoch

    def _ask(self, word: str, about: tuple[Any, ...]) -> None:
        for rank in self._connections:
            self._tell(rank, word, about)

    def _tell(self, rank: int, word: str, about: tuple[Any, ...]) -> None:
        self._pass_on(rank, Message(word, self._epoch, rank, about))

    def _pass_on(self, rank: int, message: Message) -> None:
        with suppress(OSError):  # it has died, which the next wait finds
            say(self._connections[rank], message)

    def _hear_all(self, word: str, about: tuple[Any, ...]) -> None:
        self._hear({(word, rank, *about) for rank in range(self._plan.num_ranks)})

    def _hear(self, wanted: set[tuple[Any, ...]], more_s: float = 0.0) -> None:
        """Wait until all of something has been said; pass on what is for others meanwhile.

        Raises:
            RankDied: if a process is gone.
            CannotRecover: if nobody says anything within the limit, or a rank raised.
        """
        limit_s = self._plan.stall_s + more_s
        while not wanted <= self._ears.said:
            sources: dict[Any, tuple[int, Callable[[int], None]]] = {}
            for rank, process in self._processes.items():
                sources[self._connections[rank]] = rank, self._take
                sources[process.sentinel] = rank, self._bury
            ready = wait(list(sources), timeout=limit_s)
            if not ready:
                missing = sorted(map(str, wanted - self._ears.said))
                raise CannotRecover(f"no rank said anything for {limit_s:g} s; missing: {', '.join(missing)}")
            for source in sorted(ready, key=lambda each: isinstance(each, int)):  # words first, then deaths
                rank, act = sources[source]
                act(rank)
        self._ears.said -= wanted

    def _take(self, rank: int) -> None:
        """Hear one message of a rank."""
        try:
            message = hear(self._connections[rank])
        except (EOFError, OSError):
            raise RankDied(rank) from None
        if message.word == "error":
            raise CannotRecover(f"rank {rank}: {message.about[0]}")
        if message.word == "ran":
            self._count(rank, message)
        elif message.epoch != self._epoch and message.word != "ready":
            return
        elif message.to >= 0:
            self._pass_on(message.to, message)
        elif message.word == "state":
            self._ears.masters |= unpacked(message.body).masters
            self._ears.said.add(("state", rank))
        elif message.word == "holds":
            owner, holder, step, size = message.about
            self._ears.bytes_given[owner] += size if owner == holder else 0
            self._ears.said.add(("holds", owner, holder, step))
        elif message.word == "back":
            step, size = message.about
            self._ears.bytes_read += size
            self._ears.said.add(("back", rank, step))
        else:
            self._ears.said.add((message.word, rank, *message.about))

    def _count(self, rank: int, message: Message) -> None:
        _, place = message.about
        action = self._plan.order.compute(rank)[place]
        self._num_actions += 1
        self._ran[rank] += 1
        self._num_begun += action.kind is Kind.F and action.stage == 0

    def _bury(self, rank: int) -> None:
        """What a rank said before it died, then that it has."""
        while True:
            self._take(rank)

    def _end(self, rank: int) -> None:
        process = self._processes.pop(rank)
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        self._connections.pop(rank).close()

    def close(self, *, at_once: bool = False) -> None:
        """End all processes; at once, or after what they do."""
        for rank, process in self._processes.items():
            if at_once:
                process.kill()
            self._tell(rank, "end", ())
        for rank in list(self._processes):
            self._end(rank)
