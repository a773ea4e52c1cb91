"""From records to the page: gather what there is, judge the claims, render, write."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.claims import Need, Verdict, all_claims, evaluate, tally
from analysis.exhibits.catalogue import exhibits as make_exhibits
from analysis.exhibits.exhibit import Exhibit
from analysis.records.load import load_records
from analysis.report import findings, views
from analysis.report.images import draw_all
from rpbench.harness import record
from rpbench.harness.provenance import now
from rpbench.harness.record import write_atomically

_HERE = Path(__file__).parent


@dataclass
class Content:
    """What a report shows.

    Args:
        rows: the records as they stand in their files, those of the newest code alone.
        missing: exhibits that could not be made, and why.
        scope: what was run, in a word: `full`, `quick`.
        images: data URI of every figure by its file stem.
    """

    rows: list[dict[str, Any]]
    verdicts: list[Verdict]
    exhibits: list[Exhibit]
    missing: list[tuple[str, str]]
    scope: str = "full"
    images: dict[str, str] = field(default_factory=dict)


def build(results: Path, out: Path) -> Path:
    """Write the report of a results folder as one HTML page and say where it is.

    Raises:
        ValueError: if the folder holds no record.
    """
    content = gather(results)
    content.images = draw_all(content.exhibits)
    return write(content, out)


def gather(results: Path, planned: Callable[[Need], bool] = lambda need: True, scope: str = "full") -> Content:
    """Exhibits and verdicts of a results folder.

    Args:
        planned: which runs were to be made; claims that need others are no fault.

    Raises:
        ValueError: if the folder holds no record.
    """
    records = load_records(results)
    if records.empty:
        raise ValueError(
            f"results_dir={results}: no finished run in it; make some first, as in: "
            f"python -m rpbench -m experiment=figure17 results_dir={results}"
        )
    made, missing = make_exhibits(records, results)
    verdicts = evaluate(all_claims(), records, planned)
    return Content(_as_written(records, results), verdicts, list(made), list(missing), scope)


def _as_written(records: pd.DataFrame, results: Path) -> list[dict[str, Any]]:
    """The records themselves: a table of them has turned whole numbers into decimals and gaps into NaN."""
    rows = [record.read(results / run_id) for run_id in records["run_id"]]
    return sorted((row for row in rows if row is not None), key=views.order_of)


def write(content: Content, out: Path) -> Path:
    """Render the page and put it in its place, whole or not at all."""
    write_atomically(out, render(content))
    return out


def render(content: Content) -> str:
    """The page."""
    page = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sources = views.Sources()
    return page.get_template("page.html").render(
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        made_at=now(),
        scope=content.scope,
        headline=views.headline(content.rows, content.verdicts),
        tallies=tally(content.verdicts),
        kinds=views.kinds_present(content.verdicts),
        red=[verdict for verdict in content.verdicts if verdict.red],
        findings=findings.findings(content.verdicts),
        exhibits=[views.exhibit(each, content.images, sources) for each in content.exhibits],
        claims=[views.claim(verdict, sources) for verdict in content.verdicts],
        discrepancies=views.discrepancies(content.verdicts, sources),
        missing=content.missing,
        records=views.records(content.rows, content.exhibits, content.verdicts),
        machines=views.distinct(content.rows, "hardware"),
        versions=views.distinct(content.rows, "versions"),
        sources=sources,
    )
