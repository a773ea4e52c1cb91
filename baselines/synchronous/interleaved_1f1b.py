"""Interleaved 1F1B: several stages (chunks) per rank, so that warmup and cooldown take smaller steps.

Stage s lives on rank s mod p. Microbatches go through the chunks in groups of `group` (p if m is a multiple of p): a
rank runs a group on its first chunk, then on its next. With 2 ranks, 4 microbatches and 2 chunks:

    rank 0   0F0 0F1 2F0 2F1 2B0 ...     warmup (v-1)*group + 2*(p-1-rank) forwards, then one F, one B in turn

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC'21.
Group size as in torch.distributed.pipelining: rounds = max(1, m div p), group = m div rounds; both agree if m is a
multiple of p.
"""

from rpbench.ir.action import Kind, PlainRow, in_turn, joined, plain
from rpbench.ir.schedule import Schedule, Shape, looped_placement
from rpbench.registry import schedule


@schedule("interleaved_1f1b", source="Narayanan et al., SC'21", looped=True)
def interleaved_1f1b(shape: Shape) -> Schedule:
    """Rank r keeps at most v*p + p - 1 - 2r chunk activations in flight (m a multiple of p)."""
    check_rounds("interleaved_1f1b", shape)
    rows = tuple(joined([_step(shape, rank, batch) for batch in shape.batches]) for rank in range(shape.num_ranks))
    return Schedule(shape, rows, name="interleaved_1f1b", placement=looped_placement(shape))


def check_rounds(name: str, shape: Shape) -> None:
    """Raise ValueError unless stages can be dealt evenly and microbatches go through in groups of one size."""
    shape.chunks_per_rank  # noqa: B018  refuses stages that cannot be dealt evenly
    num_rounds = max(1, shape.num_microbatches // shape.num_ranks)
    if shape.num_microbatches % num_rounds:
        raise ValueError(
            f"{name} sends {shape.num_microbatches} microbatches through {shape.num_ranks} ranks in "
            f"{num_rounds} rounds of equal size; take num_microbatches={num_rounds * shape.num_ranks} "
            f"or another multiple of {num_rounds}"
        )


def group_size(shape: Shape) -> int:
    """Microbatches that go through a rank's chunk in a row: p, where m is a multiple of it."""
    return shape.num_microbatches // max(1, shape.num_microbatches // shape.num_ranks)


def _step(shape: Shape, rank: int, batch: range) -> PlainRow:
    chunks, p = shape.chunks_per_rank, shape.num_ranks
    forwards = visits(shape, rank, batch, Kind.F)
    backwards = visits(shape, rank, batch, Kind.B)

    # The first gradient returns after the other chunks' group and a round trip to the last rank.
    num_warmup = min(len(forwards), (chunks - 1) * group_size(shape) + 2 * (p - 1 - rank))
    return in_turn(forwards, backwards, num_warmup)


def visits(shape: Shape, rank: int, batch: range, kind: Kind) -> PlainRow:
    """The rank's forwards (or any kind of backward) in order: a group of microbatches on each chunk in turn."""
    stages = range(rank, shape.num_stages, shape.num_ranks)
    group = group_size(shape)
    turns = [stage for stage in (stages if kind is Kind.F else reversed(stages)) for _ in range(group)]
    groups = [batch[first : first + group] for first in range(0, len(batch), group)]
    microbatches = [microbatch for members in groups for _ in stages for microbatch in members]
    return plain(kind, turns * len(groups), microbatches)
