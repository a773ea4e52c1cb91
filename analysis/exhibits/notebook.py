"""Displays of notebooks: chosen rows of a frame, figures, tables, an answer, a verdict on one's own."""

from collections.abc import Collection
from typing import Any

import pandas as pd
from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure

from analysis.exhibits.exhibit import Exhibit, Table
from analysis.exhibits.figures.files import png_bytes
from analysis.exhibits.tables.files import frame


def chosen(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The rows whose columns have the wanted values: one, several, or any where it is None.

        chosen(data, model=["qwen3_1p7b", "qwen3_32b"], bar=None)

    Raises:
        ValueError: for a value that no row has; it names those that there are.
    """
    kept = pd.Series(True, index=data.index)
    for column, asked in wanted.items():
        if asked is not None:
            kept &= data[column].isin(among(column, asked, data[column].unique()))
    if not kept.any():
        raise ValueError(f"no row has all of {wanted}: leave a choice out, with None")
    return data[kept].reset_index(drop=True)


def crossed(data: pd.DataFrame, down: str, across: str, value: str) -> pd.DataFrame:
    """One column's values by two others; the mean where rows share a place, as those of what is not varied do.

    Raises:
        ValueError: for a column that the frame lacks, naming those it has; for values that are no numbers.
    """
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
    """The values asked for, one or several.

    Raises:
        ValueError: if one is unknown, or none is asked for; it names those that there are.
    """
    values = list(asked) if isinstance(asked, list | tuple | set | range) else [asked]
    known = ", ".join(map(str, there))
    for value in values:
        if value not in there:
            raise ValueError(f"{name}={value!r} is unknown here: choose among {known}")
    if not values:
        raise ValueError(f"{name}=[] chooses nothing: take some of {known}, or None for all")
    return values


def show(exhibit: Exhibit) -> None:
    """Display an exhibit; what makes its records again stands below it."""
    display(Markdown(f"### {exhibit.title}"))
    if exhibit.draw:
        picture(exhibit.draw())
    if exhibit.table:
        rows(exhibit.table)
    command = f"\n\nRecords: `{exhibit.command}`" if exhibit.command else ""
    display(Markdown(f"{exhibit.caption} *({', '.join(exhibit.evidence)})*{command}"))


def picture(figure: Figure) -> None:
    """Display a figure."""
    display(Image(png_bytes(figure)))


def rows(table: Table) -> None:
    """Display a table, every cell as it is written in the report."""
    display(HTML(frame(table).to_html(index=False, border=0)))


def say(*sentences: str) -> None:
    """Display an answer, one paragraph a sentence."""
    display(Markdown("\n\n".join(sentences)))


def judge(verdict: tuple[bool | None, str]) -> None:
    """Display what becomes of an exercise: right, not yet, or (None) nothing written down so far; and why."""
    right, why = verdict
    word = {True: "Right.", False: "Not yet.", None: "Open."}[right]
    say(f"**{word}** {why}")
