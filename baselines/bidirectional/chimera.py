"""Chimera: two 1F1B pipelines through the same ranks in opposite directions, fitted into each other.

Rank r holds stage r of the pipeline that goes down and stage p - 1 - r of the one that goes up: two copies of the
weights, whose gradients are summed before the step. Each pipeline takes half of the microbatches. If forward and
backward are equally long, one runs exactly where the other would wait. With 4 ranks and 4 microbatches, of which 2 and
3 go up:

    rank 0   0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
    rank 1   1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    rank 2   1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
    rank 3   0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3

A unit is p microbatches; several units follow one another, each filling the end of the one before. If F = B the
makespan is 2m + p - 2 slots; if B = 2F and m = p the idle share is (p - 2) / (3m/2 + p - 2). A rank holds p/2 + 1
(ends) to p (middle) stage activations.

If B = 2F, units do not fit into each other. So for m > p the times choose among the units, an order that repeats one
microbatch of each direction (`rpbench.ordering.periodic`), and both with passes pulled forward; no rank may hold more
than p activations.

Source: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC'21.
The merged order is a list schedule on unit slots: backward first, then the forward of the deeper stage, with at most
min(p - s, p/2) microbatches in flight per direction at stage s.

`pipelines=2f` runs f pipelines in each direction, each shifted by p/f ranks: the j-th microbatch of a pipeline enters
at slot 2j, advances one stage per slot, and comes back. If F = B the bubble is p/f - 2, at 2f copies of the weights.
With 4 ranks and 4 pipelines no slot is empty:

    rank 0   0F0 1F3 2F1 3F2 3B2 2B1 1B3 0B0
    rank 1   0F3 1F0 2F2 3F1 3B1 2B2 1B0 0B3

`forward_doubling` is the paper's remedy for several units if B = 2F: a forward takes two microbatches at once and is
then as long as a backward of one.

`backward_halving` is its other remedy: a forward takes a microbatch and each backward half of one. The microbatches of
the shape are then halves, numbered in a row, and the order is that of doubling. With 4 ranks and 4 microbatches, where
0F01 is one forward of halves 0 and 1:

    rank 0   0F01 0F23 3F45 3B4 3B5 3F67 3B6 3B7 0B0 0B1 0B2 0B3
    rank 1   1F01 2F45 1F23 2F67 2B4 2B5 1B0 1B1 2B6 2B7 1B2 1B3
    rank 2   1F45 2F01 1F67 2F23 2B0 2B1 1B4 1B5 2B2 2B3 1B6 1B7
    rank 3   0F45 0F67 3F01 3B0 3B1 3F23 3B2 3B3 0B4 0B5 0B6 0B7
"""

from collections.abc import Iterator
from functools import lru_cache

from baselines.bidirectional.dualpipe import bidirectional_placement, check_both_ways
from baselines.bidirectional.hanayo import ends_first
from rpbench.ir.action import Action, Kind, overlap
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, step_rows
from rpbench.ordering.list_order import Pass, Pull, Rows, repeat_steps
from rpbench.ordering.periodic import grids, make_period
from rpbench.registry import schedule

PULLS = (Pull(16, 0.0), Pull(48, 1.0))


@schedule("chimera", source="Li and Hoefler, SC'21", needs_costs=True, halved={"backward_halving": True})
def chimera(
    shape: Shape,
    costs: StageCosts,
    *,
    pipelines: int = 2,  # of both directions together; p must be a multiple of it
    forward_doubling: bool = False,  # forwards take two microbatches at once, and a unit has 2p
    backward_halving: bool = False,  # microbatches are halves: a forward takes two of them, a backward one
) -> Schedule:
    """Of the p microbatches of a unit, the first half goes down and the second up."""
    p, m = shape.num_ranks, shape.num_microbatches
    check_both_ways("chimera", shape)
    in_pairs = forward_doubling or backward_halving
    _check_options(p, pipelines, forward_doubling=forward_doubling, backward_halving=backward_halving)
    _check_units(p, m, in_pairs=in_pairs, halves=1 + backward_halving)
    placement = bidirectional_placement(shape)
    if pipelines > 2:
        step = _of_slots(p, m, pipelines)
        placement = tuple(tuple(route[stage] for route in _routes(p, pipelines)) for stage in range(p))
    else:
        step = _merge(p, m // 2) if in_pairs else _by_times(p, m, costs)
    rows = repeat_steps(shape, step)
    if in_pairs:
        rows = step_rows(shape, lambda rank, batch: (one for what in step[rank] for one in _paired(what, batch.start)))
    return Schedule(shape, rows, name="chimera", placement=placement)


def _check_units(p: int, m: int, *, in_pairs: bool, halves: int) -> None:
    """Refuse parts of units; the message counts requested microbatches, each `halves` of the shape's."""
    unit = p * (1 + in_pairs)
    if m % unit:
        asked, whole = f"{m / halves:g}", unit // halves
        raise ValueError(
            f"chimera runs {asked} microbatches in units of {whole // p} for each rank: they must be a multiple of "
            f"{whole}; take num_microbatches={(m + -m % unit) // halves}"
        )


def _check_options(p: int, pipelines: int, *, forward_doubling: bool, backward_halving: bool) -> None:
    if type(pipelines) is not int or pipelines < 2 or pipelines % 2 or p % pipelines:
        raise ValueError(
            f"schedule.pipelines={pipelines}: an even number, of which {p} ranks must be a multiple; try 2"
        )
    if forward_doubling and backward_halving:
        raise ValueError(
            "schedule.forward_doubling=true with schedule.backward_halving=true: each alone makes a forward as long as "
            "a backward; take one of the two"
        )
    if pipelines > 2 and (forward_doubling or backward_halving):
        option, members = ("backward_halving", "halves") if backward_halving else ("forward_doubling", "microbatches")
        raise ValueError(
            f"schedule.pipelines={pipelines} with schedule.{option}=true: pairs of {members} are for two "
            "pipelines; take one of the two"
        )


def _paired(what: Pass, first: int) -> list[Action]:
    """A pass of a pair of microbatches, or of halves: forwards together, backwards one after the other."""
    pair = [Action(what.kind, what.stage, first + 2 * what.microbatch + other) for other in (0, 1)]
    return [overlap(*pair)] if what.kind is Kind.F else pair


def _routes(p: int, pipelines: int) -> list[list[int]]:
    """The ranks of every pipeline's stages: first the pipelines that go down, then those that go up."""
    each = pipelines // 2
    down = [[(stage + number * p // each) % p for stage in range(p)] for number in range(each)]
    up = [[(p - 1 - stage + number * p // each) % p for stage in range(p)] for number in range(each)]
    return down + up


def _of_slots(p: int, m: int, pipelines: int) -> Rows:
    """Units one after another; in each, the microbatches of a pipeline follow each other by two slots."""
    size = p // pipelines
    rows: list[list[Pass]] = [[] for _ in range(p)]
    for unit in range(0, m, p):
        slots: list[list[tuple[int, Pass]]] = [[] for _ in range(p)]
        for number, route in enumerate(_routes(p, pipelines)):
            for member in range(size):
                microbatch = unit + number * size + member
                for stage, rank in enumerate(route):
                    slots[rank].append((2 * member + stage, Pass(Kind.F, stage, microbatch)))
                    slots[rank].append((2 * member + 2 * p - 1 - stage, Pass(Kind.B, stage, microbatch)))
        for rank, row in enumerate(slots):
            rows[rank] += [what for _, what in sorted(row)]
    return rows


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _by_times(p: int, m: int, costs: StageCosts) -> Rows:
    """The rows of one step that end first."""

    def rank_of(stage: int, microbatch: int) -> int:
        return stage if _goes_down(microbatch, p) else p - 1 - stage

    if m == p:
        return _merge(p, m)
    repeated = (_repeat(p, m, *grid) for grid in grids(costs))
    return ends_first(_merge(p, m), repeated, (), rank_of, costs, p, PULLS)


def _goes_down(microbatch: int, p: int) -> bool:
    """In a unit of p microbatches the first half goes down and the second up."""
    return microbatch % p < p // 2


def _batches(p: int, m: int) -> list[list[int]]:
    return [[mb for mb in range(m) if _goes_down(mb, p) == down] for down in (True, False)]


@lru_cache(maxsize=8)  # the same under many times, as a search of cuts asks
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


@lru_cache(maxsize=8)  # the same under many times, as a search of cuts asks
def _merge(p: int, m: int) -> Rows:
    """Two pipelines on a grid of equal slots; a rank runs a ready backward first, else the deeper stage's forward."""
    batches = _batches(p, m)
    rows: list[list[Pass]] = [[] for _ in range(p)]
    over = {kind: [[0] * p for _ in batches] for kind in (Kind.F, Kind.B)}  # passes that have ended, by way and stage

    def can_run(kind: Kind, stage: int, way: int) -> bool:
        forwards, backwards = over[Kind.F][way], over[Kind.B][way]
        if kind is Kind.F:
            room = min(p - stage, p // 2) - (forwards[stage] - backwards[stage])
            above = forwards[stage - 1] if stage else len(batches[way])
            return room > 0 and forwards[stage] < above
        return backwards[stage] < (backwards[stage + 1] if stage < p - 1 else forwards[stage])

    def choices(rank: int) -> Iterator[tuple[Kind, int, int]]:
        stages = sorted([(rank, 0), (p - 1 - rank, 1)], reverse=True)
        return ((kind, stage, way) for kind in (Kind.B, Kind.F) for stage, way in stages if can_run(kind, stage, way))

    while sum(map(len, rows)) < 2 * p * m:
        chosen = [next(choices(rank), None) for rank in range(p)]
        for row, found in zip(rows, chosen, strict=True):
            if found is not None:
                kind, stage, way = found
                row.append(Pass(kind, stage, batches[way][over[kind][way][stage]]))
                over[kind][way][stage] += 1
    return rows
