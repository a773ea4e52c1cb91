"""The first screen of the report: the paper's claim, the verdict, the evidence, and our own findings.

Sentences name claims in braces; each becomes its number with a link, or its declared value if it was not evaluated.
In `findings.yaml` an id in braces, a row or a column means our value of the claim, `=id` the published one. `{}` in a
column is the model of the row; other rows have an id for each column.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analysis.claims.claim import CONTRADICTED, EVALUATED, MISSED, NOT_TESTABLE, REPRODUCED, Verdict
from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.style import BUBBLES, method_name, model_name
from analysis.records.published import PUBLISHED_MODELS
from analysis.records.runs import SCHEDULES, grouped
from analysis.report.statements import Statement, judged, statements
from rpbench.yaml_file import read_keys

_DECLARED: dict[str, dict[str, Any]] = read_keys(Path(__file__).with_name("findings.yaml"))  # in the order of the page
_SCREEN: dict[str, Any] = read_keys(Path(__file__).with_suffix(".yaml"))
FIRST: list[str] = _SCREEN["first"]  # the exhibits of the first page


@dataclass(frozen=True)
class Finding:
    """One result, with an optional table."""

    title: str
    text: str
    columns: tuple[str, ...] = ()  # headings of the table, the subjects' first
    rows: tuple[tuple[str, tuple["Number", ...]], ...] = ()  # subjects with their numbers
    claims: tuple[str, ...] = ()  # ids of the claims behind it besides those of the numbers


@dataclass(frozen=True)
class Number:
    """A number as shown, and its claim."""

    text: str
    claim: str


Verdicts = Mapping[str, Verdict]


def findings(verdicts: Iterable[Verdict]) -> list[Finding]:
    """The findings whose verdicts are all there."""
    known = {verdict.claim.id: verdict for verdict in verdicts if verdict.kind in EVALUATED}
    found = []
    for name, declared in _DECLARED.items():
        with suppress(KeyError):  # a verdict that it quotes is missing
            found.append(_simulator(known, declared) if name == "simulator" else _finding(known, declared))
    return found


def _finding(known: Verdicts, declared: Mapping[str, Any]) -> Finding:
    columns = declared.get("columns", {})
    rows = declared.get("rows") or {
        model_name(model): [pattern.format(model) for pattern in columns.values()]
        for model in (PUBLISHED_MODELS if columns else ())
    }
    return Finding(
        declared["title"],
        re.sub(r"\{([^}]+)\}", lambda name: BUBBLES.get(name[1]) or _number_of(known, name[1]).text, declared["text"]),
        (declared.get("subject", "model"), *columns) if columns else (),
        tuple((subject, tuple(_number_of(known, name) for name in names)) for subject, names in rows.items()),
        tuple(declared.get("claims", ())),
    )


def _number_of(known: Verdicts, name: str) -> Number:
    """Our value of a claim; the published one behind `=` or if the claim was not evaluated."""
    verdict = known[name.removeprefix("=")]
    claim = verdict.claim
    is_published = name[0] == "=" or verdict.kind not in EVALUATED
    return Number(claim.printed if is_published else claim.shown(verdict.value), claim.id)


def _simulator(known: Verdicts, declared: Mapping[str, str]) -> Finding:
    """Counts of the reproduced numbers in each cell of figure 17."""
    kinds, rows, cells = _kinds(known), [], []
    for model in PUBLISHED_MODELS:
        own = [kinds[f"figure17/{schedule}/{model}"] for schedule in SCHEDULES]
        claims = [f"figure17/{schedule}/{model}/makespan_ms" for schedule in SCHEDULES]
        texts = [f"{each.count(REPRODUCED)} of {len(each)}" for each in own]
        rows.append((model_name(model), tuple(map(Number, texts, claims))))
        cells += own
    met, printed = sum(each.count(REPRODUCED) for each in cells), sum(map(len, cells))
    whole = sum(set(each) == {REPRODUCED} for each in cells)
    text = declared["text"].format(met=met, printed=printed, whole=whole, cells=len(cells))
    return Finding(declared["title"], text, ("model", *map(method_name, SCHEDULES)), tuple(rows))


def _kinds(known: Verdicts) -> dict[str, list[str]]:
    """The kinds of the verdicts on each cell of figure 17."""
    names = grouped(filter(re.compile("figure17/(?!asynchronous/)").match, known), lambda name: name.rpartition("/")[0])
    return {cell: [known[name].kind for name in own] for cell, own in names.items()}


class Judgement(NamedTuple):
    """The verdict on the claims about an exhibit: its kind, empty without claims, and a few words with counts."""

    kind: str
    text: str


def answer(exhibit: Exhibit) -> str:
    """The last sentence of an exhibit's caption."""
    return re.split(r"(?<=\w\.) (?=[A-Z])", exhibit.caption)[-1]  # a full stop inside a number ends none


def judgement(exhibit: Exhibit, verdicts: Sequence[Verdict]) -> Judgement:
    """The verdict on an exhibit: contradicted if one of the statements about it is."""
    # Claims with the exhibit's name in their ids, or else those that use its records.
    named = [verdict for verdict in verdicts if verdict.claim.id.startswith(f"{exhibit.id.split('_')[0]}/")]
    runs = set(exhibit.records)
    about = statements(named or [verdict for verdict in verdicts if runs.intersection(verdict.run_ids)])
    evaluated = judged(about)
    if not about:
        return Judgement("", "no published statement")
    if not evaluated:
        return Judgement(NOT_TESTABLE, f"none of {len(about)} statements testable here")
    counts = Counter(each.verdict for each in evaluated)
    against = counts[CONTRADICTED] + counts[MISSED]
    if against:
        kind = CONTRADICTED if counts[CONTRADICTED] else MISSED
        return Judgement(kind, f"{against} of {len(evaluated)} statements {kind}")
    return Judgement(REPRODUCED, f"all {len(evaluated)} statements hold")


PAPER = "https://arxiv.org/abs/2604.27085"


@dataclass(frozen=True)
class Line:
    """A line of the first screen: its heading, its words and numbers, and whether a number is only declared."""

    head: str
    parts: tuple[str | Number, ...]
    declared: bool = False


def opening(verdicts: Iterable[Verdict], found: Sequence[Statement]) -> list[Line]:
    """The paper's claim, the verdict and the evidence."""
    known = {verdict.claim.id: verdict for verdict in verdicts}
    theirs = [each for each in found if each.claim.whose == "the paper's"]
    told = [each for each in theirs if each.verdict in (*EVALUATED, NOT_TESTABLE)]
    against = sum(each.verdict == CONTRADICTED for each in told)
    cells = _kinds(known).values()
    run = [kinds for kinds in cells if set(kinds) <= {*EVALUATED}]
    met = sum(set(kinds) == {REPRODUCED} for kinds in run)
    counted = {
        "<simulation>": _of(met, run, cells, "cells of its simulation", "come out to the last digit"),
        "<against>": _of(against, told, theirs, "statements taken from it", "are contradicted"),
    }
    texts = {head: re.sub("<.*?>", lambda name: counted[name[0]], text) for head, text in _SCREEN["opening"].items()}
    return [_line(known, head, text) for head, text in texts.items()]


def _of(number: int, told: Sized, every: Sized, what: str, outcome: str) -> str:
    """A count among those that were checked, and how many were not: those have no outcome."""
    unchecked = f"{len(every) - len(told)} of {len(every)} {what} were not checked here."
    counted = f"{number} of {len(told)} {what} {outcome}."
    return counted if len(told) == len(every) else f"{unchecked} {counted}" if told else unchecked


def own_findings(verdicts: Iterable[Verdict]) -> list[Line]:
    known = {verdict.claim.id: verdict for verdict in verdicts}
    return [_line(known, head, text) for head, text in _SCREEN["own"].items()]


def _line(known: Verdicts, head: str, text: str) -> Line:
    names = re.split(r"\{([^}]+)\}", text)
    parts = [_number_of(known, part) if place % 2 else part for place, part in enumerate(names)]
    declared = any(known[name].kind not in EVALUATED for name in names[1::2])
    return Line(head, tuple(part for part in parts if part), declared)
