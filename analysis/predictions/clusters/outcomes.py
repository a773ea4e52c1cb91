"""Outcomes: what was predicted blind at 760beda beside the answers that have been given since, row by row.

`python -m analysis.predictions.clusters outcomes` writes `sealed_760beda/outcomes.csv` and the table of
`docs/second_round.md`; the sealed table itself stays as it was committed.
"""

from math import log
from pathlib import Path

from analysis.predictions import tables
from analysis.predictions.clusters.case import Case
from analysis.predictions.clusters.problems import SETS, given
from analysis.predictions.clusters.score import Score, part_of, score, score_bytes

ROOT = Path(__file__).resolve().parents[3]
SEALED = Path(__file__).resolve().parents[1] / "sealed_760beda"
FILE = SEALED / "outcomes.csv"
PAGE = ROOT / "docs" / "second_round.md"
BEGIN, END = "<!--clusters:outcomes-->\n", "<!--/clusters:outcomes-->\n"
PACES = {"internevo", "llm_foundry_fsdp", "megatron_bridge", "torchtitan", "zero_bubble_table4"}  # what they print
Row = dict[str, str]


def sealed() -> dict[str, Row]:
    """The rows that were committed, by id."""
    return {row["id"]: row for row in tables.read("clusters", SEALED)}


def answered() -> list[tuple[Case, Row]]:
    """Rows that were predicted blind and whose answers are known now."""
    known = sealed()
    cases = [case for case in given(SETS) if case.id in known and known[case.id]["status"] == "ok"]
    return [(case, known[case.id]) for case in cases]


def predicted_s(case: Case, row: Row) -> float:
    """The seconds that were predicted; of a row that prints a pace, those of its tokens at the predicted pace."""
    if case.set_name in PACES:
        return case.repeats * case.tokens / float(row["tokens_per_s_per_gpu"]) / case.devices
    return float(row["step_time_s"])


def rows() -> list[Row]:
    """Each quantity that was predicted and is known now."""
    found = []
    for case, row in answered():
        if case.step_time_s and row["step_time_s"]:
            scale = predicted_s(case, row) / float(row["step_time_s"])
            found.append(_row(case, row, "step_time_s", case.step_time_s, scale))
        if case.memory_bytes and row["peak_memory_bytes"]:
            found.append(_row(case, row, "peak_memory_bytes", case.memory_bytes, 1.0))
    return found


def _row(case: Case, row: Row, quantity: str, measured: float, scale: float) -> Row:
    predicted, low, high = (scale * float(row[f"{quantity}{end}"]) for end in ("", "_low", "_high"))
    return {
        "id": case.id,
        "quantity": quantity,
        **{name: f"{value:.5g}" for name, value in (("predicted", predicted), ("low", low), ("high", high))},
        "measured": f"{measured:.5g}",
        "error": f"{predicted / measured - 1:+.3f}",
        "inside": "yes" if low <= measured <= high else "no",
    }


def summary() -> list[tuple[str, str, Score]]:
    """(set, quantity, score) of the blind round, of the rows that are known now."""
    pairs = answered()
    timed = [(case, row) for case, row in pairs if case.step_time_s and row["step_time_s"]]
    steps = {case.id: predicted_s(case, row) for case, row in timed}
    found = []
    for name in sorted({part_of(case) for case, _ in timed}):
        cases = [case for case, _ in timed if part_of(case) == name]
        widths = {case.id: _width(row, "step_time_s") for case, row in timed if part_of(case) == name}
        found.append((name, "step", score(cases, steps, widths)))
    held = [(case, row) for case, row in pairs if case.memory_bytes and row["peak_memory_bytes"]]
    sizes = {case.id: float(row["peak_memory_bytes"]) for case, row in held}
    for name in sorted({case.set_name for case, _ in held}):
        cases = [case for case, _ in held if case.set_name == name]
        widths = {case.id: _width(row, "peak_memory_bytes") for case, row in held if case.set_name == name}
        found.append((name, "memory", score_bytes(cases, sizes, widths)))
    return found


def _width(row: Row, quantity: str) -> float:
    return log(float(row[f"{quantity}_high"]) / float(row[quantity]))


def table_text(found: list[tuple[str, str, Score]]) -> str:
    """The summary as a table of Markdown."""
    lines = [
        "| set | quantity | rows | median, 90 % | bias | order | inside |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, quantity, each in found:
        error = f"{100 * each.median:.1f}, {100 * each.p90:.0f} %"
        values = [name, quantity, str(each.rows), error, f"{100 * each.bias:+.1f} %", each.order]
        lines.append(f"| {' | '.join([*values, f'{100 * (each.inside or 0):.0f} %'])} |")
    return "\n".join(lines) + "\n"


def write() -> int:
    """Write the rows and the page's table; returns the number of rows."""
    found = rows()
    tables.put(PAGE, BEGIN, table_text(summary()), END)
    return tables.write(FILE, found)
