"""Frame: an order with all its transfers, made once and timed for any cut and any choice of recomputation.

The stages that recompute: all (`all`), none (`none`), all but the last if its backward follows its forward
(`except_last`), or as few layers as the memory allows (`fitting`, `rpbench.cost.footprint.fitting`).
"""

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.cost.charges import with_everything
from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.replicas import host_bytes, ssd_bytes
from rpbench.cost.footprint.sizes import DeviceMemory
from rpbench.cost.pieces import of_segments
from rpbench.cost.table import CostTable
from rpbench.cost.transfers import Traffic
from rpbench.ir.action import COMPUTE
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.timeline import Timeline
from rpbench.passes.recomputation import Recompute, check_recompute, kept_layers
from rpbench.plan.contest.contender import Contender, Setting
from rpbench.plan.contest.plans import Outcome, Tuned
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import single_moves
from rpbench.plan.problem import Problem
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.metrics import step_ends, step_time
from rpbench.sim.shared_links import MovingGraph, simulate_charged

# Work of making a frame, in timelines: if cuts share an order, and if the order follows from the times of a cut.
FRAME, FRAME_OF_TIMES = 8, 20
MOST_ACTIONS = 3_000_000  # in all frames that a contender keeps, with their graphs: about a kilobyte each


class Frame:
    """An order of `num_steps` steps with all its transfers; ValueError if the schedule does not take the setting.

    If the order depends on the cut, `partition` is the only one that it can time.
    """

    def __init__(self, contender: Contender, setting: Setting, terms: Terms, partition: Partition, num_steps: int):
        self._contender, self.setting, self.terms, self.num_steps = contender, setting, terms, num_steps
        self.problem = posed(contender, setting, terms, num_steps)
        order = self.problem.order(partition)
        self.schedule = self.problem.finished(order)
        self._takes: set[Recompute] = set()  # choices that passed `check`
        sizes = terms.sizes(setting.microbatch_sequences)
        self.traffic = Traffic(sizes, terms.cluster, optimizer=terms.optimizer)
        if setting.recompute == "fitting" and self.problem.entry.needs_costs and not self.refuses("fitting"):
            self._expect_what_stays(partition)

    def _expect_what_stays(self, partition: Partition) -> None:
        """Take the order for layers that do not recompute, if all stay in it as in the order for recomputed ones."""
        if self.keeps(partition, "fitting") != partition.backward:
            return
        free = Frame(self._contender, self.setting.changed("recompute", "none"), self.terms, partition, self.num_steps)
        if free.keeps(partition, "fitting") == partition.backward:
            self.schedule, self.graph, self._footprint = free.schedule, free.graph, free._footprint

    # Made on demand: an order that is refused, or only timed, does not need all of them.

    @cached_property
    def graph(self) -> Graph:
        """The schedule, ready to be timed; ScheduleError if no lane can move on."""
        return build_graph(self.schedule)

    @cached_property
    def _moving(self) -> MovingGraph:
        return MovingGraph(self.graph)

    @cached_property
    def _footprint(self) -> Footprint:
        sizes, in_flight = self.terms.sizes(self.setting.microbatch_sequences), peak_in_flight(self.graph)
        return Footprint(self.schedule, sizes, in_flight, keeps=(), analysis=self.graph.analysis)

    def at(self, setting: Setting) -> "Frame":
        """The same order at another setting, which makes the same schedule."""
        if setting == self.setting:
            return self
        found = copy(self)
        found.setting, found.problem = setting, posed(self._contender, setting, self.terms, self.num_steps)
        return found

    def under(self, terms: Terms) -> "Frame":
        """The same order under other limits, on which it must not depend."""
        found = copy(self)
        found.terms, found.problem = terms, posed(self._contender, self.setting, terms, self.num_steps)
        return found

    @property
    def least_bytes(self) -> int:
        """A lower bound on the bytes of the fullest device, for every cut, recomputation and microbatch size.

        It has the activations of the smallest microbatch, for devices that run all layers in turn.
        """
        return self._footprint.of_sizes(self.terms.sizes(min(self.terms.microbatches))).least_bytes

    @property
    def serves_any_cut(self) -> bool:
        """Whether other cuts with as many stages have the same order."""
        return not (self.problem.entry.needs_costs or self.problem.entry.separate_cuts)

    def moves_alike(self, partition: Partition) -> bool:
        """Whether another cut has the same transfers.

        They differ with the layers under tensor parallelism, which reduces layer by layer, and where a stage has no
        layers, for it keeps no input.
        """
        own = self.schedule.partition
        if own is None or not self.serves_any_cut or self.schedule.shape.num_parts > 1:
            return False
        return [not layers for layers in own.backward] == [not layers for layers in partition.backward]

    def outcome(self, partition: Partition, recompute: Recompute) -> Outcome:
        """Pace and memory of a cut; ValueError if the order does not let activations stay."""
        self.check(recompute)
        keeps = self.keeps(partition, recompute)
        schedule = self.schedule.with_partition(partition)
        step_s = self.paced(self.costs(partition, keeps))
        shape, setting, limits = schedule.shape, self.setting, self.terms.limits
        peak = int(self._peaks(partition, keeps, recompute).max())
        sizes, shares = self.terms.sizes(setting.microbatch_sequences), self._footprint.shares
        host = host_bytes(schedule, sizes, self.graph.analysis, shares, keeps)
        misfits = (_over(peak, limits.device_memory_bytes), _over(host, limits.host_memory_bytes), self._over_ssd)
        tokens = self.terms.tokens(setting.microbatch_sequences) * shape.num_microbatches
        return Outcome(tokens / step_s, step_s, keeps, peak, host, max(misfits))

    @cached_property
    def _over_ssd(self) -> float:
        ssd, sizes = self.terms.cluster.ssd, self.terms.sizes(self.setting.microbatch_sequences)
        return 0.0 if ssd is None else ssd_bytes(self.schedule.on_ssd, sizes.under(self.schedule)).held / ssd.bytes

    def costs(self, partition: Partition, keeps: tuple[int, ...]) -> CostTable:
        """Times of all actions of a cut, transfers and optimizer included."""
        problem = self.problem
        if self.terms.problem is not None:
            own = keeps if self.terms.problem.fitting else ()  # frames of all recomputations are one
            return replace(problem, keeps=own).charged(self.schedule.with_partition(partition))
        plain = problem.times.table(
            partition,
            recompute_ahead=problem.recompute_ahead,
            fused_ahead=problem.fused_ahead,
            num_head_shards=self.schedule.shape.num_head_shards,
            keeps=keeps,
        )
        return self.traffic.charged(self.schedule.with_partition(partition), plain, keeps)

    def timeline(self, costs: CostTable) -> Timeline:
        return self._moving.simulate(costs)

    def paced(self, costs: CostTable) -> float:
        """Seconds of a step at these costs: the second of two steps; for a posed problem the mean of all."""
        if self.terms.problem is not None:  # then code is compiled only if that pays
            timeline = simulate_charged(self.graph, costs)
            return makespan(timeline) / timeline.units_per_second / self.schedule.shape.num_steps
        timeline = self.timeline(costs)
        ends = step_ends(self.graph, timeline)
        interval = ends[1] - ends[0] if len(ends) == 2 else step_time(self.graph, timeline)
        return float(interval) / timeline.units_per_second

    def check(self, recompute: Recompute) -> None:
        """Raise ValueError, with the rule and a way out, unless the order allows a choice of recomputation."""
        if recompute not in self._takes:
            check_recompute(self.schedule, recompute)
            self._takes.add(recompute)

    def refuses(self, recompute: Recompute) -> bool:
        """Whether `check` raises."""
        try:
            self.check(recompute)
        except ValueError:
            return True
        return False

    def keeps(self, partition: Partition, recompute: Recompute) -> tuple[int, ...]:
        """The layers of each stage of a cut that do not recompute."""
        if recompute != "fitting":
            return kept_layers(partition, recompute)
        kept = self._footprint.fitting(*_rows(partition), self.terms.limits.device_memory_bytes)
        return tuple(kept[0].tolist())

    def emptier(self, cut: Partition, recompute: Recompute) -> Partition:
        """The cut with layers moved off full devices, one by one, as long as that reduces the missing memory.

        Activations in flight are those of this order. Streamed stages stay on no device, so nothing is moved.
        """
        limit = self.terms.limits.device_memory_bytes
        if limit is None or cut.forward != cut.backward or self.schedule.weights is Weights.STREAMED:
            return cut
        footprint = self._keeping(() if recompute == "fitting" else self.keeps(cut, recompute), recompute)
        layers = np.array([cut.forward])
        best = _lacking(footprint, layers, limit)[0]
        while best > 0:
            moved = layers + single_moves(layers.shape[1])
            moved = moved[(moved >= 0).all(axis=1)]
            lacks = _lacking(footprint, moved, limit)
            if not len(moved) or lacks.min() >= best:
                break
            best, layers = lacks.min(), moved[[lacks.argmin()]]
        return symmetric(tuple(layers[0].tolist()))

    def memory(self, partition: Partition, keeps: Sequence[int], recompute: Recompute) -> dict[str, int]:
        """Bytes of the fullest device by class of tensor, empty classes left out."""
        classes = self._keeping(keeps, recompute).classes(*_rows(partition))
        fullest = int(sum(classes.values(), start=np.zeros((), np.int64))[0].argmax())
        return {name: int(table[0, fullest]) for name, table in classes.items() if table[0, fullest]}

    def peak_at(self, microbatch: float, partition: Partition) -> int:
        """Bytes of the fullest device with microbatches of another size and all recomputed, as many in flight."""
        sizes = self.terms.sizes(microbatch)
        return int(self._footprint.of_sizes(sizes).keeping(()).peaks(*_rows(partition)).max())

    def mean_misfit(self, partition: Partition, keeps: Sequence[int], recompute: Recompute) -> float:
        """Mean bytes of the devices over the limit; moving layers changes that little."""
        return _over(int(self._peaks(partition, keeps, recompute).mean()), self.terms.limits.device_memory_bytes)

    def _peaks(self, partition: Partition, keeps: Sequence[int], recompute: Recompute) -> Ints:
        return self._keeping(keeps, recompute).peaks(*_rows(partition))

    def _keeping(self, keeps: Sequence[int], recompute: Recompute) -> Footprint:
        return self._footprint.keeping(None if recompute == "none" else keeps)


class Frames:
    """The frames of one contender. Those not used for longest are dropped when all are too large, and made again."""

    def __init__(self, contender: Contender, terms: Terms) -> None:
        self.contender, self.terms = contender, terms
        self._known: dict[tuple[object, ...], Frame] = {}  # by last use
        self._made: set[tuple[object, ...]] = set()  # the keys of these, and of dropped frames
        self.num_made = 0
        self.each = FRAME_OF_TIMES if contender.entry.needs_costs else FRAME

    def of_plan(self, plan: Tuned) -> Frame:
        """The frame of a plan, with its setting and its number of steps."""
        known = self.of(plan.setting, plan.partition, plan.num_steps)
        if known.schedule.partition == plan.partition or known.moves_alike(plan.partition):
            return known.at(plan.setting)
        return Frame(self.contender, plan.setting, self.terms, plan.partition, plan.num_steps)

    def under(self, terms: Terms) -> "Frames":
        """The frames under other limits; none if orders follow from times, for these also depend on the limits."""
        found = Frames(self.contender, terms)
        if not self.contender.entry.needs_costs:
            found._known = {key: frame.under(terms) for key, frame in self._known.items()}
            found._made = set(self._known)
        return found

    def keep_only(self, setting: Setting, cut: Partition, num_steps: int) -> None:
        """Drop all frames except that of this cut: the frames of many contenders take gigabytes."""
        frame = self.of(setting, cut, num_steps)
        self._known = {key: known for key, known in self._known.items() if known is frame}
        self._made = set(self._known)

    def of(self, setting: Setting, cut: Partition, num_steps: int) -> Frame:
        """The frame of a setting that can time a cut; ValueError if the schedule does not take the setting."""
        asked = setting.recompute
        setting, *keys = self._keys(setting, cut, num_steps)
        for key in keys:
            if key in self._known:
                self._known[key] = self._known.pop(key)
                return self._known[key]
        made = Frame(self.contender, setting, self.terms, cut, num_steps)
        if not made.refuses(asked):
            made.graph  # noqa: B018  # raises if the order deadlocks
        key = keys[0 if made.serves_any_cut else 1]
        self.num_made += key not in self._made
        self._made.add(key)
        self._known[key] = made
        self._make_room()
        return made

    def _make_room(self) -> None:
        """If there are more than `MOST_ACTIONS`, drop the frames not used for longest, down to half of that or one."""
        kept = sum(frame.schedule.num_actions for frame in self._known.values())
        if kept <= MOST_ACTIONS or len(self._known) == 1:
            return
        while kept > MOST_ACTIONS // 2 and len(self._known) > 1:
            kept -= self._known.pop(next(iter(self._known))).schedule.num_actions

    def has(self, setting: Setting, cut: Partition, num_steps: int) -> bool:
        """Whether a frame that can time this cut has been made; False if the setting has another number of stages."""
        chunks, (_, *keys) = setting.chunks_per_device, self._keys(setting, cut, num_steps)
        alike = chunks is None or chunks * self.terms.num_devices == len(cut.forward)
        return alike and any(key in self._made for key in keys)

    def _keys(
        self, setting: Setting, cut: Partition, num_steps: int
    ) -> tuple[Setting, tuple[object, ...], tuple[object, ...]]:
        """The setting of a frame, and its keys: one for any cut with as many stages, one for this cut alone."""
        if not self.contender.entry.needs_costs:  # the order does not depend on recomputation
            setting = setting.changed("recompute", "all")
        return setting, (setting, len(cut.forward), len(cut.backward), num_steps), (setting, cut, num_steps)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection: schedules are many small tuples without reference cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def order_key(plan: Tuned, terms: Terms) -> Hashable:
    """A key that plans with the same order share: the compute actions of every device.

    Cuts, moved activations and weight versions do not count: BPipe has the order of 1F1B. A method that declares its
    own transfers, or has a late update, has its own keys.
    """
    entry = plan.contender.entry
    method = entry.name if entry.lower is not None else "", plan.contender.fixed
    order = posed(plan.contender, plan.setting, terms, plan.num_steps).order(plan.partition)
    return method, tuple(
        tuple(
            (action.kind, action.stage, action.microbatch, action.part, action.sub)
            for action in order.compute(device)
            if action.kind in COMPUTE
        )
        for device in range(order.shape.num_ranks)
    )


def posed(contender: Contender, setting: Setting, terms: Terms, num_steps: int) -> Problem:
    """The planning problem of a setting."""
    if terms.problem is not None:
        given = replace(terms.problem, num_steps=num_steps, chunks_per_rank=setting.chunks_per_device)
        return given.recomputing_nothing() if setting.recompute == "none" else given
    entry, options = contender.entry, dict(setting.options)
    times, sizes = terms.times(setting.microbatch_sequences), terms.sizes(setting.microbatch_sequences)
    segments = entry.num_segments(options)
    if segments > 1:
        times = of_segments(times, terms.times(setting.microbatch_sequences / segments), segments)
    if setting.recompute == "none":
        times, sizes = replace(times, recompute=[0] * times.num_layers), replace(sizes, keeps_activations=True)
    limit = terms.limits.device_memory_bytes
    return Problem(
        entry,
        times,
        terms.num_devices,
        terms.num_microbatches(setting.microbatch_sequences),
        num_steps,
        setting.chunks_per_device,
        options,
        recompute_ahead=entry.recompute_ahead,
        fused_ahead=terms.fused_ahead,
        memory=None if limit is None else DeviceMemory(sizes, limit),
        keeps_last=setting.recompute == "except_last",
        activations=sizes.of_a_layer,
        finish=partial(_finished, contender, setting, terms),
    )


def makespan(timeline: Timeline) -> float:
    """The last end, in the unit of the costs, without actions that take no time."""
    start, end = np.asarray(timeline.start, float), np.asarray(timeline.end, float)
    return float(end[end > start].max(initial=0.0))


def _finished(contender: Contender, setting: Setting, terms: Terms, order: Schedule) -> Schedule:
    options: dict[str, Any] = dict(setting.options)
    finished = with_everything(order, contender.entry, terms.cluster, options, setting.prefetch)
    return terms.optimizer.with_tied_ends(finished)


def _rows(partition: Partition) -> tuple[Ints, Ints]:
    """A cut as the one plan of a footprint: layers of its forward and its backward stages, (1, stages)."""
    return np.array([partition.forward]), np.array([partition.backward])


def _lacking(footprint: Footprint, layers: Ints, limit: int) -> Floats:
    """Sum over devices of the squared missing memory, GB^2, (plans,): smaller if less is missing, or evenly."""
    lacks = np.maximum(footprint.peaks(layers, layers) - limit, 0) / 1e9
    return (lacks**2).sum(axis=1)


def _over(needed: int, limit: int | None) -> float:
    return 0.0 if limit is None else needed / max(1, limit)
