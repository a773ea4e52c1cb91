"""Request -> records: each mode is one module that makes them."""

import importlib
import json
import sys

from rpbench.harness.describe import describe
from rpbench.harness.record import Record
from rpbench.harness.request import Request


def run(request: Request) -> list[Record]:
    """The records of a request, made or found; all are on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    mode = importlib.import_module(f"rpbench.harness.modes.{request.mode.name}")  # torch, where a mode needs it
    found: list[Record] = mode.records(request)
    return found


def emit(row: Record) -> None:
    """The record to stdout, one line of JSON; what it says to stderr."""
    sys.stdout.write(json.dumps(row, allow_nan=False) + "\n")
    sys.stdout.flush()
    print(describe(row), file=sys.stderr)
