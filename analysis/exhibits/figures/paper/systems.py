"""Figures 10, 11 and 14 as published: throughput, longest sequence and cost of all systems."""

from collections.abc import Callable
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Table, exhibit_of, label, table, theirs
from analysis.records.published import PUBLISHED_MODELS, RTX4090, Published, look_up, models_in, published
from rpbench.cost.roofline import cost_usd_per_billion_tokens

OURS = ("roundpipe", "roundpipe-sync")


def price_of(platform: str) -> Published:
    """The price of a published server in US dollars an hour."""
    return look_up("hardware", "value", item="server_price", applies_to=platform)


def costs(platform: str) -> pd.DataFrame:
    """As `numbers`, with US dollars for a billion tokens as `value`."""
    price, data = price_of(platform), numbers("throughput", "tokens_per_s", platform)
    dollars = partial(cost_usd_per_billion_tokens, float(price.value))
    return data.assign(value=data["value"].map(dollars, "ignore"), source=data["source"] + f"; {price.source}")


def numbers(name: str, column: str, platform: str = RTX4090) -> pd.DataFrame:
    """One row for each system and model of a published table: `value`, `status` (ok, OOM, N/A) and `source`."""
    name = name if platform == RTX4090 else f"{name}_a800"
    rows = published(name)
    rows = rows[rows["platform"] == platform].drop_duplicates(["system", "model"])  # the figure's bar stands first
    row = rows["system"] + ", " + rows["model"] + ": " + rows["source"]
    rows = rows.assign(value=rows[column].astype(float), source=f"analysis/published/{name}.csv, {column} of " + row)
    return rows[["system", "model", "status", "value", "source"]].reset_index(drop=True)


def best_baseline(
    data: pd.DataFrame, model: str, better: Callable[[pd.Series], int] = pd.Series.idxmax
) -> pd.Series | None:
    """The best other system of the paper's figure on a model; None if no other runs."""
    others = data[(data["model"] == model) & ~data["system"].isin([*OURS, "fsdp-offload"])].dropna(subset="value")
    return None if others.empty else others.loc[better(others["value"])]


def speedups(data: pd.DataFrame) -> pd.DataFrame:
    """One row for each model: RoundPipe's `value`, the `best` other system (or ""), and the `speedup` over it."""
    rows = []
    for model, name in models_in(data).items():
        own, best = _value(data, "roundpipe", name), best_baseline(data, name)
        system, speedup = ("", float("nan")) if best is None else (best["system"], own / best["value"])
        rows.append({"model": model, "value": own, "best": system, "speedup": speedup})
    return pd.DataFrame(rows)


def answer(data: pd.DataFrame) -> str:
    parts = []
    for row in speedups(data).itertuples():
        over = f"{row.speedup:.2f} × on {style.model_name(row.model)} ({style.method_name(row.best)})"
        parts.append(over if row.best else f"alone on {style.model_name(row.model)}")
    return f"RoundPipe over the best other system: {', '.join(parts)}."


def length_answer(data: pd.DataFrame) -> str:
    known = data.dropna(subset="value")
    longest = known.loc[known.groupby("model")["value"].idxmax()].set_index("model")["system"]
    names = ((style.method_name(longest[name]), style.model_name(model)) for model, name in models_in(known).items())
    return "Longest: " + ", ".join(f"{system} on {model}" for system, model in names) + "."


def cost_answer(data: pd.DataFrame) -> str:
    parts = []
    for model, name in models_in(data).items():
        best = best_baseline(data, name, pd.Series.idxmin)
        other = "no other runs" if best is None else f"{best['value']:.2f} with {style.method_name(best['system'])}"
        parts.append(f"{style.model_name(model)} {_value(data, 'roundpipe', name):.2f} ({other})")
    return f"With RoundPipe: {', '.join(parts)}."


def _value(data: pd.DataFrame, system: str, model: str) -> float:
    found = data.loc[(data["system"] == system) & (data["model"] == model), "value"]
    if found.empty:
        raise ValueError(f"there is no {system} on {model}, to which the others are compared: leave it in")
    return found.iloc[0]


def _tabulate(quantity: str, form: str, data: pd.DataFrame) -> Table:
    columns = ("system", *(f"{style.model_name(model)}, {quantity}" for model in PUBLISHED_MODELS))
    rows = []
    for system, of_system in data.groupby("system", sort=False):
        found = of_system.set_index("model")
        cells = (_cell(found, name, form) for name in PUBLISHED_MODELS.values())
        rows.append([label(style.method_name(str(system))), *cells])
    return table(columns, rows)


def _cell(of_system: pd.DataFrame, model: str, form: str) -> Cell:
    if model not in of_system.index:
        return label("not stated")
    row = of_system.loc[model]
    if row["status"] != "ok":
        return Cell(None, row["status"], source=row["source"])
    return theirs(row["value"], form, row["source"])


def _with_speedup(data: pd.DataFrame) -> Table:
    rates = _tabulate("throughput (tokens/s)", ",.2f", data)
    row = [label("RoundPipe over best baseline (×)")]
    for name in PUBLISHED_MODELS.values():
        best = best_baseline(data, name)
        if best is None:
            row.append(NOTHING)
        else:
            quotient, source = _value(data, "roundpipe", name) / best["value"], best["source"]
            row.append(theirs(quotient, ".2f", f"quotient of {source} and RoundPipe's row"))
    return table(rates.columns, [*rates.rows, row])


def draw(data: pd.DataFrame, quantity: str) -> Figure:
    """A panel for each model with a bar for each system, or the status of one that did not run."""
    with style.figure(11.5, 3.6) as figure:
        # FSDP's two measurements side by side, RoundPipe last.
        systems = sorted(data["system"].unique(), key=lambda name: (name in OURS, list(style.METHODS).index(name)))
        models = models_in(data)
        panels = style.model_panels(figure, models, sharey=True)
        for axes, name in zip(panels, models.values(), strict=True):
            _draw_model(axes, data, name, systems)
        panels[0].set_yticks(range(len(systems)), [style.method_name(system) for system in systems])
        panels[0].set_ylim(len(systems) - 0.5, -0.5)
        figure.supxlabel(quantity, fontsize=8.5)
        return figure


def _draw_model(axes: Axes, data: pd.DataFrame, model: str, systems: list[str]) -> None:
    rows = data[data["model"] == model].set_index("system")
    best = best_baseline(data, model)
    room = 1.75 * rows["value"].max()
    for height, system in enumerate(systems):
        if system not in rows.index:
            axes.text(0.02 * room, height, "not stated", va="center", fontsize=7.5)
            continue
        row = rows.loc[system]
        text, width = row["status"], 0.0
        if row["status"] == "ok":
            text, width = f"{row['value']:,.0f}", row["value"]
            text += f" ({width / best['value']:.2f} ×)" if system == "roundpipe" and best is not None else ""
            _bar(axes, height, width, system)
        axes.text(width + 0.02 * room, height, text, va="center", fontsize=7.5)
    axes.set_xlim(0, room)
    style.grid_for_rows(axes, num_ticks=4)


def _bar(axes: Axes, height: float, width: float, system: str) -> None:
    colour = style.METHODS[system].colour
    axes.barh(height, width, 0.72, color=colour, edgecolor="black", hatch=style.HATCHES["published"])


def draw_cost(data: pd.DataFrame, where: str = "8 RTX 4090") -> Figure:
    """A panel for each model: the cheapest other system above RoundPipe."""
    with style.figure(11.5, 1.9) as figure:
        models = models_in(data)
        for axes, name in zip(style.model_panels(figure, models), models.values(), strict=True):
            best = best_baseline(data, name, pd.Series.idxmin)
            bars = {"roundpipe": _value(data, "roundpipe", name)}
            if best is not None:
                bars = {best["system"]: best["value"], **bars}
            for height, (system, dollars) in enumerate(bars.items(), start=2 - len(bars)):
                _bar(axes, height, dollars, system)
                style.note(axes, f"{dollars:,.2f}", (dollars, height), (3, 0), va="center", fontsize=7.5)
            if best is None:
                axes.text(0, 0, " no other system runs it", va="center", fontsize=6.5)
            axes.set_yticks(range(2 - len(bars), 2), [style.method_name(system) for system in bars], fontsize=7)
            axes.set(ylim=(1.6, -0.6), xlim=(0, 1.5 * max(bars.values())))
            style.grid_for_rows(axes, num_ticks=4)
        figure.supxlabel(f"US dollars for 10⁹ tokens on {where}, from published throughput and price", fontsize=8.5)
        return figure


exhibit_of(
    "figure10_published",
    lambda _: numbers("throughput", "tokens_per_s"),
    _with_speedup,
    partial(draw, quantity="tokens/s, published; (×) over the best other system of the paper's figure"),
    answer=answer,
)
exhibit_of(
    "figure11_published",
    lambda _: numbers("max_seq_len", "max_seq_len_published_k"),
    partial(_tabulate, "longest sequence (1,024 tokens)", ",.0f"),
    partial(draw, quantity="longest sequence (1,024 tokens), published; (×) over the best other system"),
    answer=length_answer,
)
cost = exhibit_of(
    "cost",
    lambda _: costs(RTX4090),
    partial(_tabulate, "cost (US dollars per 1e9 tokens)", ",.2f"),
    draw_cost,
    price=float(price_of(RTX4090).value),
    answer=cost_answer,
)
