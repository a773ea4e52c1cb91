"""Reads: which version of the weights each action of a schedule uses, and how often each is used in all."""

from collections import Counter

from rpbench.engine.layout import Layout
from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.policy import STEPS_BEHIND
from rpbench.ir.schedule import Schedule
from rpbench.ir.versions import replay


class Reads:
    """Versions by the step of a microbatch where the policy says so, otherwise as the order is replayed.

    Without STEP actions there is version 0 and no other. A run that goes on from another begins with version 0,
    and with the `num_stale` versions before it: -1, -2, ...
    """

    def __init__(self, schedule: Schedule, num_stale: int = 0) -> None:
        self.schedule, self.num_stale = schedule, num_stale
        self.has_steps = any(action.kind is Kind.STEP for _, _, row in schedule.items() for action in row)
        self._replayed = replay(schedule).read if self.has_steps else ()

    def version(self, action: Action, number: int) -> int:
        """The version that a compute action reads; the number is its place in the schedule."""
        assert action.microbatch is not None
        fixed = self.fixed(action.microbatch)
        found = self._replayed[number] if fixed is None else fixed
        assert found is not None
        return found

    def fixed(self, microbatch: int) -> int | None:
        """The version that whatever a microbatch goes through reads; None if that depends on the order."""
        behind = STEPS_BEHIND.get(self.schedule.policy)
        if behind is None:
            return None if self.has_steps else 0
        newest = microbatch // self.schedule.shape.num_microbatches if self.has_steps else 0
        return max(newest - behind, -self.num_stale)

    def count(self, layout: Layout) -> Counter[tuple[int, int]]:
        """(module, version) -> the number of actions that read it."""
        counted: Counter[tuple[int, int]] = Counter()
        actions = (action for _, _, row in self.schedule.items() for action in row)
        for number, action in enumerate(actions):
            for part in parts_of(action):
                if part.kind in COMPUTE:
                    version = self.version(part, number)
                    counted.update((module, version) for module in layout.modules_of(part))
        return counted
