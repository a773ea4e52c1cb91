"""Progress of a sweep, read from its manifest: lines while it runs, whatever launcher runs it, and how it ended."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from rpbench.config.choices import ConfigError
from rpbench.records.manifest import FAILED, NOT_APPLICABLE, PLANNED, Plan, recall
from rpbench.sweep.worker import RunFailed, Terms

EVERY_S = 10.0


class Progress:
    """Says every ten seconds how many cells have ended, and when the last will have."""

    def __init__(self, results: Path, plan: Plan) -> None:
        self._results, self._plan = results, plan
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> None:
        cells = recall(self._results, self._plan)
        self._before, self._began = _num_ended(cells), time.monotonic()
        print(f"rpbench: {_number(cells)}, {self._before} with an end on record: {self._plan.name}", file=sys.stderr)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            cells = recall(self._results, self._plan)
            print(line(cells, self._before, time.monotonic() - self._began), file=sys.stderr)


def line(cells: Sequence[Any], before: int, seconds: float) -> str:
    """How far a sweep is: cells with an end, how many of each kind, and the time left at the pace so far."""
    ended = _num_ended(cells)
    rate = (ended - before) / seconds
    left = f"{(len(cells) - ended) / rate:.0f} s left" if rate else "time left not known yet"
    return f"rpbench: {ended} of {_number(cells)} ({_counts(cells)}), {rate:.2g} a second, {left}"


def _number(cells: Sequence[Any]) -> str:
    return f"{len(cells)} cell{'s' if len(cells) != 1 else ''}"


def _num_ended(cells: Sequence[Any]) -> int:
    return sum(cell.state != PLANNED for cell in cells)


def _counts(cells: Sequence[Any]) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(Counter(cell.state for cell in cells).items()))


def conclude(results: Path, plan: Plan, workers: Sequence[JobReturn], terms: Terms) -> None:
    """Count the cells of a sweep that is over.

    Raises:
        RunFailed: if one did not end.
        Exception: what broke a worker.
        ConfigError: if one cannot be asked for.
    """
    for worker in workers:
        if worker.status is JobStatus.FAILED:
            error: Any = worker._return_value
            raise error if isinstance(error, Exception) else RunFailed(f"a worker broke: {error}")
    cells = recall(results, plan)
    print(f"rpbench: {_number(cells)}: {_counts(cells)}", file=sys.stderr)
    for state, kind in ((FAILED, RunFailed), (NOT_APPLICABLE, ConfigError)):
        found = [cell for cell in cells if cell.state == state]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise kind(f"cell {found[0].number} ({found[0]}): {found[0].reason}{more}")
    left = [cell for cell in cells if cell.state == PLANNED]
    if left and not terms.only and not terms.fail_fast:
        raise RunFailed(f"{len(left)} cells did not end; the same command goes on with them")
