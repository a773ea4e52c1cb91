"""Settings: a compute-only table lowered as torch 2.15 lowers it, under its five settings.

    max_active_stages        stages of a rank whose weights are gathered at a time
    unshard_lookahead        how many stages ahead they are gathered: `full`, `auto` or a number for each rank
    defer_reduce_grad_wait   a gradient's reduction is waited for at the next one, not where it begins
    defer_pp_recv            a receive stands where its computation needs it, not where the sender comes to its send
    max_outstanding_sends    sends under way on a rank before one of them is waited for

Source: torch 2.15, `_PipelineScheduleRuntime._prepare_schedule_with_comms` and the passes it calls, whose rows these
are, action for action (a test compares them where torch has them).

Before a send that would be one too many, a rank waits for one under way: the oldest whose receive must have been handed
over by then, or else the oldest for which waiting there closes no cycle.

Source: torch 2.15, `_add_wait_send_budget`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rpbench.ir.schedule import ScheduleError
from rpbench.torch_runtime.communication.execution import needed
from rpbench.torch_runtime.communication.tokens import BACKWARD, SENDS, WAITS, Table, Token

Place = tuple[int, int]  # rank, number among its actions that are no waits


def with_send_budget(table: Table, most: int) -> Table:
    """A table with at most so many sends under way on a rank; ScheduleError where a rank cannot keep to that.

    The table waits for every send already; the waits are moved.
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
                order.waited[oldest] = rank, number
                yield oldest._replace(kind=f"WAIT_{oldest.kind}")
            pending[token] = None
        yield token
        number += 1


class _Order:
    """The order of actions that follows from rows, messages, and the waits where they stand now."""

    def __init__(self, table: Table) -> None:
        kept = [[token for token in row if token.kind not in WAITS] for row in table.rows]
        place = {token: (rank, number) for rank, row in enumerate(kept) for number, token in enumerate(row)}
        self._length = [len(row) for row in kept]
        self._received = {token: place[table.other_end(token)] for token in place if token.kind in SENDS}
        self._behind_send = {place[send]: receive for send, receive in self._received.items()}
        self.waited: dict[Token, Place] = {}  # send -> what comes after its wait
        for rank, row in enumerate(table.rows):
            number = 0
            for token in row:
                if token.kind in WAITS:
                    self.waited[token._replace(kind=WAITS[token.kind])] = (rank, number)
                else:
                    number += 1

    def choose(self, sends: Iterable[Token], place: Place) -> Token | None:
        """The send to wait for before a place; None where each wait would be for good."""
        safe = [send for send in sends if not self._leads(place, self._received[send], without=send)]
        sure = (send for send in safe if self._leads(self._received[send], place, without=send))
        return next(sure, safe[0] if safe else None)

    def _leads(self, start: Place, goal: Place, *, without: Token) -> bool:
        """Whether one action comes before another or is it, with the wait for one send left out."""
        after: dict[Place, list[Place]] = {}
        for send, place in self.waited.items():
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


def with_send_waits(row: Sequence[Token]) -> list[Token]:
    found: list[Token] = []
    pending: dict[Token, None] = {}
    for token in row:
        found.append(token)
        if token.kind in SENDS:
            pending[token] = None
        for part in token.parts:
            send = part._replace(kind="SEND_F")
            if part.kind in BACKWARD and send in pending:
                del pending[send]
                found.append(part._replace(kind="WAIT_SEND_F"))
    return found + [send._replace(kind=f"WAIT_{send.kind}") for send in pending]


def with_reduction_waits(row: Sequence[Token]) -> list[Token]:
    """A row whose reductions are waited for where they begin."""
    return [
        each
        for token in row
        for each in ((token, token._replace(kind="WAIT_REDUCE_GRAD")) if token.kind == "REDUCE_GRAD" else (token,))
    ]


@dataclass(frozen=True)
class Settings:
    """The five settings with torch's defaults; ValueError for a value that torch refuses."""

    max_active_stages: int = 3
    unshard_lookahead: str | tuple[int, ...] = "full"
    defer_reduce_grad_wait: bool = False
    defer_pp_recv: bool = False
    max_outstanding_sends: int | None = None

    def __post_init__(self) -> None:
        if self.max_active_stages < 1:
            raise ValueError(
                f"max_active_stages={self.max_active_stages}: a stage that computes is gathered; at least 1"
            )
        if self.max_outstanding_sends is not None and self.max_outstanding_sends < 1:
            raise ValueError(
                f"max_outstanding_sends={self.max_outstanding_sends}: at least 1, or nothing could be sent"
            )
        if isinstance(self.unshard_lookahead, str) and self.unshard_lookahead not in ("full", "auto"):
            raise ValueError(
                f"unshard_lookahead={self.unshard_lookahead}: full, auto, or a number for each rank as 2,3"
            )

    def lookahead(self, num_ranks: int) -> tuple[int, ...]:
        """Stages that each rank gathers ahead; ValueError if they do not fit the ranks or the most at a time."""
        if self.unshard_lookahead == "full":
            return (self.max_active_stages,) * num_ranks
        if self.unshard_lookahead == "auto":
            return tuple(min(rank + 2, self.max_active_stages) for rank in range(num_ranks))
        assert not isinstance(self.unshard_lookahead, str)
        if len(self.unshard_lookahead) != num_ranks or not all(
            1 <= each <= self.max_active_stages for each in self.unshard_lookahead
        ):
            raise ValueError(
                f"unshard_lookahead={','.join(map(str, self.unshard_lookahead))}: {num_ranks} numbers, one a rank, "
                f"from 1 to max_active_stages={self.max_active_stages}"
            )
        return self.unshard_lookahead


def lower_as_torch(table: Table, settings: Settings) -> Table:
    """The computations of a table with gathers, reductions, messages and waits where torch 2.15 puts them.

    Raises ScheduleError if they cannot run or the settings cannot be kept, ValueError if these do not fit the ranks.
    """
    compute = table.compute_rows()
    count = 1 + max(part.microbatch or 0 for row in compute for token in row for part in token.parts)
    ahead = settings.lookahead(len(compute))
    rows = [
        _with_reductions(
            _with_gathers(row, settings.max_active_stages, lookahead), count, deferred=settings.defer_reduce_grad_wait
        )
        for row, lookahead in zip(compute, ahead, strict=True)
    ]
    plain = Table(tuple(map(tuple, rows)), table.chain_length)
    found = [with_send_waits(row) for row in _with_messages(plain)]
    if settings.defer_pp_recv:
        found = [_with_late_receives(plain, rank, row) for rank, row in enumerate(found)]
    lowered = Table(tuple(map(tuple, found)), table.chain_length)
    budget = settings.max_outstanding_sends
    return lowered if budget is None else with_send_budget(lowered, budget)


# --- weights and gradients of stages that ranks share --------------------------------------------------------------


def _next_stages(row: Sequence[Token], start: int, count: int) -> list[int]:
    """The next stages that a row computes, in order; an overlapped pair stays together."""
    found: list[int] = []
    for token in row[start:]:
        found += [part.stage for part in dict.fromkeys(token._replace(kind="") for token in token.parts)]
        found = list(dict.fromkeys(found))
        if len(found) >= count:
            break
    return found


def _with_gathers(row: Sequence[Token], most: int, lookahead: int) -> list[Token]:
    """UNSHARD of a stage as soon as it is among the next stages, RESHARD once it is not."""
    found: list[Token] = []
    gathered: list[int] = []
    for place, token in enumerate(row):
        if len({part.stage for part in token.parts}) > most:
            raise ScheduleError(f"{token} needs two stages at a time, max_active_stages={most}: set at least 2")
        stay = _next_stages(row, place, most)
        come = [stage for stage in _next_stages(row, place, lookahead) if stage not in gathered]
        found += [Token(stage, "RESHARD") for stage in gathered if stage not in stay]
        found += [Token(stage, "UNSHARD") for stage in come]
        gathered = [stage for stage in gathered if stage in stay] + come
        found.append(token)
    return found + [Token(stage, "RESHARD") for stage in gathered]


def _with_reductions(row: Sequence[Token], count: int, *, deferred: bool) -> list[Token]:
    """REDUCE_GRAD after a stage's last weight gradient, and its wait."""
    found: list[Token] = []
    made: dict[int, int] = {}
    pending: list[Token] = []
    for token in row:
        found.append(token)
        for part in token.parts:
            made[part.stage] = made.get(part.stage, 0) + (part.kind in ("B", "W"))
            if part.kind not in ("B", "W") or made[part.stage] < count:
                continue
            found += [*pending, Token(part.stage, "REDUCE_GRAD")]
            pending = [Token(part.stage, "WAIT_REDUCE_GRAD")] if deferred else []
    return found + pending if deferred else with_reduction_waits(found)


# --- messages ------------------------------------------------------------------------------------------------------


def _with_messages(table: Table) -> list[list[Token]]:
    """Ranks take turns to run one action; a rank that computes another's input writes the message into both rows."""
    left = [deque(row) for row in table.rows]
    found: list[list[Token]] = [[] for _ in left]
    done: list[set[Token]] = [set() for _ in left]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            if row and all(_ready(table, part, done[rank]) for part in row[0].parts):
                _do(table, rank, row.popleft(), found, done)
                moved = True
        if not moved:
            stuck = ", ".join(f"rank {rank} at {row[0]}" for rank, row in enumerate(left) if row)
            raise ScheduleError(
                f"no rank can go on: {stuck}; the order of computations is at fault, not their messages"
            )
    return found


def _ready(table: Table, token: Token, done: set[Token]) -> bool:
    """Whether a rank has received or computed what a computation needs."""
    forward, source = token.kind == "F", table.feeder(token)
    if source is None or token._replace(kind="RECV_F" if forward else "RECV_B") in done:
        return True
    return any(Token(source, kind, token.microbatch) in done for kind in ("F" if forward else BACKWARD))


def _do(table: Table, rank: int, token: Token, found: list[list[Token]], done: list[set[Token]]) -> None:
    found[rank].append(token)
    for part in token.parts:
        done[rank].add(part)
        send = _send_of(table, part)
        if send is not None:
            receive = table.other_end(send)
            peer = table.rank_of[receive.stage]
            found[rank].append(send)
            found[peer].append(receive)
            done[peer].add(receive)


def _send_of(table: Table, part: Token) -> Token | None:
    """The send of a computation's output; None where it stays on the rank or has no taker."""
    if part.kind not in ("F", *BACKWARD):
        return None
    target = table.behind(part.stage) if part.kind == "F" else table.before(part.stage)
    if target is None or table.rank_of[target] == table.rank_of[part.stage]:
        return None
    return part._replace(kind="SEND_F" if part.kind == "F" else "SEND_B")


def _with_late_receives(table: Table, rank: int, row: Sequence[Token]) -> list[Token]:
    """Receives right before their computations; the lower rank of a pair still receives before it sends."""
    found: list[Token] = []
    late: dict[Token, None] = {}
    for token in row:
        if token.kind in SENDS.values():
            late[token] = None
            continue
        due: list[Token] = []
        if token.kind in SENDS and rank < table.peer(token):
            due = [receive for receive in late if table.peer(receive) == table.peer(token)]
        due += [
            receive for part in token.parts if (receive := needed(table, rank, part)) in late and receive is not None
        ]
        for receive in due:
            late.pop(receive)
        found += [*due, token]
    return found
