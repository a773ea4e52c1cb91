"""Whether a duel repeats: complete duels kept as small tables, and one held against another.

    python -m analysis.driver.duels keep RESULTS CSV
    python -m analysis.driver.duels compare FIRST SECOND

FIRST and SECOND are folders of results or kept tables, of duels that ran at different times. A verdict that both give
should be the same, and intervals of the same ratio should meet: `compare` prints a row a contender and says how many do
(exit status 1 where a verdict differs or fewer than 95 % of intervals meet). What only one of them has is named.
"""

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.exhibits.figures.duel import found_duels, judged
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.harness.modes.duel.contenders import BASE
from rpbench.harness.record import write_atomically

LEAST_MEETING = 0.95
NO_VERDICT = "no verdict"

Key = tuple[str, str]  # model, contender


@dataclass(frozen=True)
class Kept:
    """What one duel says of a contender: its speed over 1F1B by the clock, with its 95 % interval."""

    model: str
    contender: str
    verdict: str
    reason: str
    ratio: float
    low: float
    high: float
    comparisons: int  # clean ones, of all starts
    starts: int
    started_at: str
    git_commit: str
    processor: str

    @property
    def key(self) -> Key:
        return self.model, self.contender

    @property
    def has_verdict(self) -> bool:
        return self.verdict != NO_VERDICT

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.ratio) and math.isfinite(self.high)

    def meets(self, other: "Kept") -> bool:
        """Whether both intervals hold a ratio in common."""
        return max(self.low, other.low) <= min(self.high, other.high)


def kept_of(rows: Iterable[Mapping[str, Any]]) -> list[Kept]:
    """What the records of a duel say; 1F1B itself, which all are compared with, is left out."""
    duels = found_duels(pd.DataFrame(list(rows)))
    found = judged(duels, "wall")
    return [
        Kept(
            model,
            name,
            each.verdict,
            each.reason,
            each.ratio,
            each.low,
            each.high,
            sum(start.num_pairs for start in each.starts),
            len(each.starts),
            duels[model][name]["started_at"],
            duels[model][name]["git_commit"] or "",
            duels[model][name]["hardware"]["processor"],
        )
        for model in duels
        for name, each in found[model].items()
        if name != BASE
    ]


def read(source: Path) -> dict[Key, Kept]:
    """A duel from a folder of results, or from a table that was kept.

    Raises:
        MissingRuns: if there is no duel in it.
        ValueError: if it is no such table.
    """
    if source.is_dir():
        kept = kept_of(Experiments(source).cells("cpu_duel").to_dict("records"))
    else:
        with source.open(newline="", encoding="utf-8") as lines:
            kept = [_parsed(source, number, row) for number, row in enumerate(csv.DictReader(lines), start=2)]
    if not kept:
        raise MissingRuns(f"{source}: no contender of a duel; run python -m rpbench -m experiment=cpu_duel")
    return {each.key: each for each in kept}


def _parsed(source: Path, number: int, row: Mapping[str, str | None]) -> Kept:
    try:
        return Kept(**{field.name: field.type(row[field.name]) for field in fields(Kept)})  # type: ignore[operator]
    except (KeyError, TypeError, ValueError) as error:
        names = ",".join(field.name for field in fields(Kept))
        raise ValueError(f"{source} line {number}: {error}; a kept duel has the columns {names}") from None


def compare(first: Mapping[Key, Kept], second: Mapping[Key, Kept]) -> tuple[list[str], bool]:
    """A line a contender and what follows from them; and whether the duel repeats."""
    both = [key for key in first if key in second]
    lines = [f"{'model':18s} {'contender':20s} {'first':>22s} {'second':>22s}  verdicts"]
    for key in both:
        one, other = first[key], second[key]
        words = one.verdict if one.verdict == other.verdict else f"{one.verdict} / {other.verdict}"
        apart = "" if not (one.has_interval and other.has_interval) or one.meets(other) else "; intervals apart"
        lines.append(f"{key[0]:18s} {key[1]:20s} {_shown(one):>22s} {_shown(other):>22s}  {words}{apart}")
    judged_twice = [key for key in both if first[key].has_verdict and second[key].has_verdict]
    same = [key for key in judged_twice if first[key].verdict == second[key].verdict]
    measured_twice = [key for key in both if first[key].has_interval and second[key].has_interval]
    meeting = [key for key in measured_twice if first[key].meets(second[key])]
    lines.append(f"{len(same)} of {len(judged_twice)} verdicts that both give are the same")
    lines.append(f"{len(meeting)} of {len(measured_twice)} intervals meet, at least {LEAST_MEETING:.0%} should")
    for name, own, others in (("first", first, second), ("second", second, first)):
        if alone := [" ".join(key) for key in own if key not in others]:
            lines.append(f"only in the {name}: {', '.join(alone)}")
    repeats = len(same) == len(judged_twice) and len(meeting) >= LEAST_MEETING * len(measured_twice)
    return lines, repeats and bool(measured_twice)


def _shown(kept: Kept) -> str:
    return f"{kept.ratio:.3f} ({kept.low:.3f}-{kept.high:.3f})" if kept.has_interval else "not measured"


def table_of(kept: Iterable[Kept]) -> str:
    """The table that `read` reads."""
    text = StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Kept)], lineterminator="\n")
    writer.writeheader()
    for each in kept:
        row = asdict(each)
        writer.writerow({name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()})
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep or compare, and return the exit status: 1 for a duel that does not repeat, 2 for one that is not there."""
    parser = argparse.ArgumentParser(prog="python -m analysis.driver.duels", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    keep = verbs.add_parser("keep", help="write what a duel says as a small table")
    keep.add_argument("source", type=Path, metavar="RESULTS")
    keep.add_argument("target", type=Path, metavar="CSV")
    against = verbs.add_parser("compare", help="hold one duel against another")
    against.add_argument("first", type=Path)
    against.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.verb == "keep":
            write_atomically(options.target, table_of(read(options.source).values()))
            return 0
        lines, repeats = compare(read(options.first), read(options.second))
    except (MissingRuns, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if repeats else 1


if __name__ == "__main__":
    sys.exit(main())
