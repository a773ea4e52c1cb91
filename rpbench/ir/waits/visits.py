"""Visits: the unbroken runs of one stage on a device, and the transfers of weights or gradients that serve them.

Transfers name a stage, not a visit; they are matched by their order. The transfers of a stage on a device are

    one for each visit      0F0 0F1 | 0B0 0B1                      two visits: two LOAD:P, each with its FREE:P
    or one for each step    weights that stay on the device until the optimizer has new ones
    or one for all          weights that are brought once

The k-th FREE ends the k-th LOAD. Weights may come in pieces, `0LOAD:P 0LOAD:P.1`, which count as one transfer. An R
that makes the input of another stage (`Shape.keeps_every`) is always a visit of its own.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rpbench.ir.action import COMPUTE, HEAD, Action, Kind
from rpbench.ir.index import GRADIENT, Index

_VISITING, _ADDING = COMPUTE - set(HEAD), frozenset(GRADIENT)


class Visit(NamedTuple):
    """A stage that runs on a device for some microbatches of one step, with no other stage between."""

    device: int
    backward: bool  # whether `stage` is a backward stage, as it is of a recomputation
    stage: int
    step: int  # optimizer step of its microbatches, from 0
    numbers: tuple[int, ...]  # its actions, in order
    last_gradient: int  # the last action that adds to a weight gradient; -1 without one

    @property
    def first(self) -> int:
        return self.numbers[0]


class Transfer(NamedTuple):
    """One transfer of weights or gradients: its pieces, the visits it serves, and the FREE that ends it, or -1."""

    pieces: tuple[int, ...]
    visits: tuple[Visit, ...]
    end: int = -1


make_visit = partial(tuple.__new__, Visit)  # of all fields in their order: there are thousands


def visits_of(index: Index) -> list[list[Visit]]:
    """The visits of every device, in the order of its compute lane."""
    found: list[list[Visit]] = [[] for _ in range(index.shape.num_ranks)]
    for lane in index.lanes:
        if lane.name == "compute":
            found[lane.device] += _runs(index, range(lane.start, lane.stop), lane.device)
    return found


def _runs(index: Index, numbers: range, device: int) -> Iterator[Visit]:
    run: list[int] = []
    now: tuple[bool, int, int] | None = None
    again = False
    gradient, actions, size = -1, index.actions, index.shape.num_microbatches
    is_alone = Kind.R if index.shape.keeps_every > 1 else None  # makes the input of another stage
    for number, action in zip(numbers, actions[numbers.start : numbers.stop], strict=True):
        for kind, stage, microbatch, _, _, _, _, _ in _by_visit(action[7], size) if action[7] else (action,):
            if kind not in _VISITING:
                continue
            assert microbatch is not None
            place = kind is not Kind.F, stage, microbatch // size
            if now is not None and (place != now or again != (kind is is_alone)):
                yield make_visit((device, *now, tuple(run), gradient))
                run, gradient = [], -1
            now, again = place, kind is is_alone
            if not run or run[-1] != number:  # an OVERLAP may hold two actions of one visit
                run.append(number)
            if kind in _ADDING:
                gradient = number
    if now is not None:
        yield make_visit((device, *now, tuple(run), gradient))


def _by_visit(parts: Sequence[Action], size: int) -> list[Action]:
    """The parts of an OVERLAP, ordered by visit: they run together, so parts of one visit count as neighbours."""
    places: dict[tuple[bool, int, int], int] = {}
    order = [places.setdefault(_place(part, size), len(places)) for part in parts]
    return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]


def first_of(index: Index, visit: Visit) -> Action:
    """The first plain action of a visit."""
    action = index.actions[visit.numbers[0]]
    return next(actions_of(index, visit)) if action.sub else action


def actions_of(index: Index, visit: Visit) -> Iterator[Action]:
    """The plain actions of a visit, in order; of an OVERLAP only those that belong to it."""
    place, size = (visit.backward, visit.stage, visit.step), index.shape.num_microbatches
    for number in visit.numbers:
        action = index.actions[number]
        for part in action.sub or (action,):
            if part.kind in _VISITING and _place(part, size) == place:
                yield part


def _place(part: Action, size: int) -> tuple[bool, int, int]:
    """Direction, stage and step of a computing action."""
    return part.kind is not Kind.F, part.stage, (part.microbatch or 0) // size
