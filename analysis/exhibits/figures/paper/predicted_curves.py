"""Figures 14 to 16, predicted and measured: cost of tokens, 1 to 8 devices, 512 to 65,536 tokens a sequence."""

from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of
from analysis.predictions.tables import FOLDER
from analysis.records.published import A800, RTX4090, models_in, published

_PLATFORMS = {RTX4090: "8 RTX 4090", A800: "8 A800"}


def costs() -> pd.DataFrame:
    """Predicted US dollars for 1e9 tokens, one row for each system, machine and model."""
    return pd.read_csv(FOLDER / "cost_efficiency.csv")


def scales() -> pd.DataFrame:
    """RoundPipe's predicted tokens/s, one row for each machine, model and number of devices."""
    return pd.read_csv(FOLDER / "scaling.csv")


def lengths() -> pd.DataFrame:
    """RoundPipe's predicted tokens/s on Qwen3-1.7B, one row for each sequence length."""
    return pd.read_csv(FOLDER / "seqlen_sensitivity.csv")


def _measured(name: str) -> pd.DataFrame:
    """RoundPipe's measured rows."""
    rows = published(name)
    return rows[rows["system"] == "roundpipe"].dropna(subset="tokens_per_s")


# --- figure 14 -----------------------------------------------------------------------------------------------


def _cost_table(rows: pd.DataFrame) -> Table:
    known = published("cost_efficiency").dropna(subset="usd_per_billion_tokens")
    known = known.set_index(["platform", "model", "system_used"])["usd_per_billion_tokens"].to_dict()
    keys = zip(rows["platform"], rows["model"], rows["system"], strict=True)
    found = rows.assign(known=[known.get(key) for key in keys], source=_sources("cost_efficiency", rows))
    found = found.assign(model=rows["model_key"], machine=rows["platform"].map(_PLATFORMS))
    return declared_table("figure14_predicted", found)


def _sources(name: str, rows: pd.DataFrame) -> pd.Series:
    return f"analysis/predictions/{name}.csv, " + rows["system"] + ", " + rows["platform"] + ", " + rows["model"]


def cheapest(data: pd.DataFrame) -> pd.DataFrame:
    """For each model and machine: RoundPipe and the cheapest system other than RoundPipe and Mobius."""
    found = []
    for model, name in models_in(data).items():
        for platform in _PLATFORMS:
            rows = data[(data["model"] == name) & (data["platform"] == platform)]
            others = rows[~rows["system"].isin(["roundpipe", "roundpipe-sync", "mobius"])]
            chosen = [rows[rows["system"] == "roundpipe"]]
            if not others.empty:
                chosen.append(others.loc[[others["usd_per_1e9_tokens"].idxmin()]])
            found += [part.assign(model_key=model) for part in chosen]
    return pd.concat(found, ignore_index=True)


def cost_answer(rows: pd.DataFrame) -> str:
    best = rows.loc[rows.groupby("model_key", sort=False)["usd_per_1e9_tokens"].idxmin()]
    parts = (
        f"{style.model_name(row.model_key)} {row.usd_per_1e9_tokens:,.2f} "
        f"({style.method_name(row.system)}, {_PLATFORMS[row.platform]})"
        for row in best.itertuples()
    )
    return f"Cheapest: {', '.join(parts)}."


def draw_cost(rows: pd.DataFrame) -> Figure:
    with style.figure(11.5, 2.4) as figure:
        models = models_in(rows)
        for axes, model in zip(style.model_panels(figure, models), models, strict=True):
            own = rows[rows["model_key"] == model].reset_index(drop=True)
            for height, row in own.iterrows():
                dollars, low, high = (row[f"usd_per_1e9_tokens{end}"] for end in ("", "_low", "_high"))
                axes.barh(height, dollars, 0.7, color=style.METHODS[row["system"]].colour, edgecolor="black")
                axes.hlines(height, low, high, color="black", linewidth=1)
                axes.text(high, height, f" {dollars:,.1f}", va="center", fontsize=7)
            names = [f"{style.method_name(row.system)}\n{_PLATFORMS[row.platform]}" for row in own.itertuples()]
            axes.set_yticks(range(len(own)), names, fontsize=6)
            axes.set(ylim=(len(own) - 0.4, -0.6), xlim=(0, 1.6 * own["usd_per_1e9_tokens_high"].max()))
        figure.supxlabel("US dollars for 10⁹ tokens, predicted", fontsize=8.5)
        return figure


exhibit_of("figure14_predicted", lambda _: cheapest(costs()), _cost_table, draw_cost, answer=cost_answer)


# --- figures 15 and 16 ---------------------------------------------------------------------------------------


def scaling_answer(data: pd.DataFrame) -> str:
    parts = []
    for model, name in models_in(data).items():
        rows = data[(data["model"] == name) & (data["platform"] == RTX4090)].set_index("num_gpus")["tokens_per_s"]
        if {1, 8} <= set(rows.dropna().index):
            parts.append(f"{style.model_name(model)} {rows[8] / rows[1]:.1f} ×")
    return f"Eight RTX 4090 over one: {', '.join(parts) or 'not among these'}."


def draw_scaling(data: pd.DataFrame) -> Figure:
    measured = _measured("scaling")
    with style.figure(11.5, 2.9) as figure:
        models = models_in(data)
        for axes, name in zip(style.model_panels(figure, models), models.values(), strict=True):
            for (platform, title), look in zip(_PLATFORMS.items(), _LOOKS, strict=True):
                rows = data[(data["model"] == name) & (data["platform"] == platform)].dropna(subset="tokens_per_s")
                if rows.empty:
                    continue
                _curve(axes, rows, "num_gpus", look, title.removeprefix("8 "))
                first = rows.loc[rows["num_gpus"] == 1, "tokens_per_s"]
                if len(first):
                    ideal = [first.iloc[0], 8 * first.iloc[0]]
                    words = f"as many times one {title.removeprefix('8 ')}"
                    axes.plot([1, 8], ideal, "--", color=look[0], linewidth=0.8, label=words)
                known = measured[(measured["model"] == name) & (measured["platform"] == platform)]
                axes.plot(known["num_gpus"], known["tokens_per_s"], "k*", label="measured" if len(known) else None)
            axes.set_xticks([1, 2, 4, 8])
            axes.set_xlabel("devices", fontsize=8.5)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        figure.supylabel("tokens/s, predicted", fontsize=8.5)
        named = {
            name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), fontsize=7)
        return figure


_LOOKS = ((style.VERMILION, "o"), (style.BLUE, "s"))


def _curve(axes: Axes, rows: pd.DataFrame, x: str, look: tuple[str, str], name: str) -> None:
    colour, marker = look
    axes.plot(rows[x], rows["tokens_per_s"], marker=marker, color=colour, label=name)
    axes.fill_between(
        rows[x], rows["tokens_per_s_low"], rows["tokens_per_s_high"], color=colour, alpha=0.2, linewidth=0
    )


def draw_seqlen(data: pd.DataFrame) -> Figure:
    measured = _measured("seqlen_sensitivity")
    measured = measured[measured["seq_len_tokens"].isin(data["seq_len_tokens"])]
    with style.figure(5.5, 3.0) as figure:
        axes = figure.subplots()
        _curve(axes, data, "seq_len_tokens", _LOOKS[0], "predicted")
        if len(measured):
            axes.plot(measured["seq_len_tokens"], measured["tokens_per_s"], "k*", label="measured")
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            data["seq_len_tokens"], [f"{tokens:,}" for tokens in data["seq_len_tokens"]], fontsize=7, rotation=30
        )
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="tokens a sequence", ylabel="tokens/s")
        axes.legend(fontsize=7)
        return figure


def _rates(identity: str, name: str, x: str, data: pd.DataFrame) -> Table:
    known = _measured(name).set_index(["platform", "model", x])["tokens_per_s"].to_dict()
    rows = data.assign(source=_sources(name, data)).to_dict("records")
    for row in rows:
        row["known"] = known.get((row["platform"], row["model"], row[x]))
        row["run"] = f"{_PLATFORMS[row['platform']].removeprefix('8 ')}, {row['model']}, {row[x]:,}"
    return declared_table(identity, rows)


exhibit_of(
    "figure15_predicted",
    lambda _: scales(),
    partial(_rates, "figure15_predicted", "scaling", "num_gpus"),
    draw_scaling,
    answer=scaling_answer,
)
exhibit_of(
    "figure16_predicted",
    lambda _: lengths(),
    partial(_rates, "figure16_predicted", "seqlen_sensitivity", "seq_len_tokens"),
    draw_seqlen,
    kept=lambda data: data["tokens_per_s"].iloc[-1] / data["tokens_per_s"].iloc[0],
)
