"""Lock of the machine: runs that measure time have it to themselves. It ends with the process that holds it."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_held = 0  # by this process: a run may lead to another within it


def _path() -> Path:
    return Path(tempfile.gettempdir()) / f"rpbench-{os.getuid()}.lock"


@contextmanager
def machine_alone(*, wanted: bool) -> Iterator[None]:
    """Have the machine, if it is wanted; other runs that measure wait until this one has ended."""
    global _held
    if not wanted or _held:
        yield
        return
    with os.fdopen(os.open(_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("rpbench: another run measures time on this machine; waiting for its end", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        _held += 1
        try:
            yield
        finally:
            _held -= 1
