"""The 25 published cells of figure 17: every printed number, simulated and published side by side."""

import pandas as pd

from analysis.exhibits import style
from analysis.exhibits.cells import label, ours, table, theirs
from analysis.exhibits.exhibit import Cell, Shown, exhibited
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.paper import PUBLISHED_MODELS, Published, look_up

# Column of bubble.csv -> heading, and how a record says it. Ratios are of devices × makespan.
_SHOWN = {
    "makespan_ms": "makespan (ms)",
    "bubble_time_gpu_ms": "bubble (GPU-ms)",
    "bubble_ratio_percent": "bubble (%)",
    "fill_time_gpu_ms": "fill (GPU-ms)",
    "switch_time_gpu_ms": "switch (GPU-ms)",
    "drain_time_gpu_ms": "drain (GPU-ms)",
    "intra_time_gpu_ms": "intra (GPU-ms)",
    "comm_total_ms": "communication (ms)",
    "comm_exposed_ms": "exposed communication (ms)",
    "layer_events": "layer events",
}
DECIMALS = 4


@exhibited("published_cells")
def exhibit(experiments: Experiments) -> Shown:
    """The table."""
    rows = numbers(experiments)
    columns = ["schedule", "model", "equal numbers"]
    for heading in _SHOWN.values():
        columns += [heading, f"{heading}, published"]
    return Shown(table=table(columns, map(_row, rows)), words={"decimals": DECIMALS, "answer": answer(rows)})


def numbers(experiments: Experiments) -> list[dict]:
    """The 25 records.

    Raises:
        MissingRuns: if one is not there.
    """
    return runs.calls(experiments).to_dict("records")


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
    """One row a number of a cell: `schedule`, `model`, `number` (its column), `simulated`, `published`, `is equal`.

    Raises:
        MissingRuns: if a cell is not there.
    """
    found = []
    for row in numbers(experiments):
        for column, value in cell_numbers(row).items():
            known = _published(row, column).value
            place = {"schedule": row["schedule"], "model": row["model"], "number": column}
            found.append(place | {"simulated": value, "published": known, "is equal": _are_equal(value, known)})
    return pd.DataFrame(found)


def _are_equal(value: float, known: float) -> bool:
    """To all printed decimals."""
    return f"{value:.{DECIMALS}f}" == f"{known:.{DECIMALS}f}"


def num_equal(row: dict) -> tuple[int, int]:
    """How many numbers of a cell agree to all printed decimals, and how many there are."""
    pairs = [(value, _published(row, column).value) for column, value in cell_numbers(row).items()]
    return sum(_are_equal(value, known) for value, known in pairs), len(pairs)


def answer(rows: list[dict]) -> str:
    """How many cells match, in a sentence."""
    whole = sum(equal == total for equal, total in map(num_equal, rows))
    return f"{whole} of {len(rows)} cells agree in every number."


def _published(row: dict, column: str) -> Published:
    scheduler = row["schedule"].replace("_", "-")
    return look_up("bubble", column, scheduler=scheduler, model=PUBLISHED_MODELS[row["model"]])


def _row(row: dict) -> list[Cell]:
    values = cell_numbers(row)
    equal, total = num_equal(row)
    cells = [
        label(style.method_name(row["schedule"])),
        label(style.model_name(row["model"])),
        Cell(equal, f"{equal} of {total}", (row["run_id"],)),
    ]
    for column in _SHOWN:
        form = ".0f" if column == "layer_events" else f".{DECIMALS}f"
        known = _published(row, column)
        cells += [ours(values[column], form, row["run_id"]), theirs(known.value, form, known.source)]
    return cells
