"""Terms: what all contenders of a comparison have in common, and the times and bytes that follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rpbench.cost.activations import LayerActivations, layer_activations
from rpbench.cost.analytic import analytic_times
from rpbench.cost.basis import Basis
from rpbench.cost.engine_times import engine_times
from rpbench.cost.halves import with_halves
from rpbench.cost.machine import Machine
from rpbench.cost.measured import has_engine
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.cost.sizes import ModelBytes, model_bytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.traffic import OptimizerTraffic
from rpbench.workload.architecture import Architecture

Source = Literal["published", "analytic"]
Timed = Callable[[float], LayerTimes]  # sequences of a microbatch -> times of it through each layer

# Sequences by which uneven microbatches may miss the step.
ROUNDING = 1e-2
# Microbatches of a step, over devices: enough that small ones, of which more activations fit, can be chosen.
MOST_ON_A_DEVICE = 32
# Of the times that differ with the size of a microbatch; the others are kept.
_PER_LAYER = ("forward", "recompute", "backward", "input_grad", "weight_grad")
_OF_HEAD = ("head_forward", "head_backward", "head_input_grad", "head_weight_grad")


@dataclass(frozen=True)
class Limits:
    """Bytes that a plan may need; None for no limit."""

    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True)
class Terms:
    """What all contenders share.

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
    _times: dict[float, LayerTimes] = field(default_factory=dict, compare=False, repr=False)
    _sizes: dict[float, ModelBytes] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_devices", "sequences_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a whole number of at least 1")
        if self.num_steps < 3:
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
        if sequences not in self._sizes:
            self._sizes[sequences] = model_bytes(self.model, self.tokens(sequences))
        return self._sizes[sequences]

    def tokens(self, sequences: float) -> int:
        """Tokens of so many sequences."""
        return round(sequences * self.model.seq_len)

    def num_microbatches(self, sequences: float) -> int:
        """Microbatches of a step."""
        return max(1, round(self.sequences_per_step / sequences))

    def activations(self, sequences: float) -> LayerActivations:
        """What a layer keeps, for orders that look at it."""
        return layer_activations(self.model, self.tokens(sequences))


def terms_of(
    model: Architecture,
    cluster: Machine,
    basis: Basis,
    *,
    num_devices: int,
    sequences_per_step: int,
    microbatches: Sequence[float] | None = None,
    source: Source = "analytic",
    limits: Limits | None = None,
    num_steps: int = 4,
) -> Terms:
    """Terms of a model on a machine.

    Args:
        basis: figures and constants of `cost=analytic` on that machine; with `source="published"` it scales the
            published times to microbatches of other sizes.
        microbatches: sizes that may be chosen; None: those of `default_microbatches`.
        limits: None: what the machine's devices and its host have for a model.

    Raises:
        ValueError: if a figure is missing, or there are no published times.
    """
    if limits is None:
        limits = Limits(cluster.usable_memory_bytes, cluster.host_memory_bytes)
    pace = basis["memory_bytes_per_s"] * basis["memory_efficiency"]
    basis["host_bytes_per_s"]  # named here if it is missing: the host's optimizer cannot be charged without
    return Terms(
        model,
        cluster,
        published_source(model, basis) if source == "published" else analytic_source(model, cluster, basis),
        OptimizerTraffic(basis["optimizer_bytes"], basis["adam_bytes"], pace),
        num_devices,
        sequences_per_step,
        tuple(microbatches if microbatches is not None else default_microbatches(sequences_per_step, num_devices)),
        num_steps,
        limits,
        source=source,
    )


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


# --- where times are from ------------------------------------------------------------------------------------


def analytic_source(model: Architecture, cluster: Machine, basis: Basis) -> Timed:
    """Times counted from the model's shape; of this project's engine on a machine that was calibrated."""
    count = engine_times if has_engine(cluster.measured) else analytic_times
    return lambda sequences: count(model, sequences * model.seq_len, basis)


def published_source(model: Architecture, basis: Basis) -> Timed:
    """Published times, with halves in the ratio of FLOPs; of other sizes scaled as the count says (derived).

    Raises:
        ValueError: for a model without published times.
    """
    name = model.published_name or ""
    measured, tokens = with_halves(published_times(name), model), published_tokens_per_microbatch(name)
    counted = analytic_times(model, tokens, basis)

    def times(sequences: float) -> LayerTimes:
        if sequences * model.seq_len == tokens:
            return measured
        return _scaled(measured, counted, analytic_times(model, sequences * model.seq_len, basis), sequences, tokens)

    def _scaled(known: LayerTimes, then: LayerTimes, now: LayerTimes, sequences: float, tokens: int) -> LayerTimes:
        changed: dict[str, Any] = {
            part: [
                time * new / old
                for time, new, old in zip(getattr(known, part), getattr(now, part), getattr(then, part), strict=True)
            ]
            for part in _PER_LAYER
        }
        heads: dict[str, Any] = {
            part: getattr(known, part) * getattr(now, part) / getattr(then, part) for part in _OF_HEAD
        }
        return replace(known, **changed, **heads, hop=known.hop * sequences * model.seq_len / tokens)

    return times
