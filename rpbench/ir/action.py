"""Action and Kind: the vocabulary of a schedule and its text form; `PlainRow`: a row of many actions as columns.

A token reads `<stage><KIND>[:object][microbatch][.part][@version][>peer]`:

    2F5             forward of stage 2, microbatch 5
    2F5.1@4         ... its sequence part 1, with weight version 4
    7LOAD:P@3       bring version 3 of stage 7's parameters to the device
    7LOAD:P.1@3     ... the second piece of them
    0STORE:A5>host  move the activations of microbatch 5 out
    1WAIT4          go on when stage 1 has run microbatch 4 forward
    0VALIDATE@3     check all gradients of the step to version 3
    1ROLLBACK@3     end the step of stage 1 to version 3, which ran before that check
    1STEP_REST@4    step the late columns of stage 1 on the host, by the gradients up to the step to version 4
    (0F7;7B3)OVERLAP  two actions that run together

Letters follow torch.distributed.pipelining: F, I (input gradient), W (weight gradient), B = I then W.
The zero-bubble papers write B for what is I here.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial, reduce
from itertools import repeat
from operator import iadd, itemgetter
from typing import NamedTuple, TypeAlias, overload


class Kind(IntEnum):
    """The kind of an action; the names are the tokens' letters."""

    F = 0  # forward
    B = 1  # full backward: input and weight gradients
    I = 2  # noqa: E741  input gradient; the letter torch uses
    W = 3  # weight gradient
    R = 4  # recompute of a forward, ahead of its backward
    FB = 5  # forward, loss and backward in one visit (RoundPipe's first backward stage)
    SEND_F = 6
    RECV_F = 7
    SEND_B = 8
    RECV_B = 9
    UNSHARD = 10
    RESHARD = 11
    REDUCE_GRAD = 12
    LOAD = 13
    STORE = 14
    FREE = 15
    STEP = 16
    VALIDATE = 17  # a check of all gradients of a step: whether one overflowed, and their norm
    ROLLBACK = 18  # the end of a step that ran before that check: if it was wrong, it is taken back or done again
    OVERLAP = 19
    HF = 20  # forward of a device's shard of the head: logits of its part of the vocabulary, their maximum and sum
    HB = 21  # backward of that shard, once the sums of all shards are known
    SUM_F = 22  # all-reduces of a stage's forward, where every device has a shard of each matrix
    SUM_B = 23  # all-reduces of its backward, recomputation included
    WAIT = 24  # wait until a forward of another device has run: devices begin one after another
    STEP_REST = 25  # the host's late step of the columns that the device does not step itself


HEAD = (Kind.HF, Kind.HB)  # kinds whose stage is the number of a shard of the head, and of its device
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.FB, Kind.OVERLAP, *HEAD})
BACKWARD = (Kind.B, Kind.I, Kind.FB)  # kinds that hand an input gradient to the stage below
SEND = frozenset({Kind.SEND_F, Kind.SEND_B})
RECV = frozenset({Kind.RECV_F, Kind.RECV_B})
SUMS = frozenset({Kind.SUM_F, Kind.SUM_B})
MOVES = frozenset({Kind.LOAD, Kind.STORE, Kind.FREE})  # kinds that name an object: P, G, O or A
# Kinds that stand once for each version.
STEPPING = frozenset({Kind.STEP, Kind.VALIDATE, Kind.ROLLBACK, Kind.STEP_REST})
OBJECTS = "PGOA"  # parameters, gradients, optimizer state, activations

_PER_MICROBATCH = (COMPUTE | SEND | RECV | SUMS | {Kind.WAIT}) - {Kind.OVERLAP}


class Action(NamedTuple):
    """One entry of a lane. Its device is the row it stands in, never a function of its stage."""

    kind: Kind
    stage: int
    microbatch: int | None = None
    part: int = 0
    version: int | None = None
    object: str | None = None
    peer: int | str | None = None
    sub: tuple["Action", ...] = ()

    def __str__(self) -> str:
        return text(self)


from_fields = partial(tuple.__new__, Action)  # takes all fields in their order; the fast way to make many


def actions(kind: Kind, stage: int, microbatches: Iterable[int], part: int = 0) -> list[Action]:
    """The actions of one kind, stage and part, one for each microbatch."""
    return listed(repeat(kind), repeat(stage), microbatches, part)


def listed(
    kinds: Iterable[Kind], stages: Iterable[int], microbatches: Iterable[int], part: int = 0, moved: str | None = None
) -> list[Action]:
    """The actions of these kinds, stages and microbatches, place by place; all move one object, or none."""
    empty = repeat(None)
    fields = kinds, stages, microbatches, repeat(part), empty, repeat(moved), empty, repeat(())
    return list(map(from_fields, zip(*fields, strict=False)))


def text(action: Action) -> str:
    """The token of an action; `parse` reads it back exactly."""
    if action.kind is Kind.OVERLAP:
        return f"({';'.join(map(text, action.sub))})OVERLAP"
    token = f"{action.stage}{action.kind.name}"
    if action.object is not None:
        token += f":{action.object}"
    if action.microbatch is not None:
        token += str(action.microbatch)
    if action.part:
        token += f".{action.part}"
    if action.version is not None:
        token += f"@{action.version}"
    if action.peer is not None:
        token += f">{action.peer}"
    return token


_KINDS = "|".join(sorted((kind.name for kind in Kind if kind is not Kind.OVERLAP), key=len, reverse=True))
_NUMBER = r"0|[1-9][0-9]{0,8}"
_TOKEN = re.compile(
    rf"(?P<stage>{_NUMBER})(?P<kind>{_KINDS})(?::(?P<object>[{OBJECTS}]))?(?P<mb>{_NUMBER})?"
    rf"(?:\.(?P<part>[1-9][0-9]{{0,8}}))?(?:@(?P<version>{_NUMBER}))?(?:>(?P<peer>{_NUMBER}|[a-z][a-z0-9_]*))?"
)


def parse(token: str) -> Action:
    """The action a token stands for.

    Raises ValueError if a character of the token is left over, or if its kind lacks a field or takes none of that name.
    """
    if token.startswith("("):
        return _parse_overlap(token)
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(
            f"bad token {token!r:.60}: expected <stage><KIND>[:object][microbatch][.part][@version][>peer], numbers of "
            "at most 9 digits, such as 2F5, 7LOAD:P@3 or (0F7;7B3)OVERLAP"
        )
    peer = match["peer"]
    action = Action(
        Kind[match["kind"]],
        int(match["stage"]),
        None if match["mb"] is None else int(match["mb"]),
        int(match["part"] or 0),
        None if match["version"] is None else int(match["version"]),
        match["object"],
        int(peer) if peer and peer.isdigit() else peer,
    )
    _check_fields(action, token)
    return action


def _check_fields(action: Action, token: str) -> None:
    kind = action.kind
    if (kind in MOVES) != (action.object is not None):
        raise ValueError(
            f"bad token {token!r}: LOAD, STORE and FREE name what they move (:P, :G, :O or :A), other kinds do not"
        )
    takes_microbatch = kind in _PER_MICROBATCH or action.object == "A"
    if takes_microbatch != (action.microbatch is not None):
        rule = "needs a microbatch" if takes_microbatch else "takes no microbatch"
        raise ValueError(f"bad token {token!r}: {kind.name} {rule}, as in 2F5 or 2STEP@1")
    if action.part and action.microbatch is None and (kind, action.object) != (Kind.LOAD, "P"):
        raise ValueError(f"bad token {token!r}: a part is one of a microbatch, as in 2F5.1, or of a LOAD:P")
    if action.peer is not None and kind not in SEND | RECV | MOVES:
        raise ValueError(f"bad token {token!r}: only SEND, RECV, LOAD, STORE and FREE name a peer, as in 2SEND_F5>3")


def _parse_overlap(token: str) -> Action:
    inner, closing, kind = token[1:].rpartition(")")
    if not closing or kind != "OVERLAP":
        raise ValueError(f"bad token {token!r}: actions that run together are written (0F7;7B3)OVERLAP")
    sub = tuple(parse(part) for part in inner.split(";"))
    if len(sub) < 2 or any(part.kind is Kind.OVERLAP for part in sub):
        raise ValueError(f"bad token {token!r}: OVERLAP holds two or more plain actions")
    return overlap(*sub)


def overlap(*sub: Action) -> Action:
    """Actions that run together on one device; stage and microbatch are those of the first."""
    _, stage, microbatch, part, *_ = sub[0]
    return from_fields((Kind.OVERLAP, stage, microbatch, part, None, None, None, sub))


def parts_of(action: Action) -> tuple[Action, ...]:
    """The plain actions inside an action: itself, or what an OVERLAP holds."""
    return action.sub or (action,)


def receive_of(send: Action) -> Action:
    """The RECV that a SEND's peer runs: of the stage above for SEND_F, of the stage below for SEND_B."""
    kind, step = (Kind.RECV_F, 1) if send.kind is Kind.SEND_F else (Kind.RECV_B, -1)
    return Action(kind, send.stage + step, send.microbatch, send.part)


# --- rows of large schedules, as columns ---

Ints: TypeAlias = "array[int]"  # of type code "i": 32 bits, which numpy reads where they lie
_OF_CODE = list(Kind)  # which count from 0


class PlainRow(Sequence[Action]):
    """Actions with a kind, a stage and a microbatch that all move one object, or none; equal to the tuple of them.

    Checks and simulation of large schedules read the columns (`rpbench.sim.columns`). Actions are made on first use:
    making 262,144 of them takes longer than checking and timing them.

    Args:
        columns: kind, stage and microbatch of each action, three arrays of one length.
        moved: the object that they move.
    """

    __slots__ = ("_actions", "columns", "moved")

    def __init__(self, *columns: Ints, moved: str | None = None) -> None:
        self.columns, self.moved = columns, moved
        self._actions: tuple[Action, ...] | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions as a tuple, made once."""
        if self._actions is None:
            kinds, stages, microbatches = self.columns
            self._actions = tuple(listed(map(_OF_CODE.__getitem__, kinds), stages, microbatches, moved=self.moved))
        return self._actions

    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(map(_OF_CODE.__getitem__, set(self.columns[0])))

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, place: int) -> Action: ...
    @overload
    def __getitem__(self, place: slice) -> "PlainRow": ...
    def __getitem__(self, place: int | slice) -> "Action | PlainRow":
        if isinstance(place, slice):
            return PlainRow(*(column[place] for column in self.columns), moved=self.moved)
        if self._actions is not None:
            return self._actions[place]
        kind, stage, microbatch = (column[place] for column in self.columns)
        return Action(_OF_CODE[kind], stage, microbatch, object=self.moved)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PlainRow):
            return self.columns == other.columns and (self.moved == other.moved or not self)
        return self.actions == other

    def __hash__(self) -> int:
        return hash(self.actions)

    def __add__(self, other: tuple[Action, ...]) -> tuple[Action, ...]:
        return (*self, *other)

    def __radd__(self, other: tuple[Action, ...]) -> tuple[Action, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(self.actions)


def plain(kind: Kind, stages: int | Sequence[int], microbatches: Sequence[int], moved: str | None = None) -> PlainRow:
    """Actions of a kind, one for each microbatch; `stages` is one stage for all, or one stage for each."""
    numbers = array("i", microbatches)
    at = array("i", [stages]) * len(numbers) if isinstance(stages, int) else array("i", stages)
    return PlainRow(array("i", [kind]) * len(numbers), at, numbers, moved=moved)


def plain_of(row: Sequence[Action]) -> PlainRow:
    """The row of some actions, none of which names more than kind, stage and microbatch."""
    if isinstance(row, PlainRow):
        return row
    return PlainRow(*(array("i", map(itemgetter(field), row)) for field in range(3)))


def joined(rows: Sequence[PlainRow]) -> PlainRow:
    """Several rows as one; all move the same object, or none."""
    columns = zip(*(row.columns for row in rows), strict=True)
    return PlainRow(*(reduce(iadd, column, array("i")) for column in columns), moved=rows[0].moved)


def in_turn(first: PlainRow, second: PlainRow, num_ahead: int) -> PlainRow:
    """`num_ahead` actions of the first row, then one of each row in turn, then the rest of the second row.

    Raises ValueError if the rows differ in length.
    """
    if len(second) != len(first):
        raise ValueError(f"{len(first)} and {len(second)} actions: as many of both go in turn")
    columns = zip(first.columns, second.columns, strict=True)
    return PlainRow(*(_in_turn(*pair, num_ahead) for pair in columns), moved=first.moved)


def _in_turn(first: Ints, second: Ints, num_ahead: int) -> Ints:
    steady = len(first) - num_ahead
    middle = array("i", [0]) * (2 * steady)
    middle[::2], middle[1::2] = first[num_ahead:], second[:steady]
    return first[:num_ahead] + middle + second[steady:]
