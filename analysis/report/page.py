"""From records to the page: gather what there is, judge the claims, render, write."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.claims import Need, Verdict, all_claims, evaluate, tally
from analysis.exhibits.catalogue import exhibits as make_exhibits
from analysis.exhibits.exhibit import Exhibit
from analysis.records.experiments import Experiments
from analysis.report import findings, views
from analysis.report.images import draw_all
from rpbench.harness.provenance import now
from rpbench.harness.record import write_atomically

_HERE = Path(__file__).parent


@dataclass
class Content:
    """What a report shows.

    Args:
        rows: the records that manifests of the folder name, as they stand in their files.
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
    content = gather(Experiments(results))
    content.images = draw_all(content.exhibits)
    return write(content, out)


def gather(
    experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True, scope: str = "full"
) -> Content:
    """Exhibits and verdicts of a results folder.

    Args:
        planned: which runs were to be made; claims that need others are no fault.

    Raises:
        ValueError: if no sweep of the folder left a record.
    """
    if not experiments.rows:
        raise ValueError(
            f"results_dir={experiments.results}: no finished sweep in it; make one first, as in: "
            f"python -m rpbench -m experiment=figure17 results_dir={experiments.results}"
        )
    made, missing = make_exhibits(experiments)
    verdicts = evaluate(all_claims(), experiments, planned)
    rows = sorted(experiments.rows, key=views.order_of)
    return Content(rows, verdicts, list(made), list(missing), scope)


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
