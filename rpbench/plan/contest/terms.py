"""Terms: model, machine, batch and limits of all contenders, with the layer times and bytes they imply."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from rpbench.cost.footprint.sizes import ModelBytes, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic
from rpbench.ir.partition import Partition, divisors
from rpbench.plan.problem import Problem
from rpbench.workload.architecture import Architecture

Source = Literal["published", "analytic"]
Timed = Callable[[float], LayerTimes]  # sequences of a microbatch -> its times through each layer

ROUNDING = 1e-2  # most sequences by which uneven microbatches may differ from the step's total
MOST_ON_A_DEVICE = 32  # most microbatches of a step per device: enough to choose small ones, which need less memory


@dataclass(frozen=True)
class Limits:
    """Memory limits of a plan, in bytes; None for no limit."""

    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None

    def are_below(self, device_bytes: int, host_bytes: int) -> bool:
        """Whether the fullest device or the host needs more."""
        device, host = self.device_memory_bytes, self.host_memory_bytes
        return (device is not None and device_bytes > device) or (host is not None and host_bytes > host)


@dataclass(frozen=True)
class Terms:
    """The terms that all contenders share; ValueError for too small numbers, or sizes that do not divide the step."""

    model: Architecture
    cluster: Machine
    timed: Timed  # layer times of a microbatch, by its number of sequences
    optimizer: OptimizerTraffic  # bytes that an optimizer step moves through memory
    num_devices: int
    sequences_per_step: int  # sequences of one optimizer step, for every microbatch size
    microbatches: tuple[float, ...]  # sizes to choose from, in sequences, that divide the step; means if cut unevenly
    num_steps: int = 4  # steps in a row whose pace counts
    limits: Limits = Limits()
    fused_ahead: bool = False  # a fused stage may begin before its input is there, as in the artifact's simulator
    source: Source = "analytic"  # origin of the times
    sized: Callable[[float], ModelBytes] | None = None  # bytes of a microbatch, like `timed`; None: `model_bytes`
    # a given ("posed") problem with its own times, sizes and charges, whose pace is that of the whole run; None: every
    # setting makes its own
    problem: Problem | None = None
    starts: tuple[Partition, ...] = ()  # cuts that are always timed
    # whether a contender that fills no pipeline in every step may have fewer microbatches than devices
    may_be_few: bool = False
    _times: dict[float, LayerTimes] = field(default_factory=dict, compare=False, repr=False)
    _sizes: dict[float, ModelBytes] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_devices", "sequences_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a whole number of at least 1")
        if self.num_steps < 3 and self.problem is None:
            raise ValueError(f"num_steps={self.num_steps}: the pace is that of a step among others; take 3 or more")
        if not self.microbatches:
            raise ValueError("microbatches=(): a search needs at least 1 size of a microbatch, such as 4 sequences")
        for size in self.microbatches:
            if size <= 0 or abs(self.num_microbatches(size) * size - self.sequences_per_step) > ROUNDING:
                raise ValueError(
                    f"microbatches={list(self.microbatches)}: {size} does not divide the {self.sequences_per_step} "
                    f"sequences of a step; take some of {divisors(self.sequences_per_step)}"
                )
        if self.cluster.num_devices is not None and self.num_devices > self.cluster.num_devices:
            raise ValueError(
                f"num_devices={self.num_devices}: cluster {self.cluster.name} has {self.cluster.num_devices}; "
                "ask for fewer"
            )

    def times(self, sequences: float) -> LayerTimes:
        """Layer times of a microbatch, with the devices' speeds."""
        if sequences not in self._times:
            speeds = self.cluster.speeds_of(self.num_devices)
            self._times[sequences] = replace(self.timed(sequences), speeds=speeds)
        return self._times[sequences]

    def sizes(self, sequences: float) -> ModelBytes:
        if self.problem is not None and self.problem.memory is not None:
            return self.problem.memory.sizes
        if sequences not in self._sizes:
            own = model_bytes(self.model, self.tokens(sequences)) if self.sized is None else self.sized(sequences)
            self._sizes[sequences] = own
        return self._sizes[sequences]

    def tokens(self, sequences: float) -> int:
        return round(sequences * self.model.seq_len)

    def num_microbatches(self, sequences: float) -> int:
        return max(1, round(self.sequences_per_step / sequences))

    def steps_to_fill(self, sequences: float) -> int:
        """Steps until every device may have a microbatch of this size: 1 unless there are few of them."""
        return -(-self.num_devices // self.num_microbatches(sequences))


def default_microbatches(sequences_per_step: int, num_devices: int) -> tuple[int, ...]:
    """Microbatch sizes that give each device 1 to `MOST_ON_A_DEVICE` microbatches, by factors of about two.

    More microbatches would shrink an already small bubble only a little. Sizes whose microbatches the devices can share
    evenly are chosen by themselves too, for replicas take no others.
    """
    most = MOST_ON_A_DEVICE * num_devices
    fitting = [size for size in divisors(sequences_per_step) if sequences_per_step // size <= most]
    several = [size for size in fitting if sequences_per_step // size >= num_devices]
    even = [size for size in several if sequences_per_step // size % num_devices == 0]
    return tuple(sorted({*_by_twos(several or fitting[:1]), *_by_twos(even)}))


def few_microbatches(sequences_per_step: int, num_devices: int) -> tuple[int, ...]:
    """Microbatch sizes above the usual ones, by factors of about two, up to the whole step."""
    most = max(default_microbatches(sequences_per_step, num_devices))
    return tuple(_by_twos([most, *(size for size in divisors(sequences_per_step) if size > most)])[1:])


def _by_twos(sizes: Iterable[int]) -> list[int]:
    """The ascending sizes without those below twice the one chosen before."""
    chosen: list[int] = []
    for size in sizes:
        if not chosen or size >= 2 * chosen[-1]:
            chosen.append(size)
    return chosen
