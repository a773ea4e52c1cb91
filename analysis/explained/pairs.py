"""How much of the difference between two published runs is explained.

`pairs.csv` names pairs by what they differ in; it was committed before anything was computed. `explained.csv` has the
results, misses included; `all_pairs.csv` sums up all pairs of a table that differ by a factor of `APART` or more.
"""

import sys
from collections.abc import Iterator
from itertools import combinations
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.explained.rows import PLATFORMS, SYSTEM_TABLES, row_names, side_of
from analysis.predictions import tables
from analysis.predictions.compare import declared_basis
from rpbench.config.choices import ConfigError
from rpbench.cost.published import published_rows
from rpbench.explain.side import Side
from rpbench.explain.split import Explanation, explain

FOLDER = Path(__file__).parent
BAR = 0.10  # largest unexplained fraction of a difference
APART = 1.5
Row = dict[str, str]


class Pair(NamedTuple):
    """Two published runs, as `rpbench explain` names them, and how they differ."""

    a: str
    b: str
    why: str


def pairs() -> list[Pair]:
    return [Pair(**row) for row in tables.read("pairs", FOLDER)]


def explained(pair: Pair) -> Explanation:
    return explain(side_of(pair.a), side_of(pair.b))


def rows() -> Iterator[Row]:
    # ln(measured / predicted without the row's group) of given rows, by `NAME:ROW`
    held_out = {row["id"].replace("/", ":"): row for row in tables.read("clusters_holdout")}
    known = {name: log(float(row["step_time_s"]) / float(row["predicted_s"])) for name, row in held_out.items()}
    seen = fitted()
    for pair in pairs():
        found = explained(pair)
        besides = found.total - found.parts.get("shape", 0.0)
        unseen = [known.get(name) for name in (pair.a, pair.b)]
        yield {
            **pair._asdict(),
            "log_ratio": f"{found.total:.4f}",
            "unexplained_log": f"{found.rest:.4f}",
            "unexplained": f"{_share(found):.4f}",
            "besides_shape": f"{abs(found.rest / besides):.4f}",
            "held_out": "" if None in unseen else f"{abs((unseen[0] - unseen[1]) / found.total):.4f}",  # type: ignore[operator]
            "fitted_on": "".join(side for side, name in zip("ab", (pair.a, pair.b), strict=True) if name in seen),
        }


def summary() -> Iterator[Row]:
    for table in (*SYSTEM_TABLES, "bloom_a100_topologies", "vtrain_multi", "llm_foundry_fsdp", "internevo", *MORE):
        sides = list(_sides(table))
        shares = sorted(
            _share(found)
            for a, b in combinations(sides, 2)
            if abs(log(a.seconds / b.seconds)) >= log(APART)
            for found in [explain(a, b)]
        )
        if shares:
            yield {
                "table": table,
                "pairs": str(len(shares)),
                "explained": str(sum(share <= BAR for share in shares)),
                "median_unexplained": f"{median(shares):.4f}",
                "p90_unexplained": f"{shares[round(0.9 * (len(shares) - 1))]:.4f}",
            }


MORE = ("torchtitan", "simumax_b200", "megatron_bridge", "vocab_stage_times")


def _sides(table: str) -> Iterator[Side]:
    for row in row_names(table):
        try:
            yield side_of(f"{table}:{row}")
        except ConfigError:  # out of memory, not modelled, or without a time
            continue


def _share(found: Explanation) -> float:
    assert found.unexplained is not None  # the numbers differ
    return found.unexplained


def fitted() -> set[str]:
    """Rows that constants were fitted on: all given runs on a mesh, and cells that a constant names."""
    cells = {
        cell for place in PLATFORMS for each in declared_basis(place).declared.values() for cell in (each.cells or ())
    }
    own = {
        f"{table}:{row['system']}/{row['model']}"
        for table in SYSTEM_TABLES
        for row in published_rows(f"{table}.csv")
        if f"throughput/{row['system']}/{row['platform']}/{row['model']}" in cells
    }
    return own | {name for pair in pairs() for name in pair[:2] if name.partition(":")[0] not in SYSTEM_TABLES}


def write() -> dict[str, int]:
    made = {"explained": rows(), "all_pairs": summary()}
    return {name: tables.write(FOLDER / f"{name}.csv", list(lines)) for name, lines in made.items()}


if __name__ == "__main__":
    print(write(), file=sys.stderr)
