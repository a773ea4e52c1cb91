"""PipeDream's partitioner: which layers make a stage, and on how many machines each stage is replicated.

A stage of layers with compute time T and parameters P takes on k machines, per minibatch (k of them run at a time
and then add up their gradients),

    (T + 4 (k-1) P / (k bandwidth)) / k          4: twice (k-1)/k of P, in and out
    2 activation / (bandwidth k)                 at each end, where transfers are counted: output and its gradient

and the pipeline takes as long as the slowest of these. With A(i, j, m) for the layers between cuts i and j on m
machines, either all of them are one stage on m machines, or the last stage starts at a cut q and has k machines:

    A(i, j, m) = min over q, k of max(A(i, q, m - k), stage(q, j, k))

Machines stand in levels, as in hosts of several devices: A of one level, with all its machines, is the T of the next,
where every machine of the level below adds up gradients of its own share. Of equal plans it is the one split last,
with the fewest machines for the last stage; no split wins over any.

Source: Narayanan et al., SOSP'19, section 3.1. As the released optimizer does by default, transfers between stages
are not counted (`Rules.count_p2p`), although the paper has them in the maximum.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rpbench.plan.cuts import Cuts


@dataclass(frozen=True)
class Network:
    """Machines in levels, the innermost first, e.g. (4, 4): hosts of 4 devices, 4 hosts.

    Args:
        machines_per_level: of each group of the level.
        bandwidth_bytes_per_s: of each machine's link in each level.

    Raises:
        ValueError: if a number is not positive, or the two have different lengths.
    """

    machines_per_level: tuple[int, ...]
    bandwidth_bytes_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        machines, links = self.machines_per_level, self.bandwidth_bytes_per_s
        if not machines or any(count < 1 for count in machines):
            raise ValueError(f"machines_per_level={list(machines)}: every level has at least 1 machine")
        if len(machines) != len(links):
            raise ValueError(
                f"machines_per_level has {len(machines)} levels, bandwidth_bytes_per_s has {len(links)}: "
                "give one bandwidth for each level, the innermost first"
            )
        if not all(math.isfinite(link) and link > 0 for link in links):
            raise ValueError(f"bandwidth_bytes_per_s={list(links)}: every bandwidth is finite and above 0")

    @property
    def num_machines(self) -> int:
        return math.prod(self.machines_per_level)


@dataclass(frozen=True)
class Rules:
    """What counts and what is allowed.

    Args:
        count_p2p: transfers between stages enter the maximum.
        straight: no stage is replicated.
        use_fewer_machines: machines may stay idle where that is faster.
        memory_bytes: of a machine. A stage needs its activations and parameters once for every minibatch that is
            under way in it: (machines from the stage on) / (its own), rounded up, within its level. None: no limit.
    """

    count_p2p: bool = False
    straight: bool = False
    use_fewer_machines: bool = False
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes:g}: a machine has some; leave it out for no limit")


class Stage(NamedTuple):
    """Layers between two cuts, and their replicas in each level, the innermost first."""

    first: int
    last: int
    replicas_per_level: tuple[int, ...]

    @property
    def replicas(self) -> int:
        return math.prod(self.replicas_per_level)


@dataclass(frozen=True)
class Pipeline:
    """Stages in order, and the seconds a minibatch takes at the slowest."""

    stages: tuple[Stage, ...]
    time_s: float


def plan_pipeline(cuts: Cuts, network: Network, rules: Rules | None = None) -> Pipeline | None:
    """The pipeline of the shortest slowest stage; None if the rules leave no pipeline."""
    rules = rules or Rules()
    time_s, below = cuts.time_s, 1
    solved = []
    for level, num_machines in enumerate(network.machines_per_level):
        starts = cuts.last if level < len(network.machines_per_level) - 1 else 1
        bandwidth = network.bandwidth_bytes_per_s[level]
        table = _Level(cuts, time_s, num_machines, bandwidth, below, rules).solved(starts)
        solved.append(table)
        time_s, below = table.times(), below * num_machines
    slowest = float(time_s[0, cuts.last])
    if math.isinf(slowest):
        return None
    return Pipeline(tuple(_stages(solved, len(solved) - 1, 0, cuts.last)), slowest)


def all_reduce_s(parameter_bytes: Any, num: int, bandwidth: float) -> Any:
    """Seconds in which `num` machines add up the gradients of some parameters; floats or arrays of them."""
    return 4 * (num - 1) * parameter_bytes / (bandwidth * num)


def _stages(solved: list["_Level"], level: int, first: int, last: int) -> list[Stage]:
    """The stages between two cuts at a level, those of the levels below multiplied by their replicas."""
    found = []
    for start, end, num in solved[level].parts(first, last):
        inner = _stages(solved, level - 1, start, end) if level else [Stage(start, end, ())]
        found += [stage._replace(replicas_per_level=(*stage.replicas_per_level, num)) for stage in inner]
    return found


class _Level:
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
        shape = (self.num, self.num, num_machines)
        self.closed, self.open = _Table.empty(shape), _Table.empty(shape)

    def solved(self, num_starts: int) -> "_Level":
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

    def _fits(self, num_from_here: int, num: int) -> np.ndarray:
        """(start, end) -> whether a stage on `num` of the machines from it on fits into memory."""
        if self.rules.memory_bytes is None:
            return np.ones((self.num, self.num), dtype=bool)
        needed = self.cuts.activation_bytes + self.cuts.parameter_bytes
        return math.ceil(num_from_here / num) * needed <= self.rules.memory_bytes

    def _fill(self, starts: slice, num: int) -> None:
        """A with `num` machines, from A with fewer."""
        most = 1 if self.rules.straight else num
        if num <= most:
            # Behind a stage that is the first of its pipeline stand all machines that it leaves.
            alone = np.where(self._fits(self.num_machines, num), self.stage[num - 1], np.inf)[starts]
            self.closed.offer(num, starts, alone, None, num, 0)
            self.open.offer(num, starts, np.maximum(alone, self.transfer[num - 1]), None, num, 0)
        for own in range(1, min(most, num - 1) + 1):
            stage = np.maximum(self.stage[own - 1], self.transfer[own - 1][:, None])
            stage = np.where(self._fits(self.num_machines - (num - own), own), stage, np.inf)
            split, time = _best_splits(self.open.time[starts, :, num - own - 1], stage)
            self.closed.offer(num, starts, time, split, own, num - own)
            self.open.offer(num, starts, np.maximum(time, self.transfer[own - 1]), split, own, num - own)
        if self.rules.use_fewer_machines and num > 1:
            for table in (self.closed, self.open):
                table.take_over(num, starts)


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

    def offer(
        self, num: int, starts: slice, time: np.ndarray, split: np.ndarray | None, own: int, rest: int
    ) -> None:
        """Take over what is faster, or as fast and split later."""
        where = starts, slice(None), num - 1
        known_time, known_split = self.time[where], self.split[where]
        if split is None:
            split = np.full(time.shape, -1, dtype=np.int32)
        better = (time < known_time) | ((time == known_time) & np.isfinite(time) & (split > known_split))
        for field, value in ((self.time, time), (self.split, split), (self.own, own), (self.rest, rest)):
            field[where] = np.where(better, value, field[where])

    def take_over(self, num: int, starts: slice) -> None:
        """Leave a machine idle where that is faster."""
        more, fewer = (starts, slice(None), num - 1), (starts, slice(None), num - 2)
        better = self.time[fewer] < self.time[more]
        for field in (self.time, self.split, self.own, self.rest):
            field[more] = np.where(better, field[fewer], field[more])


def _best_splits(head: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) -> the last of the best cuts q between them, and max(head(start, q), stage(q, end)) there."""
    split = np.full((len(head), stage.shape[1]), -1, dtype=np.int32)
    time = np.full(split.shape, np.inf)
    rows = np.arange(len(head))
    for end in range(2, stage.shape[1]):
        candidates = np.maximum(head[:, end - 1 : 0 : -1], stage[end - 1 : 0 : -1, end])
        best = candidates.argmin(axis=1)  # the first of the reversed cuts is the last cut
        split[:, end], time[:, end] = end - 1 - best, candidates[rows, best]
    return split, time
