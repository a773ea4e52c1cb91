"""The virtual backend: real work on a virtual clock, so that 64 devices fit on one core.

A discrete-event loop. When everything an action waits for has ended, its own end is known from the costs and goes
into a heap; its work is done when that moment comes. Work is thus done in (end, sequence) order: readers run after
writers, ties are broken alike in every run, and no wall clock is read.

The shards of a joint action end at the same moment, and each needs intermediate results of the others. They all run
when the last one's moment comes, each on its own thread.
"""

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Self

from rpbench.cost.table import CostTable, Number, Work
from rpbench.engine.backends.threads import use_one_core
from rpbench.engine.executor import ActionFailed, Gate, Perform, failed
from rpbench.engine.program import Program
from rpbench.engine.shards.collectives import Parted
from rpbench.ir.timeline import Timeline
from rpbench.sim.longest_path import all_hops, works_by_action


class Together:
    """Performs a program's actions, joint ones together, on threads that `prepare` first. Use it in a `with` block."""

    def __init__(self, program: Program, perform: Perform, prepare: Callable[[], None]) -> None:
        self._program, self._perform = program, perform
        self._missing = {shares: len(shares) for shares in program.meets.values()}
        most = max((len(shares) for shares in self._missing), default=1)
        self._threads = ThreadPoolExecutor(most, "share", prepare)

    def perform(self, number: int, gate: Gate) -> None:
        """Do an action, or all shares of one if this is the last; raises ActionFailed if a share raised."""
        shares = self._program.meets.get(number)
        if shares is None:
            self._perform(number, gate)
            return
        self._missing[shares] -= 1
        if self._missing[shares]:
            return
        running = [self._threads.submit(self._one, share, gate) for share in shares]
        try:
            wait(running)
        except BaseException:
            self._program.stop()  # Ctrl-C: the waiting shards come back
            raise
        errors = [(share, done.exception()) for share, done in zip(shares, running, strict=True)]
        for share, error in sorted(errors, key=lambda found: isinstance(found[1], Parted)):
            if error is not None:
                raise failed(self._program, share, error) from error

    def _one(self, share: int, gate: Gate) -> None:
        try:
            self._perform(share, gate)
        except BaseException:
            self._program.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()


@dataclass(frozen=True)
class VirtualBackend:
    """One thread does all the work, joint actions apart; the costs say how long it takes."""

    costs: CostTable

    def run(self, program: Program, perform: Perform) -> Timeline:
        """When each action runs by the virtual clock, in the costs' unit."""
        works = works_by_action(program.graph, self.costs)
        with Together(program, perform, use_one_core) as joint:
            return run_clock(program, works, joint.perform, self.costs)


def known_clock(program: Program, costs: CostTable) -> Timeline:
    """When each action is going to run by the virtual clock, before anything has."""
    return run_clock(program, works_by_action(program.graph, costs), lambda number, gate: None, costs)


def replay_clock(program: Program, pre_s: Sequence[float], main_s: Sequence[float]) -> Timeline:
    """When each action would have run with exactly these times and hops of none."""
    works = [Work(main, pre) for pre, main in zip(pre_s, main_s, strict=True)]
    return run_clock(program, works, lambda number, gate: None, CostTable({}))


def run_clock(program: Program, works: Sequence[Work], perform: Perform, costs: CostTable) -> Timeline:
    """Run a program on a virtual clock, with the times `works` by action number, and hops from the costs.

    Raises as `rpbench.engine.executor.Backend` does.
    """
    clock = _Clock(program, works, costs)
    while clock.coming:
        _, _, number = heapq.heappop(clock.coming)  # the action that ends next
        try:
            perform(number, _pass)
        except ActionFailed:
            raise
        except Exception as error:
            raise failed(program, number, error) from error
        clock.finish(number)
    assert not any(clock.missing), "`make_program` refuses lanes that wait for each other"
    hops, unit = all_hops(program.graph, costs), costs.units_per_second
    return Timeline(program.schedule, clock.start, clock.main, clock.end, clock.exposed, hops, unit)


def _pass() -> None:
    """The gate on a virtual clock: every input is there when the work is done."""


class _Clock:
    """The times of actions as they become known."""

    def __init__(self, program: Program, works: Sequence[Work], costs: CostTable) -> None:
        self.program, self.works, self.costs = program, works, costs
        num = len(program.waits)
        self.start: list[Number] = [0] * num
        self.main: list[Number] = [0] * num
        self.end: list[Number] = [0] * num
        self.exposed: list[Number] = [0] * num
        self.coming: list[tuple[Number, int, int]] = []  # (end, sequence, number), a heap
        self.num_begun = 0
        self.before = program.graph.before.tolist()
        self.consumers: list[list[int]] = [[] for _ in range(num)]
        self.missing = [len(edges) for edges in program.waits]
        for number, edges in enumerate(program.waits):
            for edge in edges:
                self.consumers[edge.producer].append(number)
        for number, before in enumerate(self.before):
            if before >= 0:
                self.consumers[before].append(number)
                self.missing[number] += 1
        for number in range(num):
            if not self.missing[number]:
                self._begin(number)

    def finish(self, number: int) -> None:
        """Begin what waited for an action alone."""
        for consumer in self.consumers[number]:
            self.missing[consumer] -= 1
            if not self.missing[consumer]:
                self._begin(consumer)

    def _begin(self, number: int) -> None:
        """Find the times of an action whose inputs all have their end."""
        work, actions = self.works[number], self.program.actions
        before = self.before[number]
        free = 0 * work.pre if before < 0 else self.end[before]
        whole, late = [free], [free]  # when inputs are there, of the whole action and of its main phase
        bare_whole, bare_late = [free], [free]  # the same if hops took no time
        for producer, crosses, is_late in self.program.waits[number]:
            ended = self.end[producer]
            hop = self.costs.hop_between(actions[producer], actions[number]) if crosses else 0
            (late if is_late else whole).append(ended + hop)
            (bare_late if is_late else bare_whole).append(ended)
        main = max(max(whole) + work.pre, max(late))
        # What runs ahead stands directly before the main phase.
        self.start[number] = max(whole) if main == max(whole) + work.pre else main - work.pre
        self.main[number] = main
        self.end[number] = main + work.main
        self.exposed[number] = main - max(max(bare_whole) + work.pre, max(bare_late))
        heapq.heappush(self.coming, (self.end[number], self.num_begun, number))
        self.num_begun += 1
