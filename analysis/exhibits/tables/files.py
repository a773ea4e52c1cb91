"""Tables as files: CSV with full values, LaTeX with the digits that are shown."""

import csv
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.exhibits.cells import NOTHING
from analysis.exhibits.exhibit import Cell, Table
from analysis.exhibits.figures.files import OUT


def save_table(table: Table, stem: str, folder: Path = OUT) -> list[Path]:
    """Write `stem.csv` and `stem.tex` into a folder, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.csv", folder / f"{stem}.tex"]
    with paths[0].open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(table.columns)
        rows.writerows([_csv_value(cell) for cell in row] for row in table.rows)
    paths[1].write_text(latex(table), encoding="utf-8")
    return paths


def _csv_value(cell: Cell) -> Any:
    """The value in full; empty where there is none, and the word where a word stands for it."""
    if cell.value is not None:
        return cell.value
    return "" if cell.text == NOTHING.text else cell.text


def latex(table: Table) -> str:
    """The table as a LaTeX tabular, for the package booktabs."""
    return frame(table).to_latex(index=False, escape=True)


def frame(table: Table) -> pd.DataFrame:
    """The table as it is shown: every cell its text. A heading that occurs twice is counted."""
    headings: list[str] = []
    for column in table.columns:
        again = headings.count(column)
        headings.append(column if not again else f"{column} ({again + 1})")
    return pd.DataFrame([[cell.text for cell in row] for row in table.rows], columns=headings)
