"""Send budget: waits moved forward until no rank has more than so many sends under way.

Before a send that would be one too many, one of those under way is waited for: the oldest whose receive must have been
handed over by then, or else the oldest for which waiting there closes no circle.

Source: torch 2.15, `_add_wait_send_budget`.
"""

from collections.abc import Iterable, Iterator

from rpbench.ir.schedule import ScheduleError
from rpbench.torch_runtime.communication.tokens import SENDS, WAITS, Table, Token

Place = tuple[int, int]  # rank, number among its actions that are no waits


def with_send_budget(table: Table, most: int) -> Table:
    """The table with its waits moved.

    Args:
        table: with a wait for every send.

    Raises:
        ScheduleError: if a rank cannot keep to it.
    """
    order = _Order(table)
    rows = tuple(tuple(_row(order, rank, row, most)) for rank, row in enumerate(table.rows))
    return Table(rows, table.chain_length)


def _row(order: "_Order", rank: int, row: Iterable[Token], most: int) -> Iterator[Token]:
    pending: dict[Token, None] = {}
    number = 0
    for token in row:
        if token.kind in WAITS:
            send = token._replace(kind=WAITS[token.kind])
            if send in pending:
                del pending[send]
                yield token
            continue
        if token.kind in SENDS:
            while len(pending) >= most:
                oldest = order.choose(pending, (rank, number))
                if oldest is None:
                    raise ScheduleError(
                        f"max_outstanding_sends={most}: rank {rank} has {', '.join(map(str, pending))} under way "
                        f"before {token}, and to wait for any of them would be for good; set more, or take another "
                        "schedule"
                    )
                del pending[oldest]
                order.wait(oldest, (rank, number))
                yield oldest._replace(kind=f"WAIT_{oldest.kind}")
            pending[token] = None
        yield token
        number += 1


class _Order:
    """What must come before what: rows, messages, and the waits where they stand now."""

    def __init__(self, table: Table) -> None:
        kept = [[token for token in row if token.kind not in WAITS] for row in table.rows]
        place = {token: (rank, number) for rank, row in enumerate(kept) for number, token in enumerate(row)}
        self._length = [len(row) for row in kept]
        self._received = {token: place[table.other_end(token)] for token in place if token.kind in SENDS}
        self._behind_send = {place[send]: receive for send, receive in self._received.items()}
        self._waited: dict[Token, Place] = {}  # send -> what comes after its wait
        for rank, row in enumerate(table.rows):
            number = 0
            for token in row:
                if token.kind in WAITS:
                    self._waited[token._replace(kind=WAITS[token.kind])] = (rank, number)
                else:
                    number += 1

    def choose(self, sends: Iterable[Token], place: Place) -> Token | None:
        """The send to wait for before a place; None where none can be."""
        safe = [send for send in sends if not self._leads(place, self._received[send], without=send)]
        sure = (send for send in safe if self._leads(self._received[send], place, without=send))
        return next(sure, safe[0] if safe else None)

    def wait(self, send: Token, place: Place) -> None:
        """Move a wait."""
        self._waited[send] = place

    def _leads(self, start: Place, goal: Place, *, without: Token) -> bool:
        """Whether one action comes before another, or is it, whatever the wait of a send adds."""
        after: dict[Place, list[Place]] = {}
        for send, place in self._waited.items():
            if send != without:
                after.setdefault(self._received[send], []).append(place)
        seen, pending = {start}, [start]
        while pending:
            rank, number = place = pending.pop()
            if rank == goal[0] and number <= goal[1]:
                return True
            following = [(rank, number + 1), *after.get(place, ())]
            if place in self._behind_send:
                following.append(self._behind_send[place])
            for other in following:
                if other[1] < self._length[other[0]] and other not in seen:
                    seen.add(other)
                    pending.append(other)
        return False
