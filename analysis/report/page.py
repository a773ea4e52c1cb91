"""From records to pages: gather what there is, judge the claims, render, write."""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import monotonic

from analysis.claims import Need, all_claims, evaluate
from analysis.exhibits.catalogue import exhibits as make_exhibits
from analysis.exhibits.exhibit import DECLARED
from analysis.exhibits.figures.calibrated import calibration
from analysis.exhibits.figures.files import save_table
from analysis.exhibits.own_sweep import exhibit as compare
from analysis.records.experiments import Experiments, is_current
from analysis.report import views
from analysis.report.content import Content
from analysis.report.images import draw_all, drawings_of
from analysis.report.pages import render_all
from rpbench.config.configuration import options_of
from rpbench.records.manifest import Manifest, no_sweep_in
from rpbench.records.record import write_atomically

_EVERY_S = 3.0


def build(results: Path, out: Path) -> Path:
    """Write the report of a results folder, a first page and a folder of pages, and say where the first is.

    Claims and exhibits are those of the sweeps that are there; sweeps that none of them is about are compared.

    Raises:
        ValueError: if the folder holds no record.
    """
    experiments = Experiments(results)
    _say(f"reading the records of {results}")
    judged = {each.experiment for each in experiments.manifests if is_ours(experiments, each)}
    content = gather(experiments, lambda need: need.experiment in judged, "these runs")
    content.figures = out.parent / folder_of(out) / "figures"
    drawings = sum(len(drawings_of(each)) for each in content.shown)
    _say(f"{len(content.rows):,} records; drawing {drawings} figures")
    content.images = draw_all(content.shown, content.figures, done=_Drawn(drawings).tell)
    save_tables(content)
    _say("writing the pages")
    return write(content, out)


def save_tables(content: Content) -> None:
    """Write the numbers of every exhibit beside its figure, as CSV."""
    for each in content.shown:
        if each.table is not None:
            save_table(each.table, each.id, content.figures)


class _Drawn:
    """Says how many figures are drawn, every few seconds."""

    def __init__(self, number: int) -> None:
        self._number, self._done, self._said = number, 0, monotonic()

    def tell(self, stem: str) -> None:
        self._done += 1
        if monotonic() - self._said > _EVERY_S:
            self._said = monotonic()
            _say(f"{self._done} of {self._number} figures drawn")


def _say(words: str) -> None:
    print(f"rpbench: report: {words}", file=sys.stderr, flush=True)


def gather(
    experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True, scope: str = "full"
) -> Content:
    """Exhibits and verdicts of a results folder, and comparisons of the sweeps that are nobody's but the user's.

    Args:
        planned: which runs were to be made; claims that need others are no fault.

    Raises:
        ValueError: if no sweep of the folder left a record.
    """
    if not experiments.manifests or not (experiments.rows or any(each.cells for each in experiments.manifests)):
        raise ValueError(no_sweep_in(experiments.results))
    rows = sorted(experiments.rows, key=views.order_of)
    content = Content(rows, [], [], [], scope, sweep_of=_sweeps(experiments))
    ours = [each for each in experiments.manifests if is_ours(experiments, each)]
    content.own = [compare(each, rows) for each in experiments.manifests if each not in ours]
    content.own += calibration(experiments.results)
    if ours:
        made, missing = make_exhibits(experiments)
        content.exhibits, content.missing = list(made), list(missing)
        content.verdicts = evaluate(all_claims(), experiments, planned)
    return content


def is_ours(experiments: Experiments, manifest: Manifest) -> bool:
    """Whether exhibits and claims can read a sweep: it stands for an experiment of this code and configuration."""
    if manifest.experiment not in options_of("experiment") or manifest.experiment not in _read():
        return False
    stands = experiments.manifest(manifest.experiment)
    return stands is not None and stands.name == manifest.name and is_current(stands)


@cache
def _read() -> frozenset[str]:
    """The experiments that an exhibit or a claim is about."""
    shown = (name for each in DECLARED.values() for name in each.get("experiments", ()))
    return frozenset((*shown, *(need.experiment for claim in all_claims() for need in claim.needs)))


def _sweeps(experiments: Experiments) -> dict[str, str]:
    """The first sweep that names a record, by the record's id."""
    found: dict[str, str] = {}
    for manifest in experiments.manifests:
        for cell in manifest.cells:
            for name in cell.run_ids:
                found.setdefault(name, manifest.name)
    return found


def write(content: Content, out: Path) -> Path:
    """Render all pages, then put them in their places: those of the folder first, each whole or not at all."""
    figures = Path(os.path.relpath(content.figures, out.parent)).as_posix()
    pages = render_all(content, out.name, folder_of(out), figures)
    folder = out.parent / folder_of(out)
    for old in folder.glob("*.html"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        write_atomically(out if name == out.name else folder / name, text)
    return out


def folder_of(out: Path) -> str:
    """The folder beside the first page, for the others."""
    return f"{out.stem}_pages"
