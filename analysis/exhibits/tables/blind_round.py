"""The blind round: figures 12, 13, 15 and 16 as predicted before they were seen, and as they came out."""

from collections.abc import Sequence

import pandas as pd

from analysis.exhibits.cells import label, table, theirs
from analysis.exhibits.exhibit import Exhibit, exhibited
from analysis.predictions.outcomes import GROUPS, SEALED, SEALED_COMMIT, Outcome, coverage, outcomes, verdicts
from analysis.predictions.tables import FOLDER
from analysis.records.experiments import Experiments

_SEALED = "analysis/predictions/sealed/"
_PRESENT = "analysis/predictions/"
_COLUMNS = (
    "cells",
    "number",
    "median error",
    "largest error",
    "inside the interval",
    "median error, present model",
    "largest error, present model",
)


@exhibited("blind_round", place=410, question="What was predicted blind, and what came out?")
def exhibit(_: Experiments) -> Exhibit:
    """Every group of withheld cells: the sealed errors, and those of the present model."""
    return of_outcomes(outcomes(SEALED), outcomes(FOLDER))


def of_outcomes(sealed: Sequence[Outcome], present: Sequence[Outcome]) -> Exhibit:
    """The exhibit of what was said before and of what the present model says, cell for cell the same."""
    rows = []
    for group in GROUPS:
        before, after = pd.Series(group.errors(sealed)), pd.Series(group.errors(present))
        inside, _ = coverage([cell for cell in sealed if group.holds(cell)])
        rows.append(
            (
                label(group.name),
                theirs(len(before), "d", _SEALED),
                theirs(before.median(), ".1%", _SEALED),
                theirs(before.max(), ".1%", _SEALED),
                theirs(inside, "d", _SEALED),
                theirs(after.median(), ".1%", _PRESENT),
                theirs(after.max(), ".1%", _PRESENT),
            )
        )
    return Exhibit(
        title="What was said before, what came out",
        caption=_caption(sealed),
        evidence=("predicted", "published"),
        command="python -m analysis.predictions outcomes",
        table=table(_COLUMNS, rows),
    )


def _caption(sealed: Sequence[Outcome]) -> str:
    parts = [
        "{} of {} verdicts of {}".format(*verdicts(sealed, name), words)
        for name, words in (("throughput", "throughput"), ("max_seq_len", "longest sequences"))
    ]
    inside, known = coverage(sealed)
    return (
        f"Predictions committed at {SEALED_COMMIT} before the measurements were seen, against what was measured: "
        f"{' and '.join(parts)} were right, and {inside} of {known} measurements lie inside intervals meant to hold "
        "nine of ten. The present model was changed in sight of these measurements: its errors are those of a fit, and "
        "stand here for comparison."
    )
