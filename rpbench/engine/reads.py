"""Reads: which version of the weights each action of a schedule uses, and how often each is used in all."""

from collections import Counter

from rpbench.engine.layout import Layout
from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.dependencies import version_read
from rpbench.ir.schedule import Schedule
from rpbench.ir.versions import replay


class Reads:
    """Versions by the step of a microbatch where the policy says so, otherwise as the order is replayed.

    Without STEP actions there is version 0 and no other.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.has_steps = any(action.kind is Kind.STEP for _, _, row in schedule.items() for action in row)
        self._replayed = replay(schedule).read if self.has_steps else ()

    def version(self, action: Action, number: int) -> int:
        """The version that a compute action reads; the number is its place in the schedule."""
        if not self.has_steps:
            return 0
        assert action.microbatch is not None
        fixed = version_read(self.schedule.policy, self.schedule.shape, action.microbatch)
        found = self._replayed[number] if fixed is None else fixed
        assert found is not None
        return found

    def count(self, layout: Layout) -> Counter[tuple[int, int]]:
        """(module, version) -> the number of actions that read it."""
        counted: Counter[tuple[int, int]] = Counter()
        actions = (action for _, _, row in self.schedule.items() for action in row)
        for number, action in enumerate(actions):
            for part in parts_of(action):
                if part.kind in COMPUTE:
                    ranges = layout.forward if part.kind is Kind.F else layout.backward
                    version = self.version(part, number)
                    counted.update((module, version) for module in ranges[part.stage])
        return counted
