"""The lanes of a plan: computations and transfers in the order of their times, and what waits for room.

A lane runs its actions as early as it can. So that a device never holds more than in the plan, however long anything
takes in a run, what takes room (F, LOAD:A) waits for all that makes room before it in the plan (W, STORE:A):

    W before F          both stand in the compute row
    STORE:A1 before F   0FREE:A1 in the compute row, right before the F
    STORE:A1 before LOAD:A0      0FREE:A1 in lane h2d, right before the LOAD
    W1 before LOAD:A4   0FREE:A1 in lane h2d, right before the LOAD

Then a device never holds more than in the plan at the start of one of them: of those that have begun, the last in the
plan's order. All that had made room by then in the plan has done so. Only the last of several is named, where a lane's
order says the same of the others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row
from rpbench.ordering.exact_model import KINDS, Computed

_OWN = (Kind.LOAD, Kind.STORE, Kind.FREE)


@dataclass(frozen=True)
class Plan:
    """When everything runs, in whole steps.

    Args:
        spans: (kind, stage, microbatch) -> start and end, of F, I, W and, for what moves, STORE and LOAD.
    """

    spans: Mapping[Computed, tuple[int, int]]

    def lanes(self, stage: int) -> dict[str, Row]:
        """The lanes of the device of a stage."""
        row, up, down = (tuple(make(stage)) for make in (self._compute, self._uploads, self._downloads))
        return {"compute": row, **({"h2d": up, "d2h": down} if down else {})}

    def start(self, kind: Kind, stage: int, microbatch: int) -> int:
        return self.spans[kind, stage, microbatch][0]

    def num_moved(self) -> int:
        """Activations that go to the host, of all stages."""
        return sum(kind is Kind.STORE for kind, _, _ in self.spans)

    def _in_order(self, stage: int, *kinds: Kind) -> list[tuple[Kind, int]]:
        """Kind and microbatch by start; what takes no time makes room for what begins then."""
        own = [key for key in self.spans if key[1] == stage and key[0] in kinds]
        own.sort(key=lambda key: (*self.spans[key], kinds.index(key[0]), key[2]))
        return [(kind, microbatch) for kind, _, microbatch in own]

    def _last_ended(self, kind: Kind, stage: int, by: int) -> int:
        """The last microbatch of a kind that has ended by a time; -1 without one."""
        ended = [key[2] for key, (_, end) in self.spans.items() if key[:2] == (kind, stage) and end <= by]
        return max(ended, default=-1)

    def _compute(self, stage: int) -> Iterator[Action]:
        named = -1
        for kind, microbatch in self._in_order(stage, *KINDS):
            start = self.start(kind, stage, microbatch)
            gone = self._last_ended(Kind.STORE, stage, start) if kind is Kind.F else -1
            if gone > named and self.start(Kind.I, stage, gone) > start:  # or its backward has waited for it
                yield _action(Kind.FREE, stage, gone)
                named = gone
            yield _action(kind, stage, microbatch)

    def _downloads(self, stage: int) -> Iterator[Action]:
        for _, microbatch in self._in_order(stage, Kind.STORE):
            yield _action(Kind.STORE, stage, microbatch)
            yield _action(Kind.FREE, stage, microbatch)

    def _uploads(self, stage: int) -> Iterator[Action]:
        order = [microbatch for _, microbatch in self._in_order(stage, Kind.LOAD)]
        named, freed, unfreed = -1, -1, list(order)
        for microbatch in order:
            start = self.start(Kind.LOAD, stage, microbatch)
            used = min(self._last_ended(Kind.W, stage, start), microbatch - 1)
            while unfreed and unfreed[0] <= used:
                freed = unfreed.pop(0)
                yield _action(Kind.FREE, stage, freed)
            if used > freed:  # it has stayed on the device
                yield _action(Kind.FREE, stage, used)
                freed = used
            gone = self._last_ended(Kind.STORE, stage, start)
            if gone > max(named, microbatch):  # the LOAD waits for its own STORE anyway, which comes after earlier ones
                yield _action(Kind.FREE, stage, gone)
                named = gone
            yield _action(Kind.LOAD, stage, microbatch)
        yield from (_action(Kind.FREE, stage, microbatch) for microbatch in unfreed)


def _action(kind: Kind, stage: int, microbatch: int) -> Action:
    return Action(kind, stage, microbatch, object="A" if kind in _OWN else None)


def shifted(row: Row, microbatches: int) -> Row:
    """The same for microbatches so many further on."""
    return tuple(action._replace(microbatch=(action.microbatch or 0) + microbatches) for action in row)
