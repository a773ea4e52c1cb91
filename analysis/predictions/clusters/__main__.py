"""Make the tables of this package; its docstring lists the commands."""

import sys

from analysis.predictions import tables
from analysis.predictions.clusters import fit, holdout, league, memory_holdout, writing

# Command -> the file and its rows.
_MADE = {
    "fit": (fit.FILE, fit.rows),
    "holdout": (holdout.FILE, holdout.rows),
    "memory": (memory_holdout.FILE, memory_holdout.rows),
    "predict": (writing.FILE, writing.predictions),
    "league": (league.FILE, league.table),
    "outcomes": (writing.OUTCOMES_FILE, writing.rows),
}
# Command -> the page with its table between marks, and the text.
_TOLD = {
    "memory": (memory_holdout.PAGE, memory_holdout.table_text),
    "league": (writing.PAGE, league.table_text),
    "outcomes": (writing.PAGE, lambda _: writing.table_text(writing.summary())),
}


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0] not in _MADE:
        print(f"one of: {', '.join(_MADE)}", file=sys.stderr)
        return 2
    file, make = _MADE[argv[0]]
    rows = list(make())
    if argv[0] in _TOLD:
        page, text = _TOLD[argv[0]]
        tables.put(page, f"clusters:{argv[0]}", text(rows))
    print(f"{argv[0]}: {tables.write(file, rows)} rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
