"""PipeDream's partitioner: which layers make a stage, and on how many machines each stage is replicated.

A stage of layers with compute time T and parameters P takes on k machines, per minibatch (k of them run at a time
and then add up their gradients),

    (T + 4 (k-1) P / (k bandwidth)) / k          4: twice (k-1)/k of P, in and out
    2 activation / (bandwidth k)                 at each end, where transfers are counted: output and its gradient

and the pipeline takes as long as the slowest of these. With A(i, j, m) for the layers between cuts i and j on m
machines, either all of them are one stage on m machines, or the last stage starts at a cut q and has k machines:

    A(i, j, m) = min over q, k of max(A(i, q, m - k), stage(q, j, k))

Machines stand in levels, as in hosts of several devices: A of one level, with all its machines, is the T of the next,
where every machine of the level below adds up gradients of its own share. Of equal plans the
one with the shortest last stage is taken, then the one with the fewest machines for it; no split is better than any.

Source: Narayanan et al., SOSP'19, section 3.1. As the released optimizer does by default, transfers between stages
are not counted (`Rules.count_p2p`), although the paper has them in the maximum.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from rpbench.cost.layer_graph import Layer, chain
from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.even import num_bound_stages
from rpbench.plan.greedy import head_total, layer_totals
from rpbench.plan.of_pipedream.cuts import Cuts, cuts_of
from rpbench.plan.of_pipedream.machines import Network, Rules
from rpbench.plan.of_pipedream.pipedream_level import Level
from rpbench.plan.problem import Problem

# About 70 bytes each.
MOST_CELLS = 4e7


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
    """The pipeline of the shortest slowest stage; None if the rules leave no pipeline.

    Raises:
        ValueError: if the tables would take more memory than they should.
    """
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
        table = Level(cuts, time_s, num_machines, bandwidth, below, rules).solved(starts)
        solved.append(table)
        time_s, below = table.times(), below * num_machines
    slowest = float(time_s[0, cuts.last])
    if math.isinf(slowest):
        return None
    return Pipeline(tuple(_stages(solved, len(solved) - 1, 0, cuts.last)), slowest)


def _stages(solved: list[Level], level: int, first: int, last: int) -> list[Stage]:
    """The stages between two cuts at a level, those of the levels below multiplied by their replicas."""
    found = []
    for start, end, num in solved[level].parts(first, last):
        inner = _stages(solved, level - 1, start, end) if level else [Stage(start, end, ())]
        found += [stage._replace(replicas_per_level=(*stage.replicas_per_level, num)) for stage in inner]
    return found


def plan_straight(problem: Problem) -> Partition:
    """A straight pipeline of ours: as many stages as `even` makes; the head may be a stage of its own.

    Nothing is replicated and transfers are not counted; a stage takes its forward, recomputation and backward. With
    several stages on a device all of them are balanced, not the devices.

    Raises:
        ValueError: if the directions are cut apart, or there are fewer layers than stages.
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
