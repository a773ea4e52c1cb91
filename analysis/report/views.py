"""Values for the templates: exhibits, claims, records and sources."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from analysis.claims.claim import NOT_TESTABLE, Verdict
from analysis.claims.paper.discrepancies import SECTION as DISCREPANCIES
from analysis.exhibits.exhibit import Exhibit, Table
from analysis.exhibits.style import PARTITIONS
from analysis.records.identity import leaves
from analysis.records.published import table
from analysis.records.runs import MODELS, SCHEDULES
from analysis.report.images import Image
from rpbench.records.describe import describe

_LONG, _LONGEST = 80, 160  # characters of a value that is not repeated, and of one that is shortened
_LONGEST_METRIC = 800  # enough for a number for each of sixty devices

Row = dict[str, Any]
View = dict[str, Any]

_NOT_METRICS = (  # fields of a record that are shown elsewhere
    *("run_id", "config", "versions", "hardware", "started_at", "digest", "code_version", "git_commit", "reason"),
    *("choices", "overrides", "files", "file_digests"),
)


class Sources:
    """The tables of published numbers that a report uses, with the documents they were transcribed from."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, set[str]]] = {}

    def anchor(self, source: str) -> str:
        """The anchor of a source's table in the list of sources; the source is one of `records.published.where`."""
        place, _, document = source.partition(": ")
        table_path, _, cell = place.partition(", ")
        if not table_path.startswith("analysis/published/"):
            table_path, cell, document = "other", source, source
        self._places.setdefault(table_path, {}).setdefault(document, set()).add(cell)
        return _anchor(table_path)

    def __iter__(self) -> Iterator[View]:
        """Tables by name, with the number of used values from each document."""
        for path in sorted(self._places):
            documents = [(document, len(cells)) for document, cells in sorted(self._places[path].items())]
            yield {"anchor": _anchor(path), "path": path, "documents": documents}


def _anchor(table_path: str) -> str:
    return f"source-{Path(table_path).stem}"


def order_of(row: Row) -> tuple[Any, ...]:
    """The sorting key of records: simulations first, then by cut, schedule and model."""
    return (
        row.get("mode") != "simulate",
        row.get("num_steps") or 1,
        _place(row.get("partition"), [*PARTITIONS]),
        _place(row.get("schedule"), SCHEDULES),
        _place(row.get("model"), MODELS),
        row.get("num_microbatches") or 0,
        str(row.get("convention") or ""),
        str(row.get("cluster") or ""),
    )


def _place(name: Any, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def facts(rows: Sequence[Row]) -> View:
    times = sorted(row.get("started_at") or "" for row in rows)
    return {
        "num_records": len(rows),
        "first": times[0] if times else "",
        "last": times[-1] if times else "",
        "commits": sorted({row.get("git_commit") or "not a git checkout" for row in rows}),
        "code_versions": sorted({row.get("code_version") or "" for row in rows}),
        "evidence": sorted({row["evidence"] for row in rows if row["evidence"]}),  # failed runs have none
    }


def exhibit(each: Exhibit, images: Mapping[str, Image], rows: Mapping[str, Row]) -> View:
    """What an exhibit's page has besides its card; further figures with the commands that draw them."""
    drawn = {
        stem: shlex.join(["python", "-m", "rpbench", "show", *rows[run]["overrides"], f"draw={stem}.pdf"])
        for stem, run in each.drawn_from.items()
        if run in rows
    }
    return {
        "gallery": [(stem, images[stem], drawn.get(stem, "")) for stem in each.drawings if stem in images],
        "columns": _columns(each.table),
    }


def _columns(shown: Table | None) -> list[tuple[str, bool]]:
    """Headings, and whether their columns have numbers, which decides the alignment."""
    if shown is None:
        return []
    below = zip(*shown.rows, strict=True) if shown.rows else [()] * len(shown.columns)
    return [
        (name, any((isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool)) for cell in cells))
        for name, cells in zip(shown.columns, below, strict=True)
    ]


def claim(verdict: Verdict, sources: Sources) -> View:
    claim = verdict.claim
    ours = claim.shown(verdict.value)
    explanation = verdict.explanation
    if len(ours) > _LONG:  # it has its own column
        explanation = explanation.replace(ours, "what stands under ours")
        ours = shorten(ours, _LONGEST, placeholder=" … (the rest is in the record)")
    return {
        "verdict": verdict,
        "claim": claim,
        "metric": claim.metric,
        "anchor": sources.anchor(claim.published.source) if claim.published else "",
        "ours": ours,
        "difference": _difference(verdict),
        "is_number": claim.published is not None and isinstance(claim.published.value, float),
        "explanation": explanation,
        "origin": _origin(verdict),
    }


def _origin(verdict: Verdict) -> str:
    """The source of the published number and the origin of ours."""
    claim = verdict.claim
    if verdict.kind == NOT_TESTABLE:
        return claim.source
    evidence = claim.evidence + (f", from {claim.made_from}" if claim.made_from else "")
    experiments = ", ".join(sorted({need.experiment for need in claim.needs}))
    return "; ".join(part for part in (claim.source, evidence, experiments) if part)


def _difference(verdict: Verdict) -> str:
    """Our value less the published one; 0 for rounding in the last bits."""
    if verdict.difference is None or verdict.value is None:
        return ""
    if abs(verdict.difference) <= 1e-9 * max(1.0, abs(float(verdict.value))):
        return "0"
    return f"{verdict.difference:+.2g}"


def discrepancies(verdicts: Iterable[Verdict]) -> list[View]:
    ours = {v.claim.id: v for v in verdicts if v.claim.section == DISCREPANCIES}
    found = ((row, ours[f"discrepancies/{row['id']}/published"]) for row in table("discrepancies"))
    return [{**row, "found": v.claim.shown(v.value), "verdict": v} for row, v in found]


def records(rows: Sequence[Row], exhibits: Sequence[Exhibit], verdicts: Sequence[Verdict]) -> list[View]:
    """Every record with its command, and the exhibits and claims that use it."""
    shown_in: dict[str, list[str]] = {}
    for each in exhibits:
        for run_id in each.records:
            shown_in.setdefault(run_id, []).append(each.id)
    num_claims = Counter(run_id for verdict in verdicts for run_id in verdict.run_ids)
    return [
        {
            "row": row,
            "summary": _summary(row),
            "command": command_of(row),
            "metrics": _metrics(row),
            "config": _flat(row["config"]),
            "made_with": {
                "commit": row.get("git_commit") or "not a git checkout",
                "code": row.get("code_version") or "",
                "versions": ", ".join(f"{name} {number}" for name, number in row.get("versions", {}).items()),
            },
            "shown_in": shown_in.get(row["run_id"], []),
            "num_claims": num_claims[row["run_id"]],
        }
        for row in rows
    ]


def _summary(row: Row) -> str:
    """One line about a record; a run that failed early may lack the fields for a full one."""
    try:
        return describe(row)
    except (KeyError, TypeError, ValueError):
        return f"{row.get('schedule') or row.get('mode')} {row.get('model') or ''}: {row['status']}"


def common(shown: Sequence[View]) -> dict[str, dict[str, str]]:
    """The configuration and metrics that all records share; none for a single record."""
    return {part: shared([each[part] for each in shown]) for part in ("config", "metrics", "made_with")}


def shared(fields: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = fields
    return {key: value for key, value in first.items() if others and all(each.get(key) == value for each in others)}


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """A configuration as `cost.hop_ms: 0.1`, without unset values and sources of constants."""
    found = {".".join(path): value for path, value in leaves(dict(config)) if "declared" not in path[:-1]}
    set_ = {name: value for name, value in found.items() if value is not None and value != {}}
    return {name: value if isinstance(value, str) and value else json.dumps(value) for name, value in set_.items()}


def command_of(row: Row) -> str:
    return shlex.join(["python", "-m", "rpbench", *row["overrides"]])


def _metrics(row: Row) -> dict[str, str]:
    found = {key: readable(value) for key, value in row.items() if key not in _NOT_METRICS and value is not None}
    rest, most = " … (all of it is in record.json)", _LONGEST_METRIC
    return {key: text if len(text) <= most else text[:most] + rest for key, text in found.items()}


def readable(value: Any) -> str:
    """A value with as many digits as a reader needs."""
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def distinct(rows: Iterable[Row], key: str) -> list[tuple[View, int]]:
    """The distinct values of a field, and how many records have each."""
    counts = Counter(json.dumps(row.get(key) or {}, sort_keys=True) for row in rows)
    return [(json.loads(text), number) for text, number in counts.most_common()]
