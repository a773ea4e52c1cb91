"""Lock of the machine: runs that measure time have it to themselves. It ends with the process that holds it.

It is a file in the folder of temporary files; RPBENCH_MACHINE_LOCK names another, where several users share a machine.
"""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_POLL_S = 0.2
_held = 0  # by this process: a run may lead to another within it


def _path() -> Path:
    default = Path(tempfile.gettempdir()) / f"rpbench-{os.getuid()}.lock"
    return Path(os.environ.get("RPBENCH_MACHINE_LOCK", default))


@contextmanager
def machine_alone(*, wanted: bool) -> Iterator[None]:
    """Have the machine, if it is wanted; other runs that measure wait until this one has ended."""
    global _held
    if not wanted or _held:
        yield
        return
    with os.fdopen(os.open(_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        if not _taken(file):
            yield  # a rank of this very run has it for all of them
            return
        _held += 1
        try:
            yield
        finally:
            _held -= 1


def _taken(file: TextIO) -> bool:
    """Wait for the lock; False if another rank of the same run has it, who would wait for this one in turn."""
    said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            if file.read() == _run() != "":
                return False
            if not said:
                print(
                    f"rpbench: another run measures time on this machine; waiting for its end ({_path()})",
                    file=sys.stderr,
                )
            said = True
            time.sleep(_POLL_S)
        else:
            file.seek(0)
            file.truncate()
            file.write(_run())
            file.flush()
            return True


def _run() -> str:
    """What all ranks that a launcher has started together have in common; empty for a run of one process."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names) if "RANK" in os.environ else ""
