"""Rows of large schedules as columns: their actions are made when somebody asks for one.

Most that is asked of a large schedule is asked of columns (`rpbench.sim.columns`), and making 262,144 actions takes
longer than checking and timing them.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import iadd, itemgetter
from typing import TypeAlias, overload

from rpbench.ir.action import Action, Kind, listed

Ints: TypeAlias = "array[int]"  # of type code "i": 32 bits, which numpy reads where they lie
_KINDS = list(Kind)  # which count from 0


class PlainRow(Sequence[Action]):
    """Actions that name a kind, a stage, a microbatch and perhaps an object that all move; equal to the tuple of them.

    Args:
        columns: kind, stage and microbatch of each action, three arrays of one length.
        moved: the object that they name.
    """

    __slots__ = ("_actions", "columns", "moved")

    def __init__(self, *columns: Ints, moved: str | None = None) -> None:
        self.columns, self.moved = columns, moved
        self._actions: tuple[Action, ...] | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """The same as a tuple, made once."""
        if self._actions is None:
            kinds, stages, microbatches = self.columns
            self._actions = tuple(listed(map(_KINDS.__getitem__, kinds), stages, microbatches, moved=self.moved))
        return self._actions

    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(map(_KINDS.__getitem__, set(self.columns[0])))

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
        return Action(_KINDS[kind], stage, microbatch, object=self.moved)

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
    """Actions of a kind, one for each microbatch, all of one stage or each of its own; all move one object, or none."""
    numbers = array("i", microbatches)
    at = array("i", [stages]) * len(numbers) if isinstance(stages, int) else array("i", stages)
    return PlainRow(array("i", [kind]) * len(numbers), at, numbers, moved=moved)


def plain_of(row: Sequence[Action]) -> PlainRow:
    """Actions of which none names more than kind, stage and microbatch."""
    if isinstance(row, PlainRow):
        return row
    return PlainRow(*(array("i", map(itemgetter(field), row)) for field in range(3)))


def joined(rows: Sequence[PlainRow]) -> PlainRow:
    """One row after another, of which all move the same."""
    columns = zip(*(row.columns for row in rows), strict=True)
    return PlainRow(*(reduce(iadd, column, array("i")) for column in columns), moved=rows[0].moved)


def in_turn(first: PlainRow, second: PlainRow, num_ahead: int) -> PlainRow:
    """`num_ahead` of the first, then one of the first and one of the second in turn, then what is left of the second.

    Raises:
        ValueError: if they are not as many.
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
