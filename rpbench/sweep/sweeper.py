"""Sweeper: all combinations of the swept values, their manifest, their progress, and a count at the end."""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any, TextIO

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from rpbench.config.choices import ConfigError
from rpbench.records import manifest
from rpbench.records.provenance import usable_cores
from rpbench.records.record import check_writable
from rpbench.run.recording import emit
from rpbench.side_processes import end_with
from rpbench.sweep.preview import Summary, preview
from rpbench.sweep.slurm import TARGET as SLURM
from rpbench.sweep.worker import RunFailed, Terms

EVERY_S = 10.0


class Progress:
    """Prints every ten seconds how many cells have ended, and the time left."""

    def __init__(self, results: Path, plan: manifest.Plan) -> None:
        self._results, self._plan = results, plan
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> None:
        cells = manifest.recall(self._results, self._plan)
        self._before, self._began = _num_ended(cells), time.monotonic()
        print(f"rpbench: {_number(cells)}, {self._before} with an end on record: {self._plan.name}", file=sys.stderr)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            cells = manifest.recall(self._results, self._plan)
            print(line(cells, self._before, time.monotonic() - self._began), file=sys.stderr)


def line(cells: Sequence[Any], before: int, seconds: float) -> str:
    """The progress of a sweep: cells that ended, by state, and the time left at the pace so far."""
    ended = _num_ended(cells)
    rate = (ended - before) / seconds
    left = f"{(len(cells) - ended) / rate:.0f} s left" if rate else "time left not known yet"
    return f"rpbench: {ended} of {_number(cells)} ({_counts(cells)}), {rate:.2g} a second, {left}"


def _number(cells: Sequence[Any]) -> str:
    return f"{len(cells)} cell{'s' if len(cells) != 1 else ''}"


def _num_ended(cells: Sequence[Any]) -> int:
    return sum(cell.state != manifest.PLANNED for cell in cells)


def _counts(cells: Sequence[Any]) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(Counter(cell.state for cell in cells).items()))


def conclude(results: Path, plan: manifest.Plan, workers: Sequence[JobReturn], terms: Terms) -> None:
    """Count the cells of a sweep that is over.

    Raises RunFailed if one failed or did not end, ConfigError if one is not applicable, and the error of a worker.
    """
    for worker in workers:
        if worker.status is JobStatus.FAILED:
            error: Any = worker._return_value
            raise error if isinstance(error, Exception) else RunFailed(f"a worker broke: {error}")
    cells = manifest.recall(results, plan)
    print(f"rpbench: {_number(cells)}: {_counts(cells)}", file=sys.stderr)
    for state, kind in ((manifest.FAILED, RunFailed), (manifest.NOT_APPLICABLE, ConfigError)):
        found = [cell for cell in cells if cell.state == state]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise kind(f"cell {found[0].number} ({found[0]}): {found[0].reason}{more}")
    left = [cell for cell in cells if cell.state == manifest.PLANNED]
    if left and not terms.only and not terms.fail_fast:
        raise RunFailed(f"{len(left)} cells did not end; the same command goes on with them")


MOST_CELLS = 1_000_000
Work = Callable[[manifest.Plan, Mapping[int, Sequence[str]], Terms, DictConfig], None]


@dataclass(frozen=True)
class ManifestSweeper:
    """Every combination of the swept values, in a plan that is written before the first run.

    The launcher starts workers, which share the cells: Hydra composes a configuration for each worker, not for each
    cell.
    """

    config: DictConfig
    launch: Callable[[Callable[[DictConfig], None]], Launcher] | None
    loader: ConfigLoader  # expands ranges and globs of overrides
    terms: Terms = field(default_factory=Terms)

    def sweep(self, arguments: Sequence[str], work: Work) -> None:
        """Run every cell of the command line and its experiment by workers.

        Raises ConfigError without cells or a writable folder, and the errors of `conclude`.
        """
        assert self.launch is not None
        cells = self.cells(arguments)
        if not cells:
            empty = [item for item in arguments if any(mark in item for mark in ("glob(", "range(", "choice("))]
            what = " ".join(empty) or "the sweep"
            raise ConfigError(f"nothing to sweep: {what} gives no value; name at least one")
        results = Path(self.config.hydra.sweep.dir)
        check_writable(results, "results_dir")
        plan = manifest.write_plan(results, self._experiment, arguments, cells)
        left = self._left(results, plan, cells)
        launcher = self.launch(partial(_worked, os.getpid(), partial(work, plan, left, self.terms)))
        number = _num_workers(self.config.hydra.launcher, len(left))
        common = [item for item in arguments if item.startswith(("experiment=", "results_dir="))]
        batch = [[*common, f"hydra.job.name='{plan.name}'"] for _ in range(number)]
        with Progress(results, plan):
            ended = launcher.launch(batch, initial_job_idx=0) if left else ()
        conclude(results, plan, ended, self.terms)

    def _left(self, results: Path, plan: manifest.Plan, cells: Sequence[Sequence[str]]) -> dict[int, Sequence[str]]:
        """The cells that run, by number; the records of others, which the manifest alone shows to hold, are printed."""
        chosen = [cell for cell in manifest.recall(results, plan) if self.terms.chooses(cell)]
        left = {}
        for cell in chosen:
            overrides = cells[cell.number]
            rows = None if self.terms.asks_again(cell) else manifest.is_settled(results, cell, overrides)
            if rows is None:
                left[cell.number] = overrides
            for row in rows or ():
                emit(row)
        if len(left) < len(chosen):
            print(f"rpbench: {len(chosen) - len(left)} of {len(chosen)} cells are there", file=sys.stderr)
        return left

    def preview(self, arguments: Sequence[str], out: TextIO) -> None:
        """Print a line of JSON for each cell of the command line: what would run, and what is there."""
        name = manifest.manifest_name(self._experiment, arguments)
        rows, cells, said = Summary(), self.cells(arguments), time.monotonic()
        for row in preview(Path(self.config.hydra.sweep.dir), name, cells):
            print(json.dumps(row), file=out)
            rows.add(row)
            if time.monotonic() - said >= EVERY_S:
                said = time.monotonic()
                print(f"rpbench: {rows.num_cells:,} of {len(cells):,} cells are looked at", file=sys.stderr, flush=True)
        print(f"rpbench: {rows}", file=sys.stderr)

    @property
    def _experiment(self) -> str | None:
        chosen = self.config.hydra.runtime.choices.get("experiment")
        return None if chosen in (None, "null") else str(chosen)

    def cells(self, arguments: Sequence[str]) -> list[tuple[str, ...]]:
        """The overrides of every cell, the last key varying fastest; an argument replaces the experiment's sweep."""
        swept = [f"{key}={values}" for key, values in (self.config.hydra.sweeper.params or {}).items()]
        parser = OverridesParser.create(config_loader=self.loader)
        values = {item.get_key_element(): _values(item) for item in parser.parse_overrides([*swept, *arguments])}
        if (number := prod(map(len, values.values()))) > MOST_CELLS:
            raise ConfigError(f"{number:,} cells; a sweep has at most {MOST_CELLS:,}: name fewer values")
        if len(folders := values.get("results_dir", ())) > 1:
            raise ConfigError(f"{' '.join(folders)}: a sweep has one folder; name it, and sweep once for each other")
        return list(product(*values.values()))


def _worked(command: int, work: Callable[[DictConfig], None], config: DictConfig) -> None:
    """A worker; one that is a child process of the command ends with the command, also while idle."""
    if os.getppid() == command:
        end_with(command)
    work(config)


def _values(override: Override) -> list[str]:
    """An override for each of its values."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: an interval has no end of values; list them, or take range(...)")
    try:
        values = [f"{key}={value}" for value in islice(override.sweep_string_iterator(), MOST_CELLS + 1)]
    except ValueError as error:  # a step of 0
        raise ConfigError(f"{override.input_line}: {error}; write range(FIRST,END,STEP), or list the values") from None
    if len(values) > MOST_CELLS:
        raise ConfigError(f"{override.input_line}: more than {MOST_CELLS:,} values; name fewer")
    return values


def _num_workers(launcher: Any, num_cells: int) -> int:
    """Workers that a launcher runs at once: one, or as many as configured; on this host at most one a core."""
    target = str(launcher.get("_target_"))
    if "joblib" in target:
        asked = int(launcher.get("n_jobs", -1))
        return max(1, min(num_cells, usable_cores() if asked < 1 else asked))
    if "submitit" in target:
        asked = int(launcher.get("array_parallelism", 1))
        return max(1, min(num_cells, asked if "Slurm" in target else min(asked, usable_cores())))
    return 1 if "basic" in target or target == SLURM else max(1, min(num_cells, usable_cores()))
