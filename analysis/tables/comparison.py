"""Every system on the same work: simulated on eight devices, and measured on two cores."""

from collections.abc import Sequence

import pandas as pd

from analysis import runs, style
from analysis.cells import NOTHING, label, ours, table
from analysis.exhibit import Cell, Exhibit
from analysis.load import select
from analysis.runs import MissingRuns
from rpbench.harness.config import swept

_COLUMNS = (
    "bubble (%)",
    "device memory (GB)",
    "host memory (GB)",
    "host links (GB a step)",
    "between devices (GB a step)",
    "steps late",
)


def simulated(records: pd.DataFrame) -> Exhibit:
    """All systems on eight devices and the published models.

    Raises:
        MissingRuns: if a run behind it is not there.
    """
    rows = _figure10(records)
    columns = ("model", "system", "tokens/s", *_COLUMNS, "why it cannot run")
    cells = ((label(style.model_name(row["model"])), *_system(row), _why(row)) for row in rows.to_dict("records"))
    return Exhibit(
        id="figure10",
        title="Every system on eight RTX 4090",
        caption=(
            "Action by action, from the published layer timings: 16 microbatches of four sequences a step, three steps "
            "in a row, even cuts (RoundPipe: as many stages as the published plan). The bubble is that of a step "
            "among others. Memory is the fullest device's; bytes over links are sums over all devices. Weights, "
            "gradients and shards travel at the paces of the cluster's file, and the host's optimizer takes no time; "
            "weights of RoundPipe and boundary tensors of the pipelines take none beside a hop's. Schedules that cut "
            f"backward in two are left out: its halves have no published times. {answer(rows)}"
        ),
        evidence=("simulated",),
        command="python -m rpbench -m experiment=figure10",
        table=table(columns, cells),
    )


def measured(records: pd.DataFrame) -> Exhibit:
    """All systems that the engine trains, on two cores of this machine.

    Raises:
        MissingRuns: if there is none.
    """
    rows = _baselines_cpu(records)
    columns = ("system", "tokens/s", *_COLUMNS, "loss", "time to it (s)", "largest difference")
    cells = ((*_system(_whole_run(row)), *_training(row)) for row in rows.to_dict("records"))
    exact = int((rows["grad_max_abs_diff"] == 0).sum())
    return Exhibit(
        id="baselines_cpu",
        title="Every system on two cores",
        caption=(
            "A thread for each of two devices that share the host's memory: memory and bytes are what the actions say, "
            "and only what comes from the host is copied. The same 12 microbatches in float64 for all; pace and bubble "
            "are of the whole run. Loss of the last step and the time until then stand beside tokens/s: a stale "
            "step is not a full one. "
            "Difference: gradients against a plain loop over the same weights. "
            f"{exact} of {len(rows)} systems agree in every bit."
        ),
        evidence=("measured",),
        command="python -m rpbench -m experiment=baselines_cpu",
        table=table(columns, cells),
    )


def answer(rows: pd.DataFrame) -> str:
    """The fastest system that fits, for each model, in a sentence."""
    running = rows[rows["status"] == "ok"]
    best = running.loc[running.groupby("model", sort=False)["tokens_per_s"].idxmax()]
    named = [f"{style.method_name(row.schedule)} on {style.model_name(row.model)}" for row in best.itertuples()]
    return f"{len(running)} of {len(rows)} fit; fastest are {', '.join(named)}."


def _figure10(records: pd.DataFrame) -> pd.DataFrame:
    """The experiment's rows, those that do not fit included."""
    wanted = [(model, schedule) for model in swept("figure10", "model") for schedule in swept("figure10", "schedule")]
    rows = records if records.empty else records[records["status"].isin(("ok", "infeasible", "oom"))]
    choices = {"backend": "sim", "cost": "published", "cluster": "8x_rtx4090", "num_microbatches": 16, "num_steps": 3}
    kept = select(rows.assign(status="ok"), **choices) if not rows.empty else rows
    return runs.index(rows.loc[kept.index], ("model", "schedule"), wanted, "figure10")


def _baselines_cpu(records: pd.DataFrame) -> pd.DataFrame:
    rows = select(records, backend="cpu", model="tiny_gpt", num_devices=2, config__verify=True, config__num_steps=3)
    if rows.empty:
        raise MissingRuns("all runs of experiment=baselines_cpu")
    return (
        rows.sort_values("started_at", kind="stable").drop_duplicates("schedule", keep="last").sort_values("schedule")
    )


def _whole_run(row: dict) -> dict:
    """A measured row whose pace and bubble are those of its whole run: a few steps say little of an interval."""
    tokens = row["tokens_per_step"] * row["num_updates"]
    return row | {"tokens_per_s": tokens / row["makespan_s"], "bubble_steady": row["bubble_makespan"]}


def _system(row: dict) -> Sequence[Cell]:
    """Name, pace and what a system needs; both tables have these."""
    run = row["run_id"]
    bubble = row.get("bubble_steady")
    host = _moved(row, "h2d_bytes") + _moved(row, "d2h_bytes")
    return (
        label(style.method_name(row["schedule"])),
        ours(row["tokens_per_s"], ",.0f", run),
        ours(None if bubble is None else 100 * bubble, ".1f", run),
        ours(_gigabytes(max(row["peak_memory_bytes"])), ".3g", run),
        ours(_gigabytes(row["host_memory_bytes"]), ".3g", run),
        ours(host, ".3g", run),
        ours(_moved(row, "net_bytes"), ".3g", run),
        ours(row["staleness_steps"], ".0f", run),
    )


def _moved(row: dict, link: str) -> float:
    """Gigabytes a step over one kind of link, of all devices."""
    found = row.get(link)
    return _gigabytes(sum(found)) / row["config"]["num_steps"] if isinstance(found, list) else 0.0


def _gigabytes(number: float) -> float:
    return number / 1e9


def _why(row: dict) -> Cell:
    return NOTHING if row["status"] == "ok" else label(f"{row['status']}: {row['reason'].split(';')[0]}")


def _training(row: dict) -> Sequence[Cell]:
    run, largest = row["run_id"], row["grad_max_abs_diff"]
    return (
        ours(row["loss"], ".4f", run),
        ours(row["makespan_s"], ".2f", run),
        ours(largest, ".1e" if largest else ".0f", run),
    )
