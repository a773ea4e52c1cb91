"""Verdict: whether the messages of a table all arrive, with the smallest cycle of ranks that wait for each other.

alive       every rank comes to its end, every receive gets the tensor it is named for
mixed       every rank comes to its end, and a receive gets another tensor, without an error
broken      a rank comes to an action at which torch's runtime raises
dead        a rank waits for good

Three things wait: a rank, at an action, for a message; a message for a rank that has not come to its other end; and a
message for one that stands before it in a queue.
"""

from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rpbench.torch_runtime.communication.execution import (
    NEVER,
    Durations,
    End,
    Execution,
    Queues,
    execute,
    find_messages,
    meant,
    token_at,
)
from rpbench.torch_runtime.communication.tokens import Table

AROUND = 3  # actions shown on each side of a marked one


@dataclass(frozen=True)
class Waiting:
    """An action that waits or is wrong: its place in its row from 0, why, and that row with the action marked.

    The action is "end" where a rank only waits for its sends.
    """

    rank: int
    place: int
    action: str
    why: str
    row: str


def waiting(table: Table, end: End, why: str) -> Waiting:
    tokens = [*map(str, table.rows[end.rank]), "end"]
    first, last = max(0, end.place - AROUND), min(len(tokens), end.place + AROUND + 1)
    shown = [f">{token}<" if place == end.place else token for place, token in enumerate(tokens)][first:last]
    text = " ".join(["..."] * bool(first) + shown + ["..."] * (last < len(tokens)))
    return Waiting(end.rank, end.place, tokens[end.place], why, text)


Node = tuple[str, int]  # ("rank", its number) or ("message", its number)
Step = tuple[Node | None, Waiting]  # the awaited node, None where it can never come, and the wait in words


def smallest_cycle(execution: Execution) -> tuple[Waiting, ...]:
    """The shortest cycle of actions that wait for each other, or else the path from a rank to an unmatched message."""
    steps: dict[Hashable, list[Step]] = {}
    pending: list[Node] = [("rank", rank) for rank, number in enumerate(execution.waits_for) if number is not None]
    while pending:
        node = pending.pop()
        if node not in steps:
            steps[node] = list(_steps(execution, node))
            pending += [other for other, _ in steps[node] if other is not None]
    cycles = [way for node in steps if (way := _shortest(steps, node, node))]
    ways = cycles or [way for node in steps if node[0] == "rank" and (way := _shortest(steps, node, None))]  # type: ignore[index]
    return min(ways, key=lambda way: (len(way), [(each.rank, each.place) for each in way]))


def _steps(execution: Execution, node: Node) -> Iterator[Step]:
    kind, number = node
    if kind == "rank":
        waited = execution.waits_for[number]
        if waited is not None:
            why = f"waits for {_named(execution, waited, number)}"
            yield ("message", waited), waiting(execution.table, End(number, execution.places[number]), why)
        return
    message = execution.messages.all[number]
    if not message.is_whole:
        rank, what = (message.source, "send") if message.send is None else (message.target, "receive")
        yield None, waiting(execution.table, message.ends[0], f"rank {rank} has no {what} left for it")
    for end in message.ends:
        if not execution.handed_over(end):
            at = execution.places[end.rank]
            why = f"comes after {execution.table.rows[end.rank][at]} (action {at})"
            yield ("rank", end.rank), waiting(execution.table, end, why)
    for ahead in execution.messages.ahead[number]:
        if execution.done[ahead] is NEVER:
            own, other = next(
                (own, other)
                for own in message.ends
                for other in execution.messages.all[ahead].ends
                if own.rank == other.rank and other.place < own.place
            )
            why = f"stands in its queue behind {token_at(execution.table, other)} (action {other.place})"
            yield ("message", ahead), waiting(execution.table, own, why)


def _named(execution: Execution, number: int, rank: int) -> str:
    """A message by its end at a rank, or by its send."""
    message = execution.messages.all[number]
    own = next((end for end in message.ends if end.rank == rank), message.ends[0])
    return f"{token_at(execution.table, own)} (action {own.place} of rank {own.rank})"


def _shortest(steps: dict[Hashable, list[Step]], start: Hashable, goal: Hashable) -> tuple[Waiting, ...]:
    """The shortest path from one node to another or back to itself; empty if there is none."""
    ways: dict[Hashable, tuple[Waiting, ...]] = {start: ()}
    pending = [start]
    while pending:
        node = pending.pop(0)
        for other, words in steps.get(node, ()):
            way = (*ways[node], words)
            if other == goal:
                return way
            if other not in ways:
                ways[other] = way
                pending.append(other)
    return ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on a table with one kind of queue; `cycle`: the ranks that wait for each other, or what is wrong."""

    queues: str
    grouped: bool
    verdict: str
    cycle: tuple[Waiting, ...]
    execution: Execution

    def fields(self) -> dict[str, Any]:
        return {
            "channels": self.queues,
            "grouped": self.grouped,
            "verdict": self.verdict,
            "cycle": [asdict(each) for each in self.cycle],
        }


def judge(table: Table, queues: Queues, *, grouped: bool = False, durations: Durations | None = None) -> Verdict:
    execution = execute(table, find_messages(table, queues, grouped=grouped), durations)
    name, cycle = _judged(execution)
    return Verdict(queues.value, grouped, name, cycle, execution)


def _judged(execution: Execution) -> tuple[str, tuple[Waiting, ...]]:
    table, messages = execution.table, execution.messages
    if execution.broken is not None:
        rank, place = execution.broken
        return "broken", (waiting(table, End(rank, place), execution.faults[rank, place]),)
    if not all(execution.finished):
        return "dead", smallest_cycle(execution)
    for message in messages.all:
        assert message.receive is not None  # every receive stands before the computation that waits for it,
        assert message.send is not None  # and every send is waited for: at its WAIT, or at the end
        if not meant(table, message):
            why = f"it gets what {token_at(table, message.send)} of rank {message.source} sends"
            return "mixed", (waiting(table, message.receive, why),)
    return "alive", ()
