"""Claims, which are published numbers or statements with a check, and the verdicts of their checks."""

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
    """One run that a claim needs: the experiment, the choices of its sweep, and for a duel the contender."""

    experiment: str
    choices: Mapping[str, str] = field(default_factory=dict, hash=False)
    contender: str | None = None

    def __str__(self) -> str:
        chosen = " ".join(filter(None, (*self.choices.values(), self.contender)))
        return f"experiment={self.experiment} ({chosen})"


def runs(words: str) -> tuple[Need, ...]:
    """The runs that a sweep such as `figure17 schedule=gpipe,1f1b model=llama31_8b` makes."""
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
PREDICTED = "predicted"  # a measurement of another machine, within the interval that our model predicts
CONTRADICTED = "contradicted"  # our evidence is against the statement
MISSED = "our model misses"  # a measurement of another machine, outside the interval that our model predicts
NOT_TESTABLE = "not testable here"
NOT_IN_QUICK = "not in this scope"
MISSING = "missing"
FAILED = "failed"
KINDS = (REPRODUCED, WITHIN_TOLERANCE, PREDICTED, CONTRADICTED, MISSED, NOT_TESTABLE, NOT_IN_QUICK, MISSING, FAILED)
EVALUATED = (REPRODUCED, WITHIN_TOLERANCE, PREDICTED, CONTRADICTED, MISSED)
# The verdict of a statement is the first of these kinds that one of its cells has: one contradicted cell decides.
DECIDES = (FAILED, MISSING, CONTRADICTED, MISSED, WITHIN_TOLERANCE, PREDICTED, REPRODUCED, NOT_IN_QUICK, NOT_TESTABLE)

Whose = Literal["the paper's", "another public source's", "ours", "ours against ours"]
WHOSE: tuple[Whose, ...] = get_args(Whose)

Section = Callable[[], Iterable["Claim"]]
SECTIONS: list[tuple[int, Section]] = []


def section(place: int, heading: str = "", source: str = "") -> Callable[[Section], Section]:
    """Register a function's claims at a place in the report; `heading` and `source` are their defaults."""

    def listing(claims: Section) -> Section:
        def headed() -> Iterator[Claim]:
            for claim in claims():
                yield replace(claim, section=claim.section or heading, source=claim.source or source)

        SECTIONS.append((place, headed))
        return headed

    return listing


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published or own statement, and how it is checked."""

    id: str  # unique, `section/subject/metric`
    statement: str
    section: str = ""  # heading in the report; that of the function's `section` by default, as is the source
    source: str = ""  # paper, section or figure
    metric: str = ""  # the statement by default
    unit: str = ""
    evidence: str = "simulated"  # how our value is known
    published: Printed | None = None  # the value with its printed digits; None if the number is not public
    relation: Literal["=", "<="] = "="  # `<=` if our value may also be smaller
    # The largest absolute difference that counts as reproduced; by default half a unit of the last digit.
    tolerance: float | None = None
    wide_tolerance: float | None = None  # a larger difference, up to which the verdict is `within tolerance`
    needs: tuple[Need, ...] = ()  # the runs behind the value; `value` is called with their records in this order
    made_from: str = ""  # other sources of the value: published tables, a planner
    value: Callable[..., Value] | None = None
    not_testable: str = ""  # what a test would need that is missing here; such a claim has no value
    # Why our evidence contradicts the number, with `{value}` for our value. Such a claim has to come out as the value
    # in `analysis/claims/expected/contradictions.csv`; a claim without a reason has to hold.
    contradiction: str = ""
    # The number was measured on another machine and our value is a prediction: the verdict is `predicted` or a miss,
    # and a miss is expected in the same way as a contradiction.
    predicts: bool = False
    whose: Whose = "the paper's"  # `ours` is a regression, `ours against ours` holds by consistency
    statement_id: str = ""  # shared by the claims that are cells of one statement; the claim's id by default

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
        return self.published.text if self.published else ""

    def shown(self, value: Value | None) -> str:
        """A value with as many digits as the published one, or as many more as show a difference."""
        if value is None or isinstance(value, str) or self.published is None:
            return str(value or "")
        published, decimals = self.published.value, self.published.decimals
        if isinstance(published, float) and abs(value - published) > self.largest_difference:
            while f"{value:.{decimals}f}" == self.published.text and decimals < 12:
                decimals += 1
        return f"{value:.{decimals}f}"


def lead_of_last(*runs: Record) -> float:
    """Shortest makespan of the baselines over that of the last run, which is RoundPipe's."""
    return float(min(run["makespan_s"] for run in runs[:-1]) / runs[-1]["makespan_s"])


def over_fastest(own: Record, *others: Record) -> float:
    """Makespan of a run over the shortest of the others."""
    return float(own["makespan_s"] / min(run["makespan_s"] for run in others))


def bubble_percent(run: Record) -> float:
    return 100 * float(run["bubble_makespan"])


DECLARED = {name: fields_ for file in ("paper", "own") for name, fields_ in read_keys(_HERE / f"{file}.yaml").items()}
_FIELDS = {each.name for each in fields(Claim)}


def claim(name: str, value: Callable[..., Value] | None = None, *, needs: Sequence[Need] = (), **given: Any) -> Claim:
    """The claim that `paper.yaml` or `own.yaml` declares under the pattern `name` of its id.

    `needs` are runs besides the declared ones; `given` are values for the braces there, and fields of `Claim`.
    """
    declared = DECLARED[name]
    words = {"value": "{value}", "baselines": ",".join(BASELINES), "schedules": ",".join(SCHEDULES), **given}
    for key in {"schedule", "system"} & given.keys():
        words |= {key.capitalize(): method_name(given[key]), "scheduler": given[key].replace("_", "-")}
    if "model" in given:
        words |= {"Model": model_name(given["model"]), "published": PUBLISHED_MODELS.get(given["model"])}

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


def stated(name: str, value: Callable[..., Value], *, needs: Sequence[Need] = (), **given: Any) -> Claim:
    """A claim on a number that our documents print (`analysis.documents`), with its expected value and tolerance."""
    found = name.format(**given)
    declared = statement(found)
    ours = {"source": "this project", "whose": "ours", "tolerance": declared.tolerance}
    return claim(name, value, needs=needs, published=Printed(declared.text, f"{_STATEMENTS}, {found}"), **ours | given)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim; `kind` is one of `KINDS`, `reason` may be empty."""

    claim: Claim
    kind: str
    value: Value | None = None
    difference: float | None = None
    reason: str = ""
    run_ids: tuple[str, ...] = field(default=())

    @property
    def red(self) -> bool:
        """True if a run is missing, the check failed, or the outcome is not the expected one."""
        if self.kind in (MISSING, FAILED):
            return True
        if self.kind not in EVALUATED:
            return False
        if self.kind not in (CONTRADICTED, MISSED):
            return bool(self.claim.contradiction)
        return not self.claim.contradiction or not _is_as_expected(self.claim, self.value)

    @property
    def explanation(self) -> str:
        """The reason in one sentence; empty where the verdict needs none."""
        if self.red and self.kind in (REPRODUCED, WITHIN_TOLERANCE, PREDICTED):
            return f"expected to be contradicted, and is not: {self.reason}"
        if self.red and self.kind in (CONTRADICTED, MISSED) and self.claim.contradiction:
            declared = expected(self.claim.id)
            words = "no value is declared" if declared is None else f"declared was {declared.text}"
            return f"contradicted by another value than declared: {self.claim.shown(self.value)}, {words}"
        return self.reason


def judge(claim: Claim, experiments: Experiments, planned: Callable[[Need], bool] = lambda need: True) -> Verdict:
    """The verdict on a claim; only `planned` runs count as missing."""
    if claim.value is None:
        return Verdict(claim, NOT_TESTABLE, reason=claim.not_testable)
    found = [(need, _find(need, experiments)) for need in claim.needs]
    if absent := [(need, row) for need, row in found if isinstance(row, str)]:
        within_plan = [(need, why) for need, why in absent if planned(need)]
        reasons = list(dict.fromkeys(why for _, why in within_plan or absent))
        reason = f"{'; '.join(reasons[:3])}{' ...' if len(reasons) > 3 else ''}"
        return Verdict(claim, MISSING if within_plan else NOT_IN_QUICK, reason=reason)
    records = [row for _, row in found if not isinstance(row, str)]
    run_ids = tuple(dict.fromkeys(row["run_id"] for row in records))
    try:
        found_value = claim.value(*records)
        value = found_value if isinstance(found_value, str) else float(found_value)
    except Exception as error:  # the other claims are judged whatever this one's code does
        return Verdict(claim, FAILED, reason=f"{type(error).__name__}: {error}", run_ids=run_ids)
    published, difference = claim.published.value if claim.published else None, None
    if isinstance(value, str) or isinstance(published, str) or published is None:
        held, broken = (PREDICTED, MISSED) if claim.predicts else (REPRODUCED, CONTRADICTED)
        kind = held if value == published else broken
    elif value != value:
        return Verdict(claim, FAILED, reason="the value is not a number", run_ids=run_ids)
    else:
        difference = value - published
        kind = _kind(claim, difference, published)
    return Verdict(claim, kind, value, difference, _reason(claim, kind, value, difference), run_ids)


def _kind(claim: Claim, difference: float, published: float) -> str:
    # A value exactly between two printed ones rounds to either; arithmetic may put it just outside.
    hair = 1e-12 * abs(published) + 1e-9 * claim.largest_difference
    excess = difference if claim.relation == "<=" else abs(difference)
    if excess <= claim.largest_difference + hair:
        return PREDICTED if claim.predicts else REPRODUCED
    if claim.wide_tolerance is not None and excess <= claim.wide_tolerance + hair:
        return PREDICTED if claim.predicts else WITHIN_TOLERANCE
    return MISSED if claim.predicts else CONTRADICTED


def _is_as_expected(claim: Claim, value: Value | None) -> bool:
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
    return "" if number is None else f"{float(f'{number:.3g}'):,g}"


def _find(need: Need, experiments: Experiments) -> Record | str:
    """The record of a run, or the reason why there is none."""
    try:
        row = experiments.find(need.experiment, need.choices, need.contender)
    except MissingRuns as lack:
        return str(lack)
    return f"no record of {need}" if row is None else row
