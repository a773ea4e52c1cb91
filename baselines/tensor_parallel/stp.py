"""STP: forwards and backwards of two microbatches run together, so that tensor-parallel sums hide behind other work.

Rank r holds stage r (chunk 0, on the way down) and stage 2p - 1 - r (chunk 1, on the way up). `(F;B)` is a pair whose
layers alternate: while one waits for the all-reduce of its layer, the other computes. Weight gradients are put off
where a forward has nothing else to run with. With 2 ranks and 6 microbatches:

    rank 0   0F0 0F1 0F2 3F0 0F3 (3F1;3I0) (0F4;3W0) (3F2;3B1) (0F5;0B0) (3F3;3B2) 0B1 (3F4;3I3) 0B2 (3F5;3I4) 0B3 ...
    rank 1   1F0 2F0 1F1 2F1 (1F2;1F3) (2F2;2B0) (1F4;1B0) (2F3;2B1) (1F5;1B1) (2F4;2I2) 1B2 (2F5;2I3) 1B3 2B4 1B4 ...

`cost.overlap_gain` says what a pair gains.

Source: "Synergistic Tensor and Pipeline Parallelism", NeurIPS'25 (arXiv 2510.27257); phases as in its released code.
Here the times of F and B include the sums; offloading of activations to the host is left out.
"""

from collections import deque
from collections.abc import Iterator

from baselines.bidirectional.dualpipe_v import check_v, v_placement
from rpbench.ir.action import Action, Kind, overlap
from rpbench.ir.schedule import Schedule, Shape, step_rows
from rpbench.registry import schedule


@schedule("stp", source="arXiv 2510.27257", looped=True, chunks=2)
def stp(shape: Shape) -> Schedule:
    """Rank r runs the stages r and 2p - 1 - r."""
    p, m = shape.num_ranks, shape.num_microbatches
    check_v("stp", shape)
    if m < 3 * p - 1:
        raise ValueError(
            f"stp takes {m} microbatches through {p} ranks: there must be at least {3 * p - 1}; "
            f"take num_microbatches={3 * p - 1} or try schedule=dualpipe_v"
        )
    rows = step_rows(shape, lambda rank, batch: _Row(p, rank, batch).actions())
    return Schedule(shape, rows, name="stp", placement=v_placement(shape))


class _Row:
    """One rank's step; each kind takes the next microbatch of its chunk, W the oldest that was put off."""

    def __init__(self, p: int, rank: int, batch: range) -> None:
        self.p, self.rank, self.m = p, rank, len(batch)
        self.stages = rank, 2 * p - 1 - rank
        self.forwards, self.backwards = ([iter(batch), iter(batch)] for _ in range(2))
        self.waiting: deque[Action] = deque()

    def actions(self) -> Iterator[Action]:
        """The nine phases of the released code."""
        p, r, m = self.p, self.rank, self.m
        alone = p - 1 - r
        yield from (self.forward(0) for _ in range(2 * alone))
        yield from (self.forward(chunk) for _ in range(r + 1) for chunk in (0, 1))
        yield from (self.forward(0) for _ in range((r + 1) % 2))
        yield from (overlap(self.forward(0), self.forward(0)) for _ in range((r + 1) // 2))
        for _ in range(alone):
            yield overlap(self.forward(1), self.input_grad(1))
            yield overlap(self.forward(0), self.waiting.popleft())
        whole, steady = 2 * (m - 3 * p + 1) + 1 + r, 2 * (m - 3 * p + 1) + 1 + 2 * r
        for number in range(steady):
            chunk = (number + 1) % 2
            yield overlap(self.forward(chunk), (self.backward if number < whole else self.input_grad)(chunk))
        for _ in range(m - p - steady // 2 - 1):
            yield self.backward(0)
            yield overlap(self.forward(1), self.input_grad(1))
        yield from (self.backward(chunk) for _ in range(r + 1) for chunk in (0, 1))
        yield from self.drain(alone)

    def drain(self, alone: int) -> Iterator[Action]:
        """Backwards of chunk 0, with the remaining weight gradients between and after them."""
        for number in range(2 * alone + 1):
            if number % 2 == 0:
                yield self.backward(0)
            else:
                yield from (self.waiting.popleft() for _ in range(2))
        yield from self.waiting

    def forward(self, chunk: int) -> Action:
        return Action(Kind.F, self.stages[chunk], next(self.forwards[chunk]))

    def backward(self, chunk: int) -> Action:
        return Action(Kind.B, self.stages[chunk], next(self.backwards[chunk]))

    def input_grad(self, chunk: int) -> Action:
        found = self.backward(chunk)
        self.waiting.append(found._replace(kind=Kind.W))
        return found._replace(kind=Kind.I)
