"""Ranks: the processes of a plan, at the end of the one that watches: started, heard, passed on between, and ended."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from rpbench.engine.recovery.plan import START_S, Death, Plan
from rpbench.engine.recovery.stage_process import main
from rpbench.engine.recovery.wire import Message, hear, say, unpacked
from rpbench.engine.state.gradients import Tensors
from rpbench.ir.action import Kind

GRACE_S = 5.0

Said = tuple[Any, ...]


class RankDied(Exception):
    """A process is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class CannotRecover(RuntimeError):
    """No state is left to go on from, or a rank hung or raised."""


class Ranks:
    """The processes of a plan.

    Attributes:
        epoch: how many failures there have been; what ranks said before the last one is not heard.
        ran: by rank, actions of the step that is running.
        num_begun: forwards of the first stage among them.
        num_actions: of all steps, those that were done again counted each time.
        bytes_read: from files, since the last failure.
        bytes_given: of copies that new processes have got since then.
        masters: of the stages whose result has come.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["torch._dynamo"])  # what optimizers import; once, for all processes
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._processes: dict[int, Any] = {}
        self._said: set[Said] = set()
        self.epoch = 0
        self.ran: Counter[int] = Counter()
        self.num_begun = self.num_actions = 0
        self.bytes_read = self.bytes_given = 0
        self.masters: Tensors = {}

    @property
    def pids(self) -> dict[int, int]:
        """By rank, of those that live now."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, ranks: Iterable[int], deaths: Iterable[Death]) -> None:
        """Start some ranks, those that are there anew, and wait until they can be spoken to."""
        fresh = tuple(ranks)
        for rank in fresh:
            if rank in self._processes:
                self._end(rank)
            here, there = self._context.Pipe()
            own = tuple(death for death in deaths if death.rank == rank)
            process = self._context.Process(target=main, args=(there, self._plan, rank, own), daemon=True)
            process.start()
            there.close()
            self._connections[rank], self._processes[rank] = here, process
        self.hear({("ready", rank) for rank in fresh}, START_S)
        for rank in fresh if self.epoch else ():
            self.tell(rank, "failed")  # which tells it the epoch

    def next_epoch(self, lost: Iterable[int]) -> None:
        """Interrupt all but those that are lost, and forget what was said."""
        self.epoch += 1
        self._said.clear()
        self.bytes_read = self.bytes_given = 0
        for rank in self._processes.keys() - set(lost):
            self.tell(rank, "failed")

    def begin_step(self) -> None:
        """Count the actions of a step from here on."""
        self.ran.clear()
        self.num_begun = 0

    # --- the wire ---

    def ask(self, word: str, *about: Any) -> None:
        """Tell all ranks."""
        for rank in self._connections:
            self.tell(rank, word, *about)

    def tell(self, rank: int, word: str, *about: Any) -> None:
        """Tell one rank."""
        self._pass_on(rank, Message(word, self.epoch, rank, about))

    def hear_all(self, word: str, *about: Any) -> None:
        """Wait until all ranks have said the same."""
        self.hear({(word, rank, *about) for rank in range(self._plan.num_ranks)})

    def hear(self, wanted: set[Said], more_s: float = 0.0) -> None:
        """Wait until all of something has been said; pass on what is for others meanwhile.

        Raises:
            RankDied: if a process is gone.
            CannotRecover: if nobody says anything within the limit, or a rank raised.
        """
        limit_s = self._plan.stall_s + more_s
        while not wanted <= self._said:
            sources: dict[Any, tuple[int, Callable[[int], None]]] = {}
            for rank, process in self._processes.items():
                sources[self._connections[rank]] = rank, self._take
                sources[process.sentinel] = rank, self._bury
            ready = wait(list(sources), timeout=limit_s)
            if not ready:
                missing = ", ".join(sorted(map(str, wanted - self._said)))
                raise CannotRecover(f"no rank said anything for {limit_s:g} s; missing: {missing}")
            for source in sorted(ready, key=lambda each: isinstance(each, int)):  # words first, then deaths
                rank, act = sources[source]
                act(rank)
        self._said -= wanted

    def _pass_on(self, rank: int, message: Message) -> None:
        with suppress(OSError):  # it has died, which the next wait finds
            say(self._connections[rank], message)

    def _take(self, rank: int) -> None:
        """Hear one message of a rank."""
        try:
            message = hear(self._connections[rank])
        except (EOFError, OSError):
            raise RankDied(rank) from None
        if message.word == "error":
            raise CannotRecover(f"rank {rank}: {message.about[0]}")
        if message.word == "ran":
            self._count(rank, *message.about)
        elif message.epoch != self.epoch and message.word != "ready":
            return
        elif message.to >= 0:
            self._pass_on(message.to, message)
        else:
            self._note(rank, message)

    def _note(self, rank: int, message: Message) -> None:
        """Remember what a rank has said, without what is counted."""
        about = message.about
        if message.word == "state":
            self.masters |= unpacked(message.body).masters
        elif message.word == "holds":
            owner, *about_copy, size = about
            self.bytes_given += size if owner == rank else 0
            self._said.add(("holds", owner, *about_copy))
            return
        elif message.word == "back":
            *about_step, size = about
            self.bytes_read += size
            about = tuple(about_step)
        self._said.add((message.word, rank, *about))

    def _count(self, rank: int, step: int, place: int) -> None:
        action = self._plan.order.compute(rank)[place]
        self.num_actions += 1
        self.ran[rank] += 1
        self.num_begun += action.kind is Kind.F and action.stage == 0

    def _bury(self, rank: int) -> None:
        """Hear what a rank said before it died, then that it has."""
        while True:
            self._take(rank)

    # --- the end ---

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
            self.tell(rank, "end")
        for rank in list(self._processes):
            self._end(rank)
