"""Execution: how far each rank of a table comes, and when: rows in order, messages as their queues let them pass.

Messages carry no name: on a communicator the k-th send of a rank to another is taken by the k-th receive of that one,
whatever they were meant to be. How much stands in one queue differs:

    edge    a queue for each direction of a pair of ranks: gloo, and NCCL with a communicator for each edge (torch 2.15)
    pair    both directions of a pair in one: NCCL, whose communicators of two ranks are made at the first message
    group   all messages of a rank in one: NCCL, where the group's communicator is made when the group is

A rank hands over a message and goes on; it waits where a computation needs what it receives, and at a WAIT. A message
passes when both of its ends have been handed over and nothing stands before them in their queues; what is sent stays
until the receive is there, as gloo and NCCL have it for tensors of any size. Messages that follow each other in a row
may be handed over as one group (`batch_isend_irecv`): then they go together, in any order. At its end a rank waits for
the sends that had no WAIT. Weights of a stage are gathered, and its gradients reduced, beside the computations, one
after another.

A send is under way from where it stands to its WAIT; without one, a forward's until the backward that frees its output,
a backward's until the row ends. A receive buffer is made where the receive stands (torch 2.15; before it all of them
stood from the start) and is free when the computation that uses it has run.

Source: torch 2.13 and 2.15, `schedules._batch_p2p`, `_p2p`; ProcessGroupNCCL's key for point-to-point communicators.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from rpbench.torch_runtime.communication.tokens import BACKWARD, COMPUTE, RECEIVES, SENDS, WAITS, Table, Token


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
    """A send of one rank and the receive of another that takes it; None for a missing end."""

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
    """All messages of a table."""

    all: tuple[Message, ...]
    of: dict[End, int]  # the number of the message that an end belongs to
    ahead: tuple[tuple[int, ...], ...]  # for each message, those that its queues must have let pass before it
    # for each end, the messages of its operation; a wait for one of them waits for all
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
    return table.rows[end.rank][end.place]


def _ends(table: Table) -> Iterator[tuple[End, Token]]:
    for rank, row in enumerate(table.rows):
        for place, token in enumerate(row):
            if token.is_message:
                yield End(rank, place), token


Operations = dict[tuple[int, object], list[list[End]]]  # queue of a rank -> ends that go together


def _operations(table: Table, messages: tuple[Message, ...], of: dict[End, int], queues: Queues) -> Operations:
    """The operations in each queue of each rank; ends that follow each other in a row are one operation."""
    found: Operations = {}
    for end, _ in _ends(table):
        standing = found.setdefault((end.rank, _queue(messages[of[end]], queues)), [])
        if standing and all(token.is_message for token in table.rows[end.rank][standing[-1][-1].place : end.place]):
            standing[-1].append(end)
        else:
            standing.append([end])
    return found


def _queue(message: Message, queues: Queues) -> object:
    if queues is Queues.EDGE:
        return message.source, message.target
    return frozenset((message.source, message.target)) if queues is Queues.PAIR else None


def _parted(table: Table, together: list[End], *, grouped: bool) -> list[list[End]]:
    """Operations of adjacent ends: torch groups sends and receives, but not sends alone or receives alone."""
    mixed = len({token_at(table, end).kind in SENDS for end in together}) > 1
    return [together] if grouped and mixed else [[end] for end in together]


Faults = Mapping[tuple[int, int], str]  # (rank, place in its row) -> why


def find_faults(table: Table) -> Faults:
    """Why the runtime raises, by rank and place; empty where it does not."""
    found: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(table.rows):
        passed: set[Token] = set()
        for place, token in enumerate(row):
            why = next(filter(None, (_fault(table, rank, part, passed) for part in token.parts)), "")
            if why:
                found[rank, place] = why
    return found


def needed(table: Table, rank: int, token: Token) -> Token | None:
    """The receive that a computation waits for; None where it takes no input, or one that its own rank makes."""
    source = table.feeder(token)
    if source is None or table.rank_of[source] == rank:
        return None
    return token._replace(kind="RECV_F" if token.kind == "F" else "RECV_B")


def _fault(table: Table, rank: int, token: Token, passed: set[Token]) -> str:
    """Why the runtime raises at a plain action after those in `passed`, to which it is added; "" if it does not."""
    if token.kind in SENDS:
        makes = ("F",) if token.kind == "SEND_F" else BACKWARD
        if not any(token._replace(kind=kind) in passed for kind in makes):
            return f"what it sends has not been computed before it: {' or '.join(makes)} comes later"
        if token.kind == "SEND_F" and any(token._replace(kind=kind) in passed for kind in BACKWARD):
            return "the backward of its microbatch, which frees what it sends, stands before it"
        return ""
    receive = needed(table, rank, token)
    if receive is not None and receive not in passed:
        return f"{receive} does not stand before it"
    passed.add(token)
    beside = table.feeder(token)
    if beside is None or table.rank_of[beside] != rank:
        return ""
    kinds = ("F",) if token.kind == "F" else BACKWARD  # a neighbour of the same rank hands over what it has made
    if any(Token(beside, kind, token.microbatch) in passed for kind in kinds):
        return ""
    return f"stage {beside} of the same rank has not run microbatch {token.microbatch} before it"


NEVER = None


@dataclass(frozen=True)
class Durations:
    """Times of computations on a rank (of an overlapped pair as one), of a message, and of gathers and reductions."""

    compute: Callable[[int, Token], float] = lambda rank, token: 1.0
    hop: float = 0.0
    gather: Mapping[int, float] = field(default_factory=dict)
    reduce: Mapping[int, float] = field(default_factory=dict)


@dataclass
class Execution:
    """The state of a table when no action can run any more."""

    table: Table
    messages: Messages
    faults: Faults
    places: list[int]  # by rank, the place of its next action; the row's length at the end
    done: list[float | None]  # by message, when it passed; None where it never did
    times: list[float]  # by rank, when it came to its place
    waits_for: list[int | None]  # by rank, the message it stands at; None where it stands at none
    finished: list[bool]  # ranks that have nothing left to wait for
    busy: list[float]  # by rank, the time its computations took

    @property
    def makespan(self) -> float:
        return max(self.times)

    @property
    def broken(self) -> tuple[int, int] | None:
        """The rank and place at which the runtime raises, of ranks that come so far."""
        return next((at for at in enumerate(self.places) if at in self.faults), None)

    def handed_over(self, end: End) -> bool:
        return self.places[end.rank] > end.place


def execute(table: Table, messages: Messages, durations: Durations | None = None) -> Execution:
    run = _Run(table, messages, durations or Durations())
    while run.ready:
        run.go_on(run.ready.popleft())
    return run.state


class _Run:
    def __init__(self, table: Table, messages: Messages, durations: Durations) -> None:
        count, size = len(table.rows), len(messages.all)
        self.table, self.messages, self.durations = table, messages, durations
        self.state = Execution(
            table, messages, find_faults(table), [0] * count, [NEVER] * size, [0.0] * count, [None] * count,
            [False] * count, [0.0] * count,
        )  # fmt: skip
        self._given = dict.fromkeys(messages.of, 0.0)  # end -> when it was handed over
        self._behind: list[list[int]] = [[] for _ in range(size)]
        for number, ahead in enumerate(messages.ahead):
            for other in ahead:
                self._behind[other].append(number)
        self._operation: list[dict[Token, tuple[int, ...]]] = [{} for _ in table.rows]
        for end, numbers in messages.beside.items():
            self._operation[end.rank][table.rows[end.rank][end.place]] = numbers
        self._unwaited = [
            [] if table.has_waits else [number for token in own if token.kind in SENDS for number in own[token]]
            for own in self._operation
        ]
        self._sleepers: dict[int, list[int]] = {}  # message -> the ranks that wait for it
        self._gathered: dict[int, float] = {}
        self._reduced: dict[int, float] = {}
        self._free = [[0.0, 0.0] for _ in range(count)]  # by rank, when gathering and reducing have ended
        self.ready = deque(range(count))

    def go_on(self, rank: int) -> None:
        """Run a rank's row until an input is missing."""
        state, row = self.state, self.table.rows[rank]
        while state.places[rank] < len(row):
            place = state.places[rank]
            if (rank, place) in state.faults or not self._all_here(rank, self._inputs(rank, row[place])):
                return
            self._do(rank, place, row[place])
            state.places[rank] = place + 1
            if row[place].is_message:
                self._pass(self.messages.of[End(rank, place)])
        state.finished[rank] = self._all_here(rank, self._unwaited[rank])

    def _inputs(self, rank: int, token: Token) -> list[int]:
        if token.kind in WAITS:
            return list(self._operation[rank][token._replace(kind=WAITS[token.kind])])
        receives = (needed(self.table, rank, part) for part in token.parts)
        return [number for receive in receives if receive is not None for number in self._operation[rank][receive]]

    def _all_here(self, rank: int, numbers: list[int]) -> bool:
        """Whether all these messages have passed; the rank's clock advances to the last of them."""
        state = self.state
        for number in numbers:
            done = state.done[number]
            if done is NEVER:
                state.waits_for[rank] = number
                self._sleepers.setdefault(number, []).append(rank)
                return False
            state.times[rank] = max(state.times[rank], done)
        state.waits_for[rank] = None
        return True

    def _do(self, rank: int, place: int, token: Token) -> None:
        times, free = self.state.times, self._free[rank]
        if token.is_message:
            self._given[End(rank, place)] = times[rank]
        elif token.parts[0].kind in COMPUTE:
            begin = max(times[rank], *(self._gathered.get(part.stage, 0.0) for part in token.parts))
            lasts = self.durations.compute(rank, token)
            times[rank] = begin + lasts
            self.state.busy[rank] += lasts
        elif token.kind == "UNSHARD":
            lasts = self.durations.gather.get(token.stage, 0.0)
            free[0] = self._gathered[token.stage] = max(times[rank], free[0]) + lasts
        elif token.kind == "REDUCE_GRAD":
            lasts = self.durations.reduce.get(token.stage, 0.0)
            free[1] = self._reduced[token.stage] = max(times[rank], free[1]) + lasts
            if not self.table.has_waits:  # before 2.15 it is waited for where it stands
                times[rank] = free[1]
        elif token.kind == "WAIT_REDUCE_GRAD":
            times[rank] = max(times[rank], self._reduced.get(token.stage, 0.0))

    def _pass(self, number: int) -> None:
        """Let a message pass if it can, and then those behind it in its queues."""
        pending = [number]
        while pending:
            number = pending.pop()
            message, ahead = self.messages.all[number], self.messages.ahead[number]
            before = [self.state.done[other] for other in ahead]
            if self.state.done[number] is not NEVER or not message.is_whole or NEVER in before:
                continue
            if not all(map(self.state.handed_over, message.ends)):
                continue
            times = [self._given[end] for end in message.ends] + [time for time in before if time is not None]
            self.state.done[number] = max(times) + self.durations.hop
            pending += self._behind[number]
            self.ready += self._sleepers.pop(number, [])


@dataclass(frozen=True)
class Levels:
    """The most of each at one time on any rank; bytes are None where sizes are not known."""

    sends: int  # under way
    receive_buffers: int  # waiting to be used
    gathered_stages: int  # whose weights are whole
    gathered_bytes: int | None  # of those weights
    unreduced_bytes: int | None  # of gradients whose reduction has begun and was not waited for


def find_levels(
    table: Table, weights: Mapping[int, int] | None = None, gradients: Mapping[int, int] | None = None
) -> Levels:
    """The levels of a table, by the bytes of each stage's weights and gradients."""
    most: Counter[str] = Counter()
    for rank, row in enumerate(table.rows):
        now: Counter[str] = Counter()
        sends: set[Token] = set()
        for token in row:
            for part in token.parts:
                sends ^= {part} if part.kind in SENDS else _ended(part, sends, waits=table.has_waits)
                now["receives"] += (part.kind in RECEIVES) - (needed(table, rank, part) is not None)
                step = {"UNSHARD": 1, "RESHARD": -1}.get(part.kind, 0)
                now["stages"] += step
                now["weights"] += step * (weights or {}).get(part.stage, 0)
                pending = {"REDUCE_GRAD": 1, "WAIT_REDUCE_GRAD": -1}.get(part.kind, 0)
                now["gradients"] += pending * (gradients or {}).get(part.stage, 0)
            now["sends"] = len(sends)
            most |= now
    return Levels(
        most["sends"],
        most["receives"],
        most["stages"],
        most["weights"] if weights else None,
        most["gradients"] if gradients else None,
    )


def _ended(part: Token, sends: set[Token], *, waits: bool) -> set[Token]:
    """The send that an action waits for, or that must have ended before it."""
    if part.kind in WAITS:
        return sends & {part._replace(kind=WAITS[part.kind])}
    if part.kind in BACKWARD and not waits:
        return sends & {part._replace(kind="SEND_F")}
    return set()
