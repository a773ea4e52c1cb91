"""DualPipeV: DualPipe cut in half, on one V of chunks; forwards and backwards of the two chunks run together.

Rank r holds the stages r (chunk 0, on the way down) and 2p - 1 - r (chunk 1, on the way up), so the turn in the middle
and the loss each stay on one rank. `(F;B)` is one action whose computation and communication hide each other; the cost
table says how long it takes (`overlap_gain`, 0 by default). With 2 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
    rank 1   1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3

The rows have eight phases (`rank_order`). With F, B = I + W and F&B the times of one chunk, the bubble is (p - 1)(F&B +
B - 3W); a rank holds at most 2p + 1 chunk activations.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437); its half: Qi et al., "Cut in half", blog of Sea
AI Lab, 2025. Phases as in the DualPipe repository and torch.distributed.pipelining.
"""

from collections.abc import Sequence

from rpbench.ir.action import Action, Kind, actions, overlap
from rpbench.ir.schedule import Row, Schedule, Shape, step_rows
from rpbench.registry import schedule


@schedule("dualpipe_v", source="arXiv 2412.19437, cut in half", looped=True, chunks=2)
def dualpipe_v(shape: Shape) -> Schedule:
    """Rank r runs the stages r and 2p - 1 - r."""
    p, m = shape.num_ranks, shape.num_microbatches
    check_v("dualpipe_v", shape)
    if m < 2 * p:
        raise ValueError(
            f"dualpipe_v takes {m} microbatches through {2 * p} stages: there must be at least as many; "
            f"take num_microbatches={2 * p} or try schedule=interleaved_1f1b"
        )
    rows = step_rows(shape, lambda rank, batch: rank_order(p, rank, (rank, 2 * p - 1 - rank), (batch, batch)))
    return Schedule(shape, rows, name="dualpipe_v", placement=v_placement(shape))


def check_v(name: str, shape: Shape) -> None:
    """Raise ValueError unless there are two stages on each rank."""
    if shape.num_stages != 2 * shape.num_ranks:
        raise ValueError(
            f"{name} puts two stages on each rank, got {shape.num_stages} stages on {shape.num_ranks} ranks: there "
            "must be two on each; set chunks_per_device=2"
        )


def v_placement(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Two stages on each rank: down the ranks and up again."""
    last = shape.num_stages - 1
    return tuple((min(stage, last - stage),) for stage in range(shape.num_stages))


def rank_order(depth: int, rank: int, stages: tuple[int, int], batches: tuple[Sequence[int], Sequence[int]]) -> Row:
    """One step on a rank, counted from the ends of the V, which has `depth` ranks from there to its turn.

    Chunks 0 and 1 have a stage each, and equally many microbatches, at least 2 * depth.
    """
    return tuple(_RankOrder(stages, batches).run(depth, rank))


class _RankOrder:
    """A rank's row, written phase by phase; every kind and chunk takes its microbatches in order."""

    def __init__(self, stages: tuple[int, int], batches: tuple[Sequence[int], Sequence[int]]) -> None:
        self.row: list[Action] = []
        self.size = len(batches[0])
        self.forwards, self.backwards = (
            [iter(actions(kind, stage, batch)) for stage, batch in zip(stages, batches, strict=True)]
            for kind in (Kind.F, Kind.B)
        )
        self.weights: list[Action] = []  # weight gradients put off

    def run(self, depth: int, rank: int) -> list[Action]:
        inner = depth - 1 - rank  # ranks between this one and the turn
        for _ in range(2 * inner):  # 1: warm up
            self._forward(0)
        for _ in range(rank + 1):  # 2: both chunks forward
            self._forward(0)
            self._forward(1)
        for _ in range(inner):  # 3: first backwards, their halves apart so that the next rank can begin
            self._backward(1, split=True)
            self._put_off_weight()
            self._forward(1)
        for number in range(self.size - 2 * depth + rank + 1):  # 4: steady
            if number or inner:
                self._both(0, 1)
            else:  # at the turn the first backward needs what the forward beside it would make
                self._forward(0)
                self._backward(1)
            self._both(1, 0)
        for _ in range(inner):  # 5: no forwards of chunk 0 are left
            self._backward(1)
            self._both(1, 0)
        halfway = rank + 1
        for number in range(2 * (rank + 1)):  # 6: backwards alone; from half of them on, weights wait
            self._backward(1 - number % 2, split=number >= halfway)
        for _ in range(inner):  # 7: weights fill the gaps
            self._put_off_weight()
            self._backward(0, split=True)
        while self.weights:  # 8: the rest
            self._put_off_weight()
        return self.row

    def _forward(self, chunk: int) -> None:
        self.row.append(next(self.forwards[chunk]))

    def _backward(self, chunk: int, *, split: bool = False) -> None:
        action = next(self.backwards[chunk])
        self.row.append(action._replace(kind=Kind.I) if split else action)
        if split:
            self.weights.append(action._replace(kind=Kind.W))

    def _put_off_weight(self) -> None:
        self.row.append(self.weights.pop(0))

    def _both(self, forward: int, backward: int) -> None:
        self.row.append(overlap(next(self.forwards[forward]), next(self.backwards[backward])))
