"""One level of PipeDream's partitioner: the best pipeline for every pair of cuts and every number of machines."""

import math
from dataclasses import dataclass

import numpy as np

from rpbench.plan.of_pipedream.cuts import Cuts
from rpbench.plan.of_pipedream.machines import Rules, all_reduce_s


class Level:
    """A of one level: arrays over (start, end, machines - 1), for ends that are the pipeline's or an inner cut.

    The difference is the transfer at the end: `closed` leaves it to the level above or has none, `open` counts it.
    """

    def __init__(
        self, cuts: Cuts, time_s: np.ndarray, num_machines: int, bandwidth: float, below: int, rules: Rules
    ) -> None:
        self.cuts, self.num_machines, self.rules, self.below = cuts, num_machines, rules, below
        self.num = len(cuts.members)
        self.bandwidth = bandwidth
        self.stage = [self._stage(time_s, num) for num in range(1, num_machines + 1)]
        transfer = 2 * cuts.output_bytes / bandwidth if rules.count_p2p else np.zeros(self.num)
        self.transfer = [transfer / num for num in range(1, num_machines + 1)]
        self.behind = [np.maximum(stage, sent[:, None]) for stage, sent in zip(self.stage, self.transfer, strict=True)]
        shape = (self.num, self.num, num_machines)
        self.closed, self.open = _Table.empty(shape), _Table.empty(shape)

    def solved(self, num_starts: int) -> "Level":
        """With A filled in for the first starts."""
        for num in range(1, self.num_machines + 1):
            self._fill(slice(0, num_starts), num)
        return self

    def times(self) -> np.ndarray:
        """(start, end) -> A with all machines."""
        return self.closed.time[:, :, -1]

    def parts(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Stages of this level between two cuts, as (start, end, machines)."""
        found: list[tuple[int, int, int]] = []
        table, num = self.closed, self.num_machines
        while last != first:
            split, own, rest = (int(field[first, last, num - 1]) for field in (table.split, table.own, table.rest))
            found.insert(0, (split if split >= 0 else first, last, own))
            last, num, table = found[0][0], rest, self.open
        return found

    def _stage(self, time_s: np.ndarray, num: int) -> np.ndarray:
        """(start, end) -> seconds of a stage on `num` machines; infinite where there is no stage."""
        shared = all_reduce_s(self.cuts.parameter_bytes, num, self.bandwidth) / self.below
        return np.where(self.cuts.before, (time_s + shared) / num, np.inf)

    def _fitting(self, stage: np.ndarray, num_from_here: int, num: int) -> np.ndarray:
        """Seconds of stages on `num` of the machines from them on, infinite where memory does not hold them."""
        if self.rules.memory_bytes is None:
            return stage
        needed = math.ceil(num_from_here / num) * (self.cuts.activation_bytes + self.cuts.parameter_bytes)
        return np.where(needed <= self.rules.memory_bytes, stage, np.inf)

    def _fill(self, starts: slice, num: int) -> None:
        """A with `num` machines, from A with fewer."""
        most = 1 if self.rules.straight else num
        # Idle machines are counted before the first stage, so that no stage counts them as machines from it on.
        fewest = 1 if self.rules.use_fewer_machines else num
        for own in range(min(most, num), fewest - 1, -1):
            alone = self._fitting(self.stage[own - 1], self.num_machines - (num - own), own)[starts]
            self.closed.offer(num, starts, alone, None, own, 0)
            self.open.offer(num, starts, np.maximum(alone, self.transfer[own - 1]), None, own, 0)
        for own in range(1, min(most, num - 1) + 1):
            stage = self._fitting(self.behind[own - 1], self.num_machines - (num - own), own)
            split, time = _best_splits(self.open.time[starts, :, num - own - 1], stage)
            self.closed.offer(num, starts, time, split, own, num - own)
            self.open.offer(num, starts, np.maximum(time, self.transfer[own - 1]), split, own, num - own)


@dataclass(frozen=True)
class _Table:
    """Per (start, end, machines - 1): the time, where the last stage starts (-1: at the start), machines of the last
    stage, machines of the rest."""

    time: np.ndarray
    split: np.ndarray
    own: np.ndarray
    rest: np.ndarray

    @staticmethod
    def empty(shape: tuple[int, int, int]) -> "_Table":
        return _Table(np.full(shape, np.inf), *(np.full(shape, -1, dtype=np.int32) for _ in range(3)))

    def offer(self, num: int, starts: slice, time: np.ndarray, split: np.ndarray | None, own: int, rest: int) -> None:
        """Take over what is faster, or as fast and split later than another split."""
        where = starts, slice(None), num - 1
        known_time, known_split = self.time[where], self.split[where]
        if split is None:
            split = np.full(time.shape, -1, dtype=np.int32)
        later = (time == known_time) & np.isfinite(time) & (split > known_split) & (known_split >= 0)
        better = (time < known_time) | later
        for field, value in ((self.time, time), (self.split, split), (self.own, own), (self.rest, rest)):
            field[where] = np.where(better, value, field[where])


def _best_splits(head: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) -> the last of the best cuts q between them, and max(head(start, q), stage(q, end)) there."""
    split = np.full((len(head), stage.shape[1]), -1, dtype=np.int32)
    time = np.full(split.shape, np.inf)
    for end in range(2, stage.shape[1]):
        candidates = np.maximum(head[:end, end - 1 : 0 : -1], stage[end - 1 : 0 : -1, end])
        best = candidates.argmin(axis=1)  # the first of the reversed cuts is the last cut
        split[:end, end], time[:end, end] = end - 1 - best, candidates[np.arange(len(best)), best]
    return split, time
