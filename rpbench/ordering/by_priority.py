"""Orders by priority on a V: in every unit slot, a rank takes the most urgent pass that is ready and has room.

Rank r holds stages r and 2p-1-r. The most urgent is a forward of the upper chunk, then one of the lower, then an input
gradient of the upper, then of the lower; a weight gradient comes when nothing else can run. A forward takes room for a
chunk of activations. At most so many of the lower chunk are held that a microbatch on its way has room on every rank
to turn and come back. All passes take a slot and hops take none.
"""

from rpbench.ir.action import Kind
from rpbench.ordering.list_order import Pass

# Kind and whether it is of the upper chunk, the most urgent first.
_URGENCY = ((Kind.F, True), (Kind.F, False), (Kind.I, True), (Kind.I, False))


def order_by_priority(num_ranks: int, num_microbatches: int, limit: int, of_lower: int) -> list[list[Pass]] | None:
    """F and I of every rank in the order they are taken; None where no rank can go on.

    Args:
        limit: chunk activations on a rank.
        of_lower: the most of them that are of its lower chunk.
    """
    return _Slots(num_ranks, num_microbatches, limit, of_lower).run()


class _Slots:
    """Ranks, slot by slot."""

    def __init__(self, num_ranks: int, num_microbatches: int, limit: int, of_lower: int) -> None:
        self.num_ranks, self.num_microbatches, self.limit, self.of_lower = num_ranks, num_microbatches, limit, of_lower
        self.top = 2 * num_ranks - 1
        self.done = {kind: [0] * (self.top + 1) for kind in (Kind.F, Kind.I)}  # by stage; microbatches come in order
        self.weights: list[list[int]] = [[] for _ in range(num_ranks)]  # stages whose W is to be done
        self.held = [0] * (self.top + 1)  # chunk activations, by stage
        self.rows: list[list[Pass]] = [[] for _ in range(num_ranks)]

    def run(self) -> list[list[Pass]] | None:
        while self.done[Kind.I][0] < self.num_microbatches:
            chosen = [self._choose(rank) for rank in range(self.num_ranks)]
            if not any(chosen) and not any(self.weights):
                return None
            for rank, what in enumerate(chosen):
                if what is not None:
                    self._take(rank, what)
                elif self.weights[rank]:
                    self.held[self.weights[rank].pop(0)] -= 1
        return self.rows

    def _choose(self, rank: int) -> Pass | None:
        """The most urgent pass that is ready at the beginning of the slot."""
        lower, upper = rank, self.top - rank
        is_full = self.held[lower] + self.held[upper] >= self.limit
        for kind, is_upper in _URGENCY:
            stage = upper if is_upper else lower
            no_room = is_full or (not is_upper and self.held[lower] >= self.of_lower)
            if kind is Kind.F and no_room:
                continue
            microbatch = self.done[kind][stage]
            if microbatch < self._arrived(kind, stage):
                return Pass(kind, stage, microbatch)
        return None

    def _arrived(self, kind: Kind, stage: int) -> int:
        """How many microbatches have come to a pass."""
        if kind is Kind.F:
            return self.done[kind][stage - 1] if stage else self.num_microbatches
        return self.done[Kind.I][stage + 1] if stage < self.top else self.done[Kind.F][stage]

    def _take(self, rank: int, what: Pass) -> None:
        self.done[what.kind][what.stage] += 1
        self.rows[rank].append(what)
        if what.kind is Kind.F:
            self.held[what.stage] += 1
        else:
            self.weights[rank].append(what.stage)
