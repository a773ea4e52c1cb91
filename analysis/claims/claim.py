"""Claim: one number or statement, its origin and its check; Verdict: the outcome of the check."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, get_args

from analysis.claims.expected import FOLDER, STATEMENTS, expected, statement
from analysis.exhibits.style import method_name, model_name
from analysis.records.experiments import Experiments, MissingRuns
from analysis.records.published import PUBLISHED_MODELS, Printed, printed
from analysis.records.runs import BASELINES, SCHEDULES
from rpbench.yaml_file import read_keys

Record = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """One run of an experiment of `conf/experiment/`, by the choices its sweep makes; of a duel, by its contender."""

    experiment: str
    choices: Mapping[str, str] = field(default_factory=dict, hash=False)
    contender: str | None = None

    @property
    def command(self) -> str:
        return f"python -m rpbench -m experiment={self.experiment}"

    def __str__(self) -> str:
        chosen = " ".join(filter(None, (*self.choices.values(), self.contender)))
        return f"experiment={self.experiment} ({chosen})"


def runs(words: str) -> tuple[Need, ...]:
    """Runs in the words of a sweep, such as `figure17 schedule=gpipe,1f1b model=llama31_8b`."""
    experiment, *choices = words.split()
    keys, values = zip(*(choice.split("=") for choice in choices), strict=True) if choices else ((), ())
    return tuple(
        Need(experiment, dict(zip(keys, chosen, strict=True)))
        for chosen in product(*(each.split(",") for each in values))
    )


Value = float | str
_HERE = Path(__file__).parent
_STATEMENTS = f"analysis/claims/{FOLDER.name}/{STATEMENTS}.csv"

# Kinds of verdicts. The last four say that nothing was compared.
REPRODUCED = "reproduced"
WITHIN_TOLERANCE = "within tolerance"
PREDICTED = "predicted"  # a measurement of another machine, within the interval of what our model says of it
CONTRADICTED = "contradicted"  # our evidence is against the statement
MISSED = "our model misses"  # a measurement of another machine, outside of what our model says of it
NOT_TESTABLE = "not testable here"
NOT_IN_QUICK = "not in this scope"
MISSING = "missing"
FAILED = "failed"
KINDS = (REPRODUCED, WITHIN_TOLERANCE, PREDICTED, CONTRADICTED, MISSED, NOT_TESTABLE, NOT_IN_QUICK, MISSING, FAILED)
EVALUATED = (REPRODUCED, WITHIN_TOLERANCE, PREDICTED, CONTRADICTED, MISSED)
# The verdict of a statement is the first of these that one of its cells has: one contradicted cell contradicts it.
DECIDES = (FAILED, MISSING, CONTRADICTED, MISSED, WITHIN_TOLERANCE, PREDICTED, REPRODUCED, NOT_IN_QUICK, NOT_TESTABLE)

Whose = Literal["the paper's", "another public source's", "ours", "ours against ours"]
WHOSE: tuple[Whose, ...] = get_args(Whose)


Section = Callable[[], Iterable["Claim"]]
SECTIONS: list[tuple[int, Section]] = []


def section(place: int, heading: str = "", source: str = "") -> Callable[[Section], Section]:
    """Put a function's claims at a place of the report; heading and source are of those that have none of their own."""

    def listing(claims: Section) -> Section:
        def headed() -> Iterator[Claim]:
            for claim in claims():
                yield replace(claim, section=claim.section or heading, source=claim.source or source)

        SECTIONS.append((place, headed))
        return headed

    return listing


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published or own statement, and how it is checked.

    Args:
        id: unique, `section/subject/metric`.
        section: the heading it belongs to; that of `section` if left out.
        source: paper, section or figure, in the same way; where the number was transcribed from stands in `published`.
        metric: the statement if left out.
        published: the value with its printed digits; None for a claim whose number is not public.
        relation: `=`, or `<=` if our value may also be smaller.
        tolerance: largest absolute difference that counts as reproduced; None means half a unit of the last printed
            digit.
        wide_tolerance: a declared larger one, within which the verdict is `within tolerance`.
        evidence: how our value is known.
        needs: the runs the value follows from; it is called with one record for each, in this order.
        made_from: what else it follows from: published tables, a planner.
        not_testable: what a test would need that is not here; such a claim has no value.
        contradiction: why our evidence contradicts the number. A claim with a reason is expected to be contradicted,
            by the value that `analysis/claims/expected/contradictions.csv` has for it and by no other; one without
            is expected to hold. `{value}` stands for our value.
        predicts: the claim is a measurement of another machine, and our value what our model says of it: it is
            `predicted` or missed, and a miss is expected as a contradiction is.
        whose: whose statement it is. `ours` is a regression, `ours against ours` holds by consistency.
        statement_id: claims that are cells of one statement share it; the id of the claim if left out.
    """

    id: str
    statement: str
    section: str = ""
    source: str = ""
    metric: str = ""
    unit: str = ""
    evidence: str = "simulated"
    published: Printed | None = None
    relation: Literal["=", "<="] = "="
    tolerance: float | None = None
    wide_tolerance: float | None = None
    needs: tuple[Need, ...] = ()
    made_from: str = ""
    value: Callable[..., Value] | None = None
    not_testable: str = ""
    contradiction: str = ""
    predicts: bool = False
    whose: Whose = "the paper's"
    statement_id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.metric or self.statement)
        if (self.value is None) != bool(self.not_testable):
            raise ValueError(f"claim {self.id}: either a value or what a test needs (not_testable), not both")
        if self.value is not None and self.published is None:
            raise ValueError(f"claim {self.id}: nothing published to compare the value with")

    @property
    def largest_difference(self) -> float:
        if self.tolerance is not None or self.published is None:
            return self.tolerance or 0.0
        return self.published.half_unit

    @property
    def printed(self) -> str:
        """The published value as it is printed; empty for one that is not public."""
        return self.published.text if self.published else ""

    def shown(self, value: Value | None) -> str:
        """A value with the digits of the published one, or as many more as show that it differs."""
        if value is None or isinstance(value, str) or self.published is None:
            return str(value or "")
        published, decimals = self.published.value, self.published.decimals
        if isinstance(published, float) and abs(value - published) > self.largest_difference:
            while f"{value:.{decimals}f}" == self.published.text and decimals < 12:
                decimals += 1
        return f"{value:.{decimals}f}"


def lead_of_last(*runs: Record) -> float:
    """Makespan of the best of the first runs over that of the last, which is RoundPipe's."""
    return float(min(run["makespan_s"] for run in runs[:-1]) / runs[-1]["makespan_s"])


def over_fastest(own: Record, *others: Record) -> float:
    """Makespan of a run over that of the fastest of others."""
    return float(own["makespan_s"] / min(run["makespan_s"] for run in others))


def bubble_percent(run: Record) -> float:
    """Idle time in percent of devices x makespan."""
    return 100 * float(run["bubble_makespan"])


DECLARED = {name: fields_ for file in ("paper", "own") for name, fields_ in read_keys(_HERE / f"{file}.yaml").items()}
_FIELDS = {each.name for each in fields(Claim)}


def claim(name: str, value: Callable[..., Value] | None = None, *, needs: Sequence[Need] = (), **given: Any) -> Claim:
    """A claim whose words, published number and runs stand in `paper.yaml` or `own.yaml`.

    Args:
        name: the pattern of its id there.
        needs: its runs, where they do not stand there.
        given: what stands between braces there; fields of `Claim` by their names.
    """
    declared, words = DECLARED[name], _words(given)

    def filled(part: Any) -> Any:
        return part.format(**words) if isinstance(part, str) else part

    for key in ("metric", "unit"):  # a statement may say them
        words = {key: filled(declared.get(key, "")), **words}
    found = {key: filled(part) for key, part in declared.items() if key in _FIELDS}
    if isinstance(declared.get("published"), dict):
        cell = {key: filled(part) for key, part in declared["published"].items()}
        found["published"] = printed(cell.pop("in"), cell.pop("column"), **cell)
    found["needs"] = (*needs, *chain.from_iterable(runs(filled(part)) for part in declared.get("needs", ())))
    return Claim(**{"id": filled(name), "value": value, **found, **{key: given[key] for key in given.keys() & _FIELDS}})


def _words(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, and the names that people and published tables have for it."""
    words = {"value": "{value}", "baselines": ",".join(BASELINES), "schedules": ",".join(SCHEDULES), **given}
    for key in {"schedule", "system"} & given.keys():
        words |= {key.capitalize(): method_name(given[key]), "scheduler": given[key].replace("_", "-")}
    if "model" in given:
        words |= {"Model": model_name(given["model"]), "published": PUBLISHED_MODELS.get(given["model"])}
    return words


def stated(name: str, value: Callable[..., Value], *, needs: Sequence[Need] = (), **given: Any) -> Claim:
    """A statement of ours, as `claim`: a number that README, captions and findings say, computed from records.

    Its table of expected values has what documents print, and how far a new run may be from it (`analysis.documents`).
    """
    found = name.format(**given)
    declared = statement(found)
    ours = {"source": "this project", "whose": "ours", "tolerance": declared.tolerance}
    return claim(name, value, needs=needs, published=Printed(declared.text, f"{_STATEMENTS}, {found}"), **ours | given)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim: one of `KINDS`, our value, the runs it came from, and why where that needs saying."""

    claim: Claim
    kind: str
    value: Value | None = None
    difference: float | None = None
    reason: str = ""
    run_ids: tuple[str, ...] = field(default=())

    @property
    def red(self) -> bool:
        """True if the verdict is not as planned: nothing was compared, or it came out otherwise."""
        if self.kind in (MISSING, FAILED):
            return True
        if self.kind not in EVALUATED:
            return False
        if self.kind not in (CONTRADICTED, MISSED):
            return bool(self.claim.contradiction)
        return not self.claim.contradiction or not _is_as_expected(self.claim, self.value)

    @property
    def explanation(self) -> str:
        """Why, in one sentence; empty where the verdict says it all."""
        if self.red and self.kind in (REPRODUCED, WITHIN_TOLERANCE, PREDICTED):
            return f"expected to be contradicted, and is not: {self.reason}"
        if self.red and self.kind in (CONTRADICTED, MISSED) and self.claim.contradiction:
            declared = expected(self.claim.id)
            words = "no value is declared" if declared is None else f"declared was {declared.text}"
            return f"contradicted by another value than declared: {self.claim.shown(self.value)}, {words}"
        return self.reason


def judge(claim: Claim, experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True) -> Verdict:
    """The verdict on a claim; the absence of a run that was not `planned` is no fault."""
    if claim.value is None:
        return Verdict(claim, NOT_TESTABLE, reason=claim.not_testable)
    found = [(need, _find(need, experiments)) for need in claim.needs]
    absent = [(need, row) for need, row in found if isinstance(row, str)]
    if absent:
        within_plan = [(need, why) for need, why in absent if planned(need)]
        reason = _lacking([why for _, why in within_plan or absent])
        return Verdict(claim, MISSING if within_plan else NOT_IN_QUICK, reason=reason)
    records = [row for _, row in found if not isinstance(row, str)]
    run_ids = tuple(dict.fromkeys(row["run_id"] for row in records))
    try:
        found_value = claim.value(*records)
        value = found_value if isinstance(found_value, str) else float(found_value)
    except Exception as error:  # whatever a claim's own code does, the other claims are still to be judged
        return Verdict(claim, FAILED, reason=f"{type(error).__name__}: {error}", run_ids=run_ids)
    return _compare(claim, value, run_ids)


def _compare(claim: Claim, value: Value, run_ids: tuple[str, ...]) -> Verdict:
    published = claim.published.value if claim.published else None
    if isinstance(value, str) or isinstance(published, str) or published is None:
        held, broken = (PREDICTED, MISSED) if claim.predicts else (REPRODUCED, CONTRADICTED)
        kind = held if value == published else broken
        return Verdict(claim, kind, value, None, _reason(claim, kind, value, None), run_ids)
    if value != value:
        return Verdict(claim, FAILED, reason="the value is not a number", run_ids=run_ids)
    difference = value - published
    kind = _kind(claim, difference, published)
    return Verdict(claim, kind, value, difference, _reason(claim, kind, value, difference), run_ids)


def _kind(claim: Claim, difference: float, published: float) -> str:
    # A value exactly between two prints rounds to either; arithmetic may put it a hair on the far side.
    hair = 1e-12 * abs(published) + 1e-9 * claim.largest_difference
    excess = difference if claim.relation == "<=" else abs(difference)
    if excess <= claim.largest_difference + hair:
        return PREDICTED if claim.predicts else REPRODUCED
    if claim.wide_tolerance is not None and excess <= claim.wide_tolerance + hair:
        return PREDICTED if claim.predicts else WITHIN_TOLERANCE
    return MISSED if claim.predicts else CONTRADICTED


def _is_as_expected(claim: Claim, value: Value | None) -> bool:
    """True if a contradicting value is the one that was declared."""
    declared = expected(claim.id)
    if declared is None or value is None:
        return False
    if isinstance(value, str) or isinstance(declared.value, str):
        return str(value) == declared.text
    return abs(value - declared.value) <= declared.tolerance


def _reason(claim: Claim, kind: str, value: Value, difference: float | None) -> str:
    if claim.contradiction:
        return claim.contradiction.format(value=claim.shown(value))
    if kind == WITHIN_TOLERANCE:
        return f"differs by {_rough(difference)} {claim.unit}; up to {_rough(claim.wide_tolerance)} was allowed for"
    if kind in (CONTRADICTED, MISSED) and difference is not None:
        return f"differs by {_rough(difference)} {claim.unit}; {_rough(claim.largest_difference)} was allowed for"
    if kind not in (CONTRADICTED, MISSED):
        return ""
    return f"expected {claim.printed}, found {value}"


def _rough(number: float | None) -> str:
    """Three digits of a number, enough to judge a difference."""
    return "" if number is None else f"{float(f'{number:.3g}'):,g}"


def _find(need: Need, experiments: Experiments) -> Record | str:
    """The record of a need, or why there is none."""
    try:
        row = experiments.find(need.experiment, need.choices, need.contender)
    except MissingRuns as lack:
        return str(lack)
    return f"no record of {need}" if row is None else row


def _lacking(found: Sequence[str]) -> str:
    reasons = list(dict.fromkeys(found))
    return f"{'; '.join(reasons[:3])}{' ...' if len(reasons) > 3 else ''}"
