"""Channels: the messages of a table, and the queues in which both ends of each stand.

Messages carry no name: on a communicator the k-th send of a rank to another is taken by the k-th receive of that one,
whatever they were meant to be. How much stands in one queue differs:

    edge    a queue for each direction of a pair of ranks: gloo, and NCCL with a communicator for each edge (torch 2.15)
    pair    both directions of a pair in one: NCCL, whose communicators of two ranks are made at the first message
    group   all messages of a rank in one: NCCL, where the group's communicator is made when the group is

An operation of NCCL holds its queue until its other end comes to the front of the peer's; gloo only keeps the order of
one direction, which is the same as a queue for each. Messages that follow each other in a row may be handed over as one
group (`batch_isend_irecv`): then they go together, in any order.

Source: torch 2.13 and 2.15, `schedules._batch_p2p`, `_p2p`; ProcessGroupNCCL's key for point-to-point communicators.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from rpbench.torch_runtime.communication.tokens import SENDS, Table, Token


class Queues(StrEnum):
    """How much stands in one queue."""

    EDGE = "edge"
    PAIR = "pair"
    GROUP = "group"


class End(NamedTuple):
    """Where one end of a message stands."""

    rank: int
    place: int


@dataclass(frozen=True)
class Message:
    """A send and the receive that takes it; None for an end that nobody has.

    Args:
        source, target: ranks.
    """

    source: int
    target: int
    send: End | None
    receive: End | None

    @property
    def ends(self) -> tuple[End, ...]:
        return tuple(end for end in (self.send, self.receive) if end is not None)

    @property
    def is_whole(self) -> bool:
        return self.send is not None and self.receive is not None


@dataclass(frozen=True)
class Messages:
    """All messages of a table.

    Args:
        of: the number of the message that an end belongs to.
        ahead: for each message, those that its queues must have let pass before it.
        beside: for each end, the messages of the operation it is part of: who waits for one waits for all.
    """

    all: tuple[Message, ...]
    of: dict[End, int]
    ahead: tuple[tuple[int, ...], ...]
    beside: dict[End, tuple[int, ...]]


def find_messages(table: Table, queues: Queues, *, grouped: bool = False) -> Messages:
    """The messages of a table, matched and queued."""
    sends: dict[tuple[int, int], list[End]] = {}
    receives: dict[tuple[int, int], list[End]] = {}
    for end, token in _ends(table):
        peer = table.peer(token)
        if token.kind in SENDS:
            sends.setdefault((end.rank, peer), []).append(end)
        else:
            receives.setdefault((peer, end.rank), []).append(end)
    found = tuple(
        Message(*edge, send, receive)
        for edge in sorted(sends.keys() | receives.keys())
        for send, receive in zip_longest(sends.get(edge, ()), receives.get(edge, ()))
    )
    of = {end: number for number, message in enumerate(found) for end in message.ends}
    ahead: list[list[int]] = [[] for _ in found]
    beside: dict[End, tuple[int, ...]] = {}
    for standing in _operations(table, found, of, queues).values():
        before: list[int] = []
        for operation in (part for together in standing for part in _parted(table, together, grouped=grouped)):
            numbers = [of[end] for end in operation]
            for end in operation:
                ahead[of[end]] += before
                beside[end] = tuple(numbers)
            before = numbers
    return Messages(found, of, tuple(map(tuple, ahead)), beside)


def meant(table: Table, message: Message) -> bool:
    """Whether a receive gets the tensor it is named for."""
    if message.send is None or message.receive is None:
        return False
    return table.other_end(token_at(table, message.send)) == token_at(table, message.receive)


def token_at(table: Table, end: End) -> Token:
    """The action at a place."""
    return table.rows[end.rank][end.place]


def _ends(table: Table) -> Iterator[tuple[End, Token]]:
    for rank, row in enumerate(table.rows):
        for place, token in enumerate(row):
            if token.is_message:
                yield End(rank, place), token


Operations = dict[tuple[int, object], list[list[End]]]  # queue of a rank -> ends that go together


def _operations(table: Table, messages: tuple[Message, ...], of: dict[End, int], queues: Queues) -> Operations:
    """What stands in each queue of each rank, ends that follow each other in its row taken together."""
    found: Operations = {}
    for end, _ in _ends(table):
        standing = found.setdefault((end.rank, _queue(messages[of[end]], queues)), [])
        if standing and _follows(table, standing[-1][-1], end):
            standing[-1].append(end)
        else:
            standing.append([end])
    return found


def _queue(message: Message, queues: Queues) -> object:
    if queues is Queues.EDGE:
        return message.source, message.target
    return frozenset((message.source, message.target)) if queues is Queues.PAIR else None


def _follows(table: Table, first: End, end: End) -> bool:
    """Whether nothing but messages stands between two places of a row."""
    return all(token.is_message for token in table.rows[end.rank][first.place : end.place])


def _parted(table: Table, together: list[End], *, grouped: bool) -> list[list[End]]:
    """torch makes one operation of sends and receives that it is given together, not of sends or receives alone."""
    mixed = len({token_at(table, end).kind in SENDS for end in together}) > 1
    return [together] if grouped and mixed else [[end] for end in together]
