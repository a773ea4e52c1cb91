"""`python -m analysis.predictions [write | score | outcomes | refit | holdout | misses]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.predictions import compare, holdout, outcomes, score, tables

_VERBS = ("write", "score", "outcomes", "refit", "holdout", "misses")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.predictions", description="Predict the paper's tables.")
    parser.add_argument("verb", nargs="?", choices=_VERBS, default="write")
    parser.add_argument("--out", type=Path, default=tables.FOLDER, metavar="DIR", help="folder of the tables (write)")
    parser.add_argument("--sealed", action="store_true", help="the sealed tables alone, every cell (outcomes)")
    options = parser.parse_args(arguments)
    if options.verb == "write":
        return _write(options.out)
    texts = {
        "score": score.text,
        "outcomes": lambda: outcomes.text(only_sealed=options.sealed),
        "refit": holdout.refit_text,
        "holdout": lambda: holdout.text(compare.throughput_cells(*tables.PLATFORMS)),
        "misses": lambda: compare.misses_text(compare.throughput_cells()),
    }
    print(texts[options.verb]())
    return 0


def _write(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    cells = compare.throughput_cells(*tables.PLATFORMS)
    found = {
        "holdout": holdout.rows(cells),
        "experts_holdout": holdout.expert_rows(),
        "misses": compare.miss_rows(cells),
    }
    for name, rows in (tables.all_tables() | found).items():
        print(f"{folder / name}.csv: {tables.write(folder / f'{name}.csv', rows)} rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
