"""Chimera: two 1F1B pipelines through the same ranks in opposite directions, fitted into each other.

Rank r holds stage r of the pipeline that goes down and stage p - 1 - r of the one that goes up: two copies of the
weights, whose gradients are summed before the step. Each takes half of the microbatches, and with forward and
backward of equal length one runs exactly where the other would wait. With 4 ranks and 4 microbatches, of which 2
and 3 go up:

    rank 0   0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
    rank 1   1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    rank 2   2F0 1F2 2F1 1F3 2B0 1B2 2B1 1B3
    rank 3   3F0 0F2 ...                        rows 2 and 3 mirror 1 and 0

A unit is p microbatches; more of them are units one after another, each filling the end of the one before. With
F = B the makespan is 2m + p - 2 slots; with B = 2F and m = p the idle share is (p - 2) / (3m/2 + p - 2). A rank
holds p/2 + 1 (ends) to p (middle) stage activations.

With B = 2F units do not fit into each other. So for m > p the order is looked for by times: among the units', one
that repeats a microbatch of each direction (`rpbench.ordering.periodic`), and both with passes pulled forward, as long
as no rank holds more than p. For B = 2F its idle share is (p - 2) / (3m/2 + p - 2), whatever the number of units.

Source: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC'21.
The merged order is found by a list schedule on unit slots: backward first, then the forward of the deeper stage, with
at most min(p - s, p/2) microbatches in flight per direction at stage s. The paper's cures for more units, forward
doubling and backward halving, are not here: ours need no more memory.
"""

from collections.abc import Iterator
from functools import lru_cache

from baselines.dualpipe import bidirectional_placement
from rpbench.ir.action import Action, Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ordering.list_order import Pass, Rows, Timed, shortest, time_rows
from rpbench.ordering.periodic import grids, make_period
from rpbench.ordering.pull import Pull, pull_rows
from rpbench.registry import schedule

PULLS = (Pull(16, 0.0), Pull(48, 1.0))


@schedule("chimera", source="Li and Hoefler, SC'21", needs_costs=True)
def chimera(shape: Shape, costs: StageCosts) -> Schedule:
    """Of the p microbatches of a unit, the first half goes down and the second up."""
    p, m = shape.num_ranks, shape.num_microbatches
    if shape.num_stages != p:
        raise ValueError(
            f"chimera puts one stage of each direction on each rank, got {shape.num_stages} stages on {p} ranks; "
            "set chunks_per_device=1"
        )
    if p % 2:
        raise ValueError(
            f"chimera's two pipelines meet in the middle: the {p} ranks must be an even number; "
            f"take num_devices={p + 1}"
        )
    if m % p:
        raise ValueError(
            f"chimera runs {m} microbatches in units of one for each rank: they must be a multiple of {p}; "
            f"take num_microbatches={m + -m % p}"
        )
    rows: list[list[Action]] = [[] for _ in range(p)]
    for step in range(shape.num_steps):
        for rank, row in enumerate(_by_times(p, m, costs)):
            rows[rank] += [Action(kind, stage, microbatch + step * m) for kind, stage, microbatch in row]
    return Schedule(shape, tuple(map(tuple, rows)), name="chimera", placement=bidirectional_placement(shape))


@lru_cache(maxsize=4)  # who chooses a partition asks for its order more than once
def _by_times(p: int, m: int, costs: StageCosts) -> Rows:
    """The rows of one step that end first."""

    def rank_of(stage: int, microbatch: int) -> int:
        return stage if _goes_down(microbatch, p) else p - 1 - stage

    def timed(rows: Rows) -> Timed:
        return time_rows(rows, rank_of, costs)

    def trials() -> Iterator[Timed]:
        repeated = [timed(_repeat(p, m, *grid)) for grid in grids(costs)]
        yield from repeated
        for base in (made, *repeated):
            for how in PULLS:
                yield timed(pull_rows(base.rows, rank_of, costs, max(p, base.peak), how))

    made = timed(_merge(p, m))
    return shortest(made, trials(), p).rows if m > p else made.rows


def _goes_down(microbatch: int, p: int) -> bool:
    """In a unit of p microbatches the first half goes down and the second up."""
    return microbatch % p < p // 2


def _batches(p: int, m: int) -> list[list[int]]:
    return [[mb for mb in range(m) if _goes_down(mb, p) == down] for down in (True, False)]


def _repeat(p: int, m: int, forward: float, backward: float) -> Rows:
    """A microbatch of each direction a period."""
    routes = [list(range(p)), list(reversed(range(p)))]
    period = make_period(routes, p, forward, backward)
    rows: list[list[tuple[float, Pass]]] = [[] for _ in range(p)]
    for route, batch, starts in zip(routes, _batches(p, m), period.starts, strict=True):
        for number, microbatch in enumerate(batch):
            for (kind, stage), start in starts.items():
                rows[route[stage]].append((start + number * period.length, Pass(kind, stage, microbatch)))
    return [[what for _, what in sorted(row)] for row in rows]


def _merge(p: int, m: int) -> Rows:
    """Units one after another, found on a grid of equal slots."""
    grid = _Grid(p, _batches(p, m))
    while grid.left:
        grid.run_slot()
    return grid.rows


class _Grid:
    """Two pipelines on their way, one slot after another; `over` counts what has ended."""

    def __init__(self, p: int, batches: list[list[int]]) -> None:
        self.p, self.batches = p, batches
        self.rows: list[list[Pass]] = [[] for _ in range(p)]
        self.left = 2 * p * sum(map(len, batches))
        self.over = {kind: [[0] * p for _ in batches] for kind in (Kind.F, Kind.B)}  # by direction and stage

    def run_slot(self) -> None:
        """On every rank: a backward if there is one, else the forward of the deeper stage."""
        chosen = []
        for rank in range(self.p):
            stages = sorted([(rank, 0), (self.p - 1 - rank, 1)], reverse=True)
            tried = ((kind, stage, way) for kind in (Kind.B, Kind.F) for stage, way in stages)
            chosen.append(next((found for found in tried if self._can_run(*found)), None))
        for rank, found in enumerate(chosen):
            if found is not None:
                kind, stage, way = found
                self.rows[rank].append(Pass(kind, stage, self.batches[way][self.over[kind][way][stage]]))
                self.over[kind][way][stage] += 1
                self.left -= 1

    def _can_run(self, kind: Kind, stage: int, way: int) -> bool:
        forwards, backwards = self.over[Kind.F][way], self.over[Kind.B][way]
        if kind is Kind.F:
            room = min(self.p - stage, self.p // 2) - (forwards[stage] - backwards[stage])
            above = forwards[stage - 1] if stage else len(self.batches[way])
            return room > 0 and forwards[stage] < above
        return backwards[stage] < (backwards[stage + 1] if stage < self.p - 1 else forwards[stage])
