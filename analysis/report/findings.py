"""What the evidence says about the published data, in plain words; every number in them is a verdict's.

`findings.yaml` has the words. Between braces there, in a row or a column, stands the id of a claim and means our value;
behind `=` it means the published one. A column's `{}` is the model of the row, a row of its own has an id a column.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.claims.claim import EVALUATED, REPRODUCED, Verdict
from analysis.exhibits.style import BUBBLES, method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS
from analysis.records.runs import SCHEDULES
from rpbench.yaml_file import read_keys

_DECLARED: dict[str, dict[str, Any]] = read_keys(Path(__file__).with_suffix(".yaml"))  # in the order of the page


@dataclass(frozen=True)
class Finding:
    """One thing a reader should know.

    Args:
        columns: headings of a table, the subjects' first; empty where there is no table.
        rows: a subject each, with the numbers found for it.
        claims: ids of the claims it rests on, beside those of the numbers.
    """

    title: str
    text: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple["Number", ...]], ...] = ()
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Number:
    """A number as it is shown, and the claim it is of."""

    text: str
    claim: str


Verdicts = Mapping[str, Verdict]


def findings(verdicts: Iterable[Verdict]) -> list[Finding]:
    """The findings whose evidence is there; one that misses a run is left out."""
    known = {verdict.claim.id: verdict for verdict in verdicts if verdict.kind in EVALUATED}
    found = []
    for name, declared in _DECLARED.items():
        try:
            found.append(_simulator(known, declared) if name == "simulator" else _finding(known, declared))
        except KeyError:  # a verdict it would quote is not there
            continue
    return found


def _finding(known: Verdicts, declared: Mapping[str, Any]) -> Finding:
    columns = declared.get("columns", {})
    rows = declared.get("rows") or {
        model_name(model): [pattern.format(model) for pattern in columns.values()]
        for model in (PUBLISHED_MODELS if columns else ())
    }
    return Finding(
        declared["title"],
        re.sub(r"\{([^}]+)\}", lambda name: BUBBLES.get(name[1]) or _number(known, name[1]).text, declared["text"]),
        (declared.get("subject", "model"), *columns) if columns else (),
        tuple((subject, tuple(_number(known, name) for name in names)) for subject, names in rows.items()),
        tuple(declared.get("claims", ())),
    )


def _number(known: Verdicts, name: str) -> Number:
    """Our value of a claim; the published one of a claim behind `=`."""
    verdict = known[name.removeprefix("=")]
    claim = verdict.claim
    published = claim.published.text if claim.published else ""
    return Number(published if name[0] == "=" else claim.shown(verdict.value), claim.id)


def _simulator(known: Verdicts, declared: Mapping[str, str]) -> Finding:
    """How many numbers of each cell of figure 17 are met."""
    cells = {(schedule, model): _met(known, schedule, model) for schedule in SCHEDULES for model in PUBLISHED_MODELS}
    met, printed = (sum(counts) for counts in zip(*cells.values(), strict=True))
    whole = sum(good == all_of_them for good, all_of_them in cells.values())
    rows = tuple(
        (
            model_name(model),
            tuple(
                Number("{} of {}".format(*cells[schedule, model]), f"figure17/{schedule}/{model}/makespan_ms")
                for schedule in SCHEDULES
            ),
        )
        for model in PUBLISHED_MODELS
    )
    text = declared["text"].format(met=met, printed=printed, whole=whole, cells=len(cells))
    return Finding(declared["title"], text, ("model", *map(method_name, SCHEDULES)), rows)


def _met(known: Verdicts, schedule: str, model: str) -> tuple[int, int]:
    """Numbers of a cell that are reproduced, and all of them."""
    kinds = [verdict.kind for name, verdict in known.items() if name.startswith(f"figure17/{schedule}/{model}/")]
    if not kinds:
        raise KeyError(f"figure17/{schedule}/{model}")
    return kinds.count(REPRODUCED), len(kinds)
