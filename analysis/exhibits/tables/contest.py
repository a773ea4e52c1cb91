"""The contest of figure 10 at equal tuning: its rows, distinct orders, and what the search chose for the leaders."""

from collections.abc import Sequence

import pandas as pd

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, ours, short_cut, table
from analysis.exhibits.exhibit import Cell, Shown, exhibited
from analysis.records.experiments import NOT_APPLICABLE, Experiments, MissingRuns, index
from analysis.records.runs import MODELS
from rpbench.config.configuration import swept
from rpbench.plan.contest.contender import contenders, why_not_charged

EXPERIMENT = "figure10"
OPTIONS = ("sequences a microbatch", "stages a device", "recomputed", "stages that recompute nothing", "own options")
# The first of a model and those behind it that the table of options has.
LEADERS = 3


def numbers(experiments: Experiments) -> pd.DataFrame:
    """The rows of every schedule that takes a model, by model; those that do not fit included.

    Raises:
        MissingRuns: if a run is not there; schedules that refuse every setting have none.
    """
    rows, manifest = experiments.cells(EXPERIMENT), experiments.manifest(EXPERIMENT)
    if manifest is None:
        raise MissingRuns(f"experiment={EXPERIMENT} has not been run here")
    cells = [cell.overrides for cell in manifest.cells if cell.state != NOT_APPLICABLE]
    wanted = [(model, cell["schedule"]) for model in MODELS for cell in cells if cell["model"] == model]
    return index(rows, ("model", "schedule"), wanted, EXPERIMENT).reset_index(drop=True)


def not_compared() -> list[str]:
    """Schedules of the registry that could take part, and that the experiment does not name yet."""
    able = {each.entry.name for each in contenders() if not why_not_charged(each)}
    return sorted(able - set(swept(EXPERIMENT, "schedule")))


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Each order that fits, once: the fastest of those that compute the same in the same order, with all `names`.

    Ranked within its model, the fastest first.
    """
    fitting = rows[rows["status"] == "ok"].sort_values("tokens_per_s", ascending=False, kind="stable")
    groups = fitting.groupby(["model", "order_sha256"], sort=False)
    first = groups.head(1).copy()
    names = groups["schedule"].agg(tuple)
    first["names"] = [names[model, order] for model, order in zip(first["model"], first["order_sha256"], strict=True)]
    return first.reset_index(drop=True)


def options(row: dict) -> Sequence[Cell]:
    """The chosen settings, in the columns of `OPTIONS`."""
    run, chunks, keeping = row["run_id"], row["chunks_per_device"], row["keeping_stages"]
    own = ", ".join(f"{name}={value}" for name, value in row["schedule_options"].items() if value is not None)
    kept = "all" if len(keeping) == row["num_stages"] else str(len(keeping))
    return (
        ours(row["microbatch_sequences"], "g", run),
        ours(None if chunks != chunks else chunks, "g", run),
        label(row["recompute"]),
        Cell(len(keeping), kept, (run,)),
        label(own) if own else NOTHING,
    )


@exhibited("figure10_options")
def exhibit(experiments: Experiments) -> Shown:
    """The leaders of every model with all that the search chose for them."""
    ranked = distinct(numbers(experiments))
    columns = ("model", "system", "tokens/s", "steps late", *OPTIONS, "prefetch", "cut", "settings tried", "timelines")
    return Shown(
        table=table(columns, (_chosen(row) for model in MODELS for row in leaders(ranked, model))),
        words={"leaders": LEADERS, "answer": answer(ranked)},
    )


def leaders(ranked: pd.DataFrame, model: str) -> list[dict]:
    """The fastest orders of a model, and the fastest that is never late."""
    rows = ranked[ranked["model"] == model].to_dict("records")
    timely = [row for row in rows[LEADERS:] if not row["staleness_steps"]]
    has_timely = any(not row["staleness_steps"] for row in rows[:LEADERS])
    return rows[:LEADERS] if has_timely else rows[:LEADERS] + timely[:1]


def answer(ranked: pd.DataFrame) -> str:
    """First and second of every model, with the lead of the first, in a sentence."""
    parts = []
    for model in MODELS:
        rows = ranked[ranked["model"] == model].to_dict("records")
        if len(rows) > 1:
            lead = 100 * (rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"] - 1)
            parts.append(f"{style.model_name(model)}: {_named(rows[0])}, {lead:.1f} % before {_named(rows[1])}")
    return "; ".join(parts) + "." if parts else ""


def _named(row: dict) -> str:
    return style.method_name(row["schedule"])


def _chosen(row: dict) -> Sequence[Cell]:
    run = row["run_id"]
    return (
        label(style.model_name(row["model"])),
        label(_named(row)),
        ours(row["tokens_per_s"], ",.0f", run),
        ours(row["staleness_steps"], ".0f", run),
        *options(row),
        ours(row["prefetch"], ".0f", run),
        label(short_cut(row["partition_layers"])),
        ours(row["num_settings_tried"], ".0f", run),
        ours(row["spent_timelines"], ".0f", run),
    )
