"""The page of `advise --open`: the answer as one HTML file that opens from disk and loads nothing else."""

import json
import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rpbench.commands.advising.advise_questions import limit_lines, question_lines
from rpbench.commands.advising.advise_table import gap, label, lacks, meanings, notes, recomputed
from rpbench.records.record import write_atomically

PAGE = Path("advice.html")
SCRIPT = Path(__file__).with_suffix(".js")
# Okabe and Ito's palette; each cause is named in the table below the bars as well.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#999999", "#56b4e9", "#000000")


def write_page(answer: Mapping[str, Any], around: Mapping[str, Any] | None = None, path: Path = PAGE) -> Path:
    """Write the page of an answer and its rows at other settings (`advise_around`); OSError if it cannot be written."""
    write_atomically(path, page(answer, around))
    return path


def show_page(path: Path) -> bool:
    """Open a page in a browser if there is a screen; whether it was opened."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return webbrowser.open(path.resolve().as_uri())
    return False


def page(answer: Mapping[str, Any], around: Mapping[str, Any] | None = None) -> str:
    """The page as text; names given by the user are escaped."""
    forms = Environment(
        loader=FileSystemLoader(SCRIPT.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    form = forms.get_template("advise_page.html")
    title = f"{answer['model']} on {answer['num_devices']} devices of {answer['cluster']}"
    if "limits" in answer:
        return form.render(title=title, limits=limit_lines(answer["limits"], answer["question"], answer["num_devices"]))
    first = answer["ranking"][:2]
    causes = list(dict.fromkeys(name for row in first for name in row["why"]))
    return form.render(
        title=title,
        limits=None,
        answer=answer,
        around=around and json.dumps(around, allow_nan=False).replace("<", "\\u003c"),
        script=SCRIPT.read_text("utf-8"),
        first=first,
        colours={name: COLOURS[number % len(COLOURS)] for number, name in enumerate(causes)},
        longest=max((sum(row["why"].values()) for row in first), default=0.0),
        causes=[
            ["ms of a step", *map(label, first)],
            *([name, *(f"{1000 * row['why'].get(name, 0.0):,.1f}" for row in first)] for name in causes),
        ],
        ranking=[_cells(row) for row in answer["ranking"]],
        late=[_cells(row) for row in answer.get("ranking_late", ())],
        misfits={
            title: [(label(row), lacks(row)) for row in answer.get(key, ())]
            for key, title in (("does_not_fit", "Does not fit"), ("none_found", "No plan found that fits"))
        },
        told=[*question_lines(answer), *notes(answer)],
        meant=meanings(first),
        label=label,
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    paces = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")]
    mfu, bubble = ("-" if row.get(name) is None else f"{100 * max(0.0, row[name]):.1f}" for name in ("mfu", "bubble"))
    options = row["options"]
    plan = [str(options["microbatch_sequences"]), recomputed(row), ", ".join(row.get("runs_in", ()))]
    memory = f"{row['peak_memory_bytes'] / 1e9:.1f}"
    return [label(row), *paces, gap(row), memory, mfu, bubble, str(row["staleness_steps"]), *plan]
