"""Many partitions of one schedule timed together, as a search over partitions needs it.

The order of a schedule depends on its numbers of stages, not on the layers behind them. So partitions with
equal numbers of stages share one graph, and only the tables of stage times differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable, LayerTimes, Number
from rpbench.ir.action import Kind
from rpbench.ir.schedule import ScheduleError
from rpbench.sim.graph import Graph
from rpbench.sim.kernels import relax, relax_batch, run, trace_path
from rpbench.sim.longest_path import late_edges

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Plans timed side by side: enough for long vectors, fewer where the ends of all actions outgrow the cache.
WIDTH, LEAST_WIDTH = 128, 16
ENDS_IN_CACHE = 500_000
# Plans whose tables of stage times are made together.
BLOCK = 1024


class PlanBatch:
    """Makespans of partitions that share a graph; what does not depend on the partition is prepared once.

    `recompute_ahead` and `fused_ahead` are as in `CostTable`. ScheduleError if the schedule splits backward and the
    times do not.
    """

    def __init__(
        self, graph: Graph, times: LayerTimes, *, recompute_ahead: bool = False, fused_ahead: bool = False
    ) -> None:
        name, plain = graph.schedule.name, {member for members in graph.slots for member in members}
        kinds = {kind for kind, _ in plain}
        if kinds & {Kind.I, Kind.W} and not times.input_grad:
            raise ScheduleError(
                f"schedule {name} splits backward, and no time is known for its halves; use cost=constant or "
                "cost.split_backward=true"
            )
        self._times = times
        self._remakes = graph.schedule.shape.keeps_every > 1  # an R is a run of its own: `CostTable.of_order`
        self._fused, self._num_head_shards = graph.schedule.shape.fused, graph.schedule.shape.num_head_shards
        # Rows of the tables: first what an action alone is looked up by, then what only OVERLAPs hold.
        alone = [members for members in graph.slots if len(members) == 1]
        self._rows = list(dict.fromkeys([member for members in alone for member in members] + sorted(plain)))
        self._slots = {kind: [row for row, of in enumerate(self._rows) if of[0] is kind] for kind in kinds}
        self._stages = {kind: [stage for other, stage in self._rows if other is kind] for kind in kinds}
        self._members = [[self._rows.index(member) for member in members] for members in graph.slots]
        slot, on_devices = graph.slot, tuple((number, 0) for number in range(len(graph.slots)))
        if times.speeds:
            slot, on_devices = graph.slots_on_devices
        speeds = [float(times.speeds[device] if times.speeds else 1) for _, device in on_devices]
        self._divisors = np.array(speeds) * graph.schedule.shape.num_parts  # of the time of a whole microbatch
        self._of_slot = [number for number, _ in on_devices]
        as_rows = [[row] for row in range(len(self._rows))]
        self._is_plain = self._members == as_rows and bool((self._divisors == 1).all())
        late = late_edges(graph, CostTable({}, times.hop, recompute_ahead, fused_ahead))
        delay = np.where(graph.crosses, float(times.hop), 0.0)
        self._edges = (graph.previous, graph.pred_start, graph.pred, delay, late, slot)
        width = min(WIDTH, max(LEAST_WIDTH, ENDS_IN_CACHE // graph.num_actions))
        self._room = (np.zeros(width), np.zeros(width), np.zeros((graph.num_actions, width)))

    def makespans(self, forward: Ints, backward: Ints, keeps: Ints | None = None) -> Floats:
        """Time from the first start to the last end, per plan, in the unit of the layer times.

        Layers of each stage are given as (plans, stages); those of a backward stage that recompute nothing are the last
        `keeps` of it.
        """
        keeps = 0 * backward if keeps is None else keeps
        blocks = range(0, len(forward), BLOCK)
        found = [
            self._block(forward[at : at + BLOCK], backward[at : at + BLOCK], keeps[at : at + BLOCK]) for at in blocks
        ]
        return np.concatenate([np.empty(0), *found])

    def linear(self, kept: Ints, num_forward: int = 0) -> "LinearTimes":
        """Times as linear functions of the layers of each stage, all layers taken as equal.

        Args:
            kept: (stages,): 1 where a stage recomputes nothing, 0 where it recomputes all layers.
            num_forward: of stages that are forward stages alone, and come first; the others are backward stages. 0: all
                are both.
        """
        layers = np.vstack([np.zeros_like(kept), np.eye(len(kept), dtype=np.int64)])
        forward, backward = (layers[:, :num_forward], layers[:, num_forward:]) if num_forward else (layers, layers)
        pre, main = self._tables(forward, backward, backward * kept[num_forward:], self._times.of_equal_layers())
        return LinearTimes(self._edges, pre[:, 0], main[:, 0], pre[:, 1:] - pre[:, :1], main[:, 1:] - main[:, :1])

    def _block(self, forward: Ints, backward: Ints, keeps: Ints) -> Floats:
        makespan = np.zeros(len(forward))
        arrays = (*self._edges, *self._tables(forward, backward, keeps, self._times), *self._room, makespan)
        run(relax_batch, *arrays)
        return makespan

    def _tables(self, forward: Ints, backward: Ints, keeps: Ints, whole: LayerTimes) -> tuple[Floats, Floats]:
        """Times before and in the main phase, (slots, plans): `LayerTimes.table` for all plans at once."""
        plans, shards, times = len(forward), self._num_head_shards, whole
        if shards:
            times = replace(whole, head_forward=0, head_backward=0, head_input_grad=0, head_weight_grad=0)
        pre, main = np.zeros((len(self._rows), plans)), np.zeros((len(self._rows), plans))
        head_forward = 0 if self._fused else times.head_forward
        self._fill(main, Kind.F, times.forward, forward, head_forward)
        self._fill(pre, Kind.FB, times.forward, backward, times.head_forward)
        self._fill(main, Kind.FB, times.backward, backward, times.head_backward)
        self._fill(pre, Kind.B, times.recompute, backward, but_last=keeps)
        self._fill(main, Kind.B, times.backward, backward, times.head_backward)
        self._fill(pre, Kind.I, times.recompute, backward, but_last=keeps)
        self._fill(main, Kind.I, times.input_grad, backward, times.head_input_grad)
        self._fill(main, Kind.W, times.weight_grad, backward, times.head_weight_grad)
        if self._remakes:
            self._fill(main, Kind.R, times.recompute, backward, but_last=keeps)
        for kind, head in ((Kind.HF, whole.head_forward), (Kind.HB, whole.head_backward)):
            main[self._slots.get(kind, [])] = float(head) / max(1, shards)
        return (pre, main) if self._is_plain else self._combined(pre, main)

    def _combined(self, pre: Floats, main: Floats) -> tuple[Floats, Floats]:
        """The same of every slot: of actions that run together, on devices of any speed."""
        found = np.zeros((2, len(self._members), pre.shape[1]))
        for slot, rows in enumerate(self._members):
            if len(rows) == 1:
                found[:, slot] = pre[rows[0]], main[rows[0]]
            else:
                each = pre[rows] + main[rows]
                found[1, slot] = each.sum(axis=0) - self._times.overlap_gain * (each.sum(axis=0) - each.max(axis=0))
        pre, main = found[:, self._of_slot] / self._divisors[:, None]
        return pre, main

    def _fill(
        self,
        table: Floats,
        kind: Kind,
        layers: Sequence[Number],
        counts: Ints,
        head: Number = 0,
        but_last: Ints | None = None,
    ) -> None:
        if kind in self._slots:
            sums = stage_sums(layers, counts, but_last)
            sums[:, -1] += float(head)
            table[self._slots[kind]] = sums.T[self._stages[kind]]


class LinearTimes:
    """The makespan of a graph as a function of the layers of each stage, which may be fractions.

    Args:
        edges: as `PlanBatch` prepares them.
        pre, main: times of stages without layers before and in the main phase, (slots,).
        pre_slopes, main_slopes: what a layer of each stage adds, (slots, stages).
    """

    def __init__(self, edges: tuple[Any, ...], pre: Floats, main: Floats, pre_slopes: Floats, main_slopes: Floats):
        self._edges, self._pre, self._main = edges, pre, main
        self._pre_slopes, self._main_slopes = pre_slopes, main_slopes

    def longest_path(self, layers: Floats) -> tuple[float, Floats, float]:
        """The makespan, what a layer of each stage adds to a longest path, (stages,), and the rest of that path.

        A stage without layers counts as a very short one: what it sends at the end is part of the makespan.
        """
        pre, main = self._pre_slopes @ layers + self._pre, self._main_slopes @ layers + self._main
        start, begun, end, exposed = np.zeros((4, len(self._edges[0])))
        run(relax, *self._edges, pre, main, start, begun, end, exposed)
        num_pre, num_main = np.zeros((2, len(pre)))
        run(trace_path, *self._edges, pre, main, end, num_pre, num_main)
        slopes: Floats = num_pre @ self._pre_slopes + num_main @ self._main_slopes
        makespan = float(end.max())
        return makespan, slopes, makespan - float(slopes @ layers)


def stage_sums(layers: Sequence[Number], counts: Ints, but_last: Ints | None = None) -> Floats:
    """Sums of a per-layer quantity over the stages of many cuts, (plans, stages), without some last layers of each.

    Equal layers are multiplied, not added, as `rpbench.cost.table.total` does.
    """
    values, without = np.asarray(layers, float), 0 if but_last is None else but_last
    if len(values) and values.min() == values.max():
        return (counts - without) * values[0]
    ends = np.cumsum(counts, axis=1)
    running = np.concatenate(([0.0], np.cumsum(values)))
    sums: Floats = running[ends - without] - running[ends - counts]
    return sums
