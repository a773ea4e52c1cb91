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
    """An action of a lowered row; `members` are those of an overlapped pair, whose own stage is the first one's."""

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
        """The plain actions it consists of."""
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
        """The rank of each stage: the row its computations stand in."""
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
        """Whether it is written for a torch whose sends and reductions have waits."""
        waits = (*WAITS, "WAIT_REDUCE_GRAD")
        return any(token.kind in waits for row in self.rows for token in row)

    def before(self, stage: int) -> int | None:
        """The stage that feeds this one; None at a chain's beginning."""
        return stage - 1 if stage % self.chain_length else None

    def behind(self, stage: int) -> int | None:
        """The stage that this one feeds; None at a chain's end."""
        return stage + 1 if (stage + 1) % self.chain_length else None

    def feeder(self, token: Token) -> int | None:
        """The stage that makes what a computation takes in; None where that comes from no stage."""
        if token.kind == "F":
            return self.before(token.stage)
        return self.behind(token.stage) if token.kind in BACKWARD else None

    def other_end(self, message: Token) -> Token:
        """The receive of a send, the send of a receive; raises ScheduleError if there is no stage at the other end."""
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
    """The rows of torch's CSV in either form, which end as in torch's own reader; ScheduleError with the row and the
    token that cannot be read.
    """
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
    """A table, of one chain unless its length is given; ScheduleError with the row and token that cannot be."""
    rows = read_rows(source)
    table = Table(rows, chain_length or 1 + max((part.stage for row in rows for part in _plain(row)), default=0))
    check_table(table)
    return table


def _plain(row: Sequence[Token]) -> Iterator[Token]:
    return (part for token in row for part in token.parts)


def read_token(cell: str, rank: int) -> Token:
    """The action a cell stands for; the rank is for the error."""
    overlap = _OVERLAP.fullmatch(cell)
    if overlap:
        members = tuple(read_token(part.strip(), rank) for part in overlap[1].split(";"))
        if len(members) == 2 and all(member.kind in COMPUTE for member in members):
            return Token(members[0].stage, "OVERLAP_F_B", None, members)
    match = _PLAIN.fullmatch(cell) or _STAGE.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"row {rank + 1} (rank {rank}): {cell[:40]!r} is no action of a table: expected stage, kind and microbatch,"
            " such as 2F5, 3SEND_B0, 0WAIT_SEND_F1, or stage and kind, such as 2REDUCE_GRAD, or a pair, such as"
            " (0F7;7B3)OVERLAP_F_B"
        )
    return Token(int(match[1]), match[2], int(match[3]) if match.re is _PLAIN else None)


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
            raise ScheduleError(f"row {rank + 1} (rank {rank}): {beyond}, but the last microbatch is {count - 1}")
    for row in table.rows:
        _check_complete(row, count)


def _check_places(table: Table, rank: int, row: TokenRow) -> None:
    messages = [token for token in row if token.is_message or token.kind in WAITS]
    if len(set(messages)) < len(messages):
        twice = next(token for place, token in enumerate(messages) if token in messages[:place])
        raise ScheduleError(f"row {rank + 1} (rank {rank}): {twice} stands twice: a tensor goes to its stage once")
    for token in _plain(row):
        if token.stage not in table.rank_of or table.rank_of[token.stage] != rank:
            raise ScheduleError(
                f"row {rank + 1} (rank {rank}): {token}, but stage {token.stage} is computed "
                + (f"by rank {table.rank_of[token.stage]}" if token.stage in table.rank_of else "nowhere")
            )
        if token.is_message and table.peer(token) == rank:
            raise ScheduleError(
                f"row {rank + 1} (rank {rank}): {token} goes to a stage of the same rank, which needs no message"
            )


def _check_waits(rank: int, row: TokenRow) -> None:
    """torch 2.15 loads no row of which a send or a reduction has no wait, or a wait nothing to wait for."""
    pending: dict[Token, None] = {}
    for token in row:
        if token.kind in SENDS or token.kind == "REDUCE_GRAD":
            pending[token] = None
        begun = token._replace(kind=token.kind.removeprefix("WAIT_"))
        if begun != token and begun not in pending:
            raise ScheduleError(f"row {rank + 1} (rank {rank}): {token}, but {begun} is not under way there")
        if begun != token:
            del pending[begun]
    if pending:
        first = next(iter(pending))
        raise ScheduleError(
            f"row {rank + 1} (rank {rank}): {first} has no wait, where others of the table have one; torch before 2.15 "
            "has no waits, later ones want all of them"
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
