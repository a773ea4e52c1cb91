"""Traffic: what everything beside computing takes on a cluster, by its bytes.

weights, gradients, kept inputs, shards   the transfers of a schedule, always
boundary tensors                          a hop of the costs each; or SEND and RECV like the others
optimizer                                 nothing; or its traffic over the memory where it works: of the host, which
                                          all devices and all copies share, or of the device
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from rpbench.cost.sizes import OPTIMIZER_BYTES, LayerSize, ModelBytes, saved_state
from rpbench.cost.table import CostTable, Work
from rpbench.cost.transfers import StageBytes, TransferTimes
from rpbench.ir.action import RECV, SEND, Kind
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, Weights

if TYPE_CHECKING:
    from rpbench.cost.machine import Machine


@dataclass(frozen=True)
class OptimizerTraffic:
    """Bytes of memory traffic for each trained parameter, and the pace of a device's memory.

    Args:
        on_host: where the host's optimizer works.
        on_device: where a device updates what it holds; of both a byte of state is read and written, so that smaller
            moments save twice their bytes.
        device_bytes_per_s: what element-wise kernels get of a device's memory.
    """

    on_host: float
    on_device: float
    device_bytes_per_s: float


@dataclass(frozen=True)
class Traffic:
    """What is charged for a model's transfers on a cluster.

    Args:
        boundaries: whether boundary tensors travel as transfers, so that hops take no time besides; None: they do where
            they stand in lanes of the schedule, or weights come to them; a device that has all stages hands none over.
        optimizer: None: it takes what the costs say.
    """

    sizes: ModelBytes
    cluster: "Machine"
    boundaries: bool | None = None
    optimizer: OptimizerTraffic | None = None

    def times(self, schedule: Schedule, units_per_second: int, keeps: Collection[int] | None = None) -> TransferTimes:
        """Times of the transfers of a schedule whose partition is known; `keeps` as of `StageBytes`."""
        assert schedule.partition is not None
        stages = StageBytes(schedule.partition, self.sizes, keeps)
        on_host = None if self.optimizer is None else self.optimizer.on_host
        return TransferTimes(stages, self.cluster, units_per_second, on_host)

    def activation_times(self, partition: Partition, units_per_second: int) -> tuple[tuple[float, ...], ...]:
        """Times of the activations that a backward stage of each number keeps of a microbatch: to the host, and back.

        Of a device that has its links to itself.
        """
        times = TransferTimes(StageBytes(partition, self.sizes), self.cluster, units_per_second)
        return tuple(
            tuple(times(Cargo("A", stage, True, Fraction(1), lane)) or 0.0 for stage in range(len(partition.backward)))
            for lane in ("d2h", "h2d")
        )

    def charged(self, schedule: Schedule, costs: CostTable, keeps: Collection[int] | None = None) -> CostTable:
        """The costs with what the transfers and the optimizer of a schedule take.

        Args:
            keeps: backward stages that recompute nothing, whose whole activations move; None: all or none, as the
                sizes say.
        """
        if costs.each:
            pairs = list(zip(costs.each, self.sizes.of_each, strict=True))
            alike = {(id(table), id(sizes)): (table, sizes) for table, sizes in pairs}
            own = {
                key: replace(self, sizes=sizes).charged(schedule, table, keeps) for key, (table, sizes) in alike.items()
            }
            costs = replace(costs, each=tuple(own[id(table), id(sizes)] for table, sizes in pairs))
        times = self.times(schedule, costs.units_per_second, keeps)
        work = dict(costs.work)
        if self.optimizer is not None:
            work[Kind.STEP] = self._steps(schedule, times.stages, costs.units_per_second)
        return replace(costs, work=work, transfer_time=times, hop=0 if self._boundaries_of(schedule) else costs.hop)

    def _boundaries_of(self, schedule: Schedule) -> bool:
        if self.boundaries is not None:
            return self.boundaries
        alone = bool(schedule.placement) and all(len(holders) > 1 for holders in schedule.placement)
        return alone or schedule.weights is Weights.STREAMED or not schedule.kinds.isdisjoint(SEND | RECV)

    def _steps(self, schedule: Schedule, stages: StageBytes, units_per_second: int) -> tuple[Work, ...]:
        """Steps on devices, by stage. Of shards one STEP stands for all, and the devices take turns with them."""
        assert self.optimizer is not None
        rate = self.optimizer.device_bytes_per_s
        pace = rate * OPTIMIZER_BYTES / self.optimizer.on_device

        def seconds(stage: LayerSize) -> float:
            saved = saved_state(stage)
            return (stage.optimizer + saved) / pace - 2 * saved / rate

        numbers = range(schedule.shape.num_backward_stages)
        return tuple(Work(seconds(stages.stage(number, backward=True)) * units_per_second) for number in numbers)
