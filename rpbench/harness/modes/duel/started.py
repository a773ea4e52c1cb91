"""What a start leaves, and the process of its own that it runs in."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

Job = TypeVar("Job")


@dataclass(frozen=True)
class Started:
    """What a start has done.

    Args:
        about: what is true of all its contenders: seed, turns, seconds, cores, what was done for stability.
        columns: contender -> its runs, column by column.
    """

    about: dict[str, Any]
    columns: dict[str, dict[str, list[Any]]]


def apart(play: Callable[[Job], Started], job: Job) -> Started:
    """Play a start in a process of its own, which ends with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(play, job).result()
