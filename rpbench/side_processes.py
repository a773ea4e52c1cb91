"""Processes that work beside this one, and end with it however it ends."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import Any, Literal


def side_processes(
    number: int, start: Literal["fork", "spawn"], begin: Callable[..., None] | None = None, *arguments: Any
) -> ProcessPoolExecutor:
    """A pool whose processes leave at once when this one is gone, also when it was killed.

    Args:
        start: `fork` inherits this process's memory; `spawn` begins afresh.
        begin: what each process runs first, with `arguments`.
    """
    return ProcessPoolExecutor(number, get_context(start), _begin, (begin, arguments))


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # a pool's processes have one
    parent.join()
    os._exit(1)
