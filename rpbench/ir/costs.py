"""StageCosts: the times and sizes of stages, for generators whose order depends on them.

Most orders follow from counts alone. A heuristic or a search needs the time and the memory of each stage; the schedule
stores neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rpbench.ir.action import Kind
from rpbench.ir.schedule import Shape


@dataclass(frozen=True)
class StageCosts:
    """Times of one microbatch on every stage, and the activations it leaves there, in any one unit of time and one of
    memory; ValueError if the lists differ in length, or more is kept than there is.
    """

    forward: tuple[float, ...]  # per stage, as the next two
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    hop: float  # time of one transfer between devices
    activations: tuple[float, ...]  # per stage, held from F on
    kept_for_weights: tuple[float, ...]  # per stage, the part of them that is held until W; the rest goes at I
    head_forward: float = 0.0  # of a device's shard of the head, as the next, if the head is cut over the devices
    head_backward: float = 0.0
    store: tuple[float, ...] = ()  # per stage, time of moving a microbatch's activations to the host; empty: unknown
    load: tuple[float, ...] = ()  # the same, back
    # the costs of every microbatch of a step; empty if all are alike. Otherwise the other fields hold the mean of all
    # microbatches, and `activations` the largest
    each: tuple["StageCosts", ...] = ()

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if isinstance(value, tuple) and name != "each"}
        if not self.store and not self.load:
            del given["store"], given["load"]
        lengths = set(map(len, given.values()))
        if len(lengths) != 1:
            raise ValueError(f"stage costs of {sorted(lengths)} stages: give every quantity for each stage")
        if any(kept > held for kept, held in zip(self.kept_for_weights, self.activations, strict=True)):
            raise ValueError("a stage keeps more for its weight gradient than its forward left; check the sizes")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def mean(self) -> "StageCosts":
        """The costs of a step in which every microbatch takes the mean."""
        return replace(self, each=())

    def at(self, microbatch: int) -> "StageCosts":
        """The costs of a microbatch."""
        return self.each[microbatch % len(self.each)] if self.each else self

    def keeping(self, share: float) -> "StageCosts":
        """The same costs with that fraction of the activations held until W."""
        kept = tuple(share * held for held in self.activations)
        return replace(self, kept_for_weights=kept, each=tuple(own.keeping(share) for own in self.each))

    @property
    def backward(self) -> tuple[float, ...]:
        """Times of whole backwards, I and W together."""
        return tuple(map(sum, zip(self.input_grad, self.weight_grad, strict=True)))

    def times(self, num_ranks: int) -> Mapping[Kind, tuple[float, ...]]:
        """Times by kind: of every stage, or of every rank's shard of the head."""
        return {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.input_grad,
            Kind.W: self.weight_grad,
            Kind.HF: (self.head_forward,) * num_ranks,
            Kind.HB: (self.head_backward,) * num_ranks,
        }


def unit_costs(shape: Shape) -> StageCosts:
    """F = I = W = 1 on every stage, no hops; activations are held until W."""
    ones = (1.0,) * shape.num_stages
    return StageCosts(ones, ones, ones, 0.0, ones, ones)
