"""The pages of a report as text: the first with the answers, and one for each exhibit, section of claims and sweep."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.claims import Verdict, tally
from analysis.exhibits.exhibit import Exhibit
from analysis.report import findings, views
from analysis.report.answers import FIRST, affordable, answer, judgement, question
from analysis.report.content import Content
from analysis.report.site import Site, by_sweep, sections_of, slug
from rpbench.harness.provenance import now

_HERE = Path(__file__).parent
PAPER = "RoundPipe, reproduced"
OWN = "Runs, compared"

View = dict[str, Any]


def render_all(content: Content, front: str, folder: str) -> dict[str, str]:
    """Every page by its file name; `front` stands beside the folder of the others."""
    return dict(_Pages(content, front, folder).each())


class _Pages:
    """Renders the pages of one report; the sources are gathered on the way, so their page comes last."""

    def __init__(self, content: Content, front: str, folder: str) -> None:
        self._content, self._front = content, front
        self._site = Site(front, folder, sections_of(content.verdicts), content.sweep_of)
        self._sources = views.Sources()
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._common = {
            "style": (_HERE / "page.css").read_text(encoding="utf-8"),
            "script": (_HERE / "page.js").read_text(encoding="utf-8"),
            "pages": self._contents(),
            "contents": [(each.id, each.title) for each in content.shown],
            "here": "",
        }

    def each(self) -> Iterator[tuple[str, str]]:
        """File name and text of every page."""
        yield self._front, self._first()
        yield from map(self._exhibit, self._content.shown)
        yield from self._records()
        if self._content.reproduces:
            yield from self._claims()
            yield self._page("findings", "findings.html", findings=findings.findings(self._content.verdicts))
            found = views.discrepancies(self._content.verdicts, self._sources)
            yield self._page("discrepancies", "discrepancies.html", discrepancies=found)
        yield self._page("method", "method.html", paper=self._content.reproduces, **self._machines())
        yield self._page("sources", "sources.html", sources=self._sources)

    def _contents(self) -> list[tuple[str, str]]:
        paper = [("findings", "Findings"), ("claims", "Claims"), ("discrepancies", "Discrepancies")]
        always = [("records", "Records"), ("method", "Method and machine"), ("sources", "Sources")]
        return [*paper, *always] if self._content.reproduces else always

    def _page(self, name: str, template: str, **values: Any) -> tuple[str, str]:
        return f"{name}.html", self._render(template, self._site, **values)

    def _render(self, template: str, site: Site, **values: Any) -> str:
        return self._templates.get_template(template).render(**(self._common | {"site": site} | values))

    # --- the first page ---

    def _first(self) -> str:
        content = self._content
        front = [*FIRST, *(each.id for each in content.own)]
        cards = sorted((each for each in content.shown if each.id in front), key=lambda each: front.index(each.id))
        images = affordable([each.id for each in cards], content.images)
        red = [verdict for verdict in content.verdicts if verdict.red]
        return self._render(
            "front.html",
            replace(self._site, on_front=True),
            title=PAPER if content.reproduces else OWN,
            claims=content.reproduces,
            cards=[self._card(each) | {"image": images.get(each.id, "")} for each in cards],
            others=[self._card(each) for each in content.shown if each not in cards],
            headline=views.headline(content.rows, content.verdicts),
            tallies=tally(content.verdicts) if content.reproduces else [],
            kinds=views.kinds_present(content.verdicts),
            red=red,
            red_sections=Counter(verdict.claim.section for verdict in red).most_common(),
            missing=content.missing if content.reproduces else [],
            made_at=now(),
            scope=content.scope,
        )

    def _card(self, each: Exhibit) -> View:
        return {
            "id": each.id,
            "title": each.title,
            "question": question(each),
            "answer": answer(each),
            "judgement": judgement(each, self._content.verdicts),
            "evidence": each.evidence,
        }

    # --- a page for each part ---

    def _exhibit(self, each: Exhibit) -> tuple[str, str]:
        shown = views.exhibit(each, self._content.images, self._sources) | self._card(each)
        return self._page(f"exhibit-{slug(each.id)}", "exhibit.html", e=shown, here=each.id)

    def _claims(self) -> Iterator[tuple[str, str]]:
        sections: dict[str, list[Verdict]] = {}
        for verdict in self._content.verdicts:
            sections.setdefault(verdict.claim.section, []).append(verdict)
        for section, verdicts in sections.items():
            values = {"section": section, "num_claims": len(verdicts), "kinds": views.kinds_present(verdicts)}
            groups = views.statements(verdicts, self._sources)
            yield self._page(f"claims-{slug(section)}", "claims.html", groups=groups, **values)
        entries = [
            {
                "href": f"{self._site.claim(group[0].claim.id)}",
                "text": _statement(group),
                "outcome": views.outcome(group),
            }
            for verdicts in sections.values()
            for group in views.by_statement(verdicts)
        ]
        yield self._page("claims", "index.html", title="Claims, by statement", noun="statements", entries=entries)

    def _records(self) -> Iterator[tuple[str, str]]:
        shown = views.records(self._content.rows, self._content.shown, self._content.verdicts)
        views_of = {view["run_id"]: view for view in shown}
        entries = []
        for sweep, rows in by_sweep(self._content.rows, self._content.sweep_of).items():
            records = [views_of[row["run_id"]] for row in rows]
            yield self._page(f"records-{slug(sweep)}", "records.html", sweep=sweep, records=records)
            counts = Counter(row["status"] for row in rows)
            outcome = ", ".join(f"{number} {status}" for status, number in counts.most_common())
            entries.append({"href": self._site.records(sweep), "text": sweep, "outcome": outcome})
        yield self._page("records", "index.html", title="Records, by sweep", noun="sweeps", entries=entries)

    def _machines(self) -> View:
        rows = self._content.rows
        return {"machines": views.distinct(rows, "hardware"), "versions": views.distinct(rows, "versions")}


def _statement(group: Sequence[Verdict]) -> str:
    claim = group[0].claim
    return f"{claim.section}: {views.common_words([verdict.claim.statement for verdict in group])}"
