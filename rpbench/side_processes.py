"""Processes that work beside this one, and end with it however it ends."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context, parent_process
from typing import IO, Any, Literal, TextIO

POLL_S = 1.0
GRACE_S = 5.0  # for processes that were told to end, before they are killed


def side_processes(
    number: int, start: Literal["fork", "spawn"], begin: Callable[..., None] | None = None, *arguments: Any
) -> ProcessPoolExecutor:
    """A pool whose processes leave at once when this one is gone, also when it was killed.

    Args:
        start: `fork` inherits this process's memory; `spawn` begins afresh.
        begin: what each process runs first, with `arguments`.
    """
    return ProcessPoolExecutor(number, get_context(start), _begin, (begin, arguments))


def answers_only() -> TextIO:
    """This process's stdout; whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def end_all(processes: Iterable["subprocess.Popen[Any]"], logs: Iterable[IO[bytes]]) -> None:
    """End processes that leave when their stdin does; who does not in time is killed. Their logs are closed."""
    processes = list(processes)
    for process in processes:
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # what a dead process has not read is still to be flushed
                process.stdin.close()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    for log in logs:
        log.close()


@cache
def end_with(parent: int) -> None:
    """From now on, end this process when its parent has ended, however that went; for children of other libraries."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # a pool's processes have one
    parent.join()
    os._exit(1)
