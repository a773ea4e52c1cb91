"""Waits: the end of every send and reduction of a row, where torch 2.15 puts it.

A forward's send is waited for after its backward, which shows that it was received; the others at the row's end.
"""

from collections.abc import Sequence

from rpbench.torch_runtime.communication.tokens import BACKWARD, SENDS, Token


def with_send_waits(row: Sequence[Token]) -> list[Token]:
    """A row with a wait for each of its sends."""
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
