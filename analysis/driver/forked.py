"""Forked: a command of rpbench in a copy of this process, which has imported already what every command needs.

A start of Python with Hydra takes a second of a core, and a reproduction makes a dozen. Where a process cannot fork,
and for what is timed, the command starts afresh.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rpbench.cli import COLLECT_AFTER, dispatch
from rpbench.side_processes import end_with

_POLL_S = 0.02


class Forked:
    """A command under way, with what of `subprocess.Popen` a sweep is asked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: if it takes longer.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rpbench", timeout or 0.0)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def can_fork() -> bool:
    """Whether this system copies processes safely."""
    return sys.platform == "linux"


def fork_command(arguments: Sequence[str], folder: Path, out: IO[bytes], err: IO[bytes]) -> Forked:
    """Run `python -m rpbench` with some arguments in a copy of this process, which ends with it, even if it is killed.

    Args:
        folder: the working directory.
        out, err: files that take its output.
    """
    import rpbench.sweep.multirun  # noqa: F401  # here, so that no copy has to

    sys.stdout.flush()
    sys.stderr.flush()
    driver, pid = os.getpid(), os.fork()
    if pid:
        return Forked(pid)
    status = 1
    try:
        end_with(driver)
        status = _run(arguments, folder, out, err)
    finally:  # whatever was raised, this copy never goes back into the driver's code
        os._exit(status)


def _run(arguments: Sequence[str], folder: Path, out: IO[bytes], err: IO[bytes]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    with open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, out, err)):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, "utf-8", closefd=False) for number in (1, 2))
    sys.argv = ["rpbench", *arguments]
    gc.set_threshold(COLLECT_AFTER)
    try:
        return dispatch(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
