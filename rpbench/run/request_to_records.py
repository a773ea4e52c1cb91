"""Request -> records: each mode is one module that makes them."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rpbench.config.request import Request
from rpbench.records.describe import describe, table
from rpbench.records.record import Record


def run(request: Request) -> list[Record]:
    """The records of a request, made or found; all are on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    mode = importlib.import_module(f"rpbench.run.modes.{request.mode.name}")  # torch, where a mode needs it
    found: list[Record] = mode.records(request)
    return found


JSON = "RPBENCH_JSON"  # set: records are printed on a terminal too


@contextmanager
def json_if(asked: bool) -> Iterator[None]:
    """Meanwhile records are printed as JSON wherever stdout goes, in child processes too, if it is asked for."""
    before = os.environ.get(JSON)
    if asked:
        os.environ[JSON] = "1"
    try:
        yield
    finally:
        if asked and before is None:
            del os.environ[JSON]


def emit(row: Record, *, alone: bool = False) -> None:
    """The record to stdout, one line of JSON; what it says to stderr.

    A terminal gets no JSON unless it is asked for, and of a run alone a short table.
    """
    print(describe(row), file=sys.stderr, flush=True)
    for note in row.get("notes", ()):
        print(f"rpbench: {note}", file=sys.stderr, flush=True)
    if not sys.stdout.isatty() or os.environ.get(JSON):
        print(json.dumps(row, allow_nan=False), flush=True)
    elif alone:
        print("\n".join(table(row)), flush=True)
