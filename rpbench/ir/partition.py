"""Partition: layers cut into forward stages and backward stages, which may differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

MOST_LAYERS = 10**6  # each has times of its own


@dataclass(frozen=True)
class Partition:
    """Layers per stage, in model order (first layers first) for both directions.

    The embedding belongs to the first stage and the head with the loss to the last; neither is counted, so a
    stage of 0 layers may still hold one of them. With `fused`, the last backward stage runs forward, loss and
    backward of its own layers in one visit, and the forward stages cover only the layers below it
    (RoundPipe; the published cuts give that stage the head alone).
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    fused: bool = False

    def __post_init__(self) -> None:
        for name, counts in (("forward", self.forward), ("backward", self.backward)):
            if not counts or any(count < 0 for count in counts):
                raise ValueError(
                    f"partition {name}={list(counts)}: every stage holds 0 or more layers, at least one stage"
                )
        if sum(self.forward) != self.num_layers - self.num_layers_fused:
            raise ValueError(
                f"partition covers {sum(self.forward)} layers forward and {self.num_layers} backward"
                f"{f' ({self.num_layers_fused} fused)' if self.fused else ''}: "
                "both directions cover the same layers"
            )

    @property
    def num_layers(self) -> int:
        return sum(self.backward)

    @property
    def num_layers_fused(self) -> int:
        return self.backward[-1] if self.fused else 0

    def forward_ranges(self) -> tuple[range, ...]:
        """The layers of each forward stage."""
        return _ranges(self.forward)

    def backward_ranges(self) -> tuple[range, ...]:
        """The layers of each backward stage."""
        return _ranges(self.backward)

    def backward_stages_over(self, forward_stage: int) -> tuple[int, ...]:
        """Backward stages that share a layer, the embedding or the head with a forward stage."""
        layers = self.forward_ranges()[forward_stage]
        if not self.fused and self.forward == self.backward:
            return (forward_stage,)
        ends = {0} if forward_stage == 0 else set[int]()
        if forward_stage == len(self.forward) - 1 and not self.fused:
            ends.add(len(self.backward) - 1)
        return tuple(
            stage
            for stage, other in enumerate(self.backward_ranges())
            if stage in ends or (other.start < layers.stop and layers.start < other.stop)
        )

    @cached_property
    def keeping_stages(self) -> tuple[int, ...]:
        """By backward stage, the forward stage that runs its first layer, and so keeps its input."""
        ranges, starts = self.forward_ranges(), (layers.start for layers in self.backward_ranges())
        return tuple(next((at for at, own in enumerate(ranges) if start in own), len(ranges) - 1) for start in starts)

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError unless the partition covers `num_layers` layers."""
        if self.num_layers != num_layers:
            raise ValueError(
                f"partition {self} sums to {self.num_layers} layers, the model has {num_layers}: "
                "change the counts, or let partition=even or partition=search choose them"
            )

    def __str__(self) -> str:
        """Counts joined by dashes; a bar stands between two cuts, a star behind the fused stage."""
        forward = "-".join(map(str, self.forward))
        if not self.fused and self.forward == self.backward:
            return forward
        return f"{forward}|{'-'.join(map(str, self.backward))}{'*' if self.fused else ''}"


def parse(text: str) -> Partition:
    """The partition a text such as `3-3-4` or `2-2|1-1-2-0*` stands for; the inverse of `str`. ValueError if a count is
    not a whole number, the two directions cover different layers, or there are too many layers.
    """
    forward, bar, backward = text.partition("|")
    fused = backward.endswith("*")
    try:
        cut = tuple(int(count) for count in forward.split("-"))
        other = tuple(int(count) for count in backward.removesuffix("*").split("-")) if bar else cut
    except ValueError:
        raise ValueError(
            f"bad partition {text!r:.60}: write layers per stage as 3-3-4, or forward|backward as 2-2|1-1-2-0*"
        ) from None
    if max(sum(cut), sum(other)) > MOST_LAYERS:
        raise ValueError(f"partition {text:.60}: layers: at most {MOST_LAYERS:,}; give its stages fewer")
    return Partition(cut, other, fused)


def symmetric(counts: tuple[int, ...]) -> Partition:
    """One cut for both directions."""
    return Partition(counts, counts)


def filled(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Cuts near this one without empty stages: each empty stage takes a layer from the nearest stage below or above.

    The first and the last stage may stay without layers: they hold the embedding and the head.
    """
    hole = next((stage for stage, layers in enumerate(counts[1:-1], 1) if not layers), None)
    if hole is None:
        yield counts
        return
    ends = (0, len(counts) - 1)
    for way in (range(hole - 1, -1, -1), range(hole + 1, len(counts))):
        giver = next((stage for stage in way if counts[stage] > (stage not in ends)), None)
        if giver is not None:
            moved = {giver: counts[giver] - 1, hole: 1}
            yield from filled(tuple(moved.get(stage, layers) for stage, layers in enumerate(counts)))


def divisors(number: int) -> list[int]:
    """The sizes of equal parts that it can be cut into, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def split_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that differ by one at most; the larger stages stand in the middle of the pipeline.

    The first stage also holds the embedding and the last one the head, so a remainder is kept away from both.
    """
    base, extra = divmod(num_layers, num_stages)
    first = (num_stages - extra + 1) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(num_stages))


@lru_cache(maxsize=256)
def _ranges(counts: tuple[int, ...]) -> tuple[range, ...]:
    ends = tuple(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))
