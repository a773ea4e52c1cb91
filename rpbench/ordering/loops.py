"""The two loops behind orders under given times, on flat columns: plain Python on lists, or compiled on arrays.

`rpbench.plan.contest`, which makes thousands of orders, compiles them; the orders are the same, bit for bit. Passes are
stored row by row, row r from `start[r]` on. A table of stages and microbatches is flat, stage by stage.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

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

    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda loop: loop  # the loop as it runs
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


def run_rows(
    start: Array,
    kind: Array,
    stage: Array,
    microbatch: Array,
    rank_of: Array,
    times: Array,  # by kind and stage, or rank of the head's shares, kinds first, and by microbatch
    # stages, microbatches, columns of `times`, microbatches of `times` (1: all are alike), 1 where the head is cut over
    # the ranks, 1 where W are put in
    sizes: Array,
    hop: float,
    fill: int,
    limit: int,
    out_start: Array,
    out: Array,  # kinds, stages and microbatches as they ran; as long as `out_start` says, three times
    ends: Array,  # of forwards and backwards by stage and microbatch; below 0: unknown
    now: Array,
    idle: Array,
    began: Array,  # by rank; below 0: unknown
    held: Array,
    place: Array,
    written: Array,  # counts along `out`
    pending: Array,  # passes whose W is to come, a row a rank
    first_pending: Array,  # counts along `pending`
    shares: Array,  # of the head, HF and HB by microbatch: how many, the last two ends, and the rank of the last
    found: Array,  # 1 where rows do not wait for each other, and the most activations on a rank
) -> None:
    """Run rows in order, each pass as soon as its rank and its input are there (`rpbench.ordering.list_order`)."""
    num_microbatches, width, each, head, fills = sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    num_ranks, last_stage, half = len(now), sizes[0] - 1, sizes[0] * sizes[1]
    total = out_start[num_ranks]
    of_head = 2 * num_microbatches
    peak, moved = 0, True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while start[rank] + place[rank] < start[rank + 1]:
                at = start[rank] + place[rank]
                what, own, mb = kind[at], stage[at], microbatch[at]
                arrives = 0.0
                source = -1  # what hands over: a place in `ends`
                gathers = -1  # or shares of the head
                if what == F:
                    if own > 0:
                        source = (own - 1) * num_microbatches + mb
                elif what == HF:
                    source = last_stage * num_microbatches + mb
                elif what == HB:
                    gathers = mb
                elif what != W:
                    if own == last_stage and head:
                        gathers = num_microbatches + mb
                    elif own == last_stage:
                        source = own * num_microbatches + mb
                    else:
                        source = half + (own + 1) * num_microbatches + mb
                if source >= 0:
                    arrives = ends[source]
                    if arrives < 0:
                        break
                    if hop != 0 and rank_of[source % half] != rank:
                        arrives = arrives + hop
                if gathers >= 0:
                    if shares[gathers] < num_ranks:
                        break
                    latest, second = shares[of_head + gathers], shares[2 * of_head + gathers]
                    if shares[3 * of_head + gathers] == rank:
                        arrives = max(latest, second + hop)
                    else:
                        arrives = latest + hop
                moved = True
                place[rank] += 1
                first = out_start[rank]
                while fills and first + first_pending[rank] < pending[total + rank]:
                    waiting = pending[first + first_pending[rank]]
                    its_stage, its_mb = waiting // num_microbatches, waiting % num_microbatches
                    takes = times[(W * width + its_stage) * each + its_mb % each]
                    fits = (what == F and held[rank] >= limit) or now[rank] + takes <= arrives + ROUNDING
                    if not fits:
                        gap = arrives - now[rank]
                        if gap <= ROUNDING or fill == FILL_NONE:
                            break
                        if fill == FILL_SPARE and not gap > max(idle) - idle[rank]:
                            break
                        if fill == FILL_MOST and not gap > 0.75 * takes:
                            break
                    if began[rank] < 0:
                        began[rank] = now[rank]
                    now[rank] = now[rank] + takes
                    to = first + written[rank]
                    out[to], out[total + to], out[2 * total + to] = W, its_stage, its_mb
                    written[rank] += 1
                    first_pending[rank] += 1
                    held[rank] -= 1
                    if not fits:
                        break
                began_at = arrives if arrives > now[rank] else now[rank]
                if began[rank] < 0:
                    began[rank] = began_at
                else:
                    idle[rank] += began_at - now[rank]
                end = began_at + times[(what * width + (rank if what >= HF else own)) * each + mb % each]
                now[rank] = end
                to = first + written[rank]
                out[to], out[total + to], out[2 * total + to] = what, own, mb
                written[rank] += 1
                if what == F:
                    held[rank] += 1
                    peak = max(peak, held[rank])
                    ends[own * num_microbatches + mb] = end
                elif what == W:
                    held[rank] -= 1
                elif what < W:
                    ends[half + own * num_microbatches + mb] = end
                    if what == B:
                        held[rank] -= 1
                    elif fills:
                        pending[pending[total + rank]] = own * num_microbatches + mb
                        pending[total + rank] += 1
                else:
                    share = (what - HF) * num_microbatches + mb
                    shares[share] += 1
                    if end >= shares[of_head + share]:
                        shares[2 * of_head + share] = shares[of_head + share]
                        shares[of_head + share] = end
                        shares[3 * of_head + share] = rank
                    else:
                        shares[2 * of_head + share] = max(shares[2 * of_head + share], end)
    found[0], found[1] = 1, peak
    for rank in range(num_ranks):
        if start[rank] + place[rank] < start[rank + 1]:
            found[0] = 0
        first = out_start[rank]
        while fills and first + first_pending[rank] < pending[total + rank]:
            waiting = pending[first + first_pending[rank]]
            to, its_mb = first + written[rank], waiting % num_microbatches
            out[to], out[total + to], out[2 * total + to] = W, waiting // num_microbatches, its_mb
            if began[rank] < 0:
                began[rank] = now[rank]
            now[rank] = now[rank] + times[(W * width + waiting // num_microbatches) * each + its_mb % each]
            written[rank] += 1
            first_pending[rank] += 1


def pull(
    start: Array,
    kind: Array,
    stage: Array,
    microbatch: Array,
    rank_of: Array,
    times: Array,
    sizes: Array,  # the first four of `run_rows`
    hop: float,
    limit: int,
    window: int,
    lateness: float,
    fill: float,
    left: Array,  # passes that a rank has not taken, by their place; the taken ones stand in `out`
    out: Array,
    ready: Array,  # when the input of a forward or a backward is there, by stage and microbatch; below 0: unknown
    free: Array,
    held: Array,
    place: Array,
    pending: Array,  # places in `times` of the W to come, a row a rank
    first_pending: Array,
    last_pending: Array,
) -> None:
    """Reorder rows so that ranks wait less (`rpbench.ordering.list_order.pull_rows`)."""
    num_microbatches, width, each = sizes[1], sizes[2], sizes[3]
    num_ranks, last_stage, half = len(free), sizes[0] - 1, sizes[0] * sizes[1]
    clock = [(0.0, 0)]
    for rank in range(1, num_ranks):
        clock.append((0.0, rank))  # noqa: PERF401  # numba knows no extend by a generator
    while len(clock) > 0:
        now, rank = heappop(clock)
        lo, hi = start[rank] + place[rank], start[rank + 1]
        if free[rank] > now + ROUNDING or lo >= hi:
            continue
        waits = last_pending[rank] > first_pending[rank]
        following = left[lo]
        is_forward = kind[following] == F
        at = stage[following] * num_microbatches + microbatch[following] + (0 if is_forward else half)
        comes = ready[at]
        full = is_forward and held[rank] >= limit
        taken, weight = -1, False
        if full and waits:
            weight = True
        elif 0 <= comes <= now + ROUNDING and not full:
            taken = 0
        else:
            until = -1.0 if full else comes
            least = held[rank] - (last_pending[rank] - first_pending[rank])
            most = least
            for number in range(min(window, hi - lo)):
                what = left[lo + number]
                forward = kind[what] == F
                its = ready[stage[what] * num_microbatches + microbatch[what] + (0 if forward else half)]
                if number > 0 and 0 <= its <= now + ROUNDING:
                    takes = times[(kind[what] * width + stage[what]) * each + microbatch[what] % each]
                    in_time = until < 0 or now + takes * (1 - lateness) <= until + ROUNDING
                    if in_time and (not forward or max(most, held[rank]) < limit):
                        taken = number
                        break
                least += 1 if forward else -1
                most = max(most, least)
            if taken < 0:
                if waits and (
                    comes < 0 or now + times[pending[start[rank] + first_pending[rank]]] * fill <= comes + ROUNDING
                ):
                    weight = True
                elif comes > now:
                    heappush(clock, (comes, rank))
                else:
                    soonest = -1.0
                    for number in range(min(window, hi - lo)):
                        what = left[lo + number]
                        its = ready[
                            stage[what] * num_microbatches + microbatch[what] + (0 if kind[what] == F else half)
                        ]
                        if its > now and (soonest < 0 or its < soonest):
                            soonest = its
                    if soonest >= 0:
                        heappush(clock, (soonest, rank))
        if weight:
            takes = times[pending[start[rank] + first_pending[rank]]]
            first_pending[rank] += 1
            free[rank] = now + takes
            heappush(clock, (now + takes, rank))
            held[rank] -= 1
        elif taken >= 0:
            what = left[lo + taken]
            for number in range(lo + taken, lo, -1):
                left[number] = left[number - 1]
            out[lo] = what
            place[rank] += 1
            own, mb = stage[what], microbatch[what]
            end = now + times[(kind[what] * width + own) * each + mb % each]
            free[rank] = end
            heappush(clock, (end, rank))
            to = -1
            if kind[what] == F:
                held[rank] += 1
                to = (own + 1) * num_microbatches + mb if own < last_stage else half + own * num_microbatches + mb
            else:
                if kind[what] == I:
                    pending[start[rank] + last_pending[rank]] = (W * width + own) * each + mb % each
                    last_pending[rank] += 1
                else:
                    held[rank] -= 1
                if own > 0:
                    to = half + (own - 1) * num_microbatches + mb
            if to >= 0:
                taker = rank_of[to % half]
                arrives = end if taker == rank else end + hop
                ready[to] = arrives
                heappush(clock, (arrives, taker))
