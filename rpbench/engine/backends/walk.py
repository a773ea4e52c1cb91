"""Walk: one run of a program by real threads, one a lane, by the wall clock.

Every action has a flag that is set at its end. A lane runs its actions in order. Before an action whose producer has
not ended, the lane enters itself as a waiter of the producer and sleeps at its gate, a lock that the producer's lane
opens. There is no other synchronisation: the program's edges order all shared state. Without waits no lock is taken,
because single reads and writes of lists and dictionaries are atomic in Python.

If all unfinished lanes sleep for actions that have not ended, the walk stops with a table of the waits.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rpbench.engine.executor import Perform, failed
from rpbench.engine.host_order import host_order
from rpbench.engine.program import Edge, Program
from rpbench.ir.timeline import Timeline


class Stopped(BaseException):
    """Unwinds a lane after another one has failed."""


class Walk:
    """The state that the lanes of one run share.

    Attributes:
        error: that stopped the run, if any.
        over: set when every lane has ended, done or not.
        places: the lanes that have actions.
    """

    def __init__(self, program: Program, perform: Perform, hop_s: float = 0.0) -> None:
        self.program, self.perform, self.hop_s = program, perform, hop_s
        num = len(program.waits)
        self.start, self.main, self.end = [0.0] * num, [0.0] * num, [0.0] * num
        self.pre_cpu, self.main_cpu = [0.0] * num, [0.0] * num
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._stop = False
        self._finished = [False] * num
        self._lock = threading.Lock()  # of what sleeping lanes say, and of ending
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
        runner = _Lane(self, place)
        if self._turns is not None:
            self._turns.take(place)
        self.order.wait((self, "begins"))
        try:
            runner.run()
        except Stopped:
            pass
        except BaseException as error:
            found = failed(self.program, runner.number, error)
            found.__cause__ = error
            self.fail(found)
        finally:
            self.order.signal((self, "lane", place))
            if self._turns is not None:
                self._turns.give(place, goes_on=False)
            self._leave(place)

    def fail(self, error: BaseException) -> None:
        """Stop: no action begins any more. The first error counts."""
        with self._lock:
            self._fail(error)

    def timeline(self) -> Timeline:
        """When everything ran, from the first start on; in seconds."""
        for place in self.places:
            self.order.wait((self, "lane", place))
        origin = min(self.start, default=0.0)
        start, main, end = ([value - origin for value in column] for column in (self.start, self.main, self.end))
        hops = self.program.graph.num_hops * self.hop_s
        return Timeline(self.program.schedule, start, main, end, [0.0] * len(start), hops)

    # --- called by lanes ---

    def wait_for(self, place: int, number: int, edges: Sequence[Edge]) -> None:
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

    def finish(self, number: int) -> None:
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
        self._fail(self.program.stuck(dict(self._sleeping[place] for place in self._working)))

    def _moves(self, place: int) -> bool:
        asleep = self._sleeping.get(place)
        return asleep is None or self._finished[asleep[1]]

    def _fail(self, error: BaseException) -> None:
        if self._stop:
            return
        self.error, self._stop = error, True
        if self._turns is not None:
            self._turns.end()
        for place in self._gates:
            self._open(place)
        self.program.stop()


class _Lane:
    """A running lane; `number` is its current action."""

    def __init__(self, walk: Walk, place: int) -> None:
        self.walk, self.place = walk, place
        self.number = walk.program.lanes[place].start

    def run(self) -> None:
        walk = self.walk
        lane = walk.program.lanes[self.place]
        for number in range(lane.start, lane.stop):
            self.number = number
            walk.order.begins(f"{walk.program.actions[number]} of device {lane.device}, {lane.name}")
            edges = walk.program.waits[number]
            self.late = [edge for edge in edges if edge.late]
            walk.wait_for(self.place, number, [edge for edge in edges if not edge.late] if self.late else edges)
            self.began = self.main = time.perf_counter()
            self.cpu = time.thread_time()
            walk.perform(number, self.gate)
            walk.end[number] = time.perf_counter()
            walk.main_cpu[number] = time.thread_time() - self.cpu
            # What runs ahead is drawn directly before the main phase, as the simulator has it.
            walk.main[number] = self.main
            walk.start[number] = self.began
            walk.finish(number)

    def gate(self) -> None:
        """Between recomputation and backward: wait for what only the latter needs."""
        walk, number = self.walk, self.number
        ahead, used = time.perf_counter() - self.began, time.thread_time() - self.cpu
        walk.wait_for(self.place, number, self.late)
        self.main = time.perf_counter()
        self.began = self.main - ahead
        walk.pre_cpu[number] = used
        self.cpu = time.thread_time()
