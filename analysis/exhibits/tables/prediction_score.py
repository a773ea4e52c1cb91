"""How good the predictions are: the bars, bias and coverage, hold-out errors, and what would explain the misses."""

import pandas as pd

from analysis.exhibits.cells import label, table, theirs
from analysis.exhibits.exhibit import Exhibit, exhibited
from analysis.exhibits.style import method_name, model_name
from analysis.predictions import score
from analysis.predictions.tables import read
from analysis.records.experiments import Experiments

_HELD = "analysis/predictions/holdout.csv"
_MISSED = "analysis/predictions/misses.csv"


@exhibited("prediction_bars", place=330, question="Does the prediction keep the bars it was given beforehand?")
def bars(_: Experiments) -> Exhibit:
    """Every bar with what was measured against it."""
    found = score.bars()
    rows = [(label(bar.name), label(bar.measured), label("held" if bar.held else "missed")) for bar in found]
    held = sum(bar.held for bar in found)
    return Exhibit(
        title="Predictions against the published 4090 figures: the bars",
        caption=(
            f"{held} of {len(found)} bars are held. The 4090 figures were known when the model was built; constants "
            "fitted on some of them are declared with their cells."
        ),
        evidence=("predicted", "published"),
        command="python -m analysis.predictions score",
        table=table(("bar", "measured", "verdict"), rows),
    )


@exhibited("prediction_errors", place=340, question="How far off is every predicted throughput?")
def errors(_: Experiments) -> Exhibit:
    """Bias and coverage of every system, and its errors with a model or with itself left out of the fits."""
    summary = score.bias_and_coverage()
    held = pd.DataFrame(read("holdout"))
    held["error"] = held["error"].astype(float)
    total, inside = sum(row[0] for row in summary.values()), sum(row[2] for row in summary.values())
    outside_fits, all_held = score.held_out_coverage()
    rows = []
    for system, (num, bias, covered) in summary.items():
        own = held[held["system"] == system]
        by_model, by_system = (own.loc[own["held_out"] == axis, "error"].abs().max() for axis in ("model", "system"))
        kept = own.loc[own["held_out"] == "system", "kept_constants"].iloc[0]
        rows.append(
            (
                label(method_name(system)),
                theirs(num, "d", "analysis/published/throughput.csv"),
                theirs(bias, "+.1%", "analysis/predictions/throughput.csv"),
                theirs(covered, "d", "analysis/predictions/throughput.csv"),
                theirs(by_model, ".1%", _HELD),
                theirs(by_system, ".1%", _HELD),
                label(kept),
            )
        )
    return Exhibit(
        title="Predictions: bias, coverage, and errors with a model or a system left out",
        caption=(
            f"In-sample, {inside} of {total} published throughputs of the 4090 lie inside the intervals, which are "
            "meant to hold nine of ten; out-of-sample, of the errors with a model, a system or the A800 left out of "
            f"every fit, {outside_fits} of {all_held} do. Left out: largest error of the cells left out."
        ),
        evidence=("predicted", "published"),
        command="python -m analysis.predictions holdout",
        table=table(
            (
                "system",
                "cells",
                "signed mean error",
                "inside the interval",
                "largest error, model left out",
                "largest error, system left out",
                "constants that the rest cannot tell",
            ),
            rows,
        ),
    )


@exhibited("prediction_misses", place=350, question="Where is the prediction wrong?")
def misses(_: Experiments) -> Exhibit:
    """Every cell that is off by more than 15 %, and what would have to change by how much."""
    rows = [
        (
            label(f"{method_name(row['system'])}, {model_name(row['model'])}"),
            theirs(float(row["error"]), "+.1%", _MISSED),
            theirs(float(row["missing_s"]), "+.2f", _MISSED),
            label(row["terms_s"]),
            label(row["constant"]),
            theirs(float(row["factor"]), ".2f", _MISSED),
            theirs(float(row["deviations"]), ".1f", _MISSED),
        )
        for row in read("misses")
    ]
    return Exhibit(
        title="Predictions that are off by more than 15 %, and what would explain them",
        caption=(
            "For each cell the constants that would close the gap alone, the most plausible first: the factor each "
            "would have to change by, and how many of its declared deviations that is. Synchronous steps of "
            "GPT-OSS-20B expose a third of the optimizer time per parameter that other models do; a host with that "
            "bandwidth would make every other synchronous cell too fast. Mobius has no public settings."
        ),
        evidence=("predicted", "published"),
        command="python -m analysis.predictions misses",
        table=table(
            ("cell", "error", "seconds missing", "step (s)", "constant", "factor", "deviations"),
            rows,
        ),
    )
