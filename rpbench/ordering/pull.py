"""Orders that do not wait: a rank whose next pass is not ready takes a later one of its row that is.

Pulling a forward holds its activations for longer. It is safe if the rest of the row, left as it is, still keeps to
the limit: then whatever was pulled, the rows can always be finished.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ordering.list_order import ROUNDING, Pass, RankOf, Rows


@dataclass(frozen=True)
class Pull:
    """How eagerly a rank takes a later pass.

    Args:
        window: how many passes it looks ahead.
        lateness: the share of the pulled pass's time by which it may hold up the next one.
        fill: the share of its time that W must find free where nothing can be pulled.
    """

    window: int
    lateness: float
    fill: float = 1.0


# Settings worth trying, the one that is best most often first.
PULLS = (Pull(4, 0.5, 0.25), Pull(16, 0.0), Pull(48, 1.0), Pull(8, 0.5, 0.0), Pull(48, 0.5))


def pull_rows(rows: Rows, rank_of: RankOf, costs: StageCosts, limit: int, how: Pull) -> list[list[Pass]]:
    """The same passes in the order in which ranks take them that would rather not wait.

    Args:
        rows: of F with B, or of F with I; W is none of them, but room and time are left for it.
        limit: chunk activations on a rank; the rows keep to it.
    """
    return _Puller(rows, rank_of, costs, limit, how).run()


class _Puller:
    """Ranks that take what is ready, on a clock."""

    def __init__(self, rows: Rows, rank_of: RankOf, costs: StageCosts, limit: int, how: Pull) -> None:
        self.left = [list(row) for row in rows]
        self.backward = Kind.I if any(what.kind is Kind.I for what in rows[0]) else Kind.B
        self.rank_of, self.costs, self.limit, self.how = rank_of, costs, limit, how
        self.times, self.last_stage = costs.times(len(rows)), costs.num_stages - 1
        self.taken: list[list[Pass]] = [[] for _ in rows]
        self.ready = {what: 0.0 for row in rows for what in row if what.kind is Kind.F and not what.stage}
        self.free, self.held = [0.0] * len(rows), [0] * len(rows)
        self.pending: list[deque[int]] = [deque() for _ in rows]  # stages whose W is to be done
        self.clock = [(0.0, rank) for rank in range(len(rows))]

    def run(self) -> list[list[Pass]]:
        while self.clock:
            now, rank = heappop(self.clock)
            if self.free[rank] <= now + ROUNDING and self.left[rank]:
                self._go_on(rank, now)
        return self.taken

    def _go_on(self, rank: int, now: float) -> None:
        """Take the next pass, or a later one, or W, or look again when the next can run."""
        following, pending = self.left[rank][0], self.pending[rank]
        ready = self.ready.get(following)
        full = following.kind is Kind.F and self.held[rank] >= self.limit
        if full and pending:
            self._weight_grad(rank, now)
        elif ready is not None and ready <= now + ROUNDING and not full:
            self._take(rank, now, 0)
        elif (number := self._later(rank, now, None if full else ready)) is not None:
            self._take(rank, now, number)
        elif pending and (ready is None or now + self.times[Kind.W][pending[0]] * self.how.fill <= ready + ROUNDING):
            self._weight_grad(rank, now)
        elif ready is not None and ready > now:
            heappush(self.clock, (ready, rank))
        else:
            coming = [self.ready.get(what, 0.0) for what in self.left[rank][: self.how.window]]
            later = [time for time in coming if time > now]
            if later:
                heappush(self.clock, (min(later), rank))

    def _later(self, rank: int, now: float, until: float | None) -> int | None:
        """The first later pass that is ready, hardly holds up the next one (at `until`), and leaves enough room."""
        held, known, soon = self.held[rank], self.ready, now + ROUNDING
        least = most = held - len(self.pending[rank])
        for number, what in enumerate(self.left[rank][: self.how.window]):
            ready, forward = known.get(what), what[0] is Kind.F
            if number and ready is not None and ready <= soon:
                time = self.times[what.kind][what.stage]
                in_time = until is None or now + time * (1 - self.how.lateness) <= until + ROUNDING
                if in_time and (not forward or max(most, held) < self.limit):
                    return number
            least += 1 if forward else -1
            if least > most:
                most = least
        return None

    def _take(self, rank: int, now: float, number: int) -> None:
        what = self.left[rank].pop(number)
        kind, stage, microbatch = what
        end = self._spend(rank, now, self.times[kind][stage])
        self.taken[rank].append(what)
        if kind is Kind.F:
            self.held[rank] += 1
            last = stage == self.last_stage
            following = (Kind.F, stage + 1) if not last else (self.backward, stage)
        else:
            following = kind, stage - 1
            if kind is Kind.I:
                self.pending[rank].append(stage)
            else:
                self.held[rank] -= 1
        if following[1] >= 0:
            self._send(rank, end, Pass(*following, microbatch))

    def _send(self, rank: int, end: float, what: Pass) -> None:
        taker = self.rank_of(what.stage, what.microbatch)
        self.ready[what] = arrives = end if taker == rank else end + self.costs.hop
        heappush(self.clock, (arrives, taker))

    def _weight_grad(self, rank: int, now: float) -> None:
        self._spend(rank, now, self.times[Kind.W][self.pending[rank].popleft()])
        self.held[rank] -= 1

    def _spend(self, rank: int, now: float, time: float) -> float:
        self.free[rank] = now + time
        heappush(self.clock, (now + time, rank))
        return now + time
