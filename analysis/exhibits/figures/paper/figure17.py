"""Figure 17: the parts of every schedule's idle time, beside the published bars."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of
from analysis.exhibits.tables import published_cells
from analysis.exhibits.tables.published_cells import cell_numbers, published_of
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, Published, look_up

PARTS = ("fill", "switch", "drain", "intra")
BACK_TO_BACK = (8, 10)  # microbatches of a call: one for each device, and as in the paper's benchmarks

_BARS = style.names("figure17")
_BACK_TO_BACK = {f"back to back {count}" for count in BACK_TO_BACK}
_ONE_CALL = (*runs.BASELINES, "roundpipe-sync")


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each `model` and `bar`: its four parts and `total` in percent, `published`, `source`, `run_id`.

    Bars whose record is gone are left out.
    """
    bars = [bar for row in runs.calls_there(experiments).to_dict("records") for bar in _of_call(row)]
    steady = runs.of_models(experiments, "steady_state", num_microbatches=BACK_TO_BACK)
    for row in steady.to_dict("records"):
        name = f"back to back {row['num_microbatches']}"
        bars.append(_bar(row, name, 100 * row["bubble_steady"], Published(None, ""), {}))
    rows = pd.DataFrame(bars).set_index(["model", "bar"])
    order = [(model, bar) for model in runs.MODELS for bar in _BARS if (model, bar) in rows.index]
    return rows.loc[order].reset_index()


def _of_call(row: dict) -> list[dict]:
    percent = cell_numbers(row)
    parts = {part: percent[f"{part}_ratio_percent"] for part in PARTS}
    published, total = published_of(row, "bubble_ratio_percent"), 100 * row["bubble_makespan"]
    if row["schedule"] != "roundpipe":
        return [_bar(row, row["schedule"], total, published, parts)]
    label_only = look_up("async_bubble", "bubble_percent", model=PUBLISHED_MODELS[row["model"]], kind="published")
    kept = {"switch": parts["switch"], "intra": parts["intra"]}
    return [
        _bar(row, "roundpipe-sync", total, published, parts),
        _bar(row, "relabelled", sum(kept.values()), label_only, kept),
    ]


def _bar(row: dict, bar: str, total: float, published: Published, parts: dict[str, float]) -> dict:
    own = {"model": row["model"], "bar": bar, **{part: parts.get(part) for part in PARTS}, "total": total}
    return own | {"published": published.value, "source": published.source, "run_id": row["run_id"]}


def missing(data: pd.DataFrame) -> str:
    calls = data[data["bar"].isin(_ONE_CALL)].assign(schedule=data["bar"].str.removesuffix("-sync"))
    return published_cells.missing(calls.to_dict("records"))


def answer(data: pd.DataFrame) -> str:
    known = data.dropna(subset="published")
    met = sum(round(row.total, _digits(row.bar)) == row.published for row in known.itertuples())
    count = f"{met} of {len(known)} published bars are met to their last digit."
    totals = data.pivot(index="model", columns="bar", values="total").reindex(columns=list(_BARS)).dropna()
    if totals.empty:  # every model lacks a bar
        return count
    num_models = data["model"].nunique()
    call = "One" if len(totals) == num_models else f"On the {len(totals)} of {num_models} models with all bars, one"
    best = totals[list(runs.BASELINES)].min(axis=1)
    sync, relabelled = totals["roundpipe-sync"], totals["relabelled"]
    steady = [totals[f"back to back {count}"] for count in BACK_TO_BACK]
    return (
        f"{call} RoundPipe call idles {_span(sync)} % of the time where the best of the other schedules idles "
        f"{_span(best)} %; the relabelled bars say {_span(relabelled)} %, calls back to back leave "
        + " and ".join(f"{_span(each)} % at N = {count}" for each, count in zip(steady, BACK_TO_BACK, strict=True))
        + f". {count}"
    )


def _digits(bar: str) -> int:
    return 2 if bar == "relabelled" else 4  # as published


def _span(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def tabulate(data: pd.DataFrame) -> Table:
    names = data["bar"].map(_BARS).str.replace("\n", " ")
    return declared_table("figure17", data.assign(name=names, form=[f".{_digits(bar)}f" for bar in data["bar"]]))


def draw(data: pd.DataFrame) -> Figure:
    with style.figure(11.5, 4.3) as figure:
        models, names = runs.models_of(data), {bar: name for bar, name in _BARS.items() if bar in set(data["bar"])}
        panels = style.model_panels(figure, models, sharey=True, sharex=True)
        for axes, model in zip(panels, models, strict=True):
            _draw_model(axes, data[data["model"] == model], list(names))
        panels[len(panels) // 2].set_xlabel("bubble (% of devices × makespan)")
        panels[0].set_yticks(range(len(names)), list(names.values()))
        panels[0].set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.18 * data["total"].max()))
        bars = set(data["bar"])
        relabelled = style.bar_key("fill and drain set to 0", hatch=style.HATCHES["published"])
        calls = style.bar_key("60 calls back to back, all idle time", style.VERMILION)
        handles = [
            *(style.bar_key(part, style.PARTS[part].colour) for part in PARTS),
            *([relabelled] if "relabelled" in bars else ()),
            *([calls] if bars & _BACK_TO_BACK else ()),
            Line2D([], [], color="black", linewidth=1.6, label="published"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=7)
        return figure


def _draw_model(axes: Axes, data: pd.DataFrame, bars: list[str]) -> None:
    style.grid_for_rows(axes)
    axes.axhline(len({*bars} & {*_ONE_CALL}) - 0.5, color=style.GREY, linewidth=0.7, linestyle=":")
    for row in data.to_dict("records"):
        height = bars.index(row["bar"])
        if pd.isna(row["switch"]):
            axes.barh(height, row["total"], 0.7, color=style.VERMILION, edgecolor="black")
        else:
            left, hatch = 0.0, style.HATCHES["published"] if row["bar"] == "relabelled" else ""
            for part in (part for part in PARTS if pd.notna(row[part])):
                colour = style.PARTS[part].colour
                axes.barh(height, row[part], 0.7, left, color=colour, edgecolor="black", linewidth=0.4, hatch=hatch)
                left += row[part]
        if pd.notna(row["published"]):
            axes.plot([row["published"]] * 2, [height - 0.45, height + 0.45], color="black", linewidth=1.6)
        axes.text(row["total"] + 1, height, f"{row['total']:.2f}", va="center", fontsize=7.5)


exhibit = exhibit_of("figure17", numbers, tabulate, draw, answer=answer, missing=missing)
