"""Experiments: the records behind exhibits and claims, found through the manifests of their sweeps and in no other way.

A record that no cell of an experiment's manifest names cannot reach a table, however much it looks like one that does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from analysis.records import identity
from rpbench.records import provenance, record
from rpbench.records.manifest import ENDED, Cell, Manifest, ManifestError, manifest_name, read_manifest, read_manifests

_SHOWN = 3  # missing cells that a message names

Record = dict[str, Any]
_Found = TypeVar("_Found")


class MissingRuns(LookupError):
    """Runs that an exhibit needs and that are not there."""


class WrongRecord(MissingRuns):
    """A record that is there and does not answer the cell that names it."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as the command line has it.

    Args:
        experiment: of `conf/experiment/`.
        overrides: what narrows it down.
    """

    experiment: str
    overrides: tuple[str, ...] = ()

    @property
    def manifest(self) -> str:
        """The name of its manifest."""
        return manifest_name(self.experiment, self.overrides)

    def arguments(self, results: Path) -> list[str]:
        """The words behind `python -m rpbench`."""
        return ["-m", f"experiment={self.experiment}", *self.overrides, f"results_dir={results}"]

    @property
    def command(self) -> str:
        """The command that runs it, into the usual folder."""
        return " ".join(("python -m rpbench -m", f"experiment={self.experiment}", *self.overrides))


@dataclass(frozen=True)
class Experiments:
    """The experiments of a results folder.

    Args:
        results: the folder of the records; it also holds timelines.
        narrowed: sweeps that stand for their experiment where the whole of it has not been run.
    """

    results: Path
    narrowed: Sequence[Sweep] = ()
    _known: dict[tuple[str, str], Any] = field(default_factory=dict, compare=False, repr=False)

    def _once(self, find: Callable[[str], _Found], experiment: str) -> _Found:
        """What is found out of an experiment, or why nothing is, kept from the first time on."""
        key = find.__name__, experiment
        if key not in self._known:
            try:
                self._known[key] = find(experiment)
            except MissingRuns as lack:
                self._known[key] = lack
            except ManifestError as error:
                self._known[key] = MissingRuns(str(error))
        found = self._known[key]
        if isinstance(found, MissingRuns):
            raise found
        return found  # type: ignore[no-any-return]

    def cells(self, experiment: str) -> pd.DataFrame:
        """The records of an experiment's cells that came to a verdict, a row each, with the cell's number as `cell`;
        MissingRuns if its sweep was not run by this code and configuration, or has no record or lost one; WrongRecord
        if a record does not answer its cell.
        """
        return self._once(self._frame, experiment)

    def _frame(self, experiment: str) -> pd.DataFrame:
        return pd.DataFrame(self.checked(experiment))

    def checked(self, experiment: str) -> list[Record]:
        """The same as they stand in their files: what a record does not hold is not there; errors as of `cells`."""
        return self._once(self._all_records, experiment)

    def refusals(self) -> Iterator[str]:
        """Why an experiment that was run is not read, of each that lost a record or holds one of another cell."""
        for name in self.names():
            try:
                self.checked(name)
            except MissingRuns as error:
                yield str(error)

    def replaced(self, experiment: str, rows: pd.DataFrame) -> "Experiments":
        """The same experiments with other rows for one of them, as if its records said so."""
        known = {key: found for key, found in self._known.items() if key[0] != self._by_cell.__name__}
        return replace(self, _known=known | {(self._frame.__name__, experiment): rows})

    def manifest(self, experiment: str) -> Manifest | None:
        """The manifest that stands for an experiment, if any: the first of this code; ManifestError if it is torn."""
        sweeps = (Sweep(experiment), *(sweep for sweep in self.narrowed if sweep.experiment == experiment))
        read = (read_manifest(self.results, sweep.manifest) for sweep in sweeps)
        found = [manifest for manifest in read if manifest is not None]
        return next(filter(is_current, found), next(iter(found), None))

    def names(self) -> list[str]:
        """The experiments of `conf/experiment/` that this code and configuration have run here."""
        found = dict.fromkeys(manifest.experiment for manifest in self.manifests if manifest.experiment)
        return [name for name in found if self._is_sound(name)]

    def _is_sound(self, experiment: str) -> bool:
        try:
            return bool(self._sound(experiment))
        except MissingRuns:
            return False

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Every manifest of the folder that can be read."""
        return read_manifests(self.results)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every record that a manifest of the folder names, once each, as it stands in its file."""
        names = dict.fromkeys(name for each in self.manifests for cell in each.cells for name in cell.run_ids)
        found = (record.read(self.results / name) for name in names)
        return [row for row in found if row is not None]

    def find(self, experiment: str, choices: Mapping[str, str], contender: str | None = None) -> Record | None:
        """The record of the cell that makes these choices, of a duel's cell that of a contender; None if the sweep has
        none, or it came to no verdict. Raises MissingRuns as of `cells`.
        """
        wanted = choices.items()
        number = next((cell.number for cell in self._sound(experiment).cells if wanted <= cell.overrides.items()), None)
        return self._once(self._by_cell, experiment).get((number, contender))

    def _by_cell(self, experiment: str) -> dict[tuple[int | None, str | None], Record]:
        """Records by the number of their cell and, of a duel, their contender."""
        rows = self.cells(experiment).to_dict("records")
        named = (row.get("contender") for row in rows)  # NaN in a row of a table that has none
        return {
            (row["cell"], name if isinstance(name, str) else None): row for row, name in zip(rows, named, strict=True)
        }

    def records(self, experiment: str) -> list[Record]:
        """The records of an experiment's cells that came to a verdict, in their order; MissingRuns as of `cells`."""
        return list(self._once(self._by_cell, experiment).values())

    def cells_of(self, experiment: str) -> list[Cell]:
        """The cells of an experiment's manifest that came to a verdict; MissingRuns as of `cells`."""
        return [cell for cell in self._sound(experiment).cells if cell.state in ENDED]

    def plans(self, experiment: str, choices: Mapping[str, str]) -> bool:
        """True if a cell belongs to the sweep that stands for its experiment, or if there is no such sweep."""
        try:
            manifest = self.manifest(experiment)
        except ManifestError:
            return True
        return manifest is None or any(choices.items() <= cell.overrides.items() for cell in manifest.cells)

    def _sound(self, experiment: str) -> Manifest:
        """The manifest of an experiment that was run by this code."""
        return self._once(self._current, experiment)

    def _current(self, experiment: str) -> Manifest:
        manifest = self.manifest(experiment)
        if manifest is None:
            raise MissingRuns(f"experiment={experiment} has not been run here: {Sweep(experiment).command}")
        if manifest.code_version != provenance.code_version():
            raise MissingRuns(f"experiment={experiment} was run by another version of the code: {manifest.command}")
        if manifest.conf_version != provenance.conf_version():
            raise MissingRuns(f"experiment={experiment} was run with another configuration: {manifest.command}")
        return manifest

    def _all_records(self, experiment: str) -> list[Record]:
        manifest = self._sound(experiment)
        rows = [row for cell in manifest.cells for row in self._records(manifest, cell)]
        if not rows:
            counts = ", ".join(f"{number} {state}" for state, number in manifest.counts.items())
            raise MissingRuns(f"no cell of experiment={experiment} came to a verdict ({counts}): {manifest.command}")
        return rows

    def _records(self, manifest: Manifest, cell: Cell) -> Iterator[Record]:
        if cell.state not in ENDED:
            return
        for run_id in cell.run_ids:
            row = record.read(self.results / run_id)
            if row is None:
                why = identity.problem_of_unreadable(self.results / run_id / "record.json", manifest.experiment, cell)
            else:
                why = identity.problem(row, manifest.experiment, cell, self._digests.get(run_id, ()))
            if why:
                raise WrongRecord(
                    f"the record {run_id} is not that of cell {cell} of experiment={manifest.experiment}: {why}; "
                    f"remove {self.results / run_id} and run the sweep again: {manifest.command}"
                )
            if row is None:
                raise MissingRuns(f"the record {run_id} of cell {cell} is gone: {manifest.command}")
            if row["status"] != "failed":  # as a run that was forced again may have
                yield row | {"cell": cell.number}

    @cached_property
    def _digests(self) -> dict[str, list[str]]:
        """The digests that the manifests of the folder keep of each record."""
        found: dict[str, list[str]] = {}
        for manifest in self.manifests:
            for cell in manifest.cells:
                for run_id, digest in zip(cell.run_ids, cell.digests, strict=False):
                    found.setdefault(run_id, []).append(digest)
        return found


def is_current(manifest: Manifest) -> bool:
    """True if a sweep was run by this code and configuration."""
    versions = (manifest.code_version, manifest.conf_version)
    return versions == (provenance.code_version(), provenance.conf_version())


def index(rows: pd.DataFrame, keys: Sequence[str], wanted: Sequence[tuple[Any, ...]], experiment: str) -> pd.DataFrame:
    """The rows by `keys`, in the order of `wanted`; MissingRuns names the experiment that makes one that is missing."""
    named = [] if rows.empty else rows[list(keys)].to_dict("records")
    found = {tuple(row[key] for key in keys): at for row, at in zip(named, rows.index, strict=True)}
    missing = [key for key in wanted if key not in found]
    if missing:
        some = ", ".join(" ".join(map(str, key)) for key in missing[:_SHOWN])
        raise MissingRuns(
            f"{len(missing)} of {len(wanted)} runs of experiment={experiment}: "
            f"{some}{' ...' if len(missing) > _SHOWN else ''}"
        )
    return rows.loc[[found[key] for key in wanted]]


def succeeded(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose run ended with numbers, not with a verdict that it cannot be."""
    return rows if rows.empty else rows[rows["status"] == "ok"]


def open_cells(results: Path, sweep: Sweep) -> list[str]:
    """The cells of a sweep that came to no verdict, a line each: planned, failed, or refused by what was asked."""
    try:
        manifest = read_manifest(results, sweep.manifest)
    except ManifestError as error:
        return [str(error)]
    if manifest is None:
        return [f"experiment={sweep.experiment} left no manifest: {sweep.command}"]
    return [
        f"experiment={sweep.experiment}, cell {cell}: {cell.state}{f', {cell.reason}' if cell.reason else ''}"
        for cell in manifest.cells
        if cell.state not in ENDED
    ]


def is_complete(results: Path, sweep: Sweep, holds: Callable[[str], bool]) -> bool:
    """True if this code and configuration ran a sweep to its end, and all of its runs are there and whole (`holds`)."""
    try:
        manifest = read_manifest(results, sweep.manifest)
    except ManifestError:
        return False
    if manifest is None or not is_current(manifest):
        return False
    return all(cell.state in ENDED and all(map(holds, cell.run_ids)) for cell in manifest.cells)
