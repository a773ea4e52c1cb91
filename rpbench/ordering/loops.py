"""The two loops behind orders under given times, on flat columns: plain Python on lists, or compiled on arrays.

`rpbench.plan.contest`, which makes thousands of orders, compiles them; the orders are the same, bit for bit. A table of
stages and microbatches is flat, stage by stage. What nearly every pass goes through stands in the loops themselves,
because a call takes plain Python a tenth of a pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from rpbench.ir.action import Kind

Array = Any  # list, or numpy array where loops are compiled

# Times closer together than this are equal: they are rounded sums.
ROUNDING = 1e-9
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.HF, Kind.HB)
F, B, I, W, HF, HB = range(len(KINDS))  # noqa: E741  # as the kinds are called
NO_FILL, FILL_NONE, FILL_ANY, FILL_MOST, FILL_SPARE = range(-1, 4)
CODES: dict[int, int] = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Means:
    """How loops run: in plain Python, or compiled."""

    # the loop as it runs; takes the loop, the `PARTS` it calls and whether it `allocates`
    compiled: Callable[..., Callable[..., Any]] = lambda loop, *parts, allocates=True: loop
    # whole numbers as a column; `zeros` makes one of so many, and `filled` one of equal times
    ints: Callable[[Iterable[int]], Array] = list
    zeros: Callable[[int], Array] = lambda number: [0] * number
    filled: Callable[[int, float], Array] = lambda number, value: [value] * number
    # the values of a column at some places
    taken: Callable[[Array, Array], Array] = lambda column, places: [column[place] for place in places]
    listed: Callable[[Array], list[Any]] = list  # a column as a list


PLAIN = Means()
_in_use = [PLAIN]


def means() -> Means:
    """How loops run now."""
    return _in_use[-1]


def use(other: Means) -> None:
    """Run loops by other means from now on; their results stay the same."""
    _in_use[-1] = other


class Passes(NamedTuple):
    """Passes row by row, row r from `start[r]` to `start[r + 1]` - 1."""

    start: Array
    kind: Array
    stage: Array
    microbatch: Array


class Given(NamedTuple):
    """What passes take, and the sizes of the tables."""

    rank_of: Array  # by stage and microbatch
    times: Array  # by kind and stage, or rank of the head's shards, kinds first, and by microbatch
    num_stages: int
    num_microbatches: int
    width: int  # columns of `times`
    each: int  # microbatches of `times`; 1: all are alike
    hop: float
    limit: int  # chunk activations on a rank


# --- an order as it is ---


class Run(NamedTuple):
    """The state of `run_rows`: tables by stage and microbatch, places in rows, and columns by rank."""

    ends: Array  # of forwards and then of backwards; below 0: unknown
    shares: Array  # of the head, HF and HB by microbatch: how many, the last two ends, and the rank of the last
    pending: Array  # places of the I whose W is to come, a row a rank
    first_pending: Array
    last_pending: Array  # behind the last
    place: Array  # of the next pass
    written: Array  # where it goes
    now: Array
    idle: Array
    began: Array  # below 0: unknown
    held: Array


def run_rows(passes: Passes, given: Given, fill: int, run: Run, made: Passes) -> int:
    """Run rows in order, each pass as soon as its rank and its input are there, and write them into `made`.

    Returns the most chunk activations on a rank; -1 if rows wait for each other.
    """
    (start, kind, stage, microbatch), (_, out_kind, out_stage, out_microbatch) = passes, made
    rank_of, times, num_stages, num, width, each, hop, limit = given
    ends, shares, pending, first_pending, last_pending, place, written, now, idle, began, held = run
    last_stage, half, peak, moved = num_stages - 1, num_stages * num, 0, True
    while moved:
        moved = False
        for rank in range(len(now)):
            while place[rank] < start[rank + 1]:
                at = place[rank]
                what, own, mb = kind[at], stage[at], microbatch[at]
                arrives, source = 0.0, -1  # the place in `ends` of what hands over
                if what == F:
                    source = (own - 1) * num + mb if own > 0 else -1
                elif what == HF:
                    source = last_stage * num + mb
                elif what == HB or (what != W and own == last_stage and len(shares) > 0):
                    arrives = gathered(mb if what == HB else num + mb, rank, hop, len(now), shares)
                elif what != W:
                    source = own * num + mb if own == last_stage else half + (own + 1) * num + mb
                if source >= 0:
                    arrives = ends[source]
                    if arrives >= 0 and hop != 0 and rank_of[source % half] != rank:
                        arrives = arrives + hop
                if arrives < 0:
                    break
                moved = True
                place[rank] = at + 1
                if first_pending[rank] < last_pending[rank]:
                    needed = held[rank] - limit + 1 if what == F else 0
                    if needed > 0 or now[rank] <= arrives + ROUNDING:
                        put_weights(rank, needed, arrives, fill, passes, given, run, made)
                begins = arrives if arrives > now[rank] else now[rank]
                if began[rank] < 0:
                    began[rank] = begins
                else:
                    idle[rank] += begins - now[rank]
                now[rank] = end = begins + times[(what * width + (rank if what >= HF else own)) * each + mb % each]
                to = written[rank]
                out_kind[to], out_stage[to], out_microbatch[to] = what, own, mb
                written[rank] = to + 1
                if what == F:
                    held[rank] += 1
                    peak = max(peak, held[rank])
                    ends[own * num + mb] = end
                elif what >= HF:
                    hand_in((what - HF) * num + mb, rank, end, shares)
                else:
                    if what != W:
                        ends[half + own * num + mb] = end
                    if what != I:
                        held[rank] -= 1
                    elif fill != NO_FILL:
                        pending[last_pending[rank]] = at
                        last_pending[rank] += 1
    return peak if finish(passes, given, run, made) else -1


def finish(passes: Passes, given: Given, run: Run, made: Passes) -> bool:
    """Run the W that are left; return whether all other passes have run."""
    has_ended = True
    for rank in range(len(run.now)):
        has_ended = has_ended and run.place[rank] == passes.start[rank + 1]
        put_weights(rank, len(run.pending), 0.0, NO_FILL, passes, given, run, made)
    return has_ended


def put_weights(
    rank: int, needed: int, arrives: float, fill: int, passes: Passes, given: Given, run: Run, made: Passes
) -> None:
    """Run W that a rank has put off: as many as are needed, and those that end before its next input arrives."""
    times, width, each = given.times, given.width, given.each
    _, _, pending, first_pending, last_pending, _, written, now, idle, began, held = run
    first, to, free = first_pending[rank], written[rank], now[rank]
    while first < last_pending[rank]:
        at = pending[first]
        own, mb = passes.stage[at], passes.microbatch[at]
        takes = times[(W * width + own) * each + mb % each]
        fits = needed > 0 or free + takes <= arrives + ROUNDING
        if not fits:
            gap = arrives - free
            if gap <= ROUNDING or fill == FILL_NONE:
                break
            if fill == FILL_SPARE and not gap > max(idle) - idle[rank]:
                break
            if fill == FILL_MOST and not gap > 0.75 * takes:
                break
        if began[rank] < 0:
            began[rank] = free
        made.kind[to], made.stage[to], made.microbatch[to] = W, own, mb
        first, to, free, needed = first + 1, to + 1, free + takes, needed - 1
        if not fits:
            break
    held[rank] -= first - first_pending[rank]
    first_pending[rank], written[rank], now[rank] = first, to, free


def gathered(share: int, rank: int, hop: float, num_ranks: int, shares: Array) -> float:
    """When a rank has the sums of all shards of the head; below 0: unknown."""
    num = len(shares) // 4
    if shares[share] < num_ranks:
        return -1.0
    latest: float = shares[num + share]
    if shares[3 * num + share] == rank:
        return max(latest, shares[2 * num + share] + hop)
    return latest + hop


def hand_in(share: int, rank: int, end: float, shares: Array) -> None:
    """Note that a rank's shard of the head has ended."""
    num = len(shares) // 4
    shares[share] += 1
    if end >= shares[num + share]:
        shares[2 * num + share], shares[num + share] = shares[num + share], end
        shares[3 * num + share] = rank
    else:
        shares[2 * num + share] = max(shares[2 * num + share], end)


RUN_PARTS = (put_weights, finish, gathered, hand_in)


# --- passes pulled forward ---


class Pulling(NamedTuple):
    """The state of `pull`: columns by pass, and by rank."""

    left: Array  # passes that a rank has not taken, by their place; the taken ones stand in `out`
    out: Array
    at: Array  # place of a pass in `ready`
    takes: Array  # time of a pass
    pending: Array  # times of the W to come, a row a rank
    ready: Array  # when the input of a forward or a backward is there, by stage and microbatch; below 0: unknown
    free: Array
    held: Array
    place: Array  # of the next pass
    first_pending: Array
    last_pending: Array


def pull(passes: Passes, given: Given, window: int, lateness: float, fill: float, state: Pulling) -> None:
    """Reorder rows so that ranks wait less (`rpbench.ordering.list_order.pull_rows`)."""
    start, kind, stage, microbatch = passes
    rank_of, times, num_stages, num, width, each, hop, limit = given
    left, out, at, takes, pending, ready, free, held, place, first_pending, last_pending = state
    half = num_stages * num
    for what in range(len(kind)):
        at[what] = stage[what] * num + microbatch[what] + (0 if kind[what] == F else half)
        takes[what] = times[(kind[what] * width + stage[what]) * each + microbatch[what] % each]
    clock = [(0.0, 0)]
    for rank in range(1, len(free)):
        clock.append((0.0, rank))  # noqa: PERF401  # numba knows no extend by a generator
    while len(clock) > 0:
        now, rank = heappop(clock)
        lo, stop = place[rank], start[rank + 1]
        if free[rank] > now + ROUNDING or lo >= stop:
            continue
        following, waits = left[lo], last_pending[rank] - first_pending[rank]
        comes = ready[at[following]]
        full = kind[following] == F and held[rank] >= limit
        taken, weight = 0, full and waits > 0
        if not weight and (full or not 0 <= comes <= now + ROUNDING):
            ahead, until, room = min(window, stop - lo), -1.0 if full else comes, limit - held[rank]
            taken = next_ready(lo, ahead, now, until, lateness, room, waits, kind, left, at, takes, ready)
            if taken < 0 and waits > 0:
                weight = comes < 0 or now + pending[first_pending[rank]] * fill <= comes + ROUNDING
            if taken < 0 and not weight:
                soonest = comes if comes > now else first_coming(lo, ahead, now, left, at, ready)
                if soonest >= 0:
                    heappush(clock, (soonest, rank))
        if weight:
            free[rank] = end = now + pending[first_pending[rank]]
            first_pending[rank] += 1
            held[rank] -= 1
            heappush(clock, (end, rank))
        elif taken >= 0:
            what = left[lo + taken]
            for number in range(lo + taken, lo, -1):
                left[number] = left[number - 1]
            out[lo], place[rank] = what, lo + 1
            free[rank] = end = now + takes[what]
            heappush(clock, (end, rank))
            if kind[what] == F:
                held[rank] += 1
                to = at[what] + (num if stage[what] < num_stages - 1 else half)
            else:
                to = at[what] - num if stage[what] > 0 else -1
                if kind[what] == I:
                    pending[last_pending[rank]] = times[(W * width + stage[what]) * each + microbatch[what] % each]
                    last_pending[rank] += 1
                else:
                    held[rank] -= 1
            if to >= 0:
                taker = rank_of[to % half]
                ready[to] = arrives = end if taker == rank else end + hop
                heappush(clock, (arrives, taker))


def next_ready(
    lo: int,
    ahead: int,
    now: float,
    until: float,
    lateness: float,
    room: int,  # forwards that the limit leaves
    waits: int,  # W to come
    kind: Array,
    left: Array,
    at: Array,
    takes: Array,
    ready: Array,
) -> int:
    """How far ahead the first later pass is that a rank can take now; -1 if there is none."""
    least = most = -waits  # forwards more than now, as the row goes on
    for number in range(ahead):
        what = left[lo + number]
        is_forward = kind[what] == F
        if number > 0 and 0 <= ready[at[what]] <= now + ROUNDING:
            in_time = until < 0 or now + takes[what] * (1 - lateness) <= until + ROUNDING
            if in_time and (not is_forward or max(most, 0) < room):
                return number
        least += 1 if is_forward else -1
        most = max(most, least)
    return -1


def first_coming(lo: int, ahead: int, now: float, left: Array, at: Array, ready: Array) -> float:
    """When the first input of later passes comes that is known; below 0 without one."""
    soonest = -1.0
    for number in range(lo, lo + ahead):
        comes = ready[at[left[number]]]
        if comes > now and (soonest < 0 or comes < soonest):
            soonest = comes
    return soonest


PULL_PARTS = (next_ready, first_coming)
