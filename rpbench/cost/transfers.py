"""Transfers: bytes and seconds of what goes over the links of a schedule with LOAD, STORE, UNSHARD and their like.

Bytes are counted from actions, never from a formula: every action that uses a link carries a share of a stage's
weights, gradients or optimizer state, or a boundary tensor of one microbatch (`rpbench.ir.moves.Cargo`). What a stage
keeps for recomputation is one boundary tensor; a stage that recomputes nothing moves all its activations.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from rpbench.cost.sizes import OPTIMIZER_BYTES, LayerSize, ModelBytes, saved_state
from rpbench.cost.table import Number
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.moved_objects import LINKS, Cargo
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule

if TYPE_CHECKING:
    from rpbench.cost.machine import Machine


class StageBytes:
    """Bytes of the stages of a partition.

    Args:
        keeps: backward stages that recompute nothing; None: all or none, as `sizes` says.
    """

    def __init__(self, partition: Partition, sizes: ModelBytes, keeps: Collection[int] | None = None) -> None:
        partition.check_layers(sizes.num_layers)
        everyone = range(len(partition.backward)) if sizes.keeps_activations else ()
        self._sizes, self._keeps = sizes, frozenset(everyone if keeps is None else keeps)
        self._forward = _stages(partition.forward_ranges(), sizes, has_head=not partition.fused)
        self._backward = _stages(partition.backward_ranges(), sizes, has_head=True)

    def of(self, cargo: Cargo) -> Number:
        """Bytes that an action carries over the link of its device."""
        if cargo.object == "A" and cargo.stage in self._keeps:
            last = cargo.stage == len(self._backward) - 1
            kept = self.stage(cargo.stage, backward=True).activations + self._sizes.logits * last
            return _part(kept, cargo.share)
        if cargo.object in ("A", "boundary", "sum"):
            return _part(self._sizes.boundary, cargo.share)
        stage = self.stage(cargo.stage, backward=cargo.backward)
        whole = {"P": stage.weights, "G": stage.gradients, "O": stage.optimizer}[cargo.object]
        return _part(whole, cargo.share)

    def stage(self, number: int, *, backward: bool) -> LayerSize:
        """Bytes of a forward or a backward stage."""
        return (self._backward if backward else self._forward)[number]


def _part(amount: int, share: Fraction) -> Number:
    """A share of some bytes; a whole number where it is one, for fractions are slow."""
    return amount * share.numerator if share.denominator == 1 else amount * share


def moved_bytes(
    schedule: Schedule | Analysis, sizes: ModelBytes, keeps: Collection[int] | None = None
) -> list[dict[str, int]]:
    """Bytes over the links of each device by lane and kind, such as `h2d LOAD:P`, for the whole schedule.

    Args:
        keeps: as of `StageBytes`.

    Raises:
        ValueError: if the schedule has no partition.
    """
    analysis = analysed(schedule)
    partition, index = analysis.schedule.partition, analysis.index
    if partition is None:
        raise ValueError("the bytes of a transfer follow from its layers: give the schedule a partition first")
    stages = [StageBytes(partition, own, keeps) for own in sizes.of_each]
    found: list[dict[str, Number]] = [defaultdict(int) for _ in range(analysis.schedule.shape.num_ranks)]
    for number, cargo in analysis.cargo.items():
        if cargo.lane not in LINKS:
            continue
        action = index.actions[number]
        what = f"{action.kind.name}:{action.object}" if action.object else action.kind.name
        own = stages[(action.microbatch or 0) % len(stages)]
        found[index.device(number)][f"{cargo.lane} {what}"] += own.of(cargo)
    return [{what: round(moved) for what, moved in sorted(device.items())} for device in found]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of transfers that have their links to themselves: latency, and bytes at the pace of the link.

    Args:
        units_per_second: 1000 for times in milliseconds.
        optimizer_bytes: traffic of the host's memory for each parameter that a STEP on lane host works on; None: such
            a step takes what the costs say.
    """

    stages: StageBytes
    cluster: "Machine"
    units_per_second: int = 1
    optimizer_bytes: float | None = None

    def __call__(self, cargo: Cargo) -> float | None:
        """Time of one action on its link, 0 if it carries nothing; None if its bytes do not decide."""
        if cargo.lane == "host" and self.optimizer_bytes is None:
            return None
        carried, pace = self.bytes_of(cargo), self.bytes_per_s(cargo)
        seconds = self.cluster.transfer_latency_s + (carried / pace if pace else 0.0)
        return seconds * self.units_per_second if carried else 0.0

    def bytes_of(self, cargo: Cargo) -> float:
        """Bytes that an action moves over its link, or through the host's memory."""
        found = float(self.stages.of(cargo))
        if cargo.lane != "host":
            return found
        saved = float(_part(saved_state(self.stages.stage(cargo.stage, backward=cargo.backward)), cargo.share))
        return (found + saved) / OPTIMIZER_BYTES * (self.optimizer_bytes or 0.0) - 2 * saved

    def bytes_per_s(self, cargo: Cargo) -> float | None:
        """The pace of a link alone; None without limit. What all devices exchange goes at that of collectives."""
        if cargo.lane == "host":
            return self.cluster.host_bytes_per_s
        if cargo.lane == "net" and cargo.object != "boundary" and self.cluster.collective_bytes_per_s:
            return self.cluster.collective_bytes_per_s
        return self.cluster.link_bytes_per_s(cargo.lane)


def _stages(ranges: Sequence[range], sizes: ModelBytes, *, has_head: bool) -> list[LayerSize]:
    found = []
    for number, layers in enumerate(ranges):
        held = [sizes.layers[layer] for layer in layers]
        held += [sizes.embedding] * (number == 0) + [sizes.head] * (has_head and number == len(ranges) - 1)
        found.append(LayerSize(*(sum(getattr(layer, name) for layer in held) for name in LayerSize._fields)))
    return found
