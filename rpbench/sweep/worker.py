"""Worker: one process of a sweep, which runs free cells until every cell of the plan has ended.

A launcher of Hydra starts one or several workers, here or elsewhere; they divide the cells by leases. What a worker has
run, no other worker of the same command runs or prints again.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rpbench.config.choices import ConfigError
from rpbench.config.composing import Composer
from rpbench.config.configuration import Composed
from rpbench.config.loading import request_of
from rpbench.config.request import Request
from rpbench.records.manifest import Cell, Ends, Journal, Plan, recall
from rpbench.records.record import run_id
from rpbench.registry import GeneratorError
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

    def chooses(self, cell: Cell) -> bool:
        return not self.only or cell.state in self.only

    def asks_again(self, cell: Cell) -> bool:
        """Whether a cell runs even where its records are there."""
        return cell.state in self.again | self.only


@dataclass(frozen=True)
class Worker:
    """Runs cells of a plan, each by its number."""

    results: Path
    plan: Plan
    cells: Mapping[int, Sequence[str]]
    terms: Terms
    carry_out: Callable[[Request, Journal], None]  # runs a request and writes its end to a journal
    known: Composed | None = None  # what Hydra composed for this worker

    def work(self) -> None:
        """Run the cells that no other worker has run or is running, until every one has ended."""
        before, ends = recall(self.results, self.plan), Ends(self.results, self.plan)
        leases, composer, refusals, waiting = Leases(self.results), Composer(self.known), 0, deque(self.cells)
        try:
            while waiting:
                number = waiting.popleft()
                if number in ends or self._run(before[number], ends, composer, leases):
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

    def _run(self, cell: Cell, ends: Ends, composer: Composer, leases: Leases) -> bool:
        """Run a cell and report its end; False if another worker has it."""
        journal = Journal(self.results, self.plan, cell.number)
        overrides = [*self.cells[cell.number]]
        if self.terms.asks_again(cell):
            overrides.append("force=true")
        try:
            request = request_of(composer.compose(overrides))
            lease = leases.take(run_id(identity(request)))
            if lease is None:
                return False
            try:
                if cell.number not in ends:  # until the lease was taken
                    self.carry_out(request, journal)
            finally:
                leases.give_back(lease)
        except (ValueError, RunFailed) as error:
            write = journal.failed if isinstance(error, (RunFailed, GeneratorError)) else journal.refused
            write(str(error))
            print(f"rpbench: cell {cell.number} ({' '.join(self.cells[cell.number])}): {error}", file=sys.stderr)
            if self.terms.fail_fast and not isinstance(error, ConfigError):
                raise _Stop from None
        return True


class _Stop(Exception):
    pass
