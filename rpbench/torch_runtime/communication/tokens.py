"""Tokens: a lowered table as torch's runtime reads it, a row a rank, each message and wait where it stands.

A token is a stage, a kind and mostly a microbatch: `0F3`, `1SEND_B3`, `0WAIT_SEND_F3`, `2REDUCE_GRAD`,
`(0F7;7B3)OVERLAP_F_B`. A forward message goes to the next stage, a backward message to the one before, so that a token
needs no peer. The waits are of torch 2.15; tables of older versions have none.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rpbench.ir.schedule import ScheduleError

BACKWARD = ("B", "I")  # kinds that make the gradient of a stage's input
COMPUTE = ("F", "B", "I", "W")
SENDS = {"SEND_F": "RECV_F", "SEND_B": "RECV_B"}
RECEIVES = ("RECV_F", "RECV_B")
WAITS = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}
OF_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
_PLAIN = re.compile(rf"([0-9]{{1,6}})({'|'.join((*COMPUTE, *SENDS, *RECEIVES, *WAITS))})([0-9]{{1,7}})")
_STAGE = re.compile(rf"([0-9]{{1,6}})({'|'.join(OF_STAGE)})")
_OVERLAP = re.compile(r"\(([^()]+)\)OVERLAP_F_B")


class Token(NamedTuple):
    """An action of a lowered row. An overlapped pair has two `members`, and the stage of the first."""

    stage: int
    kind: str
    microbatch: int | None = None
    members: tuple["Token", ...] = ()

    def __str__(self) -> str:
        if self.members:
            return f"({';'.join(map(str, self.members))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def parts(self) -> tuple["Token", ...]:
        """Its plain actions: two of an overlapped pair."""
        return self.members or (self,)

    @property
    def is_message(self) -> bool:
        return self.kind in SENDS or self.kind in RECEIVES


TokenRow = tuple[Token, ...]


@dataclass(frozen=True)
class Table:
    """The rows of all ranks."""

    rows: tuple[TokenRow, ...]
    # stages of one route through the ranks; two routes that go opposite ways are two chains, and nothing passes from
    # the last stage of one to the first of the next
    chain_length: int

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """stage -> the rank that computes it."""
        return {
            part.stage: rank
            for rank, row in enumerate(self.rows)
            for token in row
            for part in token.parts
            if part.kind in COMPUTE
        }

    @property
    def num_messages(self) -> int:
        return sum(token.kind in SENDS for row in self.rows for token in row)

    @property
    def is_lowered(self) -> bool:
        return any(token.is_message for row in self.rows for token in row)

    @property
    def has_waits(self) -> bool:
        """Whether it waits for sends and reductions, as from torch 2.15 on."""
        waits = (*WAITS, "WAIT_REDUCE_GRAD")
        return any(token.kind in waits for row in self.rows for token in row)

    def before(self, stage: int) -> int | None:
        """The stage before this one; None at the start of a chain."""
        return stage - 1 if stage % self.chain_length else None

    def behind(self, stage: int) -> int | None:
        """The stage after this one; None at the end of a chain."""
        return stage + 1 if (stage + 1) % self.chain_length else None

    def feeder(self, token: Token) -> int | None:
        """The stage whose output a computation takes; None if it takes none."""
        if token.kind == "F":
            return self.before(token.stage)
        return self.behind(token.stage) if token.kind in BACKWARD else None

    def other_end(self, message: Token) -> Token:
        """The receive of a send, or the send of a receive; ScheduleError if no stage is at the other end."""
        forth = message.kind in ("SEND_F", "RECV_B")
        stage = self.behind(message.stage) if forth else self.before(message.stage)
        if stage is None:
            where = "last" if forth else "first"
            raise ScheduleError(f"{message}: stage {message.stage} is the {where} one, nothing is there to talk to")
        kinds = SENDS | {receive: send for send, receive in SENDS.items()}
        return Token(stage, kinds[message.kind], message.microbatch)

    def peer(self, message: Token) -> int:
        return self.rank_of[self.other_end(message).stage]

    def compute_rows(self) -> list[list[Token]]:
        return [[token for token in row if token.parts[0].kind in COMPUTE] for row in self.rows]

    def to_csv(self) -> str:
        """As torch's `_load_csv` takes it; no line end after the last row."""
        return "\n".join(",".join(map(str, row)) for row in self.rows)


MOST_LETTERS = 2**22  # of a row of a file: a hundred thousand microbatches, with their messages


def read_rows(source: str) -> tuple[TokenRow, ...]:
    """The rows of torch's CSV in either form; ScheduleError naming the row and token that cannot be read."""
    longest = max(map(len, source.splitlines()), default=0)
    if longest > MOST_LETTERS:
        raise ScheduleError(
            f"a row of {longest:,} letters; at most {MOST_LETTERS:,} are read, and an action stands once"
        )
    try:
        lines = list(csv.reader(io.StringIO(source.strip("\r\n"), newline="")))
    except csv.Error as error:
        raise ScheduleError(f"no CSV ({error}): expected a line a rank, tokens parted by commas") from None
    return tuple(
        tuple(read_token(cell.strip(), rank) for cell in line if cell.strip()) for rank, line in enumerate(lines)
    )


def read_table(source: str, chain_length: int | None = None) -> Table:
    """A checked table, of one chain unless a length is given; ScheduleError naming the wrong row and token."""
    rows = read_rows(source)
    table = Table(rows, chain_length or 1 + max((part.stage for row in rows for part in _plain(row)), default=0))
    check_table(table)
    return table


def _plain(row: Sequence[Token]) -> Iterator[Token]:
    return (part for token in row for part in token.parts)


def read_token(cell: str, rank: int) -> Token:
    """The action of a cell; the rank is for the error."""
    if overlap := _OVERLAP.fullmatch(cell):
        members = tuple(read_token(part.strip(), rank) for part in overlap[1].split(";"))
        if len(members) == 2 and all(member.kind in COMPUTE for member in members):
            return Token(members[0].stage, "OVERLAP_F_B", None, members)
    match = _PLAIN.fullmatch(cell) or _STAGE.fullmatch(cell)
    if match is None:
        raise _wrong(
            rank,
            f"{cell[:40]!r} is no action of a table: expected stage, kind and microbatch, such as 2F5, 3SEND_B0, "
            "0WAIT_SEND_F1, or stage and kind, such as 2REDUCE_GRAD, or a pair, such as (0F7;7B3)OVERLAP_F_B",
        )
    return Token(int(match[1]), match[2], int(match[3]) if match.re is _PLAIN else None)


def _wrong(rank: int, what: str) -> ScheduleError:
    return ScheduleError(f"row {rank + 1} (rank {rank}): {what}")


def check_table(table: Table) -> None:
    """Each stage on one rank, with every microbatch once; messages between two ranks; or ScheduleError."""
    if not table.rank_of:
        raise ScheduleError("the table holds no computation: expected rows of tokens such as 0F0,0SEND_F0, one a rank")
    stages = range(1 + max(table.rank_of))
    missing = next((stage for stage in stages if stage not in table.rank_of), None)
    if missing is not None:
        raise ScheduleError(f"stage {missing} is computed in no row, though there are stages up to {stages[-1]}")
    count = 1 + max(part.microbatch or 0 for row in table.rows for part in _plain(row) if part.kind in COMPUTE)
    for rank, row in enumerate(table.rows):
        _check_places(table, rank, row)
        if table.has_waits:
            _check_waits(rank, row)
        beyond = next((token for token in row if (token.microbatch or 0) >= count), None)
        if beyond is not None:
            raise _wrong(rank, f"{beyond}, but the last microbatch is {count - 1}")
    for row in table.rows:
        _check_complete(row, count)


def _check_places(table: Table, rank: int, row: TokenRow) -> None:
    messages = [token for token in row if token.is_message or token.kind in WAITS]
    if len(set(messages)) < len(messages):
        twice = next(token for place, token in enumerate(messages) if token in messages[:place])
        raise _wrong(rank, f"{twice} stands twice: a tensor goes to its stage once")
    for token in _plain(row):
        holder = table.rank_of.get(token.stage)
        if holder != rank:
            where = "nowhere" if holder is None else f"by rank {holder}"
            raise _wrong(rank, f"{token}, but stage {token.stage} is computed {where}")
        if token.is_message and table.peer(token) == rank:
            raise _wrong(rank, f"{token} goes to a stage of the same rank, which needs no message")


def _check_waits(rank: int, row: TokenRow) -> None:
    """torch 2.15 refuses a row in which a send or a reduction has no wait, or a wait follows neither."""
    pending: dict[Token, None] = {}
    for token in row:
        if token.kind in SENDS or token.kind == "REDUCE_GRAD":
            pending[token] = None
        begun = token._replace(kind=token.kind.removeprefix("WAIT_"))
        if begun != token and begun not in pending:
            raise _wrong(rank, f"{token}, but {begun} is not under way there")
        if begun != token:
            del pending[begun]
    if pending:
        raise _wrong(
            rank,
            f"{next(iter(pending))} has no wait, where others of the table have one; torch before 2.15 has no waits, "
            "later ones want all of them",
        )


def _check_complete(row: TokenRow, count: int) -> None:
    """Each stage of a row runs every microbatch forward and backward, once and in this order."""
    seen: dict[Token, int] = {}
    for place, token in enumerate(part for part in _plain(row) if part.kind in COMPUTE):
        if token in seen:
            raise ScheduleError(f"{token} stands twice")
        seen[token] = place
    for stage in {token.stage for token in seen}:
        for microbatch in range(count):
            found = {kind: seen.get(Token(stage, kind, microbatch)) for kind in COMPUTE}
            order = ("F", "B") if found["B"] is not None else ("F", "I", "W")
            places = [found[kind] for kind in order]
            absent = next((kind for kind, place in zip(order, places, strict=True) if place is None), None)
            if absent:
                raise ScheduleError(f"{stage}{absent}{microbatch} is missing")
            if places != sorted(place for place in places if place is not None):
                raise ScheduleError(
                    f"stage {stage} runs microbatch {microbatch} in another order than {', '.join(order)}"
                )
            if found["B"] is not None and (found["I"] is not None or found["W"] is not None):
                raise ScheduleError(f"{stage}B{microbatch} stands beside I or W of the same microbatch")
