"""Levels: what a rank of a lowered table keeps at its fullest, as its row alone decides.

A send is under way from where it stands to its WAIT; without one, a forward's until the backward that frees its output,
a backward's until the row ends. A receive buffer is made where the receive stands (torch 2.15; before it all of them
stood from the start) and is free when the computation that uses it has run.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rpbench.torch_runtime.communication.faults import needed
from rpbench.torch_runtime.communication.tokens import BACKWARD, RECEIVES, SENDS, WAITS, Table, Token


@dataclass(frozen=True)
class Levels:
    """The most of each that stand at one time on any rank.

    Args:
        sends: under way.
        receive_buffers: waiting to be used.
        gathered_stages: whose weights are whole.
        gathered_bytes: of those weights; None where sizes are not known.
        unreduced_bytes: of gradients whose reduction has begun and was not waited for.
    """

    sends: int
    receive_buffers: int
    gathered_stages: int
    gathered_bytes: int | None
    unreduced_bytes: int | None


def find_levels(
    table: Table, weights: Mapping[int, int] | None = None, gradients: Mapping[int, int] | None = None
) -> Levels:
    """The levels of a table.

    Args:
        weights, gradients: bytes by stage.
    """
    most: Counter[str] = Counter()
    for rank in range(len(table.rows)):
        most |= _of_rank(table, rank, weights or {}, gradients or {})
    return Levels(
        most["sends"],
        most["receives"],
        most["stages"],
        most["weights"] if weights else None,
        most["gradients"] if gradients else None,
    )


def _of_rank(table: Table, rank: int, weights: Mapping[int, int], gradients: Mapping[int, int]) -> Counter[str]:
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    sends: set[Token] = set()
    for token in table.rows[rank]:
        for part in token.parts:
            sends ^= {part} if part.kind in SENDS else _ended(part, sends, waits=table.has_waits)
            now["receives"] += (part.kind in RECEIVES) - (needed(table, rank, part) is not None)
            step = {"UNSHARD": 1, "RESHARD": -1}.get(part.kind, 0)
            now["stages"] += step
            now["weights"] += step * weights.get(part.stage, 0)
            pending = {"REDUCE_GRAD": 1, "WAIT_REDUCE_GRAD": -1}.get(part.kind, 0)
            now["gradients"] += pending * gradients.get(part.stage, 0)
        now["sends"] = len(sends)
        most |= now
    return most


def _ended(part: Token, sends: set[Token], *, waits: bool) -> set[Token]:
    """The send that an action shows to have ended, or waits for."""
    if part.kind in WAITS:
        return sends & {part._replace(kind=WAITS[part.kind])}
    if part.kind in BACKWARD and not waits:
        return sends & {part._replace(kind="SEND_F")}
    return set()
