"""Make what stands in the tables of this folder; see the package."""

import sys

from analysis.predictions import tables
from analysis.predictions.clusters import fit, holdout, league, memory_holdout, writing

# Command -> the file, its rows, and who says them on a page, and how.
_MADE = {
    "fit": (fit.FILE, fit.rows, None, None),
    "holdout": (holdout.FILE, holdout.rows, None, None),
    "memory": (
        memory_holdout.FILE,
        memory_holdout.rows,
        memory_holdout,
        lambda rows: memory_holdout.table_text(memory_holdout.summaries(rows)),
    ),
    "predict": (writing.FILE, writing.predictions, None, None),
    "league": (league.FILE, league.table, league, league.table_text),
    "outcomes": (writing.OUTCOMES_FILE, writing.rows, writing, lambda _: writing.table_text(writing.summary())),
}


def main(argv: list[str]) -> int:
    """Run one command; returns the exit status."""
    if len(argv) != 1 or argv[0] not in _MADE:
        print(f"one of: {', '.join(_MADE)}", file=sys.stderr)
        return 2
    file, make, page, text = _MADE[argv[0]]
    rows = list(make())
    if page is not None and text is not None:
        tables.put(page.PAGE, page.BEGIN, text(rows), page.END)
    print(f"{argv[0]}: {tables.write(file, rows)} rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
