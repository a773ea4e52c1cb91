"""`python -m analysis.predictions [write | score | outcomes | refit | holdout | misses]`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.predictions import compare, holdout, outcomes, score, tables


def main(arguments: Sequence[str] | None = None) -> int:
    texts: dict[str, Callable[[argparse.Namespace], str]] = {
        "score": lambda _: score.text(),
        "outcomes": lambda options: outcomes.text(only_sealed=options.sealed),
        "refit": lambda _: holdout.refit_text(),
        "holdout": lambda _: holdout.text(compare.throughput_cells(*tables.PLATFORMS)),
        "misses": lambda _: compare.misses_text(compare.throughput_cells()),
    }
    parser = argparse.ArgumentParser(prog="python -m analysis.predictions", description="Predict the paper's tables.")
    parser.add_argument("verb", nargs="?", choices=("write", *texts), default="write")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the tables (write)")
    parser.add_argument("--sealed", action="store_true", help="the sealed tables alone, every cell (outcomes)")
    options = parser.parse_args(arguments)
    if options.out is not None and options.verb != "write":
        parser.error(f"--out {options.out}: {options.verb} writes no tables; leave it out")
    if options.sealed and options.verb != "outcomes":
        parser.error(f"--sealed: {options.verb} has no sealed tables; leave it out, or take outcomes")
    if options.verb != "write":
        print(texts[options.verb](options))
        return 0
    folder = tables.FOLDER if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)
    cells = compare.throughput_cells(*tables.PLATFORMS)
    found = tables.all_tables() | {
        "holdout": holdout.rows(cells),
        "experts_holdout": holdout.expert_rows(),
        "misses": compare.miss_rows(cells),
    }
    for name, rows in found.items():
        path = folder / f"{name}.csv"
        print(f"{path}: {tables.write(path, rows)} rows", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
