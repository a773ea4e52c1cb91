"""The 25 published cells of figure 17, and how good the predictions are."""

from collections.abc import Iterable
from itertools import product

import pandas as pd

from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Shown, Table, declared_table, exhibit_of, exhibited
from analysis.predictions import score
from analysis.predictions.outcomes import GROUPS, SEALED, SEALED_COMMIT, coverage, outcomes, verdicts
from analysis.predictions.tables import FOLDER, read
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, Published, look_up


@exhibited("blind_round")
def blind_round(_: Experiments) -> Shown:
    """Figures 12, 13, 15 and 16 by group: errors of the blind predictions and of the present ones."""
    sealed, present, rows = outcomes(SEALED), outcomes(FOLDER), []
    for group in GROUPS:
        before, after = pd.Series(group.errors(sealed)), pd.Series(group.errors(present))
        own = {"cells": group.name, "number": len(before), "median": before.median(), "largest": before.max()}
        own["inside"] = coverage([cell for cell in sealed if group.holds(cell)])[0]
        rows.append(own | {"median_now": after.median(), "largest_now": after.max()})
    right = (
        "{} of {} verdicts of {}".format(*verdicts(sealed, name), words)
        for name, words in (("throughput", "throughput"), ("max_seq_len", "longest sequences"))
    )
    inside, known = coverage(sealed)
    words = {"commit": SEALED_COMMIT, "right": " and ".join(right), "inside": inside, "known": known}
    return Shown(declared_table("blind_round", rows), words=words)


exhibit_of(
    "prediction_targets",
    lambda _: [target.__dict__ | {"verdict": "held" if target.held else "missed"} for target in score.targets()],
    held=lambda targets: sum(target["held"] for target in targets),
    targets=len,
)


@exhibited("prediction_errors")
def errors(_: Experiments) -> Shown:
    """Bias and coverage of every system, and its errors if a model or the system is left out of the fits."""
    summary, rows = score.bias_and_coverage(), []
    held = pd.DataFrame(read("holdout")).astype({"error": float})
    for system, (cells, bias, inside) in summary.items():
        own = held[held["system"] == system]
        by_system = own[own["held_out"] == "system"]
        row = {"system": system, "cells": cells, "bias": bias, "inside": inside}
        row["by_model"] = own.loc[own["held_out"] == "model", "error"].abs().max()
        rows.append(row | {"by_system": by_system["error"].abs().max(), "kept": by_system["kept_constants"].iloc[0]})
    total, inside = sum(row[0] for row in summary.values()), sum(row[2] for row in summary.values())
    outside_fits, all_held = score.held_out_coverage()
    words = {"inside": inside, "total": total, "outside_fits": outside_fits, "all_held": all_held}
    return Shown(declared_table("prediction_errors", rows), words=words)


def _misses(_: Experiments) -> pd.DataFrame:
    """Every cell that is off by more than 15 %, and the constants that would explain it."""
    found = pd.DataFrame(read("misses"))
    found["cell"] = found["system"].map(style.method_name) + ", " + found["model"].map(style.model_name)
    return found.astype(dict.fromkeys(("error", "missing_s", "factor", "deviations"), float))


exhibit_of("prediction_misses", _misses)


DECIMALS = 4


def numbers(experiments: Experiments) -> list[dict]:
    return runs.calls_there(experiments).to_dict("records")


def missing(rows: Iterable[dict]) -> str:
    """The cells of figure 17 that are not among some rows; empty if none is missing."""
    there, wanted = {(row["schedule"], row["model"]) for row in rows}, list(product(runs.SCHEDULES, runs.MODELS))
    lost = [f"{style.method_name(s)} on {style.model_name(m)}" for s, m in wanted if (s, m) not in there]
    return f"{len(wanted) - len(lost)} of {len(wanted)} cells; missing: {', '.join(lost)}." if lost else ""


def cell_numbers(row: dict) -> dict[str, float]:
    """A record in the columns of bubble.csv: milliseconds, device-milliseconds and percent."""
    capacity_s = row["num_devices"] * row["makespan_s"]
    numbers = {
        "layer_events": row["num_layer_events"],
        "makespan_ms": 1000 * row["makespan_s"],
        "bubble_time_gpu_ms": 1000 * row["idle_s"],
        "bubble_ratio_percent": 100 * row["bubble_makespan"],
        "comm_total_ms": 1000 * row["comm_total_s"],
        "comm_exposed_ms": 1000 * row["comm_exposed_s"],
        "comm_exposed_ratio_percent": 100 * row["comm_exposed_s"] / capacity_s,
    }
    for part in ("fill", "switch", "drain", "intra"):
        numbers[f"{part}_time_gpu_ms"] = 1000 * row[f"{part}_s"]
        numbers[f"{part}_ratio_percent"] = 100 * row[f"{part}_s"] / capacity_s
    return numbers


def compared(experiments: Experiments) -> pd.DataFrame:
    """One row for each number of each cell: `schedule`, `model`, `number`, `simulated`, `published`, `is equal`."""
    return pd.DataFrame([each for row in numbers(experiments) for each in _compared(row)])


def _compared(row: dict) -> list[dict]:
    found = []
    for column, value in cell_numbers(row).items():
        known = published_of(row, column).value
        place = {"schedule": row["schedule"], "model": row["model"], "number": column}
        is_equal = f"{value:.{DECIMALS}f}" == f"{known:.{DECIMALS}f}"
        found.append(place | {"simulated": value, "published": known, "is equal": is_equal})
    return found


def num_equal(row: dict) -> tuple[int, int]:
    """The number of a cell's values that agree to all printed decimals, and of all values."""
    found = _compared(row)
    return sum(each["is equal"] for each in found), len(found)


def answer(rows: list[dict]) -> str:
    whole = sum(equal == total for equal, total in map(num_equal, rows))
    return f"{whole} of {len(rows)} cells agree in every number."


def published_of(row: dict, column: str) -> Published:
    scheduler = row["schedule"].replace("_", "-")
    return look_up("bubble", column, scheduler=scheduler, model=PUBLISHED_MODELS[row["model"]])


def _tabulate(rows: list[dict]) -> Table:
    found = []
    for row in rows:
        equal, total = num_equal(row)
        shown = row | {"equal": Cell(equal, f"{equal} of {total}", (row["run_id"],))}
        for column, value in cell_numbers(row).items():
            known = published_of(row, column)
            shown |= {column: value, f"{column}_known": known.value, f"{column}_in": known.source}
        found.append(shown)
    return declared_table("published_cells", found)


exhibit = exhibit_of("published_cells", numbers, _tabulate, decimals=DECIMALS, answer=answer, missing=missing)
