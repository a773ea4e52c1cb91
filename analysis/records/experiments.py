"""Experiments: the records behind exhibits and claims, found only through the manifests of their sweeps.

A record that no cell of an experiment's manifest names cannot reach a table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
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
    """A record that does not answer the cell that names it."""


@dataclass(frozen=True)
class Sweep:
    """A sweep of an experiment of `conf/experiment/`, narrowed by overrides."""

    experiment: str
    overrides: tuple[str, ...] = ()

    @property
    def manifest(self) -> str:
        return manifest_name(self.experiment, self.overrides)

    def arguments(self, results: Path) -> list[str]:
        """The arguments of `python -m rpbench`."""
        return ["-m", f"experiment={self.experiment}", *self.overrides, f"results_dir={results}"]

    @property
    def command(self) -> str:
        """The command that runs it into the default folder."""
        return " ".join(("python -m rpbench -m", f"experiment={self.experiment}", *self.overrides))


def _once(find: Callable[["Experiments", str], _Found]) -> Callable[["Experiments", str], _Found]:
    """A method that keeps its result, or its MissingRuns, for each experiment."""

    @wraps(find)
    def kept(experiments: "Experiments", experiment: str) -> _Found:
        key, known = (find.__name__, experiment), experiments._known
        if key not in known:
            try:
                known[key] = find(experiments, experiment)
            except MissingRuns as lack:
                known[key] = lack
            except ManifestError as error:
                known[key] = MissingRuns(str(error))
        found = known[key]
        if isinstance(found, MissingRuns):
            raise found
        return found  # type: ignore[no-any-return]

    return kept


@dataclass(frozen=True)
class Experiments:
    """The experiments of a results folder."""

    results: Path  # the folder of records and timelines
    narrowed: Sequence[Sweep] = ()  # sweeps that are read in place of experiments that were not run in full
    _known: dict[tuple[str, str], Any] = field(default_factory=dict, compare=False, repr=False)

    @_once
    def cells(self, experiment: str) -> pd.DataFrame:
        """The records of an experiment with a verdict as rows, with the cell's number as `cell`.

        MissingRuns if this code and configuration did not run the sweep, or it has no record, or lost one; WrongRecord
        if a record does not answer its cell.
        """
        return pd.DataFrame(self.checked(experiment))

    @_once
    def cells_there(self, experiment: str) -> pd.DataFrame:
        """The rows of `cells` without the records that are gone; other errors as of `cells`, also if all are gone."""
        try:
            return self.cells(experiment)
        except MissingRuns as lack:
            manifest, rows = self._sound(experiment), list[Record]()
            for cell in manifest.cells:
                try:
                    rows += self._records(manifest, cell)
                except WrongRecord:
                    raise
                except MissingRuns:
                    continue
            if not rows:
                raise lack from None
            return pd.DataFrame(rows)

    @_once
    def checked(self, experiment: str) -> list[Record]:
        """The records of `cells` as in their files, without the missing values of a frame; errors as of `cells`."""
        manifest = self._sound(experiment)
        rows = [row for cell in manifest.cells for row in self._records(manifest, cell)]
        if not rows:
            counts = ", ".join(f"{number} {state}" for state, number in manifest.counts.items())
            raise MissingRuns(f"no cell of experiment={experiment} came to a verdict ({counts}): {manifest.command}")
        return rows

    def refusals(self) -> Iterator[str]:
        """For each experiment that was run and cannot be read: why."""
        for name in self.names():
            try:
                self.checked(name)
            except MissingRuns as error:
                yield str(error)

    def manifest(self, experiment: str) -> Manifest | None:
        """The manifest of an experiment, preferably one of this code; ManifestError if it is torn."""
        sweeps = (Sweep(experiment), *(sweep for sweep in self.narrowed if sweep.experiment == experiment))
        read = (read_manifest(self.results, sweep.manifest) for sweep in sweeps)
        found = [manifest for manifest in read if manifest is not None]
        return next(filter(is_current, found), next(iter(found), None))

    def names(self) -> list[str]:
        """The experiments of `conf/experiment/` that this code and configuration have run here."""
        found = []
        for name in dict.fromkeys(manifest.experiment for manifest in self.manifests if manifest.experiment):
            with suppress(MissingRuns):
                self._sound(name)
                found.append(name)
        return found

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Every readable manifest of the folder."""
        return read_manifests(self.results)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every record that a manifest of the folder names, as in its file."""
        names = dict.fromkeys(name for each in self.manifests for cell in each.cells for name in cell.run_ids)
        found = (record.read(self.results / name) for name in names)
        return [row for row in found if row is not None]

    def find(self, experiment: str, choices: Mapping[str, str], contender: str | None = None) -> Record | None:
        """The record of the cell with these choices, for a duel that of a contender; MissingRuns as of `cells`.

        None if the sweep has no such cell or the cell no verdict.
        """
        wanted = choices.items()
        number = next((cell.number for cell in self._sound(experiment).cells if wanted <= cell.overrides.items()), None)
        return self._by_cell(experiment).get((number, contender))

    @_once
    def _by_cell(self, experiment: str) -> dict[tuple[int | None, str | None], Record]:
        """Records by the number of their cell and, in a duel, their contender."""
        found = {}
        for row in self.cells(experiment).to_dict("records"):
            name = row.get("contender")  # NaN in a row that has none
            found[row["cell"], name if isinstance(name, str) else None] = row
        return found

    def cells_of(self, experiment: str) -> list[Cell]:
        """The cells of an experiment with a verdict; MissingRuns as of `cells`."""
        return [cell for cell in self._sound(experiment).cells if cell.state in ENDED]

    def plans(self, experiment: str, choices: Mapping[str, str]) -> bool:
        """True if a cell belongs to the manifest of its experiment, or there is no manifest."""
        try:
            manifest = self.manifest(experiment)
        except ManifestError:
            return True
        return manifest is None or any(choices.items() <= cell.overrides.items() for cell in manifest.cells)

    @_once
    def _sound(self, experiment: str) -> Manifest:
        """The manifest of an experiment that this code and configuration ran; else MissingRuns."""
        manifest = self.manifest(experiment)
        if manifest is None:
            raise MissingRuns(f"experiment={experiment} has not been run here: {Sweep(experiment).command}")
        if manifest.code_version != provenance.code_version():
            raise MissingRuns(f"experiment={experiment} was run by another version of the code: {manifest.command}")
        if manifest.conf_version != provenance.conf_version():
            raise MissingRuns(f"experiment={experiment} was run with another configuration: {manifest.command}")
        return manifest

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
            if row["status"] != "failed":  # a run that was forced again may have failed
                yield row | {"cell": cell.number}

    @cached_property
    def _digests(self) -> dict[str, list[str]]:
        """The digests of each record in the manifests of the folder."""
        found: dict[str, list[str]] = {}
        for manifest in self.manifests:
            for cell in manifest.cells:
                for run_id, digest in zip(cell.run_ids, cell.digests, strict=False):
                    found.setdefault(run_id, []).append(digest)
        return found


def is_current(manifest: Manifest) -> bool:
    """True if this code and configuration ran a sweep."""
    versions = (manifest.code_version, manifest.conf_version)
    return versions == (provenance.code_version(), provenance.conf_version())


def index(rows: pd.DataFrame, keys: Sequence[str], wanted: Sequence[tuple[Any, ...]], experiment: str) -> pd.DataFrame:
    """The rows with the `wanted` values of `keys`, in that order; MissingRuns, naming the experiment, without one."""
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
    """The rows whose run ended with numbers."""
    return rows if rows.empty else rows[rows["status"] == "ok"]


def open_cells(results: Path, sweep: Sweep) -> list[str]:
    """A line for each cell of a sweep without a verdict: planned, failed or refused."""
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
    """True if this code and configuration ran a sweep to its end and `holds` is true of each of its runs."""
    try:
        manifest = read_manifest(results, sweep.manifest)
    except ManifestError:
        return False
    if manifest is None or not is_current(manifest):
        return False
    return all(cell.state in ENDED and all(map(holds, cell.run_ids)) for cell in manifest.cells)
