"""Checkpointing passes: where recomputation stands in a row, and forwards that run earlier because little is kept.

    checkpoint   every backward gets an R of its own right before it. R needs what its forward kept, not the gradient
                 that comes from above, so it runs in the wait for that gradient.
    remove       a forward whose backward directly follows keeps what it computes, and needs no R
    prepose      forwards behind a rank's first backward go before it; what a forward keeps is only its input

One recomputed activation is there at a time: the R of a backward stands behind the backward before it.

Source: the passes of Mario (PPoPP'25), after their description.
"""

from collections.abc import Sequence

from rpbench.ir.action import BACKWARD, Action, Kind, parts_of
from rpbench.ir.schedule import Row


def checkpoint(row: Sequence[Action]) -> Row:
    """The row with an R before every backward that does not directly follow its forward."""
    found: list[Action] = []
    for action in row:
        before = found[-1] if found else None
        found += [
            Action(Kind.R, part.stage, part.microbatch, part.part)
            for part in parts_of(action)
            if part.kind in (Kind.B, Kind.I) and not _turns(before, part)
        ]
        found.append(action)
    return tuple(found)


def prepose(row: Sequence[Action], number: int) -> Row:
    """The row with the first `number` forwards behind its first backward before it.

    A row whose first backward directly follows its own forward stays as it is: that forward keeps what it computes.
    """
    first = next(
        (place for place, action in enumerate(row) if any(part.kind in BACKWARD for part in parts_of(action))), len(row)
    )
    if not first or first == len(row) or any(_turns(row[first - 1], part) for part in parts_of(row[first])):
        return tuple(row)
    moved = [place for place in range(first, len(row)) if row[place].kind is Kind.F][:number]
    stays = [action for place, action in enumerate(row[first:], start=first) if place not in moved]
    return (*row[:first], *(row[place] for place in moved), *stays)


def _turns(before: Action | None, backward: Action) -> bool:
    """Whether an action is the forward of a backward that directly follows."""
    return before == Action(Kind.F, backward.stage, backward.microbatch, backward.part)
