"""What notebooks use: the display of exhibits, and verdicts on their exercises."""

from collections.abc import Collection
from typing import Any

import pandas as pd
from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure

from analysis.exhibits.exhibit import Table
from analysis.exhibits.figures.files import frame, png_bytes
from rpbench.config.loading import load
from rpbench.cost.roofline import cost_usd_per_billion_tokens
from rpbench.run.scheduled import assembled_of
from rpbench.sim.longest_path import simulate_graph

Verdict = tuple[bool | None, str]
OPEN: Verdict = (None, "Write your answer into the cell above, run it, and run this one again.")
_NEAR = 0.02  # largest relative error of an answer that is a real number


def simulated(*overrides: str) -> dict[str, Any]:
    """The fields that `python -m rpbench` would record of a timeline; nothing is written."""
    assembled = assembled_of(load(overrides))
    graph, costs = assembled.graph, assembled.costs
    timeline = simulate_graph(graph, costs)
    return assembled.metrics(timeline, costs, graph)


def smallest_step(num_microbatches: int | None, rival_percent: float) -> Verdict:
    """Is this the smallest step whose 1F1B, with equal stages on 8 devices, idles less than a rival?"""
    if num_microbatches is None:
        return OPEN
    found, before = (_bubble_of_1f1b(count) for count in (num_microbatches, max(1, num_microbatches - 1)))
    text = f"With {num_microbatches} microbatches it idles {found:.2f} %, RoundPipe {rival_percent:.2f} %"
    if found >= rival_percent:
        return False, f"{text}: not less."
    if num_microbatches > 1 and before < rival_percent:
        return False, f"{text}: less, but a smaller step does it too."
    return True, f"{text}; with one microbatch fewer 1F1B idles {before:.2f} %."


def _bubble_of_1f1b(num_microbatches: int) -> float:
    step = ("schedule=1f1b", "cost=unit", "num_devices=8", f"num_microbatches={num_microbatches}")
    return 100 * simulated(*step)["bubble_makespan"]


def bubble_of_calls(model: str, num_microbatches: int, guess_percent: float | None) -> Verdict:
    """Is this, to a percentage point, the bubble of 60 calls of `num_microbatches`?"""
    if guess_percent is None:
        return OPEN
    run = simulated("experiment=steady_state", f"model={model}", f"num_microbatches={num_microbatches}")
    found = 100 * run["bubble_steady"]
    if abs(found - guess_percent) > 1:
        where = "more" if found > guess_percent else "less"
        return False, f"60 calls of {num_microbatches} microbatches leave {where} idle than {guess_percent:g} %."
    return True, f"60 calls of {num_microbatches} microbatches leave {found:.2f} % idle."


def better_cut(cut: str | None, known: pd.DataFrame, model: str, schedule: str) -> Verdict:
    """Is a step with this cut, such as `4-4-4-4-4-4-4-4`, shorter than with the published one of `tuning.numbers`?"""
    if cut is None:
        return OPEN
    try:
        run = simulated("experiment=figure17", f"model={model}", f"schedule={schedule}", f"partition='{cut}'")
    except ValueError as error:
        return False, f"That is no cut of this model for this schedule: {error}"
    own = known[(known["model"] == model) & (known["schedule"] == schedule)].set_index("cut")["makespan_s"]
    text = f"The step takes {run['makespan_s']:.4f} s, with the published cut {own['published']:.4f} s"
    if run["makespan_s"] >= own["published"]:
        return False, f"{text}: not shorter."
    return True, f"{text}, with the searched one {own['search']:.4f} s."


def even_link(link_bytes_per_s: float | None, record: pd.Series) -> Verdict:
    """Does reloading a layer's activations over this link take as long as recomputing, by a roofline record?"""
    if link_bytes_per_s is None:
        return OPEN
    own = record["config"]["cluster"]["host_to_device_bytes_per_s"]
    reload_s, recompute_s = record["reload_s"] * own / link_bytes_per_s, record["recompute_s"]
    text = f"Over {link_bytes_per_s / 1e9:g} GB/s reloading takes {1e3 * reload_s:.2f} ms, recomputing takes "
    return abs(reload_s / recompute_s - 1) <= _NEAR, f"{text}{1e3 * recompute_s:.2f} ms."


def fair_price(usd_per_hour: float | None, tokens_per_s: float, usd_per_billion_tokens: float) -> Verdict:
    """Does a server of this price and throughput cost as much per token as the other one?"""
    if usd_per_hour is None:
        return OPEN
    found = cost_usd_per_billion_tokens(usd_per_hour, tokens_per_s)
    text = f"For {usd_per_hour:g} US dollars an hour 10⁹ tokens cost {found:.2f} US dollars there"
    return abs(found / usd_per_billion_tokens - 1) <= _NEAR, f"{text}, and {usd_per_billion_tokens:.2f} here."


def longest_sequence(seq_len_tokens: int | None, fraction: float, curve: pd.DataFrame) -> Verdict:
    """Is this the longest sequence of a curve that keeps a fraction of the throughput of the shortest?"""
    if seq_len_tokens is None:
        return OPEN
    paces = curve.set_index("seq_len_tokens")["tokens_per_s"].sort_index()
    if seq_len_tokens not in paces:
        return False, f"Nothing is predicted of {seq_len_tokens:,} tokens."
    kept = paces / paces.iloc[0]
    text = f"With {seq_len_tokens:,} tokens a sequence, {kept[seq_len_tokens]:.1%} of the throughput is left"
    if kept[seq_len_tokens] < fraction:
        return False, f"{text}: less than {fraction:.0%}."
    if (kept[kept.index > seq_len_tokens] >= fraction).any():
        return False, f"{text}, but a longer one keeps {fraction:.0%} too."
    return True, f"{text}."


def chosen(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The rows whose columns have the wanted values: one, several, or None for any; ValueError for an unknown value.

    chosen(data, model=["qwen3_1p7b", "qwen3_32b"], bar=None)
    """
    kept = pd.Series(True, index=data.index)
    for column, asked in wanted.items():
        if asked is not None:
            kept &= data[column].isin(among(column, asked, data[column].unique()))
    if not kept.any():
        raise ValueError(f"no row has all of {wanted}: leave a choice out, with None")
    return data[kept].reset_index(drop=True)


def crossed(data: pd.DataFrame, down: str, across: str, value: str) -> pd.DataFrame:
    """The mean of one column by two others; ValueError for an unknown column, or values that are no numbers."""
    for name, column in (("down", down), ("across", across), ("value", value)):
        among(name, column, list(data.columns))
    if len({down, across, value}) < 3:
        raise ValueError(
            f"down={down!r}, across={across!r}, value={value!r}: choose among the columns three different ones"
        )
    if not pd.api.types.is_numeric_dtype(data[value]):
        numbers = ", ".join(data.select_dtypes("number").columns)
        raise ValueError(f"value={value!r} holds no numbers: choose among {numbers}")
    return data.pivot_table(index=down, columns=across, values=value, sort=False)


def among(name: str, asked: Any, there: Collection[Any]) -> list[Any]:
    """The wanted values as a list; ValueError, naming the known ones, if one is unknown or none is wanted."""
    values = list(asked) if isinstance(asked, list | tuple | set | range) else [asked]
    known = ", ".join(map(str, there))
    for value in values:
        if value not in there:
            raise ValueError(f"{name}={value!r} is unknown here: choose among {known}")
    if not values:
        raise ValueError(f"{name}=[] chooses nothing: take some of {known}, or None for all")
    return values


def picture(figure: Figure) -> None:
    display(Image(png_bytes(figure)))


def rows(table: Table) -> None:
    """Display a table as in the report."""
    display(HTML(frame(table).to_html(index=False, border=0)))


def say(*sentences: str) -> None:
    """Display each sentence as a paragraph."""
    display(Markdown("\n\n".join(sentences)))


def judge(verdict: Verdict) -> None:
    """Display the verdict on an exercise: right, not yet, or open (None)."""
    right, why = verdict
    word = {True: "Right.", False: "Not yet.", None: "Open."}[right]
    say(f"**{word}** {why}")
