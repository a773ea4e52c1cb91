"""The emulated backend: no tensors; every action sleeps for as long as the costs say it would work.

An action sleeps for its whole time from its real start, so the difference from the simulated makespan is the engine's
own time.
"""

import ctypes
import sys
import time
from collections.abc import Mapping

from rpbench.cost.table import CostTable, Work
from rpbench.engine.backends.threads import ThreadBackend
from rpbench.engine.executor import Gate, Handler, Perform
from rpbench.engine.program import Program
from rpbench.ir.action import Action, Kind, parts_of
from rpbench.ir.timeline import Timeline
from rpbench.sim.longest_path import works_by_action

_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl(2), in nanoseconds


class EmulatedBackend(ThreadBackend):
    """Modelled work by the wall clock: actions and hops take what the costs say, times a scale."""

    def __init__(self, costs: CostTable, scale: float = 1.0) -> None:
        self._unit_s = scale / costs.units_per_second
        super().__init__(_wake_on_time, float(costs.hop) * self._unit_s)
        self._costs = costs
        self._works: list[Work] = []  # of the program that runs
        self._first: list[Action] = []  # of each action of that program: itself, or the first of an OVERLAP

    def run(self, program: Program, perform: Perform) -> Timeline:
        """As `ThreadBackend.run`; every device works at its own speed."""
        self._works = works_by_action(program.graph, self._costs)
        self._first = [parts_of(action)[0] for action in program.actions]
        return super().run(program, perform)

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """One for every kind: a sleep ahead, the gate, a sleep for the main phase."""
        return dict.fromkeys(Kind, self._sleep)

    def _sleep(self, action: Action, number: int, gate: Gate) -> None:
        if action is not self._first[number]:
            return  # together with the first
        work = self._works[number]
        if work.pre:
            time.sleep(float(work.pre) * self._unit_s)
        gate()
        if work.main:
            time.sleep(float(work.main) * self._unit_s)


def _wake_on_time() -> None:
    """Ask Linux to wake this thread within a microsecond; by default it takes 50, to wake several threads at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1_000, 0, 0, 0)
