"""Causes: where the seconds of a step go, as a mean over the devices.

    computation     forwards and backwards
    recomputation   forwards that run once more
    optimizer       steps on the devices, and waits for steps on the host
    collectives     waits for gathers and sums: of shards, and of a tied matrix's gradients
    transfers       waits for weights, gradients and boundary tensors
    bubble          waits that remain if transfers take no time

Work is summed from the costs. A transfer counts with the time that others wait for it, under the cause that
`rpbench.cost.charges` names: the same actions are timed again with one cause after another made free, first
collectives, then the host's steps, then all transfers. The causes add up to the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.action import Kind
from rpbench.ir.partition import Partition
from rpbench.plan.contest.frame import Frame
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import works_by_action

ROUNDING = 1e-12
CAUSES = ("computation", "recomputation", "optimizer", "collectives", "transfers", "bubble")


def causes_of(frame: Frame, partition: Partition, keeps: tuple[int, ...]) -> Mapping[str, float]:
    """Seconds of a step by cause; they add up to it."""
    return causes_at(frame.graph, frame.costs(partition, keeps), frame.paced)


def causes_at(graph: Graph, costs: CostTable, paced: Callable[[CostTable], float]) -> Mapping[str, float]:
    """Seconds of a step by cause; they add up to it.

    Args:
        paced: seconds from step to step at some costs.
    """
    step_s = paced(costs)
    found = _work(graph, costs)
    before, free = step_s, frozenset[str]()
    for name in ("collectives", "optimizer", "transfers"):
        free |= {name}
        times, hop = costs.transfer_time, 0 if name == "transfers" else costs.hop
        freed = replace(times, free=free) if isinstance(times, TransferTimes) else times
        after = min(before, paced(replace(costs, transfer_time=freed, hop=hop)))
        found[name] = found.get(name, 0.0) + before - after
        before = after
    left = step_s - sum(found.values())
    found["bubble"] = left if abs(left) > ROUNDING * step_s else 0.0
    return {name: found.get(name, 0.0) for name in CAUSES}


def _work(graph: Graph, costs: CostTable) -> dict[str, float]:
    """Seconds of a step that a device computes, recomputes and updates; means over devices and steps."""
    schedule, shape = graph.schedule, graph.schedule.shape
    works = works_by_action(graph, replace(costs, carry={}))
    kind = graph.columns.kind
    lanes = np.repeat([lane == "compute" for _, lane, _ in schedule.items()], np.diff(graph.columns.lane_start))
    main = np.array([float(work.main) for work in works]) * lanes
    pre = np.array([float(work.pre) for work in works]) * lanes
    step = kind == Kind.STEP
    again = (kind == Kind.B) | (kind == Kind.I) | (kind == Kind.R)
    each = 1 / (shape.num_ranks * shape.num_steps * costs.units_per_second)
    return {
        "computation": float(main[~step & (kind != Kind.R)].sum() + pre[~again].sum()) * each,
        "recomputation": float(pre[again].sum() + main[kind == Kind.R].sum()) * each,
        "optimizer": float(main[step].sum()) * each,
    }
