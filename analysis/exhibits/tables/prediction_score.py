"""How good the predictions are: the bars, bias and coverage, hold-out errors, and what would explain the misses."""

import pandas as pd

from analysis.exhibits.cells import label, table, theirs
from analysis.exhibits.exhibit import Shown, exhibited
from analysis.exhibits.style import method_name, model_name
from analysis.predictions import score
from analysis.predictions.tables import read
from analysis.records.experiments import Experiments

_HELD = "analysis/predictions/holdout.csv"
_MISSED = "analysis/predictions/misses.csv"


@exhibited("prediction_bars")
def bars(_: Experiments) -> Shown:
    """Every bar with what was measured against it."""
    found = score.bars()
    rows = [(label(bar.name), label(bar.measured), label("held" if bar.held else "missed")) for bar in found]
    held = sum(bar.held for bar in found)
    return Shown(table=table(("bar", "measured", "verdict"), rows), words={"held": held, "bars": len(found)})


@exhibited("prediction_errors")
def errors(_: Experiments) -> Shown:
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
    return Shown(
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
        words={"inside": inside, "total": total, "outside_fits": outside_fits, "all_held": all_held},
    )


@exhibited("prediction_misses")
def misses(_: Experiments) -> Shown:
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
    return Shown(
        table=table(("cell", "error", "seconds missing", "step (s)", "constant", "factor", "deviations"), rows)
    )
