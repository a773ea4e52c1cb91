"""From records to pages: gather records, judge the claims, render and write."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.claims import Need, all_claims, evaluate
from analysis.exhibits.catalogue import exhibits as make_exhibits
from analysis.exhibits.exhibit import DECLARED, Exhibit
from analysis.exhibits.figures.calibrated import calibration
from analysis.exhibits.figures.files import save_table
from analysis.exhibits.own_sweep import exhibit as compare
from analysis.exhibits.style import BUBBLES
from analysis.records.experiments import Experiments, is_current
from analysis.records.runs import grouped
from analysis.report import opening, views
from analysis.report.content import ALONE, Content, Site, slug
from analysis.report.images import draw_all, drawings_of
from analysis.report.opening import FIRST, answer, judgement
from analysis.report.statements import Statement, choices, counted, grouped_by, judged, statements
from rpbench.config.configuration import options_of
from rpbench.records.manifest import Manifest, no_sweep_in
from rpbench.records.provenance import now
from rpbench.records.record import write_atomically

_HERE = Path(__file__).parent
PAPER = "RoundPipe, reproduced"
OWN = "Runs, compared"
_MADE_ON = {"machines": "hardware", "versions": "versions"}  # fields of records

View = dict[str, Any]


def rendered(content: Content, front: str, folder: str, figures: str = "figures") -> Iterator[tuple[str, str]]:
    """(file name, text) of all pages, the style and the script; the first page, whose file is `front`, first.

    `folder` is that of the other pages beside it, `figures` that of the figures, relative to the first page.
    """
    return _Pages(content, front, folder, figures).each()


@cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


class _Pages:
    """The pages of one report; the page of sources is last because rendering the others collects them."""

    def __init__(self, content: Content, front: str, folder: str, figures: str) -> None:
        self._content, self._front = content, front
        section_of = {verdict.claim.id: verdict.claim.section for verdict in content.verdicts}
        self._site = Site(front, folder, section_of, content.sweep_of, figures=figures)
        self._sources = views.Sources()
        self._statements = statements(content.verdicts)
        self._rows = {row["run_id"]: row for row in content.rows}
        self._cards = {each.id: self._card(each) for each in content.shown}
        paper = [("findings", "Findings"), ("claims", "Statements"), ("discrepancies", "Discrepancies")]
        always = [("records", "Records"), ("method", "Method and machine"), ("sources", "Sources")]
        self._common = {
            "style": (_HERE / "page.css").read_text(encoding="utf-8"),
            "script": (_HERE / "page.js").read_text(encoding="utf-8"),
            "pages": [*paper, *always] if content.reproduces else always,
            "contents": [(each.id, each.title) for each in content.shown],
            "here": "",
            "sources": self._sources,
        }

    def each(self) -> Iterator[tuple[str, str]]:
        yield self._front, self._first()
        yield "page.css", str(self._common["style"])
        listed = [(self._site.exhibit(each.id), each.title) for each in self._content.shown]
        contents = json.dumps(listed).replace("<", "\\u003c")  # no tag begins in it
        yield "page.js", f"const CONTENTS = {contents};\n{self._common['script']}"
        for each in self._content.shown:
            shown = views.exhibit(each, self._content.images, self._rows) | self._cards[each.id]
            yield self._page(f"exhibit-{slug(each.id)}", "exhibit.html", e=shown, here=each.id)
        yield from self._records()
        if self._content.reproduces:
            yield from self._claims()
            yield self._page("findings", "findings.html", findings=opening.findings(self._content.verdicts))
            found = views.discrepancies(self._content.verdicts)
            yield self._page("discrepancies", "discrepancies.html", discrepancies=found)
        made_on = {name: views.distinct(self._content.rows, key) for name, key in _MADE_ON.items()}
        yield self._page("method", "method.html", paper=self._content.reproduces, bubbles=BUBBLES, **made_on)
        yield self._page("sources", "sources.html")

    def _page(self, name: str, template: str, **values: Any) -> tuple[str, str]:
        return f"{name}.html", self._render(template, self._site, **values)

    def _render(self, template: str, site: Site, **values: Any) -> str:
        return _templates().get_template(template).render(**(self._common | {"site": site} | values))

    # --- the first page ---

    def _first(self) -> str:
        content = self._content
        front = [*FIRST, *(each.id for each in content.own)]
        cards = sorted((each for each in content.shown if each.id in front), key=lambda each: front.index(each.id))
        red = [verdict for verdict in content.verdicts if verdict.red]
        return self._render(
            "front.html",
            replace(self._site, on_front=True),
            title=PAPER if content.reproduces else OWN,
            claims=content.reproduces,
            cards=[self._cards[each.id] for each in cards],
            others=[self._cards[each.id] for each in content.shown if each not in cards],
            facts=views.facts(content.rows),
            **self._verdicts(),
            red=red,
            red_sections=Counter(verdict.claim.section for verdict in red).most_common(),
            missing=content.missing if content.reproduces else [],
            made_at=now(),
            scope=content.scope,
        )

    def _verdicts(self) -> View:
        """The first screen and the counts; empty without claims."""
        verdicts, found = self._content.verdicts, self._statements
        if not verdicts:
            return {"opening": [], "own": [], "tiles": {}, "sections": {}, "num_judged": 0, "paper": ""}
        return {
            "paper": opening.PAPER,
            "opening": opening.opening(verdicts, found),
            "own": opening.own_findings(verdicts),
            "num_judged": len(judged(found)),
            "tiles": counted("verdict", found),
            "sections": {name: counted("verdict", those) for name, those in grouped_by("section", found).items()},
        }

    def _card(self, each: Exhibit) -> View:
        return {
            "of": each,
            "answer": answer(each),
            "judgement": judgement(each, self._content.verdicts),
            "image": self._content.images.get(each.id),
            "commands": [command.strip() for command in each.command.split(";") if command.strip()],
        }

    # --- a page for each part ---

    def _claims(self) -> Iterator[tuple[str, str]]:
        for section, found in grouped_by("section", self._statements).items():
            cells = [cell for each in found for cell in each.cells]
            several = dict.fromkeys(cell.run_ids for cell in cells if len(cell.run_ids) > 1)
            values = {
                "groups": [self._group(each) for each in found],
                "num_cells": len(cells),
                "runs": {runs: number for number, runs in enumerate(several, 1)},
                "verdicts": Counter(cell.kind for cell in cells),
            }
            yield self._page(f"claims-{slug(section)}", "claims.html", section=section, **values)
        yield self._page("claims", "statements.html", choices=choices(self._statements), statements=self._statements)

    def _group(self, each: Statement) -> View:
        claims = [
            views.claim(cell, self._sources) | {"statement": words}
            for cell, words in zip(each.cells, each.own_words, strict=True)
        ]
        shared = views.shared([{key: claim[key] for key in ("origin", "metric")} for claim in claims])
        name = each.claim.statement_id or each.claim.id
        return {"id": name, "statement": each.words, "claims": claims, "shared": shared}

    def _records(self) -> Iterator[tuple[str, str]]:
        shown = views.records(self._content.rows, self._content.shown, self._content.verdicts)
        views_of = {view["row"]["run_id"]: view for view in shown}
        entries = []
        sweep_of = self._content.sweep_of
        for sweep, rows in grouped(self._content.rows, lambda row: sweep_of.get(row["run_id"], ALONE)).items():
            records = [views_of[row["run_id"]] for row in rows]
            name = f"records-{slug(sweep)}"
            yield self._page(name, "records.html", sweep=sweep, records=records, common=views.common(records))
            counts = Counter(row["status"] for row in rows)
            outcome = ", ".join(f"{number} {status}" for status, number in counts.most_common())
            entries.append({"href": self._site.records(sweep), "text": sweep, "outcome": outcome})
        yield self._page("records", "index.html", title="Records, by sweep", noun="sweeps", entries=entries)


_EVERY_S = 3.0


def build(results: Path, out: Path) -> Path:
    """Write the report of a results folder; returns the path of its first page.

    Sweeps that no claim or exhibit uses are compared. Raises ValueError if the folder has no record.
    """
    experiments = Experiments(results)
    _say(f"reading the records of {results}")
    judged = {each.experiment for each in experiments.manifests if is_ours(experiments, each)}
    content = gather(experiments, lambda need: need.experiment in judged, "these runs")
    content.figures = out.parent / folder_of(out) / "figures"
    drawings = sum(len(drawings_of(each)) for each in content.shown)
    _say(f"{len(content.rows):,} records; drawing {drawings} figures")
    number, said = 0, monotonic()

    def tell(_: str) -> None:
        nonlocal number, said
        number += 1
        if monotonic() - said > _EVERY_S:
            said = monotonic()
            _say(f"{number} of {drawings} figures drawn")

    content.images = draw_all(content.shown, content.figures, done=tell)
    save_tables(content)
    _say("writing the pages")
    return write(content, out)


def save_tables(content: Content) -> None:
    """Write the numbers of every exhibit beside its figure, as CSV."""
    for each in content.shown:
        if each.table is not None:
            save_table(each.table, each.id, content.figures)


def _say(words: str) -> None:
    print(f"rpbench: report: {words}", file=sys.stderr, flush=True)


def gather(
    experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True, scope: str = "full"
) -> Content:
    """Exhibits and verdicts of a results folder, and comparisons of the user's own sweeps.

    `planned` runs count as missing, as in `judge`. ValueError if no sweep left a record.
    """
    if not experiments.manifests or not (experiments.rows or any(each.cells for each in experiments.manifests)):
        raise ValueError(no_sweep_in(experiments.results))
    rows = sorted(experiments.rows, key=views.order_of)
    last_first = reversed(experiments.manifests)  # a record belongs to the first sweep that names it
    sweep_of = {name: each.name for each in last_first for cell in each.cells for name in cell.run_ids}
    content = Content(rows, [], [], [], scope, sweep_of=sweep_of)
    ours = [each for each in experiments.manifests if is_ours(experiments, each)]
    content.own = [compare(each, rows) for each in experiments.manifests if each not in ours]
    content.own += calibration(experiments.results)
    if ours:
        made, missing = make_exhibits(experiments)
        content.exhibits, content.missing = list(made), list(missing)
        content.verdicts = evaluate(all_claims(), experiments, planned)
    return content


def is_ours(experiments: Experiments, manifest: Manifest) -> bool:
    """True if exhibits and claims read a sweep: it is the current one of an experiment that they use."""
    if manifest.experiment not in options_of("experiment") or manifest.experiment not in _read():
        return False
    stands = experiments.manifest(manifest.experiment)
    return stands is not None and stands.name == manifest.name and is_current(stands)


@cache
def _read() -> frozenset[str]:
    """The experiments that exhibits and claims use."""
    shown = (name for each in DECLARED.values() for name in each.get("experiments", ()))
    return frozenset((*shown, *(need.experiment for claim in all_claims() for need in claim.needs)))


def write(content: Content, out: Path) -> Path:
    """Render all pages, then write each atomically, the first page last."""
    figures = Path(os.path.relpath(content.figures, out.parent)).as_posix()
    pages = dict(rendered(content, out.name, folder_of(out), figures))
    folder = out.parent / folder_of(out)
    for old in folder.glob("*.html"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        write_atomically(out if name == out.name else folder / name, text)
    return out


def folder_of(out: Path) -> str:
    return f"{out.stem}_pages"
