"""Figures 10 to 16: measurements on machines that we do not have, beside our predictions.

A measurement is `predicted` if it lies within the interval of the committed tables of `analysis/predictions/`, meant
to hold for nine in ten; otherwise our model misses it. Known misses are declared, with their values, in
`analysis/claims/expected/contradictions.csv`; any other miss is red. The first predictions of figures 12 to 16 were
made blind (`analysis/predictions/outcomes.py`); here are the present ones.

Where one of our schedules represents a system of figure 10, its bar is also compared with that schedule and the
settings of the run script (experiment=figure10_published): `predicted` within 15 %, else a miss with the missing term.
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
    """Every bar and point of the figures, also of systems that did not run."""
    for figure in DECLARED["figures"]:
        seen: set[str] = set()
        keys = figure.get("keys", _KEYS)
        found = {_key(row, keys): row for row in read(figure["predictions"])}
        for row in table(figure["table"]):
            made = _claim(figure, keys, row, found.get(_key(row, keys)))
            yield replace(made, id=f"{made.id}/again") if made.id in seen else made  # two sources print this bar
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
    given = {
        "system": system,
        "model": model,
        "more": more,
        "words": figure.get("words", "").format(**row),
        "source": "RoundPipe library, README" if system == "fsdp-offload" else f"RoundPipe, figure {figure['number']}",
        "unit": figure["unit"] if row["status"] == "ok" else "",
        "published": published,
    }
    return claim("{table}/{system}/{model}{more}", **figure | given | beside)


def _beside(name: str, published: Printed, prediction: dict[str, Any], column: str) -> dict[str, Any]:
    """A claim's fields from its prediction: the value and its interval."""
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


NEAR = 0.15  # largest relative error of a predicted bar
NO_BAR = ("OOM", "N/A")  # in the published table in place of a bar


@section(120, "Figure 10: throughput on 8 RTX 4090, action by action", "RoundPipe, figure 10 (section 5.2)")
def by_action_claims() -> Iterator[Claim]:
    """Every bar of a system that one of our schedules represents."""
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
    """The number of a row, or its status if it did not run."""
    return cell(name, column, row, of) or Printed(row["status"], where(name, "status", of, row["source"]))


def _pace(row: Record, status: str) -> Value:
    """Our tokens per second, or a status in the words of the published table."""
    if row["status"] != "ok":
        return status if status in NO_BAR else "OOM"
    return "ok" if status in NO_BAR else row["tokens_per_s"]
