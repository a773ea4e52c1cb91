"""Figures 10 to 16: measurements of machines that are not here, beside what our model says of each.

A measurement is `predicted` where it lies within the interval that the committed tables of `analysis/predictions/`
give, nine in ten of which are meant to hold; otherwise our model misses it. A miss that is known is declared, with the
value it comes out as, in `analysis/claims/expected/contradictions.csv`; another miss is red. Of figures 12 to 16 the
first predictions were made blind (`analysis/predictions/outcomes.py`); these are the present ones.

A bar of figure 10 whose system a schedule stands for is set against that schedule with the settings of the run script
(experiment=figure10_published): `predicted` within 15 %, otherwise our model misses it, and the missing term is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from analysis.claims.claim import DECLARED, Claim, Record, Value, claim, section
from analysis.claims.expected import expected
from analysis.predictions.tables import read
from analysis.records.published import OUR_MODELS, Printed, Row, cell, table, where
from rpbench.advice.published_runs import SYSTEMS

_KEYS = ("system", "platform", "model")
_MISS = "outside the nine-in-ten interval of the prediction, {value}: analysis/predictions/README.md names the term"
_UNTESTABLE = {"evidence": "measured", "not_testable": "its machine: our model has no such system"}


@section(110)
def claims() -> Iterator[Claim]:
    """Every bar and point of the figures; what did not run is a claim as well."""
    for figure in DECLARED["figures"]:
        seen: set[str] = set()
        keys = figure.get("keys", _KEYS)
        found = {_key(row, keys): row for row in read(figure["predictions"])}
        for row in table(figure["table"]):
            made = _claim(figure, keys, row, found.get(_key(row, keys)))
            yield replace(made, id=f"{made.id}/again") if made.id in seen else made  # a bar that two sources print
            seen.add(made.id)
    yield claim("withheld/convergence")


def _key(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in keys)


def _claim(figure: dict[str, Any], keys: Sequence[str], row: Row, prediction: dict[str, Any] | None) -> Claim:
    published = _published(figure["table"], figure["column"], row, ", ".join(_key(row, keys)))
    system, model = row["system"], OUR_MODELS[row["model"]]
    more = "".join(f"/{row[key]}" for key in keys if key not in _KEYS)
    beside = _UNTESTABLE
    if prediction is not None:
        name = f"{figure['table']}/{system}/{model}{more}"
        beside = _beside(name, published, prediction, figure.get("predicted", figure["column"]))
    return claim(
        "{table}/{system}/{model}{more}",
        **figure
        | {"system": system, "model": model, "more": more, "words": figure.get("words", "").format(**row)}
        | {
            "source": "RoundPipe library, README"
            if system == "fsdp-offload"
            else f"RoundPipe, figure {figure['number']}"
        }
        | {"unit": figure["unit"] if row["status"] == "ok" else "", "published": published}
        | beside,
    )


def _beside(name: str, published: Printed, prediction: dict[str, Any], column: str) -> dict[str, Any]:
    """A claim's fields that follow from its prediction: the value, and how far a measurement may be from it."""
    given: dict[str, Any] = {
        "evidence": "predicted",
        "predicts": True,
        "made_from": "analysis/predictions/",
        "contradiction": _MISS if expected(name) is not None else "",
    }
    measured, status = published.value, prediction["status"]
    if status != "ok" or isinstance(measured, str):
        return given | {"value": lambda: status}
    value, low, high = (float(prediction[f"{column}{end}"]) for end in ("", "_low", "_high"))
    reach = high - value if measured > value else value - low
    return given | {"value": lambda: value, "wide_tolerance": reach}


# How far a predicted bar may be from the published one.
NEAR = 0.15
# What the published table has in the place of a bar.
NO_BAR = ("OOM", "N/A")


@section(120, "Figure 10: throughput on 8 RTX 4090, action by action", "RoundPipe, figure 10 (section 5.2)")
def by_action_claims() -> Iterator[Claim]:
    """Every bar of a system that one of our schedules stands for."""
    for row in table("throughput"):
        if row["system"] in SYSTEMS:
            system, model = row["system"], OUR_MODELS[row["model"]]
            published = _published("throughput", "tokens_per_s", row, f"{system}, {row['model']}")
            known, term = published.value, DECLARED["misses"].get(f"{system}/{model}", "")
            yield claim(
                "by_action/{system}/{model}",
                lambda record, status=published.text: _pace(record, status),
                unit="tokens/s" if row["status"] == "ok" else "",
                published=published,
                wide_tolerance=NEAR * known if isinstance(known, float) else None,
                contradiction=f"our schedule has {{value}}: {term}" if term else "",
                system=system,
                model=model,
            )


def _published(name: str, column: str, row: Row, of: str) -> Printed:
    """The number of a row, or the words for what did not run."""
    return cell(name, column, row, of) or Printed(row["status"], where(name, "status", of, row["source"]))


def _pace(row: Record, status: str) -> Value:
    """Our pace, or for a run that has none the words of the published table: what does not fit cannot run either."""
    if row["status"] != "ok":
        return status if status in NO_BAR else "OOM"
    return "ok" if status in NO_BAR else row["tokens_per_s"]
