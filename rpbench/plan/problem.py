"""Problem: the input of a planner: schedule, layer times, run sizes and memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rpbench.cost.footprint.sizes import UNKNOWN, DeviceMemory, LayerActivations
from rpbench.cost.table import CostTable, LayerTimes, Number
from rpbench.cost.transfers import Traffic
from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.waits.moves import has_transfers
from rpbench.passes.lower import add_steps
from rpbench.registry import Entry


def times_of_method(times: LayerTimes, entry: Entry, num_ranks: int, options: Mapping[str, Any]) -> LayerTimes:
    """Layer times under a method: unchanged in a pipeline, adapted for replicas of all layers and for tensor shards."""
    given, wanted = entry.options | dict(options), entry.gathers
    if entry.tensor_parallel:
        return times.of_shards(along_sequence=bool(given.get("sequence_parallel")))
    if not entry.whole_microbatches:
        return times
    gathers = num_ranks > 1 and wanted is not None and all(given[name] == value for name, value in wanted.items())
    return times.of_whole_microbatches(num_ranks, gathers=gathers)


@dataclass(frozen=True)
class Problem:
    """A schedule, the times of the model's layers and the sizes of a run; a planner finds the partition."""

    entry: Entry
    times: LayerTimes  # of one microbatch through each layer
    # num_ranks, num_microbatches, num_steps: as in `Shape`; see `Entry.steps` for schedules that step more often
    num_ranks: int
    num_microbatches: int
    num_steps: int = 1
    # stages per device (v). None leaves it open: `search` tries every number, `even` and `greedy` take that of the
    # published partition, or 2. Schedules that are not looped have 1, and some looped ones take one number only
    # (`Entry.chunks`). If the directions are cut apart, it only sets the number of backward stages of `even`.
    chunks_per_rank: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the schedule
    # recompute_ahead, fused_ahead: as in `CostTable`
    recompute_ahead: bool = False
    fused_ahead: bool = False
    published: Partition | None = None  # the partition published for this schedule and model, if any
    memory: DeviceMemory | None = None  # of a device, and the model's sizes; None for no limit
    keeps_last: bool = False  # the last stage is not recomputed; for orders that go back at once (`turns_at_once`)
    fitting: bool = False  # as few layers recompute as the memory allows, which depends on the cut
    keeps: tuple[int, ...] = ()  # layers of each backward stage that are not recomputed; known only for a given cut
    activations: LayerActivations = UNKNOWN  # of one layer, for schedules that order by the activations of stages
    finish: Callable[[Schedule], Schedule] | None = None  # adds steps and transfers; None: steps, if there are several
    traffic: Traffic | None = None  # times of transfers; None: transfers take no time
    each: tuple[LayerTimes, ...] = ()  # times of every microbatch of a step if they differ; `times` are then their mean
    sizes: tuple[float, ...] = ()  # tokens of each of these over those of the largest, whose `activations` are given

    def __post_init__(self) -> None:
        each = {
            id(own): times_of_method(own, self.entry, self.num_ranks, self.options) for own in (self.times, *self.each)
        }
        object.__setattr__(self, "times", each[id(self.times)])
        object.__setattr__(self, "each", tuple(each[id(own)] for own in self.each))
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers}: a model to cut has at least 1 layer")
        if self.chunks_per_rank is None and self.entry.chunks is not None and not self.entry.more_chunks:
            object.__setattr__(self, "chunks_per_rank", self.entry.chunks)
        if self.chunks_per_rank is not None and self.chunks_per_rank < 1:
            raise ValueError(f"chunks_per_device={self.chunks_per_rank}: a device holds at least 1 stage")
        if self.memory is not None and self.memory.sizes.num_layers != self.num_layers:
            raise ValueError(
                f"sizes of {self.memory.sizes.num_layers} layers beside times of {self.num_layers}: "
                "take both from the same model"
            )

    @property
    def num_layers(self) -> int:
        return self.times.num_layers

    @property
    def default_chunks(self) -> int:
        """Stages per device, if their number is not searched for."""
        if self.chunks_per_rank is not None:
            return self.chunks_per_rank
        if self.entry.chunks is not None:
            return self.entry.chunks
        if not self.entry.looped:
            return 1
        if self.published and len(self.published.forward) % self.num_ranks == 0:
            return len(self.published.forward) // self.num_ranks
        return max(1, min(2, self.num_layers // self.num_ranks))

    @property
    def num_bound_stages(self) -> int:
        """Stages bound to devices, if their number is not searched for."""
        return len(self.options.get("replicas") or range(self.num_ranks)) * self.default_chunks

    def schedule(self, num_forward: int, num_backward: int, costs: StageCosts | None = None) -> Schedule:
        """The schedule for these numbers of stages, which are equal without costs; ValueError if it cannot be built."""
        replicas, fused = self.options.get("replicas"), self.entry.separate_cuts
        num_microbatches, num_steps = self.entry.steps(self.num_microbatches, self.num_steps, replicas)
        shape = Shape(self.num_ranks, num_forward, num_microbatches, num_backward, num_steps=num_steps, fused=fused)
        found = self.entry.build(shape, costs, **self.options)
        why = self.times.uncut_along if found.shape.sequence_parallel else self.times.uncut
        if why and found.shape.tensor_parallel:
            raise ValueError(why)
        return found

    def costs(self, partition: Partition) -> CostTable:
        """Times of every action of a partition."""
        table = partial(
            LayerTimes.table,
            partition=partition,
            recompute_ahead=self.recompute_ahead,
            fused_ahead=self.fused_ahead,
            num_head_shards=self.num_ranks if self.entry.shards_head else 0,
            keeps_last=self.keeps_last,
            keeps=self.keeps,
        )
        tables = {id(own): table(own) for own in self.each}  # one for all microbatches of the same times
        return replace(table(self.times), each=tuple(tables[id(own)] for own in self.each))

    def recomputing_nothing(self) -> "Problem":
        """The problem without recomputation: all activations stay."""
        times, memory = replace(self.times, recompute=[0] * self.num_layers), self.memory
        if memory is not None:
            memory = replace(memory, sizes=replace(memory.sizes, keeps_activations=True))
        return replace(self, times=times, memory=memory)

    def finished(self, order: Schedule) -> Schedule:
        """The schedule that runs, with steps and transfers."""
        if self.finish is not None:
            return self.finish(order)
        return add_steps(order) if order.shape.num_steps > 1 else order

    def charged(self, schedule: Schedule) -> CostTable:
        """Times of a finished schedule's actions, transfers included."""
        costs = self.costs(schedule.cut)
        if self.traffic is None or not (self.traffic.optimizer or has_transfers(schedule)):
            return costs
        return self.traffic.charged(schedule, costs, self.keeps or None)

    @property
    def head_time(self) -> Number:
        """Time of the head on the last stage, forward and backward; 0 if devices share the head."""
        return 0 if self.entry.shards_head else self.times.head_forward + self.times.head_backward

    def order(self, partition: Partition) -> Schedule:
        """The schedule of a partition; ValueError if that does not cover the layers or does not fit the schedule."""
        partition.check_layers(self.num_layers)
        costs = self._stage_costs(partition) if self.entry.needs_costs else None
        return self.schedule(len(partition.forward), len(partition.backward), costs).with_partition(partition)

    def stage_speeds(self, num_stages: int) -> tuple[Number, ...]:
        """The speed of each bound stage's device, or of its slowest; 1 if all are equal. ValueError as `schedule`."""
        if not self.times.speeds:
            return (1,) * num_stages
        placement = self.schedule(num_stages, num_stages).placement
        return tuple(min(self.times.speeds[device] for device in holders) for holders in placement)

    def _stage_costs(self, partition: Partition) -> StageCosts:
        table, found = self.costs(partition), dict[tuple[int, float], StageCosts]()
        for own, size in zip(table.each, self.sizes, strict=True):
            if (id(own), size) not in found:
                found[id(own), size] = self._of_stages(partition, own, size)
        each = tuple(found[id(own), size] for own, size in zip(table.each, self.sizes, strict=True))
        return replace(self._of_stages(partition, table, 1.0), each=each)

    def _of_stages(self, partition: Partition, table: CostTable, size: float) -> StageCosts:
        """Times and activations of stages for a microbatch that has the fraction `size` of the largest one's tokens."""
        speeds = self.stage_speeds(len(partition.forward))
        whole = Kind.I not in table.work  # the costs do not split backward, so no part of it can wait

        def times(kind: Kind) -> tuple[float, ...]:
            works = (table.of(kind, stage) for stage in range(len(speeds)))
            return tuple(float((work.pre + work.main) / speed) for work, speed in zip(works, speeds, strict=True))

        def share(kind: Kind) -> float:
            works = table.work.get(kind, ())
            return float(max((work.main for work in works), default=0) / min(self.times.speeds or (1,)))

        known = self.traffic if self.entry.needs_transfers else None
        store, load = known.activation_times(partition, self.times.units_per_second) if known else ((), ())
        return StageCosts(
            times(Kind.F),
            times(Kind.B if whole else Kind.I),
            (0.0,) * len(speeds) if whole else times(Kind.W),
            float(table.hop),
            tuple(float(layers * self.activations.whole * size) for layers in partition.forward),
            tuple(float(layers * self.activations.for_weights * size) for layers in partition.forward),
            share(Kind.HF),
            share(Kind.HB),
            store,
            load,
        )
