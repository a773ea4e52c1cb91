"""Terms: what all contenders of a comparison have in common, and the times and bytes that follow."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from rpbench.cost.footprint.sizes import LayerActivations, ModelBytes, layer_activations, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic
from rpbench.ir.partition import Partition
from rpbench.plan.problem import Problem
from rpbench.workload.architecture import Architecture

Source = Literal["published", "analytic"]
Timed = Callable[[float], LayerTimes]  # sequences of a microbatch -> times of it through each layer

# Sequences by which uneven microbatches may miss the step.
ROUNDING = 1e-2
# Microbatches of a step, over devices: enough that small ones, of which more activations fit, can be chosen.
MOST_ON_A_DEVICE = 32


@dataclass(frozen=True)
class Limits:
    """Bytes that a plan may need; None for no limit."""

    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True)
class Terms:
    """The terms that all contenders share.

    Args:
        timed: times of a microbatch of so many sequences.
        optimizer: bytes that a step of the optimizer moves through memory.
        num_devices: that take part.
        sequences_per_step: of one optimizer step, whatever the size of a microbatch.
        microbatches: the sizes, in sequences, that a plan may choose; they divide the step. A mean where a batch is
            cut into uneven ones.
        num_steps: steps in a row whose pace counts.
        fused_ahead: whether a fused stage may begin before its input is there, as the artifact's simulator has it.
        source: where the times are from.
        sized: bytes of the layers for a microbatch of so many sequences; None: as `model_bytes` counts.
        problem: posed already, with its own times, sizes and charges; the pace is then that of the whole run. None:
            every setting poses one.
        starts: cuts that take part whatever a sketch says.

    Raises:
        ValueError: for a size that cannot be.
    """

    model: Architecture
    cluster: Machine
    timed: Timed
    optimizer: OptimizerTraffic
    num_devices: int
    sequences_per_step: int
    microbatches: tuple[float, ...]
    num_steps: int = 4
    limits: Limits = Limits()
    fused_ahead: bool = False
    source: Source = "analytic"
    sized: Callable[[float], ModelBytes] | None = None
    problem: Problem | None = None
    starts: tuple[Partition, ...] = ()
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
                    f"sequences of a step; take some of {_divisors(self.sequences_per_step)}"
                )
        if self.cluster.num_devices is not None and self.num_devices > self.cluster.num_devices:
            raise ValueError(
                f"num_devices={self.num_devices}: cluster {self.cluster.name} has {self.cluster.num_devices}; "
                "ask for fewer"
            )

    def times(self, sequences: float) -> LayerTimes:
        """Times of one microbatch of so many sequences, its backward in halves as well."""
        if sequences not in self._times:
            speeds = self.cluster.speeds_of(self.num_devices)
            self._times[sequences] = replace(self.timed(sequences), speeds=speeds)
        return self._times[sequences]

    def sizes(self, sequences: float) -> ModelBytes:
        """Bytes of the layers for such a microbatch."""
        if self.problem is not None and self.problem.memory is not None:
            return self.problem.memory.sizes
        if sequences not in self._sizes:
            own = model_bytes(self.model, self.tokens(sequences)) if self.sized is None else self.sized(sequences)
            self._sizes[sequences] = own
        return self._sizes[sequences]

    def tokens(self, sequences: float) -> int:
        """Tokens of so many sequences."""
        return round(sequences * self.model.seq_len)

    def num_microbatches(self, sequences: float) -> int:
        """Microbatches of a step."""
        return max(1, round(self.sequences_per_step / sequences))

    def activations(self, sequences: float) -> LayerActivations:
        """The activations that a layer keeps, for orders that depend on them."""
        return layer_activations(self.model, self.tokens(sequences))


def default_microbatches(sequences_per_step: int, num_devices: int) -> tuple[int, ...]:
    """Sizes that leave between a microbatch and `MOST_ON_A_DEVICE` on every device, by factors of two where it divides.

    With more, a bubble that is small by then would shrink a little further.
    """
    most = MOST_ON_A_DEVICE * num_devices
    fitting = [size for size in _divisors(sequences_per_step) if sequences_per_step // size <= most]
    several = [size for size in fitting if sequences_per_step // size >= num_devices]
    chosen: list[int] = []
    for size in several or fitting[:1]:
        if not chosen or size >= 2 * chosen[-1]:
            chosen.append(size)
    return tuple(chosen)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
