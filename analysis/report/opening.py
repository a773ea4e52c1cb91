"""The first screen of the report: what the paper claims, the verdict, how it is known, and what we found ourselves.

Sentences name claims in braces; each becomes its number with a link. One that was not evaluated has its declared value.

`findings.yaml` has the words. Between braces there, in a row or a column, stands the id of a claim and means our value;
behind `=` it means the published one. A column's `{}` is the model of the row, a row of its own has an id a column.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.claims.claim import CONTRADICTED, EVALUATED, MISSED, NOT_TESTABLE, REPRODUCED, Verdict
from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.style import BUBBLES, method_name, model_name
from analysis.records.published import PUBLISHED_MODELS
from analysis.records.runs import SCHEDULES
from analysis.report.statements import Statement, judged, statements
from rpbench.yaml_file import read_keys

_DECLARED: dict[str, dict[str, Any]] = read_keys(Path(__file__).with_name("findings.yaml"))  # in the order of the page
_SCREEN: dict[str, Any] = read_keys(Path(__file__).with_suffix(".yaml"))
FIRST: list[str] = _SCREEN["first"]  # the exhibits of the first page


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
        re.sub(r"\{([^}]+)\}", lambda name: BUBBLES.get(name[1]) or _number_of(known, name[1]).text, declared["text"]),
        (declared.get("subject", "model"), *columns) if columns else (),
        tuple((subject, tuple(_number_of(known, name) for name in names)) for subject, names in rows.items()),
        tuple(declared.get("claims", ())),
    )


def _number_of(known: Verdicts, name: str) -> Number:
    """Our value of a claim; the published one of a claim behind `=`, or that was not evaluated."""
    verdict = known[name.removeprefix("=")]
    claim = verdict.claim
    is_published = name[0] == "=" or verdict.kind not in EVALUATED
    return Number(claim.printed if is_published else claim.shown(verdict.value), claim.id)


def _simulator(known: Verdicts, declared: Mapping[str, str]) -> Finding:
    """Reproduced numbers of each cell of figure 17."""
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


@dataclass(frozen=True)
class Judgement:
    """The verdict on the claims about an exhibit.

    Args:
        kind: the kind of verdict that decides; empty where no claim is about it.
        text: the same in a few words, with its counts.
    """

    kind: str
    text: str


def answer(exhibit: Exhibit) -> str:
    """The answer of an exhibit: the last sentence of its caption."""
    return re.split(r"(?<=\w\.) (?=[A-Z])", exhibit.caption)[-1]  # a full stop inside a number ends none


def judgement(exhibit: Exhibit, verdicts: Sequence[Verdict]) -> Judgement:
    """The verdict on what an exhibit shows: contradicted as soon as one of the statements about it is."""
    about = statements(_about(exhibit, verdicts))
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


def _about(exhibit: Exhibit, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Claims that bear an exhibit's name, or else those that rest on its records."""
    own = f"{exhibit.id.split('_')[0]}/"
    named = [verdict for verdict in verdicts if verdict.claim.id.startswith(own)]
    runs = set(exhibit.records)
    return named or [verdict for verdict in verdicts if runs.intersection(verdict.run_ids)]


PAPER = "https://arxiv.org/abs/2604.27085"


@dataclass(frozen=True)
class Line:
    """A line of the first screen.

    Args:
        head: what it is about.
        parts: its words, and numbers among them.
        declared: whether some number is the declared one, because its runs are not there.
    """

    head: str
    parts: tuple[str | Number, ...]
    declared: bool = False


def opening(verdicts: Iterable[Verdict], found: Sequence[Statement]) -> list[Line]:
    """The claim, the verdict, and how it is known."""
    known = {verdict.claim.id: verdict for verdict in verdicts}
    counted = {"<simulation>": _simulation(known), "<against>": _against(found)}
    texts = {head: re.sub("<.*?>", lambda name: counted[name[0]], text) for head, text in _SCREEN["opening"].items()}
    return [_line(known, head, text) for head, text in texts.items()]


def own_findings(verdicts: Iterable[Verdict]) -> list[Line]:
    known = {verdict.claim.id: verdict for verdict in verdicts}
    return [_line(known, head, text) for head, text in _SCREEN["own"].items()]


def _line(known: Verdicts, head: str, text: str) -> Line:
    names = re.split(r"\{([^}]+)\}", text)
    parts = [_number_of(known, part) if place % 2 else part for place, part in enumerate(names)]
    declared = any(known[name].kind not in EVALUATED for name in names[1::2])
    return Line(head, tuple(part for part in parts if part), declared)


def _simulation(known: Mapping[str, Verdict]) -> str:
    """The number of cells of the published simulation that are reproduced."""
    cells: dict[str, set[str]] = {}
    for name, verdict in known.items():
        if name.startswith("figure17/") and not name.startswith("figure17/asynchronous/"):
            cells.setdefault(name.rpartition("/")[0], set()).add(verdict.kind)
    met = sum(kinds == {REPRODUCED} for kinds in cells.values())
    return f"{met} of {len(cells)} cells of its simulation come out to the last digit."


def _against(found: Sequence[Statement]) -> str:
    theirs = [each for each in found if each.whose == "the paper's"]
    against = sum(each.verdict == CONTRADICTED for each in theirs)
    return f"{against} of {len(theirs)} statements taken from it are contradicted."
