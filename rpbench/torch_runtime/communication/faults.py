"""Faults: actions at which torch's runtime raises, seen from their own row alone."""

from collections.abc import Mapping

from rpbench.torch_runtime.communication.tokens import (
    BACKWARD,
    COMPUTE,
    RECEIVES,
    SENDS,
    Table,
    Token,
    TokenRow,
)

Faults = Mapping[tuple[int, int], str]  # (rank, place in its row) -> why


def find_faults(table: Table) -> Faults:
    """Why the runtime raises, by rank and place; empty where it does not."""
    found: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(table.rows):
        walk = _Walk(table, rank)
        for place, token in enumerate(row):
            why = next(filter(None, map(walk.meet, token.parts)), "")
            if why:
                found[rank, place] = why
    return found


def needed(table: Table, rank: int, token: Token) -> Token | None:
    """The receive that a computation waits for; None where its input is made by its own rank, or comes from nowhere."""
    if token.kind == "F":
        source, kind = table.before(token.stage), "RECV_F"
    elif token.kind in BACKWARD:
        source, kind = table.behind(token.stage), "RECV_B"
    else:
        return None
    if source is None or table.rank_of[source] == rank:
        return None
    return Token(token.stage, kind, token.microbatch)


class _Walk:
    """What has happened in a row so far."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank
        self._received: set[Token] = set()
        self._computed: set[Token] = set()

    def meet(self, token: Token) -> str:
        """Go past an action; why it cannot be, or nothing."""
        if token.kind in COMPUTE:
            return self._compute(token)
        if token.kind in RECEIVES:
            self._received.add(token)
        if token.kind in SENDS:
            return self._send(token)
        return ""

    def _compute(self, token: Token) -> str:
        receive = needed(self._table, self._rank, token)
        if receive is not None and receive not in self._received:
            return f"{receive} does not stand before it"
        self._received.discard(receive or token)
        self._computed.add(token)
        return self._local_input(token)

    def _local_input(self, token: Token) -> str:
        """A neighbour of the same rank hands over what it has made, so it must have run."""
        beside = self._table.before(token.stage) if token.kind == "F" else self._table.behind(token.stage)
        if token.kind == "W" or beside is None or self._table.rank_of[beside] != self._rank:
            return ""
        kinds = ("F",) if token.kind == "F" else BACKWARD
        if any(Token(beside, kind, token.microbatch) in self._computed for kind in kinds):
            return ""
        return f"stage {beside} of the same rank has not run microbatch {token.microbatch} before it"

    def _send(self, token: Token) -> str:
        makes = ("F",) if token.kind == "SEND_F" else BACKWARD
        if not any(token._replace(kind=kind) in self._computed for kind in makes):
            return f"what it sends has not been computed before it: {' or '.join(makes)} comes later"
        if token.kind == "SEND_F" and any(token._replace(kind=kind) in self._computed for kind in BACKWARD):
            return "the backward of its microbatch, which frees what it sends, stands before it"
        return ""


def consumers(table: Table, rank: int, row: TokenRow) -> dict[Token, int]:
    """For each receive of a row, the place of the computation that uses it."""
    return {
        receive: place
        for place, token in enumerate(row)
        for part in token.parts
        if (receive := needed(table, rank, part)) is not None
    }
