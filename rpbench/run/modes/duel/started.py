"""What a start leaves, and the process of its own that it runs in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rpbench.side_processes import side_processes

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
    with side_processes(1, "spawn") as pool:
        return pool.submit(play, job).result()
