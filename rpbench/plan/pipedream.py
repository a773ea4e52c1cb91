"""PipeDream's partitioner: the layers of each stage, and the machines that replicate it.

A stage of layers with compute time T and parameters P takes on k machines, per minibatch (k of them run at a time
and then add up their gradients),

    (T + 4 (k-1) P / (k bandwidth)) / k          4: twice (k-1)/k of P, in and out
    2 activation / (bandwidth k)                 at each end, where transfers are counted: output and its gradient

and the pipeline takes as long as the slowest of these. With A(i, j, m) for the layers between cuts i and j on m
machines, either all of them are one stage on m machines, or the last stage starts at a cut q and has k machines:

    A(i, j, m) = min over q, k of max(A(i, q, m - k), stage(q, j, k))

Machines are in levels, such as hosts of several devices: A of one level, with all its machines, is the T of the next,
where every machine of the level below adds up gradients of its own shard. Of equal plans the one with the shortest last
stage is taken, then the one with the fewest machines for it; a single stage is better than any split.

Source: Narayanan et al., SOSP'19, section 3.1. As the released optimizer does by default, transfers between stages
are not counted (`Rules.count_p2p`), although the paper has them in the maximum.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rpbench.cost.layer_graph import Layer, chain
from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.even_and_greedy import head_total, layer_totals, num_bound_stages
from rpbench.plan.graph_cuts import Cuts, cuts_of
from rpbench.plan.problem import Problem

MOST_MACHINES = 256  # in a level: time grows with their square, to a minute for 200 layers
MOST_CELLS = 4e7  # of the tables, about 70 bytes each

# --- machines and rules ---


@dataclass(frozen=True)
class Network:
    """Machines in levels, the innermost first: (4, 4) is 4 hosts of 4 devices; ValueError for impossible numbers."""

    machines_per_level: tuple[int, ...]  # in each group of the level
    bandwidth_bytes_per_s: tuple[float, ...]  # of each machine's link in each level

    def __post_init__(self) -> None:
        machines, links = self.machines_per_level, self.bandwidth_bytes_per_s
        if not machines or any(count < 1 for count in machines):
            raise ValueError(f"machines_per_level={list(machines)}: every level has at least 1 machine")
        if max(machines) > MOST_MACHINES:
            raise ValueError(
                f"{max(machines)} machines in one level: every share of at most {MOST_MACHINES} is tried; "
                "give machines_per_level, such as machines_per_level=[8,64] for 512"
            )
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
    """The charges and limits of the partitioner."""

    count_p2p: bool = False  # transfers between stages enter the maximum
    straight: bool = False  # no stage is replicated
    use_fewer_machines: bool = False  # machines may stay idle where that is faster
    # of a machine; None: no limit. A stage needs its activations and parameters once for every minibatch in flight:
    # (machines from the stage on) / (its own), rounded up, within its level.
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes:g}: a machine has some; leave it out for no limit")


def all_reduce_s(parameter_bytes: Any, num: int, bandwidth: float) -> Any:
    """Seconds in which `num` machines add up gradients; for one size of parameters, or an array of sizes."""
    return 4 * (num - 1) * parameter_bytes / (bandwidth * num)


# --- the partitioner ---


class Level:
    """A of one level: the best pipeline from each of the first `starts` cuts to each cut, for every number of machines.

    `closed` and `open` have tables over (start, end, machines - 1). `open` counts the transfer at the end; `closed`
    leaves it to the level above, or there is none.
    """

    def __init__(
        self, cuts: Cuts, time_s: np.ndarray, num_machines: int, bandwidth: float, below: int, rules: Rules, starts: int
    ) -> None:
        self.cuts, self.num_machines, self.rules = cuts, num_machines, rules
        num_cuts, numbers = len(cuts.members), range(1, num_machines + 1)
        shared = [all_reduce_s(cuts.parameter_bytes, num, bandwidth) / below for num in numbers]
        # seconds of a stage on 1, 2, ... machines, (start, end); infinite where there is no stage
        self.stage = [np.where(cuts.before, (time_s + shared[num - 1]) / num, np.inf) for num in numbers]
        transfer = 2 * cuts.output_bytes / bandwidth if rules.count_p2p else np.zeros(num_cuts)
        self.transfer = [transfer / num for num in numbers]
        self.behind = [np.maximum(stage, sent[:, None]) for stage, sent in zip(self.stage, self.transfer, strict=True)]
        shape = (num_cuts, num_cuts, num_machines)
        self.closed, self.open = _Table.empty(shape), _Table.empty(shape)
        for num in numbers:
            self._fill(slice(0, starts), num)

    def parts(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Stages of this level between two cuts, as (start, end, machines)."""
        found: list[tuple[int, int, int]] = []
        table, num = self.closed, self.num_machines
        while last != first:
            split, own, rest = (int(field[first, last, num - 1]) for field in (table.split, table.own, table.rest))
            found.insert(0, (split if split >= 0 else first, last, own))
            last, num, table = found[0][0], rest, self.open
        return found

    def _fitting(self, stage: np.ndarray, num_from_here: int, num: int) -> np.ndarray:
        """Seconds of stages on `num` of the machines from them on, infinite where memory does not hold them."""
        if self.rules.memory_bytes is None:
            return stage
        needed = math.ceil(num_from_here / num) * (self.cuts.activation_bytes + self.cuts.parameter_bytes)
        return np.where(needed <= self.rules.memory_bytes, stage, np.inf)

    def _fill(self, starts: slice, num: int) -> None:
        """A with `num` machines, from A with fewer."""
        most = 1 if self.rules.straight else num
        # Idle machines are placed before the first stage, so that no stage counts them among the machines from it on.
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
    """Per (start, end, machines - 1): time, start of the last stage (-1: no split), machines of it and of the rest."""

    time: np.ndarray
    split: np.ndarray
    own: np.ndarray
    rest: np.ndarray

    @staticmethod
    def empty(shape: tuple[int, int, int]) -> "_Table":
        return _Table(np.full(shape, np.inf), *(np.full(shape, -1, dtype=np.int32) for _ in range(3)))

    def offer(self, num: int, starts: slice, time: np.ndarray, split: np.ndarray | None, own: int, rest: int) -> None:
        """Take over plans that are faster, or as fast with a later split."""
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
    """The pipeline whose slowest stage is shortest, None if the rules leave none; ValueError for too large tables."""
    rules = rules or Rules()
    num_cuts, most_machines = len(cuts.members), max(network.machines_per_level)
    if num_cuts**2 * most_machines > MOST_CELLS:
        raise ValueError(
            f"{num_cuts} places to cut and {most_machines} machines in one level make tables of "
            f"{num_cuts**2 * most_machines:.3g} cells, more than {MOST_CELLS:.3g}: join layers, or give more levels"
        )
    time_s, below = cuts.time_s, 1
    solved = []
    for level, num_machines in enumerate(network.machines_per_level):
        starts = cuts.last if level < len(network.machines_per_level) - 1 else 1
        bandwidth = network.bandwidth_bytes_per_s[level]
        table = Level(cuts, time_s, num_machines, bandwidth, below, rules, starts)
        solved.append(table)
        time_s, below = table.closed.time[:, :, -1], below * num_machines
    slowest = float(time_s[0, cuts.last])
    if math.isinf(slowest):
        return None
    return Pipeline(tuple(_stages(solved, len(solved) - 1, 0, cuts.last)), slowest)


def _stages(solved: list[Level], level: int, first: int, last: int) -> list[Stage]:
    """The stages between two cuts at a level; each has its stages of the level below, replicated together."""
    found = []
    for start, end, num in solved[level].parts(first, last):
        inner = _stages(solved, level - 1, start, end) if level else [Stage(start, end, ())]
        found += [stage._replace(replicas_per_level=(*stage.replicas_per_level, num)) for stage in inner]
    return found


def plan_straight(problem: Problem) -> Partition:
    """PipeDream's pipeline without replicas, of as many stages as `even` makes; the head may be a stage of its own.

    Transfers are not counted; a stage takes its forward, recomputation and backward. If devices have several stages,
    the stages are balanced, not the devices. Raises ValueError if the directions are cut apart, or there are fewer
    layers than stages.
    """
    if problem.entry.separate_cuts:
        raise ValueError(
            f"partition=pipedream: schedule {problem.entry.name} cuts forward and backward apart, PipeDream cuts both "
            "at once; use partition=greedy or search"
        )
    ms = 1000 / problem.times.units_per_second
    totals = [float(time * ms) for time in (*layer_totals(problem.times), head_total(problem.times))]
    layers = [Layer(f"layer {number}", "", time, 0, 0, 0) for number, time in enumerate(totals)]
    if not totals[-1]:
        layers.pop()  # a head of no time is no layer
    num_stages = num_bound_stages(problem, "pipedream")
    cuts = cuts_of(chain(layers))
    pipeline = plan_pipeline(cuts, Network((num_stages,), (1.0,)), Rules(straight=True))
    assert pipeline is not None  # there are enough layers
    num_layers = problem.num_layers
    return symmetric(tuple(min(stage.last, num_layers) - min(stage.first, num_layers) for stage in pipeline.stages))


# --- a pipeline by the cost model, beside one machine and data parallelism ---


@dataclass(frozen=True)
class Traffic:
    """Bytes that all machines together send for one minibatch."""

    boundary: float  # outputs of stages forward, and their gradients back
    all_reduce: float  # gradients of replicated stages: 2 (k-1)/k of the parameters for k replicas
    data_parallel: float  # the same, with the whole model on every machine of the network
    narrowest: float  # one boundary at the cut of the smallest output, without replicas: no two stages send less

    @property
    def saved(self) -> float | None:
        """Fraction of the bytes of data parallelism that the pipeline does not send; None if that sends nothing."""
        return 1 - (self.boundary + self.all_reduce) / self.data_parallel if self.data_parallel else None

    @property
    def saved_at_boundaries(self) -> float | None:
        """`saved` counting the stages' outputs alone, as for a pipeline without replicas."""
        return 1 - self.boundary / self.data_parallel if self.data_parallel else None

    @property
    def saved_at_most(self) -> float | None:
        """`saved` by the pipeline that sends least, however slow: an upper bound for this model."""
        return 1 - self.narrowest / self.data_parallel if self.data_parallel else None


def data_parallel_time_s(cuts: Cuts, network: Network) -> float:
    """Seconds a minibatch takes with all layers on all machines, gradients added up level by level."""
    time_s, below = one_machine_time_s(cuts), 1
    parameters = float(cuts.parameter_bytes[0, cuts.last])
    for num, bandwidth in zip(network.machines_per_level, network.bandwidth_bytes_per_s, strict=True):
        time_s = (time_s + all_reduce_s(parameters, num, bandwidth) / below) / num
        below *= num
    return time_s


def one_machine_time_s(cuts: Cuts) -> float:
    return float(cuts.time_s[0, cuts.last])


def traffic(cuts: Cuts, network: Network, pipeline: Pipeline) -> Traffic:
    shares = [
        (stage.replicas - 1) / stage.replicas * float(cuts.parameter_bytes[stage.first, stage.last])
        for stage in pipeline.stages
    ]
    everywhere = 2 * (network.num_machines - 1) / network.num_machines * float(cuts.parameter_bytes[0, cuts.last])
    return Traffic(
        2 * sum(float(cuts.output_bytes[stage.last]) for stage in pipeline.stages[:-1]),
        2 * sum(shares),
        everywhere,
        min(everywhere, 2 * float(cuts.output_bytes[1 : cuts.last].min(initial=everywhere))),
    )


def weight_versions(pipeline: Pipeline) -> list[int]:
    """Minibatches in flight in each stage, which each need a version of its weights.

    Machines from the stage on over its own, rounded up; for the first stage the paper's NOAM (section 3.2).
    """
    replicas = [stage.replicas for stage in pipeline.stages]
    return [math.ceil(sum(replicas[stage:]) / replicas[stage]) for stage in range(len(replicas))]


def stage_bytes(cuts: Cuts, pipeline: Pipeline) -> list[float]:
    """Bytes on a machine of each stage: activations and parameters, once for every minibatch in flight."""
    return [
        versions * float((cuts.activation_bytes + cuts.parameter_bytes)[stage.first, stage.last])
        for versions, stage in zip(weight_versions(pipeline), pipeline.stages, strict=True)
    ]
