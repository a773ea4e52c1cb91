"""The page of `advise --open`: the answer as one HTML file that opens from disk and loads nothing else."""

import json
import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rpbench.commands.advising.advise_questions import limit_lines, question_lines
from rpbench.commands.advising.advise_table import gap, label, lacks, meanings, notes, recomputed
from rpbench.records.record import write_atomically

PAGE = Path("advice.html")
SCRIPT = Path(__file__).with_suffix(".js")
TURNED = (
    *(("schedule", ""), ("s a step", ""), ("tokens/s", ' colspan="2"'), ("memory, GB", ' colspan="2"')),
    *(("host, GB", ""), ("sequences", ""), ("recomputed", ""), ("layers by stage", "")),
)
TOLD = (
    "Each row at other microbatch sizes, recomputation and numbers of devices: simulated beforehand with the row's own "
    "other settings and the best of a few cuts; a step keeps its sequences. A row of the ranking was searched longer, "
    "so that a point beside it may be a little below what a search finds there."
)
# Okabe and Ito's palette; each cause is named in the table below the bars as well.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#999999", "#56b4e9", "#000000")
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid #8886; }
div.bar { display: flex; height: 1.4rem; width: 100%; } details code { overflow-wrap: anywhere; }
#controls { display: flex; flex-wrap: wrap; gap: .5rem 2rem; } select { font: inherit; }
div.meter { width: 6rem; height: .8rem; background: #8883; } div.meter div { height: 100%; transition: width .3s; }
div.within { background: #0072b2; } div.over { background: #d55e00; } tr.unfit { opacity: .75; }
#rows th { font-weight: normal; }
td.why { text-align: left; white-space: normal; min-width: 16rem; }
@media (prefers-reduced-motion: reduce) { div.meter div { transition: none; } }
@media (prefers-color-scheme: dark) { div.within { background: #56b4e9; } div.over { background: #e69f00; } }
span.key { display: inline-block; width: .9rem; height: .9rem; margin: 0 .3rem 0 .9rem; vertical-align: -.1rem; }
"""


def write_page(answer: Mapping[str, Any], around: Mapping[str, Any] | None = None, path: Path = PAGE) -> Path:
    """Write the page of an answer.

    Args:
        around: its rows at other settings (`rpbench.commands.advising.advise_around`).

    Raises:
        OSError: if it cannot be written.
    """
    write_atomically(path, page(answer, around))
    return path


def show_page(path: Path) -> bool:
    """Open a page in a browser where there is a screen to show it on; whether there is one."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return webbrowser.open(path.resolve().as_uri())
    return False


def page(answer: Mapping[str, Any], around: Mapping[str, Any] | None = None) -> str:
    """The page as text; everything that a user named is escaped."""
    title = escape(f"{answer['model']} on {answer['num_devices']} devices of {answer['cluster']}")
    head = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    )
    if "limits" in answer:
        return head + _limits(answer) + "</html>\n"
    told = "".join(f"<li>{escape(line)}</li>" for line in (*question_lines(answer), *notes(answer)))
    return (
        f"{head}<p>Predicted. {answer['seq_len']:,} tokens a sequence, {answer['tokens_per_step']:,} a step. Nine of "
        f"ten outcomes should lie between low and high.</p>{_ranking(answer['ranking'])}{_late(answer)}"
        f"{_turned(around) if around else ''}"
        f"{_causes(answer['ranking'])}{_misfits(answer)}"
        f"<h2>What would change it, and what was assumed</h2><ul>{told}</ul>{_commands(answer['ranking'])}</html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{cells}</tbody></table></div>'


def _limits(answer: Mapping[str, Any]) -> str:
    """Memory of each schedule by class, the largest first."""
    lines = limit_lines(answer["limits"], answer["question"], answer["num_devices"])
    return "<h2>Predicted limits</h2><pre>" + escape("\n".join(lines)) + "</pre>"


def _ranking(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>Nothing fits.</p>"
    return "<h2>Ranking</h2>" + _ranking_table(rows)


def _ranking_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("schedule", "tokens/s", "low", "high", "gap", "memory, GB", "MFU, %", "bubble, %", "steps late")
    return _table([*head, "sequences", "recomputed", "runs in"], [_cells(row) for row in rows])


def _turned(around: Mapping[str, Any]) -> str:
    """A table that moves with three controls; without scripts the page is whole as it is."""
    data = json.dumps(around, allow_nan=False).replace("<", "\\u003c")
    names = "".join(f'<th scope="col"{span}>{escape(name)}</th>' for name, span in TURNED)
    return (
        f"<h2>Other settings</h2><p>{TOLD}</p>"
        '<div id="controls"></div><p id="told" role="status"></p><div class="wide" tabindex="0" role="region" '
        f'aria-label="rows at these settings"><table><thead><tr>{names}</tr></thead><tbody id="rows"></tbody></table>'
        f'</div><script type="application/json" id="around">{data}</script><script>{SCRIPT.read_text("utf-8")}</script>'
    )


def _late(answer: Mapping[str, Any]) -> str:
    rows = answer.get("ranking_late")
    return "<p>Gradients of older weights, which may cost tokens:</p>" + _ranking_table(rows) if rows else ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    paces = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")]
    mfu, bubble = ("-" if row.get(name) is None else f"{100 * max(0.0, row[name]):.1f}" for name in ("mfu", "bubble"))
    options = row["options"]
    plan = [str(options["microbatch_sequences"]), recomputed(row), ", ".join(row.get("runs_in", ()))]
    memory = f"{row['peak_memory_bytes'] / 1e9:.1f}"
    return [label(row), *paces, gap(row), memory, mfu, bubble, str(row["staleness_steps"]), *plan]


def _causes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the time of the first two goes: a bar each, and the same as numbers."""
    two = rows[:2]
    if not two:
        return ""
    causes = list(dict.fromkeys(name for row in two for name in row["why"]))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(causes)}
    longest = max(sum(row["why"].values()) for row in two)
    found = "<h2>Where a step's time goes</h2><p>" + "".join(
        f'<span class="key" style="background:{colour[name]}"></span>{escape(name)}' for name in causes
    )
    for row in two:
        parts = "".join(
            f'<div style="width:{100 * max(0.0, seconds) / longest:.3f}%;background:{colour[name]}" '
            f'title="{escape(name)} {seconds:.4f} s"></div>'
            for name, seconds in row["why"].items()
        )
        found += f'</p><p>{escape(label(row))}</p><div class="bar">{parts}</div><p>'
    cells = [[name, *(f"{1000 * row['why'].get(name, 0.0):,.1f}" for row in two)] for name in causes]
    meant = "".join(f"<p>{escape(words)}</p>" for words in meanings(two))
    return found + "</p>" + _table(["ms of a step", *(label(row) for row in two)], cells) + meant


def _misfits(answer: Mapping[str, Any]) -> str:
    """Schedules that cannot fit or have no found plan that fits, each with the memory its best plan lacks."""
    found = ""
    for key, title in (("does_not_fit", "Does not fit"), ("none_found", "No plan found that fits")):
        if rows := answer.get(key):
            found += f"<h2>{title}</h2>" + _table(("schedule", "lacks"), [(label(row), lacks(row)) for row in rows])
    return found


def _commands(rows: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(
        f"<details><summary>{escape(label(row))}</summary><code>{escape(row['command'])}</code></details>"
        for row in rows
    )
    return f"<h2>Commands</h2>{items}" if rows else ""
