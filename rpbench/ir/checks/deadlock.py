"""Whether a schedule can run to its end, and in what order; if not, the ranks that wait for each other.

There are two rules. Buffered: a SEND leaves its tensor behind and its lane goes on. Rendezvous: a SEND and its RECV end
together, so a SEND blocks its lane until the peer has come to the RECV.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import sub

from rpbench.ir.action import COMPUTE, SEND, Action, Kind, parts_of, receive_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.schedule import ScheduleError

Producers = Sequence[tuple[int, ...]]  # by number, what an action waits for besides the one before it in its lane


def in_rounds(rounds: Sequence[int]) -> list[int]:
    """The actions in the order of their rounds, those of one round in the order of their numbers."""
    return sorted(range(len(rounds)), key=rounds.__getitem__)


def execution_rounds(index: Index, producers: Producers, *, rendezvous: bool = False) -> list[int]:
    """For each action the round in which it can run, counted from 1.

    In each round every lane that can move runs one action, as if all took the same time. If no lane can move, a
    ScheduleError shows a shortest cycle of lanes that wait for each other.
    """
    sends = [number for number, action in enumerate(index.actions) if action.kind in SEND] if rendezvous else []
    received = {number: index.find(receive_of(index.actions[number])) for number in sends}
    partners = {send: receive for send, receive in received.items() if receive >= 0}
    return _run(index, producers, partners)


def slots_of(index: Index, producers: Producers) -> tuple[list[int], list[int]]:
    """The slots, from 1, in which each action begins and ends, if computations take one slot and the others no time;
    raises as `execution_rounds`.
    """
    takes = [action.kind in COMPUTE for action in index.actions]
    ends = _run(index, producers, {}, takes)
    return list(map(sub, ends, takes)), ends


def _run(index: Index, producers: Producers, partners: Mapping[int, int], takes: Sequence[int] = ()) -> list[int]:
    """The round of each action; ScheduleError if no lane can move.

    Each `takes` so many rounds, by default one; the last of them is its round, from 1 if it takes none.
    """
    lane_of, first = index.lane_of, 1 if takes else 0
    takes = takes or [1] * len(index.actions)
    rounds = [0] * len(index.actions)
    heads = [lane.start for lane in index.lanes]
    waiting: dict[int, list[int]] = {}  # action -> lanes that move on when it has run
    ready = list(range(len(index.lanes)))
    while ready:
        lane = ready.pop()
        number, stop = heads[lane], index.lanes[lane].stop
        latest = rounds[number - 1] if number > index.lanes[lane].start else first
        while number < stop:
            blocker = -1
            for producer in producers[number]:
                ran = rounds[producer]
                if not ran:
                    blocker = producer
                    break
                if ran > latest:
                    latest = ran
            partner = partners.get(number, -1) if partners else -1
            if blocker < 0 <= partner and heads[lane_of[partner]] != partner:
                blocker = partner - 1  # the peer comes to the RECV when it has run the action before
            if blocker >= 0:
                waiting.setdefault(blocker, []).append(lane)
                break
            latest += takes[number]
            rounds[number] = latest
            if number in waiting:
                ready += waiting.pop(number)
            number += 1
        heads[lane] = number
    if any(head < lane.stop for head, lane in zip(heads, index.lanes, strict=True)):
        raise _no_rank_can_move(index, producers, rounds, heads, partners)
    return rounds


# --- the counter-example ------------------------------------------------------------------------------------


def _no_rank_can_move(
    index: Index, producers: Producers, rounds: list[int], heads: list[int], partners: Mapping[int, int]
) -> ScheduleError:
    waits: dict[int, dict[int, int]] = {}  # lane -> lane it waits for -> the action
    for lane, (head, limits) in enumerate(zip(heads, index.lanes, strict=True)):
        if head < limits.stop:
            needed = [producer for producer in producers[head] if not rounds[producer]]
            waits[lane] = {index.lane_of[other]: other for other in reversed(needed or [partners[head]])}
    cycle = _shortest_cycle(waits)
    notes, needed_by = {}, {}
    for lane, other in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        needed_by[heads[lane]] = index.actions[waits[lane][other]]
        notes[heads[lane]] = f"waits at {index.actions[heads[lane]]} for {needed_by[heads[lane]]}"
    return broken(
        index.schedule,
        "no rank can move",
        [heads[lane] for lane in cycle],
        notes=notes,
        way_out=_way_out(index, needed_by),
    )


def _shortest_cycle(waits: Mapping[int, Iterable[int]]) -> list[int]:
    """The fewest lanes that wait for each other in a cycle; every lane in `waits` waits for another one there."""
    best: list[int] = []
    for start in waits:
        came_from: dict[int, int] = {}
        queue = deque([start])
        while queue and start not in came_from:
            lane = queue.popleft()
            for other in waits[lane]:
                if other not in came_from:
                    came_from[other] = lane
                    queue.append(other)
        if start in came_from:
            cycle = [start]
            while came_from[cycle[-1]] != start:
                cycle.append(came_from[cycle[-1]])
            if not best or len(cycle) < len(best):
                best = [start, *reversed(cycle[1:])]
    return best


def _way_out(index: Index, needed_by: Mapping[int, Action]) -> str:
    for number, needed in needed_by.items():
        action = index.actions[number]
        readers = [part for part in parts_of(action) if part.kind in (Kind.F, Kind.FB, Kind.LOAD, Kind.UNSHARD)]
        if needed.kind is Kind.STEP and readers:
            reader = readers[0]
            return f"policy {index.schedule.policy.value}: {reader} reads the version {needed} publishes"
        if action.kind in SEND:
            return "a SEND waits until its peer comes to the RECV; lower_communication finds such an order"
    return ""
