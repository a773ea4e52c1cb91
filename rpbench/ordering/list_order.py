"""Orders under given times: how long they take, which is best, and orders that do not wait.

Generators that know the costs of stages (`StageCosts`) try several orders, a row of passes for every rank, and keep the
best. `time_rows` times an order; it can also place the W, where a rank would wait or needs the memory. `pull_rows` lets
a rank whose next pass is not ready take a later one of its row that is.

Memory is counted in chunk activations: one more from F on, one less from the end of B or W on. A pulled forward holds
its activations for longer. It is allowed if the rest of the row, left as it is, still keeps to the limit: then the rows
can always be finished.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice, pairwise, starmap
from typing import NamedTuple, overload

from rpbench.ir.action import Action, Kind, joined, listed, plain_of
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Row, Shape
from rpbench.ordering import loops
from rpbench.ordering.loops import CODES, KINDS, ROUNDING, Array, means

__all__ = ["ROUNDING"]

# A search tries as many orders as have this many passes in all, at least one.
PASSES_TO_TRY = 200_000


class Pass(NamedTuple):
    """An action of a stage and microbatch, without its rank."""

    kind: Kind
    stage: int
    microbatch: int


Rows = Sequence[Sequence[Pass]]
RankOf = Callable[[int, int], int]  # stage, microbatch -> rank


def as_passes(rows: Iterable[Iterable[Action]]) -> Rows:
    return [[Pass(action.kind, action.stage, action.microbatch or 0) for action in row] for row in rows]


def repeat_steps(shape: Shape, rows: Rows) -> tuple[Row, ...]:
    """The rows of one optimizer step as rows of actions, repeated for every step of the shape."""

    def row(kinds: Sequence[Kind], stages: Sequence[int], microbatches: Sequence[int]) -> Row:
        steps = (listed(kinds, stages, map(batch.start.__add__, microbatches)) for batch in shape.batches)
        return tuple(chain.from_iterable(steps))

    if isinstance(rows, Lanes):
        return tuple(starmap(row, rows.fields))
    return tuple(row(*zip(*passes, strict=True)) if passes else () for passes in rows)


class Lanes(Sequence[Sequence[Pass]]):
    """Rows as columns: kinds, stages and microbatches of all passes, row r from `start[r]` on."""

    def __init__(self, columns: loops.Passes) -> None:
        self.columns = columns

    @classmethod
    def of(cls, rows: Rows) -> "Lanes":
        if isinstance(rows, Lanes):
            return rows
        return cls._of(rows, *(zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((), (), ())))

    @classmethod
    def of_actions(cls, rows: Sequence[Sequence[Action]]) -> "Lanes":
        return cls._of(rows, *joined(list(map(plain_of, rows))).columns)

    @classmethod
    def _of(cls, rows: Sequence[Sized], kinds: Iterable[int], *others: Iterable[int]) -> "Lanes":
        columns = [0, *accumulate(map(len, rows))], list(map(CODES.__getitem__, kinds)), *others
        return cls(loops.Passes(*map(means().ints, columns)))

    @cached_property
    def fields(self) -> list[tuple[list[Kind], list[int], list[int]]]:
        """Kinds, stages and microbatches of each row."""
        start, kinds, *others = map(means().listed, self.columns)
        columns = [list(map(KINDS.__getitem__, kinds)), *others]
        return [tuple(column[first:last] for column in columns) for first, last in pairwise(start)]  # type: ignore[misc]

    @cached_property
    def _rows(self) -> list[list[Pass]]:
        return [list(map(Pass, *fields)) for fields in self.fields]

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max(means().listed(self.columns.microbatch))

    @cached_property
    def num_halved(self) -> list[int]:
        """Number of split backwards (I) in each row."""
        start, kinds = map(means().listed, self.columns[:2])
        return [kinds[first:last].count(loops.I) for first, last in pairwise(start)]

    @overload
    def __getitem__(self, rank: int) -> Sequence[Pass]: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Sequence[Pass]]: ...
    def __getitem__(self, rank: int | slice) -> Sequence[Pass] | Sequence[Sequence[Pass]]:
        return self._rows[rank]

    def __len__(self) -> int:
        return len(self.columns.start) - 1

    def without(self, kind: Kind) -> "Lanes":
        """The rows without the passes of a kind."""
        using, code = means(), CODES[kind]
        start, kinds = map(using.listed, self.columns[:2])
        places = using.ints([place for place, other in enumerate(kinds) if other != code])
        left = accumulate(last - first - kinds[first:last].count(code) for first, last in pairwise(start))
        columns = (using.taken(column, places) for column in self.columns[1:])
        return Lanes(loops.Passes(using.ints([0, *left]), *columns))


class Fill(Enum):
    """The idle times that are filled with a W although they are shorter than it; longer ones always are."""

    ANY = "any"
    MOST = "those of three quarters of its time"
    SPARE = "those that would make its rank wait longer than the one that waits most"
    NONE = "none"


@dataclass(frozen=True)
class Timed:
    """An order with its times and its memory."""

    rows: Rows  # of every rank
    makespan: float  # to the last end, in the unit of the costs
    span: float  # the longest time from a rank's first start to its last end
    peak: int  # the most chunk activations on a rank


def as_many_as_fit(trials: Iterable[Timed], num_passes: int) -> Iterator[Timed]:
    """As many trials as `PASSES_TO_TRY` allows for an order with so many passes."""
    return islice(trials, max(1, PASSES_TO_TRY // num_passes))


def shortest(made: Timed, trials: Iterable[Timed], limit: int) -> Timed:
    """The order that ends first: `made`, or an earlier trial that holds no more than the limit or than `made`."""
    limit = max(limit, made.peak)
    sound = (trial for trial in as_many_as_fit(trials, sum(map(len, made.rows))) if trial.peak <= limit)
    return min((made, *sound), key=lambda trial: round(trial.makespan / (made.makespan or 1.0), 9))


# --- an order as it is --------------------------------------------------------------------------------------


def time_rows(rows: Rows, rank_of: RankOf, costs: StageCosts, *, fill: Fill | None = None, limit: int = 0) -> Timed:
    """Run rows of F with B or I (and W, HF, HB) in order, each pass as soon as its rank and its input are there.

    They do not deadlock. With `fill` they lack W, which are put into idle times so; a W runs before a forward that
    would exceed the `limit` of chunk activations on a rank.
    """
    lanes, using = Lanes.of(rows), means()
    num_ranks, start, given = len(lanes), lanes.columns.start, _given(lanes, rank_of, costs, limit)
    waiting = [0] * num_ranks if fill is None else lanes.num_halved
    begins = [0, *accumulate(int(start[r + 1] - start[r]) + waiting[r] for r in range(num_ranks))]
    total, has_head = begins[-1], loops.HB in lanes.columns.kind[: start[1]]
    now, idle = using.filled(num_ranks, 0.0), using.filled(num_ranks, 0.0)
    began, pending = using.filled(num_ranks, -1.0), using.zeros(total)
    ends = using.filled(2 * given.num_stages * given.num_microbatches, -1.0)
    shares = using.filled(8 * given.num_microbatches if has_head else 0, 0.0)
    written, first_pending, last_pending = (using.ints(begins[:-1]) for _ in range(3))
    place, held = using.ints(start[:-1]), using.zeros(num_ranks)
    run = loops.Run(ends, shares, pending, first_pending, last_pending, place, written, now, idle, began, held)
    made = loops.Passes(using.ints(begins), *(using.zeros(total) for _ in range(3)))
    loop = using.compiled(loops.run_rows, *loops.RUN_PARTS, allocates=False)
    peak = loop(lanes.columns, given, _FILLS[fill], run, made)
    assert peak >= 0, "rows that wait for each other"
    spans = [float(end - max(0.0, first)) for first, end in zip(began, now, strict=True)]
    return Timed(Lanes(made), float(max(now)), max(spans), int(peak))


_FILLS = {
    None: loops.NO_FILL,
    Fill.NONE: loops.FILL_NONE,
    Fill.ANY: loops.FILL_ANY,
    Fill.MOST: loops.FILL_MOST,
    Fill.SPARE: loops.FILL_SPARE,
}


def _given(lanes: Lanes, rank_of: RankOf, costs: StageCosts, limit: int) -> loops.Given:
    num_ranks, num_stages, num_microbatches = len(lanes), costs.num_stages, lanes.num_microbatches
    tables = rank_table(rank_of, num_stages, num_microbatches, means()), times_table(costs, num_ranks, means())
    width, each = max(num_stages, num_ranks), max(1, len(costs.each))
    return loops.Given(*tables, num_stages, num_microbatches, width, each, float(costs.hop), limit)


# The tables are cached: loops only read them, and many orders in a row are tried with the same ones.


@lru_cache(maxsize=32)
def rank_table(rank_of: RankOf, num_stages: int, num_microbatches: int, using: loops.Means) -> Array:
    return using.ints([rank_of(stage, each) for stage in range(num_stages) for each in range(num_microbatches)])


@lru_cache(maxsize=4)
def times_table(costs: StageCosts, num_ranks: int, using: loops.Means) -> Array:
    """Times by kind and stage, or rank of the head's shards, and by microbatch."""
    every = costs.each or (costs,)
    width, num = max(costs.num_stages, num_ranks), len(every)
    found = using.filled(len(KINDS) * width * num, 0.0)
    for number, own in enumerate(every):
        times = own.times(num_ranks)
        for code, kind in enumerate(KINDS):
            for place, time in enumerate(times[kind]):
                found[(code * width + place) * num + number] = float(time)
    return found


@dataclass(frozen=True)
class Pull:
    """How eagerly a rank takes a later pass."""

    window: int  # number of passes it looks ahead
    lateness: float  # how long a pulled pass may delay the next one, as a fraction of its own time
    fill: float = 1.0  # idle time that W needs where nothing can be pulled, as a fraction of its own time


# Settings worth trying, the one that is best most often first.
PULLS = (Pull(4, 0.5, 0.25), Pull(16, 0.0), Pull(48, 1.0), Pull(8, 0.5, 0.0), Pull(48, 0.5))


def pull_rows(rows: Rows, rank_of: RankOf, costs: StageCosts, limit: int, how: Pull) -> Lanes:
    """The rows reordered: a rank whose next pass is not ready takes a later one that is.

    They are of F with B, or of F with I, without W; memory and time are left for the W. They keep to the `limit` of
    chunk activations on a rank.
    """
    lanes, using = Lanes.of(rows), means()
    start, *columns = lanes.columns
    num_ranks, num, given = len(lanes), len(columns[0]), _given(lanes, rank_of, costs, limit)
    ready = using.filled(2 * given.num_stages * given.num_microbatches, -1.0)
    for microbatch in range(given.num_microbatches):
        ready[microbatch] = 0.0
    left, out, at = using.ints(range(num)), using.zeros(num), using.zeros(num)
    takes, pending, free = using.filled(num, 0.0), using.filled(num, 0.0), using.filled(num_ranks, 0.0)
    held, (place, first_pending, last_pending) = using.zeros(num_ranks), (using.ints(start[:-1]) for _ in range(3))
    state = loops.Pulling(left, out, at, takes, pending, ready, free, held, place, first_pending, last_pending)
    loop = using.compiled(loops.pull, *loops.PULL_PARTS)
    loop(lanes.columns, given, how.window, float(how.lateness), float(how.fill), state)
    return Lanes(loops.Passes(start, *(using.taken(column, out) for column in columns)))
