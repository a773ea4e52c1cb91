"""Orders that do not wait: a rank whose next pass is not ready takes a later one of its row that is.

Pulling a forward holds its activations for longer. It is safe if the rest of the row, left as it is, still keeps to
the limit: then whatever was pulled, the rows can always be finished.
"""

from dataclasses import dataclass

from rpbench.ir.costs import StageCosts
from rpbench.ordering import loops
from rpbench.ordering.list_order import Lanes, RankOf, Rows, rank_table, sizes_of, times_table
from rpbench.ordering.loops import means


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


def pull_rows(rows: Rows, rank_of: RankOf, costs: StageCosts, limit: int, how: Pull) -> Lanes:
    """The same passes in the order in which ranks take them that would rather not wait.

    Args:
        rows: of F with B, or of F with I; W is none of them, but room and time are left for it.
        limit: chunk activations on a rank; the rows keep to it.
    """
    lanes, using = Lanes.of(rows), means()
    num_ranks, sizes, num = len(lanes), sizes_of(lanes, costs), len(lanes.kind)
    left, out = using.ints(range(num)), using.zeros(num)
    ready = using.filled(2 * sizes[0] * sizes[1], -1.0)
    for microbatch in range(sizes[1]):
        ready[microbatch] = 0.0
    held, place, first_pending, last_pending = (using.zeros(num_ranks) for _ in range(4))
    using.compiled(loops.pull)(
        *(lanes.start, lanes.kind, lanes.stage, lanes.microbatch),
        *(rank_table(rank_of, sizes), times_table(costs, num_ranks), using.ints(sizes), float(costs.hop), limit),
        *(how.window, float(how.lateness), float(how.fill), left, out, ready, using.filled(num_ranks, 0.0)),
        *(held, place, using.zeros(num), first_pending, last_pending),
    )
    columns = (using.taken(column, out) for column in (lanes.kind, lanes.stage, lanes.microbatch))
    return Lanes(lanes.start, *columns)
