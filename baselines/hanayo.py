"""Hanayo: waves. The stages go over the ranks and back again, W times, and each turn stays on its rank.

With W waves a rank holds v = 2W stages (chunks_per_device): stage c p + i is on rank i for even c and on rank
p - 1 - i for odd c, a V for W = 1. There is one copy of the weights. Ranks are greedy: a backward if one is ready,
of the first microbatch; else the forward that is deepest. With 2 ranks, 2 microbatches and one wave:

    rank 0   0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    rank 1   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

On the grid of equal slots that orders are made on (`backward_slots` 1), the bubble is 2(p - 1) chunk slots for F = B
and m a multiple of p, so its share is (p - 1) / (2Wm + p - 1); a rank holds p microbatches' activations at most,
2Wp of its chunks. For B = 2F and m = p the same order waits (2p - 2) / (3Wp + 2p - 2) of the time. Being greedy with
backwards of two slots (`backward_slots` 2) waits a little longer for W > 1, and holds more for m > p.

Source: Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency",
SC'23, section 3.
"""

from heapq import heappop, heappush

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule("hanayo", source="Liu et al., SC'23, section 3", looped=True, chunks=2)
def hanayo(shape: Shape, *, backward_slots: int = 1) -> Schedule:
    """Waves of greedy ranks.

    Args:
        shape: with an even number of stages on every rank, two a wave.
        backward_slots: how many times as long as a forward a backward is taken to be while the order is made.
    """
    if shape.num_stages % (2 * shape.num_ranks):
        raise ValueError(
            f"hanayo's waves go over {shape.num_ranks} ranks and back: the {shape.num_stages} stages must be a "
            f"multiple of {2 * shape.num_ranks}; set chunks_per_device=2 for one wave, 4 for two"
        )
    if backward_slots < 1:
        raise ValueError(f"schedule.backward_slots={backward_slots}: a backward takes at least 1 slot; try 1 or 2")
    placement = tuple((_rank_of(stage, shape.num_ranks),) for stage in range(shape.num_stages))
    step = _Greedy(shape, backward_slots).rows()
    rows = tuple(
        tuple(
            action._replace(microbatch=first + (action.microbatch or 0))
            for first in range(0, shape.total_microbatches, shape.num_microbatches)
            for action in row
        )
        for row in step
    )
    return Schedule(shape, rows, name="hanayo", placement=placement)


def _rank_of(stage: int, p: int) -> int:
    chunk, place = divmod(stage, p)
    return p - 1 - place if chunk % 2 else place


class _Greedy:
    """One step on a grid of slots: whoever is free takes what is ready."""

    def __init__(self, shape: Shape, backward_slots: int) -> None:
        self.p, self.num_stages = shape.num_ranks, shape.num_stages
        self.slots = {Kind.F: 1, Kind.B: backward_slots}
        self.ready: list[list[tuple[int, int, int, Action]]] = [[] for _ in range(self.p)]
        self.ending: dict[int, list[Action]] = {}  # slot -> what has ended when it begins
        for microbatch in range(shape.num_microbatches):
            self._offer(Action(Kind.F, 0, microbatch))

    def rows(self) -> list[list[Action]]:
        rows: list[list[Action]] = [[] for _ in range(self.p)]
        free_from, slot = [0] * self.p, 0
        while self.ending or any(self.ready):
            for ended in self.ending.pop(slot, ()):
                self._pass_on(ended)
            for rank, ready in enumerate(self.ready):
                if ready and free_from[rank] <= slot:
                    action = heappop(ready)[-1]
                    rows[rank].append(action)
                    free_from[rank] = slot + self.slots[action.kind]
                    self.ending.setdefault(free_from[rank], []).append(action)
            slot += 1
        return rows

    def _offer(self, action: Action) -> None:
        microbatch = action.microbatch or 0
        backward = action.kind is Kind.B
        order = (0, microbatch, -action.stage) if backward else (1, -action.stage, microbatch)
        heappush(self.ready[_rank_of(action.stage, self.p)], (*order, action))

    def _pass_on(self, ended: Action) -> None:
        """Offer what has waited for an action."""
        if ended.kind is Kind.F and ended.stage == self.num_stages - 1:
            self._offer(ended._replace(kind=Kind.B))
        elif ended.kind is Kind.F:
            self._offer(ended._replace(stage=ended.stage + 1))
        elif ended.stage:
            self._offer(ended._replace(stage=ended.stage - 1))
