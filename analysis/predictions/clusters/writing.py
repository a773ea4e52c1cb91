"""Writing: the predictions of all withheld rows, with intervals, as `analysis/predictions/clusters.csv`."""

import csv
from collections.abc import Iterable
from math import exp
from pathlib import Path

from analysis.predictions import tables
from analysis.predictions.clusters.case import Case, Model, rows_of
from analysis.predictions.clusters.problems import SETS, asked
from analysis.predictions.clusters.spread import memory_log_sd, step_log_sd, unseen

FILE = Path(__file__).resolve().parents[1] / "clusters.csv"
COLUMNS = (
    "id",
    "status",
    "step_time_s",
    "step_time_s_low",
    "step_time_s_high",
    "tokens_per_s_per_gpu",
    "peak_memory_bytes",
    "peak_memory_bytes_low",
    "peak_memory_bytes_high",
    "note",
)
NINE_IN_TEN = 1.645
WIDE = 1.12  # either way of the bytes of orders
BEYOND = 1.03  # the fullest given run that fits is predicted below it, every given one that does not above


def predictions() -> Iterable[dict[str, str]]:
    """One row for each withheld case, in the order of the files."""
    model = Model()
    for name in sorted(set(SETS) - {"vocab_stage_times"}):
        for case in asked(name):
            yield row_of(case, model)
    yield from orders()


def orders() -> Iterable[dict[str, str]]:
    """Rows that are about orders alone, from their own tables: iterations of known stages, and relative paces."""
    stages = {row["id"]: row for row in csv.DictReader((FILE.parent / "vocab_stage_times.csv").open(newline=""))}
    for row in rows_of("challenge", "vocab_stage_times"):
        known, tokens = stages[row["id"]], int(row["micro_batch"]) * int(row["num_microbatches"]) * int(row["seq"])
        low, step, high = (float(known[f"iteration_ms{end}"]) / 1e3 for end in ("_low", "", "_high"))
        need = float(known["peak_memory_bytes"])
        cells = ("ok", step, low, high, tokens / step / int(row["gpus"]), need, need / WIDE, need * WIDE)
        found = {
            name: cell if isinstance(cell, str) else f"{cell:.6g}"
            for name, cell in zip(COLUMNS[1:], cells, strict=False)
        }
        yield {
            "id": row["id"],
            **found,
            "note": "simulated from the printed times of its stages: vocab_stage_times.csv",
        }
    for row in rows_of("challenge", "schedules_measured"):
        found = dict.fromkeys(COLUMNS, "")
        yield found | {"id": row["id"], "status": "not_modelled", "note": "a relative pace, in schedules_measured.csv"}


def row_of(case: Case, model: Model) -> dict[str, str]:
    """The prediction of one case."""
    found = dict.fromkeys(COLUMNS, "")
    found |= {"id": case.id, "status": "not_modelled", "note": case.note}
    if case.job is None and case.said is None:
        return found
    found["status"] = "ok"
    if "time" in case.asks:
        step = model.step_time_s(case)
        margin = exp(NINE_IN_TEN * step_log_sd(case))
        found["step_time_s"] = f"{step:.5g}"
        found["step_time_s_low"], found["step_time_s_high"] = f"{step / margin:.5g}", f"{step * margin:.5g}"
        wider = ", ".join(each.name for each in unseen(case))
        found["note"] = "; ".join(filter(None, (case.note, f"wider interval: {wider}" if wider else "")))
        pace = case.repeats * case.tokens / step / case.devices
        found["tokens_per_s_per_gpu"] = f"{pace:.5g}"
    if "memory" in case.asks:
        found |= _memory(case, model)
    return found


def _memory(case: Case, model: Model) -> dict[str, str]:
    need = model.memory_bytes(case)
    margin = exp(NINE_IN_TEN * memory_log_sd(case))
    return {
        "status": "OOM" if out_of_memory(case, model) else "ok",
        "peak_memory_bytes": f"{need:.0f}",
        "peak_memory_bytes_low": f"{need / margin:.0f}",
        "peak_memory_bytes_high": f"{need * margin:.0f}",
    }


def out_of_memory(case: Case, model: Model) -> bool:
    """Whether a run cannot fit: what its source would print is beyond the device, with a margin for what differs."""
    if case.job is None:
        return False
    job = model.job(case)
    return bool(model.memory_bytes(case) > BEYOND * job.machine.device.memory_bytes)


def write() -> int:
    """Write the file; returns the number of rows."""
    return tables.write(FILE, list(predictions()))
