"""Orders under given times: how long they take, and which is best.

Generators that know what stages cost (`StageCosts`) try several orders, a row of passes for every rank, and keep the
best. `time_rows` runs an order as it is; W can be left to it, which places them where a rank would wait or needs the
room. `rpbench.ordering.pull` makes other orders of the same passes.

Memory is counted in chunk activations: one more from F on, one less from the end of B or W on.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts

# Rounding of times that are sums: what lies closer together is the same moment.
ROUNDING = 1e-9
# Whoever looks for an order tries as many as this many passes make, at least one.
PASSES_TO_TRY = 200_000


class Pass(NamedTuple):
    """An action of a stage and microbatch, whatever its rank."""

    kind: Kind
    stage: int
    microbatch: int


Rows = Sequence[Sequence[Pass]]
RankOf = Callable[[int, int], int]  # stage, microbatch -> rank


class Fill(Enum):
    """Which waits W takes that are shorter than itself; those that are long enough it always takes."""

    ANY = "any"
    MOST = "those of three quarters of its time"
    SPARE = "those that would make its rank wait longer than the one that waits most"
    NONE = "none"


@dataclass(frozen=True)
class Timed:
    """An order and what it takes.

    Args:
        rows: of every rank.
        makespan: to the last end, in the unit of the costs.
        span: the longest time from a rank's first start to its last end.
        peak: the most chunk activations on a rank.
    """

    rows: Rows
    makespan: float
    span: float
    peak: int


def as_many_as_fit(trials: Iterable[Timed], num_passes: int) -> Iterator[Timed]:
    """The first trials of an order with so many passes, as many as there is time for."""
    return islice(trials, max(1, PASSES_TO_TRY // num_passes))


def shortest(made: Timed, trials: Iterable[Timed], limit: int) -> Timed:
    """The order that ends first: `made`, or a trial that ends before it and holds no more than the limit or than it."""
    limit = max(limit, made.peak)
    sound = (trial for trial in as_many_as_fit(trials, sum(map(len, made.rows))) if trial.peak <= limit)
    return min((made, *sound), key=lambda trial: round(trial.makespan / (made.makespan or 1.0), 9))


# --- an order as it is --------------------------------------------------------------------------------------


def time_rows(rows: Rows, rank_of: RankOf, costs: StageCosts, *, fill: Fill | None = None, limit: int = 0) -> Timed:
    """Run every row in order, each pass as soon as its rank and its input are there.

    Args:
        rows: of F with B or I (and W, HF, HB); they do not deadlock.
        fill: None for rows that have all their passes; otherwise they lack W, which come as said.
        limit: chunk activations that W makes room for, with `fill`.
    """
    run = _Run(len(rows), rank_of, costs, fill, limit)
    run.head = any(what.kind is Kind.HB for what in rows[0])
    following, unfinished = [0] * len(rows), list(range(len(rows)))
    while unfinished:
        num_taken = sum(following)
        for rank in unfinished:
            following[rank] = run.go_on(rank, rows[rank], following[rank])
        unfinished = [rank for rank in unfinished if following[rank] < len(rows[rank])]
        assert not unfinished or sum(following) > num_taken, "rows that wait for each other"
    return run.finish()


class _Shares:
    """How many shares of the head have ended, and when and where the last two of them did."""

    def __init__(self) -> None:
        self.count, self.last, self.second, self.last_rank = 0, 0.0, 0.0, 0

    def add(self, rank: int, end: float) -> None:
        self.count += 1
        if end >= self.last:
            self.last, self.second, self.last_rank = end, self.last, rank
        else:
            self.second = max(self.second, end)


class _Run:
    """Rows while they run."""

    head = False  # whether the head is cut over the ranks

    def __init__(self, num_ranks: int, rank_of: RankOf, costs: StageCosts, fill: Fill | None, limit: int) -> None:
        self.rank_of, self.costs, self.fill, self.limit = rank_of, costs, fill, limit
        self.rows: list[list[Pass]] = [[] for _ in range(num_ranks)]
        self.pending: list[deque[Pass]] = [deque() for _ in range(num_ranks)]
        self.forward: list[dict[int, float]] = [{} for _ in range(costs.num_stages)]  # ends, by microbatch
        self.backward: list[dict[int, float]] = [{} for _ in range(costs.num_stages)]
        self.shares: dict[tuple[Kind, int], _Shares] = {}  # of the head, by microbatch
        self.now, self.idle = [0.0] * num_ranks, [0.0] * num_ranks
        self.started: list[float | None] = [None] * num_ranks
        self.held, self.peak = [0] * num_ranks, 0
        self.times = costs.times(num_ranks)
        self.last_stage, self.hop = costs.num_stages - 1, costs.hop

    def go_on(self, rank: int, row: Sequence[Pass], place: int) -> int:
        """Run the passes of a row from a place on, until one lacks its input; the place of that one."""
        head, fill, last_stage, times = self.head, self.fill, self.last_stage, self.times
        forward, backward = self.forward, self.backward
        while place < len(row):
            what = row[place]
            kind, stage, microbatch = what
            if kind is Kind.F:
                arrives = self._handed(rank, forward, stage - 1, microbatch) if stage else 0.0
            elif kind is Kind.W:
                arrives = 0.0
            elif not head:
                turns = stage == last_stage
                arrives = self._handed(rank, forward if turns else backward, stage + (not turns), microbatch)
            else:
                arrives = self._through_head(rank, what)
            if arrives is None:
                return place
            place += 1
            if fill is not None:
                self._fill(rank, kind, arrives)
            end = self._take(rank, what, arrives, times[kind][stage])
            if kind is Kind.F:
                self.held[rank] = held = self.held[rank] + 1
                if held > self.peak:
                    self.peak = held
                forward[stage][microbatch] = end
            elif kind is Kind.B:
                self.held[rank] -= 1
                backward[stage][microbatch] = end
            elif kind is Kind.I:
                backward[stage][microbatch] = end
                if fill is not None:
                    self.pending[rank].append(Pass(Kind.W, stage, microbatch))
            elif kind is Kind.W:
                self.held[rank] -= 1
            else:
                self.shares.setdefault((kind, microbatch), _Shares()).add(rank, end)
        return place

    def _handed(self, rank: int, source: list[dict[int, float]], stage: int, microbatch: int) -> float | None:
        """When what a pass of a stage has made is on a rank; None while nobody knows."""
        ended = source[stage].get(microbatch)
        if ended is None or not self.hop or self.rank_of(stage, microbatch) == rank:
            return ended
        return ended + self.hop

    def _through_head(self, rank: int, what: Pass) -> float | None:
        """The same of what is no F or W, where the head is cut over the ranks."""
        kind, stage, microbatch = what
        if kind is Kind.HF:
            return self._handed(rank, self.forward, self.last_stage, microbatch)
        if kind is Kind.HB:
            return self._gathered(Kind.HF, rank, microbatch)
        if stage == self.last_stage:
            return self._gathered(Kind.HB, rank, microbatch)
        return self._handed(rank, self.backward, stage + 1, microbatch)

    def _gathered(self, kind: Kind, rank: int, microbatch: int) -> float | None:
        """When the shares of all ranks are on one; a rank's own makes no hop."""
        shares = self.shares.get((kind, microbatch))
        if shares is None or shares.count < len(self.rows):
            return None
        others = shares.second if shares.last_rank == rank else shares.last
        return max(shares.last, others + self.costs.hop) if shares.last_rank == rank else others + self.costs.hop

    def finish(self) -> Timed:
        for rank, pending in enumerate(self.pending):
            while pending:
                self._weight_grad(rank)
        spans = [end - (start or 0.0) for start, end in zip(self.started, self.now, strict=True)]
        return Timed(self.rows, max(self.now), max(spans), self.peak)

    def _take(self, rank: int, what: Pass, arrives: float, time: float) -> float:
        """Run a pass; its end."""
        now = self.now[rank]
        started = arrives if arrives > now else now
        if self.started[rank] is None:
            self.started[rank] = started
        else:
            self.idle[rank] += started - now
        self.now[rank] = end = started + time
        self.rows[rank].append(what)
        return end

    def _weight_grad(self, rank: int) -> None:
        what = self.pending[rank].popleft()
        self._take(rank, what, 0.0, self.times[Kind.W][what.stage])
        self.held[rank] -= 1

    def _fill(self, rank: int, kind: Kind, arrives: float) -> None:
        pending = self.pending[rank]
        while pending and kind is Kind.F and self.held[rank] >= self.limit:
            self._weight_grad(rank)
        while pending and self.now[rank] + self.times[Kind.W][pending[0].stage] <= arrives + ROUNDING:
            self._weight_grad(rank)
        gap = arrives - self.now[rank]
        if pending and gap > ROUNDING and self._takes(rank, gap, self.times[Kind.W][pending[0].stage]):
            self._weight_grad(rank)

    def _takes(self, rank: int, gap: float, time: float) -> bool:
        if self.fill is Fill.SPARE:
            return gap > max(self.idle) - self.idle[rank]
        return self.fill is Fill.ANY or (self.fill is Fill.MOST and gap > 0.75 * time)
