"""How good the predictions are: the bars, bias and coverage, hold-out errors, and what would explain the misses."""

import pandas as pd

from analysis.exhibits.cells import label, table, theirs
from analysis.exhibits.exhibit import Shown, columns_of, exhibited
from analysis.exhibits.style import method_name, model_name
from analysis.predictions import score
from analysis.predictions.outcomes import GROUPS, SEALED, SEALED_COMMIT, coverage, outcomes, verdicts
from analysis.predictions.tables import FOLDER, read
from analysis.records.experiments import Experiments

# The blind round: figures 12, 13, 15 and 16 as predicted before they were seen, and as they came out.


_SEALED = "analysis/predictions/sealed/"
_PRESENT = "analysis/predictions/"
_COLUMNS = columns_of("blind_round")


@exhibited("blind_round")
def exhibit(_: Experiments) -> Shown:
    """Every group of withheld cells: the sealed errors, and those of the present model."""
    sealed, present, rows = outcomes(SEALED), outcomes(FOLDER), []
    for group in GROUPS:
        before, after = pd.Series(group.errors(sealed)), pd.Series(group.errors(present))
        inside = coverage([cell for cell in sealed if group.holds(cell)])[0]
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
    right = (
        "{} of {} verdicts of {}".format(*verdicts(sealed, name), words)
        for name, words in (("throughput", "throughput"), ("max_seq_len", "longest sequences"))
    )
    inside, known = coverage(sealed)
    words = {"commit": SEALED_COMMIT, "right": " and ".join(right), "inside": inside, "known": known}
    return Shown(table(_COLUMNS, rows), words=words)


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
