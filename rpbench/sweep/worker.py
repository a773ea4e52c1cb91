"""Worker: one process of a sweep, which runs free cells until every cell of the plan has ended.

A launcher of Hydra starts one or several workers, here or elsewhere; they divide the cells by leases.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.config.composing import Composer
from rpbench.config.configuration import Composed
from rpbench.config.request import Request, request_of
from rpbench.records.manifest import Journal, Plan, is_settled, recall
from rpbench.records.record import Record, run_id
from rpbench.run.recording import identity
from rpbench.sweep.lease import Leases

_POLL_S = 0.2


class RunFailed(RuntimeError):
    """A run of a correct request that broke."""


@dataclass(frozen=True)
class Terms:
    """The cells that a sweep runs, and whether the first failure ends it."""

    only: frozenset[str] = frozenset()  # cells in these states, if there are any
    again: frozenset[str] = frozenset()  # cells in these states run again
    fail_fast: bool = False


@dataclass(frozen=True)
class Worker:
    """Runs the cells of a plan that the terms choose."""

    results: Path
    plan: Plan
    cells: Sequence[Sequence[str]]
    terms: Terms
    carry_out: Callable[[Request, Journal], None]  # runs a request and writes its end to a journal
    emit: Callable[[Record], None]  # prints a record that was there before
    known: Composed | None = None  # what Hydra composed for this worker

    def work(self, first: int = 0) -> None:
        """Run the cells that are left, beginning at one and going round."""
        known = recall(self.results, self.plan)
        numbers = [*range(first, len(self.cells)), *range(first)]
        chosen = [number for number in numbers if not self.terms.only or known[number].state in self.terms.only]
        waiting = deque(number for number in chosen if not self._is_there(known[number], number))
        if len(waiting) < len(chosen):
            print(f"rpbench: {len(chosen) - len(waiting)} of {len(chosen)} cells are there", file=sys.stderr)
        leases, composer, refusals = Leases(self.results), Composer(self.known), 0
        try:
            while waiting:
                number = waiting.popleft()
                if self._run(number, known[number].state, composer, leases):
                    refusals = 0
                    continue
                waiting.append(number)  # another worker has it
                refusals += 1
                if refusals >= len(waiting):
                    time.sleep(_POLL_S)
        except _Stop:
            print("rpbench: stopped at the first failure", file=sys.stderr)
        finally:
            leases.remove_lapsed()
            leases.close()

    def _is_there(self, cell: Any, number: int) -> bool:
        """Whether a cell has its records, by the manifest alone; they are printed again."""
        if cell.state in self.terms.again | self.terms.only:
            return False
        rows = is_settled(self.results, cell, self.cells[number])
        for row in rows or ():
            self.emit(row)
        return rows is not None

    def _run(self, number: int, state: str, composer: Composer, leases: Leases) -> bool:
        """Run a cell and report its end; False if another worker has it."""
        journal = Journal(self.plan.folder(self.results), self.plan.plan_id, number)
        overrides = [*self.cells[number]]
        if state in self.terms.again | self.terms.only:
            overrides.append("force=true")
        try:
            request = request_of(composer.compose(overrides))
            lease = leases.take(run_id(identity(request)))
            if lease is None:
                return False
            try:
                self.carry_out(request, journal)
            finally:
                leases.give_back(lease)
        except (ValueError, RunFailed) as error:
            write = journal.refused if isinstance(error, ValueError) else journal.failed
            write(str(error))
            print(f"rpbench: cell {number} ({' '.join(self.cells[number])}): {error}", file=sys.stderr)
            if self.terms.fail_fast and not isinstance(error, ConfigError):
                raise _Stop from None
        return True


class _Stop(Exception):
    pass
