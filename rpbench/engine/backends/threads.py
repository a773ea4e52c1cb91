"""Thread backends: one long-lived thread a lane, by the wall clock; on cpu it computes on one core.

Every action has a flag that is set at its end. A lane runs its actions in order. Before an action whose producer has
not ended, the lane enters itself as a waiter of the producer and sleeps at its gate, a lock that the producer's lane
opens. There is no other synchronisation: the program's edges order all shared state. Without waits no lock is taken,
because single reads and writes of lists and dictionaries are atomic in Python.

If all unfinished lanes sleep for actions that have not ended, the walk stops with a table of the waits.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from typing import Self, TypeVar

import torch

from rpbench.engine.executor import Perform, failed
from rpbench.engine.host_order import host_order
from rpbench.engine.program import Edge, Program
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.timeline import Timeline

T = TypeVar("T")


class Stopped(BaseException):
    """Unwinds a lane after another one has failed."""


class Walk:
    """The state that the lanes of one run share."""

    def __init__(self, program: Program, perform: Perform, hop_s: float = 0.0) -> None:
        self.program, self.perform, self.hop_s = program, perform, hop_s
        num = len(program.waits)
        self.start, self.main, self.end = [0.0] * num, [0.0] * num, [0.0] * num
        self.pre_cpu, self.main_cpu = [0.0] * num, [0.0] * num
        self.over = threading.Event()  # set when every lane has ended, done or not
        self.error: BaseException | None = None  # that stopped the run, if any
        self._stop = False
        self._finished = [False] * num
        self._lock = threading.RLock()  # of what sleeping lanes say, and of ending
        # the lanes that have actions
        self.places = [place for place, lane in enumerate(program.lanes) if lane.stop > lane.start]
        self._working = set(self.places)
        self._gates = {place: threading.Lock() for place in self.places}
        for gate in self._gates.values():
            gate.acquire()  # shut; `_open` releases it
        self._sleeping: dict[int, tuple[int, int]] = {}  # lane -> (its action, what that waits or has waited for)
        self._waiters: dict[int, list[int]] = {}  # action -> lanes whose gate is to be opened when it ends
        self.order = host_order()
        self._turns = self.order.turns(self.places)
        self.order.signal((self, "begins"))

    def run_lane(self, place: int) -> None:
        """Do the actions of a lane; never raises."""
        lane = self.program.lanes[place]
        number = lane.start
        if self._turns is not None:
            self._turns.take(place)
        self.order.wait((self, "begins"))
        try:
            for number in range(lane.start, lane.stop):
                self._do(place, number)
        except Stopped:
            pass
        except BaseException as error:
            found = failed(self.program, number, error)
            found.__cause__ = error
            self.fail(found)
        finally:
            self.order.signal((self, "lane", place))
            if self._turns is not None:
                self._turns.give(place, goes_on=False)
            self._leave(place)

    def _do(self, place: int, number: int) -> None:
        lane, edges = self.program.lanes[place], self.program.waits[number]
        self.order.begins(f"{self.program.actions[number]} of device {lane.device}, {lane.name}")
        late = [edge for edge in edges if edge.late]
        self._wait_for(place, number, [edge for edge in edges if not edge.late] if late else edges)
        began = main = time.perf_counter()
        cpu = time.thread_time()

        def gate() -> None:
            """Between recomputation and backward: wait for what only the latter needs."""
            nonlocal began, main, cpu
            ahead, used = time.perf_counter() - began, time.thread_time() - cpu
            self._wait_for(place, number, late)
            main = time.perf_counter()
            began = main - ahead  # what runs ahead is drawn directly before the main phase, as the simulator has it
            self.pre_cpu[number] = used
            cpu = time.thread_time()

        self.perform(number, gate)
        self.end[number] = time.perf_counter()
        self.main_cpu[number] = time.thread_time() - cpu
        self.start[number], self.main[number] = began, main
        self._finish(number)

    def fail(self, error: BaseException) -> None:
        """Stop: no action begins any more. The first error counts."""
        with self._lock:
            if self._stop:
                return
            self.error, self._stop = error, True
            if self._turns is not None:
                self._turns.end()
            for place in self._gates:
                self._open(place)
            self.program.stop()

    def timeline(self) -> Timeline:
        """When everything ran, from the first start on; in seconds."""
        for place in self.places:
            self.order.wait((self, "lane", place))
        origin = min(self.start, default=0.0)
        start, main, end = ([value - origin for value in column] for column in (self.start, self.main, self.end))
        hops = self.program.graph.num_hops * self.hop_s
        return Timeline(self.program.schedule, start, main, end, [0.0] * len(start), hops)

    def _wait_for(self, place: int, number: int, edges: Sequence[Edge]) -> None:
        """Return when all producers have ended and their outputs have arrived."""
        finished = self._finished
        for producer, crosses, _ in edges:
            if not finished[producer]:
                self._sleep(place, number, producer)
            if self._stop:
                raise Stopped
            self.order.wait((self, producer))
            if crosses and self.hop_s:
                time.sleep(max(0.0, self.end[producer] + self.hop_s - time.perf_counter()))
        if self._stop:
            raise Stopped

    def _finish(self, number: int) -> None:
        """Mark an action as ended, and open the gates of the lanes that sleep for it."""
        self.order.signal((self, number))
        self._finished[number] = True
        waiters = self._waiters.get(number)
        while waiters:
            try:
                place = waiters.pop()
            except IndexError:
                return  # the last one has struck itself out
            self._open(place)
        if self._turns is not None:
            self._turns.pass_on(self.program.index.lane_of[number])

    def _sleep(self, place: int, number: int, producer: int) -> None:
        waiters = self._waiters.setdefault(producer, [])
        waiters.append(place)
        if self._finished[producer]:
            with suppress(ValueError):  # struck out already: our gate is opened
                waiters.remove(place)
                return  # it ended in between and has not seen us
        with self._lock:
            self._sleeping[place] = (number, producer)
            self._check_moving()
        if self._turns is not None:
            self._turns.give(place, goes_on=False)
        self._gates[place].acquire()
        if self._turns is not None:
            self._turns.take(place)

    def _open(self, place: int) -> None:
        if self._turns is not None:
            self._turns.wake(place)
        with suppress(RuntimeError):  # open already: the walk is at its end
            self._gates[place].release()

    def _leave(self, place: int) -> None:
        with self._lock:
            self._working.discard(place)
            self._check_moving()
            if not self._working:
                self.over.set()

    def _check_moving(self) -> None:
        """Stop if every lane sleeps. A lane whose producer has ended moves, even if it is not awake yet."""
        if self._stop or not self._working or any(self._moves(place) for place in self._working):
            return
        self.fail(self.program.stuck(dict(self._sleeping[place] for place in self._working)))

    def _moves(self, place: int) -> bool:
        asleep = self._sleeping.get(place)
        return asleep is None or self._finished[asleep[1]]


Job = Callable[[], None]


class Workers:
    """Daemon threads that run jobs; each calls `prepare` first. There are as many as ever ran jobs at once."""

    def __init__(self, prepare: Job) -> None:
        self._prepare = prepare
        self._threads: list[threading.Thread] = []
        self._queues: list[SimpleQueue[Job | None]] = []

    def start(self, jobs: Sequence[Job], names: Sequence[str]) -> None:
        """Give job i to worker i; a job must not raise."""
        for number in range(len(self._threads), len(jobs)):
            queue: SimpleQueue[Job | None] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(queue,), name=names[number], daemon=True)
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()
        for queue, job in zip(self._queues, jobs, strict=False):
            queue.put(job)

    def dead(self) -> list[int]:
        return [number for number, thread in enumerate(self._threads) if not thread.is_alive()]

    def close(self, timeout_s: float) -> None:
        """End all workers; wait at most `timeout_s` in all."""
        for queue in self._queues:
            queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads, self._queues = [], []

    def _work(self, queue: "SimpleQueue[Job | None]") -> None:
        self._prepare()
        while (job := queue.get()) is not None:
            job()


POLL_S = 0.1  # how often to look whether a worker has died
IDLE_S = 30.0  # within which an idle worker ends on any machine
# How long a thread keeps the interpreter when another one asks for it. On two cores, in random order, a step took 1.05
# (1F1B) and 1.08 (RoundPipe) times its replay with Python's default of 5 ms, 1.03 and 1.05 with this. 10 us is no
# better.
SWITCH_S = 1e-4
GRACE_S = 0.6  # how long to wait, after an error, for actions that are running


class ThreadBackend:
    """Runs programs in real time. Use it in a `with` block, or close it.

    Each worker first does `prepare`; an action's output is on another device `hop_s` after its end.
    """

    def __init__(self, prepare: Callable[[], None], hop_s: float = 0.0) -> None:
        self._workers = Workers(prepare)
        self._hop_s = hop_s
        self.pre_cpu_s: list[float] = []  # by action of the last run, the processor time of what runs ahead
        self.main_cpu_s: list[float] = []  # and of the main phase

    def run(self, program: Program, perform: Perform) -> Timeline:
        """When each action ran, in seconds; what ran ahead of a main phase is put directly before it.

        Raises as `rpbench.engine.executor.Backend` does, and RuntimeError if a worker has died.
        """
        walk = Walk(program, perform, self._hop_s)
        places = walk.places
        names = [f"device {program.lanes[place].device} {program.lanes[place].name}" for place in places]
        try:
            with _with_value(sys.getswitchinterval, sys.setswitchinterval, min(sys.getswitchinterval(), SWITCH_S)):
                self._workers.start([partial(walk.run_lane, place) for place in places], names)
                self._wait(walk, places)
        except BaseException as error:  # Ctrl-C too: nothing begins any more
            walk.fail(error)
            walk.over.wait(GRACE_S)
            self._workers.close(GRACE_S / 2)
            raise
        self.pre_cpu_s, self.main_cpu_s = walk.pre_cpu, walk.main_cpu
        return walk.timeline()

    def close(self) -> None:
        """End the workers, each after the action that it runs."""
        self._workers.close(IDLE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, walk: Walk, places: list[int]) -> None:
        while places and not walk.over.wait(POLL_S):
            for number in self._workers.dead():
                lane = walk.program.lanes[places[number]]
                rule = f"the worker of device {lane.device}, lane {lane.name} has died"
                walk.fail(RuntimeError(str(broken(walk.program.schedule, rule, [lane.start]))))
            if walk.error is not None:
                break
        if walk.error is not None:
            raise walk.error


class CpuBackend(ThreadBackend):
    """Real work by the wall clock, one thread for each lane, bound to `cores` in turn if there are any."""

    def __init__(self, cores: Sequence[int] = ()) -> None:
        places = cycle(cores)

        def prepare() -> None:
            use_one_core()
            if cores:
                bind(0, next(places))

        super().__init__(prepare)


@contextmanager
def _with_value(read: Callable[[], T], write: Callable[[T], object], value: T) -> Iterator[None]:
    """Inside, a setting of the process has this value."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def one_thread() -> AbstractContextManager[None]:
    """Operations on one core each: with more, sums are split and the last bits depend on the machine."""
    return _with_value(torch.get_num_threads, torch.set_num_threads, 1)


def use_one_core() -> None:
    """Call it first in a worker: until then, its matrix products use all cores."""
    torch.set_num_threads(1)


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bind(thread: int, core: int) -> None:
    """Keep a thread on a core, where the system can; 0 is the calling thread, a process id its first thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread, {core})
