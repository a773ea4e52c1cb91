"""Our orders against those of torch.distributed.pipelining 2.13, from its visualizer, without devices."""

import pytest

from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entries

try:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
except ImportError as error:  # a private interface: another torch may have moved it
    pytest.skip(f"torch's schedule visualizer is not where it was in 2.13: {error}", allow_module_level=True)


def torch_order(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> list[list[str]]:
    """Torch's compute actions by rank, without the slots it leaves empty."""
    ops = get_schedule_ops(name, ranks, microbatches, chunks)
    return [[str(op) for op in row if op is not None and "REDUCE" not in str(op)] for row in ops]


def order(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in schedule.compute(rank)] for rank in range(schedule.shape.num_ranks)]


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 5), (3, 4), (4, 8)])
def test_gpipe(ranks, microbatches):
    assert order(entries()["gpipe"].build(Shape(ranks, ranks, microbatches))) == torch_order(
        "GPipe", ranks, microbatches
    )


@pytest.mark.parametrize(
    "ranks, chunks, microbatches",
    [(2, 2, 2), (2, 3, 6), (3, 2, 6), (4, 2, 8), (4, 2, 10), (3, 2, 2), (4, 3, 12)],
)
def test_interleaved_1f1b(ranks, chunks, microbatches):
    ours = entries()["interleaved_1f1b"].build(Shape(ranks, ranks * chunks, microbatches))
    assert order(ours) == torch_order("Interleaved1F1B", ranks, microbatches, chunks)


def test_interleaved_1f1b_takes_the_microbatches_torch_takes():
    with pytest.raises(ValueError, match="microbatches"):
        torch_order("Interleaved1F1B", 4, 14, 3)
    with pytest.raises(ValueError, match="14 microbatches through 4 ranks in 3 rounds"):
        entries()["interleaved_1f1b"].build(Shape(4, 12, 14))


@pytest.mark.parametrize(
    "ranks, chunks, microbatches",
    [(2, 2, 1), (2, 2, 2), (2, 3, 6), (3, 2, 6), (4, 2, 8), (4, 2, 10), (3, 2, 2), (4, 3, 12), (8, 2, 32)],
)
def test_interleaved_zb(ranks, chunks, microbatches):
    ours = entries()["interleaved_zb"].build(Shape(ranks, ranks * chunks, microbatches))
    assert order(ours) == torch_order("InterleavedZeroBubble", ranks, microbatches, chunks)


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 2), (3, 7), (4, 2), (4, 8), (8, 32)])
def test_zb_v(ranks, microbatches):
    ours = entries()["zb_v"].build(Shape(ranks, 2 * ranks, microbatches))
    assert order(ours) == torch_order("ZBVZeroBubble", ranks, microbatches, 2)


@pytest.mark.parametrize("ranks, chunks, microbatches", [(2, 2, 2), (3, 2, 5), (4, 3, 4)])
def test_looped_bfs(ranks, chunks, microbatches):
    ours = entries()["looped_bfs"].build(Shape(ranks, ranks * chunks, microbatches))
    assert order(ours) == torch_order("LoopedBFS", ranks, microbatches, chunks)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (3, 4), (4, 8)])
def test_1f1b_but_for_the_last_rank_of_torchs_export(ranks, microbatches):
    """Torch 2.13 numbers the last rank's forwards 1 to m, so 0 is missing and m does not exist."""
    ours = order(entries()["1f1b"].build(Shape(ranks, ranks, microbatches)))
    theirs = torch_order("1F1B", ranks, microbatches)
    assert ours[:-1] == theirs[:-1]
    last = ranks - 1
    shifted = [
        f"{last}F{int(token.removeprefix(f'{last}F')) + 1}" if token.startswith(f"{last}F") else token
        for token in ours[-1]
    ]
    assert shifted == theirs[-1]
    assert ours[-1] != theirs[-1]


@pytest.mark.parametrize("ranks, microbatches", [(1, 2), (1, 5), (2, 4), (2, 7), (3, 8), (4, 8), (4, 11), (8, 20)])
def test_dualpipe_v(ranks, microbatches):
    ours = order(entries()["dualpipe_v"].build(Shape(ranks, 2 * ranks, microbatches)))
    theirs = torch_order("DualPipeV", ranks, microbatches, 2)
    assert [[token.replace("OVERLAP_F_B", "OVERLAP") for token in row] for row in theirs] == ours


def test_dualpipe_v_takes_the_microbatches_torch_takes():
    with pytest.raises(ValueError, match="microbatches"):
        torch_order("DualPipeV", 4, 7, 2)
    with pytest.raises(ValueError, match="7 microbatches through 8 stages: there must be at least as many"):
        entries()["dualpipe_v"].build(Shape(4, 8, 7))
