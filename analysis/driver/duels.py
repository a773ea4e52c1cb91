"""Repeatability of duels: complete duels kept as small tables, and compared with one another.

    python -m analysis.driver.duels keep RESULTS CSV [--experiment aa_duel]
    python -m analysis.driver.duels compare FIRST SECOND
    python -m analysis.driver.duels over RESULTS CONTENDER [NAME ...]

FIRST and SECOND are folders of results or kept tables of two duels. Verdicts should be the same and intervals should
overlap: `compare` prints a row for each contender and both counts (exit status 1 if a verdict differs or fewer than
95 % of the intervals overlap), and names what only one duel has.

`over` compares contenders, the named ones or all, with another one than 1F1B. Verdicts that are asked for together are
corrected for their number, so choose the names before you see results.

Records of earlier versions are read as well, with today's rules for verdicts: their measurements stay true of the
commit in the table. `analysis/kept/` holds five duels and an A/A duel, which the report shows.
"""

import argparse
import csv
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path

from analysis.exhibits.figures.duel import by_model, plan
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.records import record
from rpbench.records.record import Record, as_csv, write_atomically
from rpbench.run.modes.duel.findings import findings, findings_over, timed
from rpbench.run.modes.duel.verdict import Finding
from rpbench.whole_file import read_text

LEAST_MEETING = 0.95
NO_VERDICT = "no verdict"
KEPT = Path(__file__).parents[1] / "kept"
# Two earlier commits, which chose the plan with the best simulation (1, 2) or the first of a run-off (3).
EARLIER = tuple(KEPT / f"cpu_duel_{number}.csv" for number in (1, 2, 3))
# One commit: the plan with the best simulation, unless another is significantly faster in a run-off.
DUELS = tuple(KEPT / f"cpu_duel_{number}.csv" for number in (4, 5))
SAME = KEPT / "aa_duel.csv"
_SEAL = "# digest of the lines above: "

Key = tuple[str, str]  # model, contender


@dataclass(frozen=True)
class Kept:
    """A contender's speed over 1F1B by the clock in one duel, with its 95 % interval.

    Every duel measures its layers and searches anew, so plans may differ, also that of 1F1B.
    """

    model: str
    contender: str
    plan: str
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
    def has_interval(self) -> bool:
        return math.isfinite(self.ratio) and math.isfinite(self.high)

    def meets(self, other: "Kept") -> bool:
        """True if both intervals overlap."""
        return max(self.low, other.low) <= min(self.high, other.high)


def records_of(results: Path, experiment: str) -> list[Record]:
    """The records of a duel by any version of the code; MissingRuns if the duel or one of its records is missing."""
    if not results.is_dir():
        raise MissingRuns(f"{results}: no folder of results; what is kept as a table has no runs")
    manifest = Experiments(results).manifest(experiment)
    if manifest is None:
        raise MissingRuns(f"{results}: no contender of a duel; run python -m rpbench -m experiment={experiment}")
    rows = [record.read(results / run_id) for cell in manifest.cells for run_id in cell.run_ids]
    found = [row for row in rows if row is not None]
    if lost := len(rows) - len(found):
        raise MissingRuns(f"{results}: {lost} of {len(rows)} records are gone; run {manifest.command}")
    return found


def kept_of(rows: Iterable[Record]) -> list[Kept]:
    """The rows of a duel's records; all verdicts are corrected together."""
    duels = by_model(rows)
    together = sum(len(timed(duel)) for duel in duels.values())
    return [
        Kept(
            model,
            name,
            plan(duel[name]),
            each.verdict,
            each.reason,
            each.ratio,
            each.low,
            each.high,
            sum(start.num_pairs for start in each.starts),
            len(each.starts),
            duel[name]["started_at"],
            duel[name]["git_commit"] or "",
            duel[name]["hardware"]["processor"],
        )
        for model, duel in duels.items()
        for name, each in findings(duel, "wall", together).items()
    ]


def over(rows: Iterable[Record], base: str, names: Sequence[str] = ()) -> list[str]:
    """A line for each named contender, or for all but the base: its speed over the base by the clock.

    All verdicts are corrected together, and all runs count for the differences between starts. LookupError if the base
    or a name has no runs.
    """
    duels = by_model(rows)
    together = sum(len(names) or len(timed(duel)) - 1 for duel in duels.values())
    lines = [f"{'model':18s} {'contender':20s} {'over ' + base:>22s}  verdict"]
    for model, duel in duels.items():
        found = findings_over(duel, "wall", base, together)
        for name in names or found:
            if name not in found:
                raise LookupError(f"{name}: not held against {base}; one of {', '.join(found)}")
            each = found[name]
            shown = _shown(each, math.isfinite(each.high))
            lines.append(f"{model:18s} {name:20s} {shown:>22s}  {each.verdict}{each.reason and '; ' + each.reason}")
    return lines


def read(source: Path, experiment: str = "cpu_duel") -> dict[Key, Kept]:
    """A duel from a folder of results or a kept table; MissingRuns without a duel, ValueError for another file."""
    if source.is_dir():
        kept = kept_of(records_of(source, experiment))
    else:
        lines = StringIO(_unsealed(source), newline="")
        kept = [_parsed(source, number, row) for number, row in enumerate(csv.DictReader(lines), start=2)]
    if not kept:
        raise MissingRuns(f"{source}: no contender of a duel; run python -m rpbench -m experiment={experiment}")
    return {each.key: each for each in kept}


def sealed(table: str) -> str:
    """A table with a digest as its last line."""
    return f"{table}{_SEAL}{hashlib.sha256(table.encode()).hexdigest()[:16]}\n"


def _unsealed(source: Path) -> str:
    """The table in a file without its digest; ValueError if that is wrong."""
    try:
        text = read_text(source)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    table = text[: text.rfind(_SEAL)] if _SEAL in text else ""
    if text != sealed(table):
        raise ValueError(
            f"{source}: no duel as it was kept: its last line is not the digest of the others; take it from the "
            "commit it is of, or keep the duel again"
        )
    return table


def _parsed(source: Path, number: int, row: Mapping[str, str | None]) -> Kept:
    try:
        return Kept(**{field.name: field.type(row[field.name]) for field in fields(Kept)})  # type: ignore[operator]
    except (KeyError, TypeError, ValueError) as error:
        names = ",".join(field.name for field in fields(Kept))
        raise ValueError(f"{source} line {number}: {error}; a kept duel has the columns {names}") from None


def compare(first: Mapping[Key, Kept], second: Mapping[Key, Kept]) -> tuple[list[str], bool]:
    """A line for each contender, the counts below them, and whether the duel repeats."""
    both = [key for key in first if key in second]
    lines = [f"{'model':18s} {'contender':20s} {'first':>22s} {'second':>22s}  verdicts"]
    for key in both:
        one, other = first[key], second[key]
        words = one.verdict if one.verdict == other.verdict else f"{one.verdict} / {other.verdict}"
        apart = "" if not (one.has_interval and other.has_interval) or one.meets(other) else "; intervals apart"
        plans = "" if one.plan == other.plan else f"; plans {one.plan} and {other.plan}"
        ratios = " ".join(f"{_shown(each, each.has_interval):>22s}" for each in (one, other))
        lines.append(f"{key[0]:18s} {key[1]:20s} {ratios}  {words}{apart}{plans}")
    judged_twice = [key for key in both if NO_VERDICT not in (first[key].verdict, second[key].verdict)]
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


def _shown(found: Kept | Finding, measured: bool) -> str:
    return f"{found.ratio:.3f} ({found.low:.3f}-{found.high:.3f})" if measured else "not measured"


def table_of(kept: Iterable[Kept]) -> str:
    """The table that `read` reads."""
    rows = [
        {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in asdict(each).items()}
        for each in kept
    ]
    return sealed(as_csv(rows, [field.name for field in fields(Kept)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 for a duel that does not repeat, 2 for a missing one."""
    parser = argparse.ArgumentParser(prog="python -m analysis.driver.duels", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    keep = verbs.add_parser("keep", help="write what a duel says as a small table")
    keep.add_argument("source", type=Path, metavar="RESULTS")
    keep.add_argument("target", type=Path, metavar="CSV")
    keep.add_argument("--experiment", choices=("cpu_duel", "aa_duel"), default="cpu_duel")
    against = verbs.add_parser("compare", help="hold one duel against another")
    against.add_argument("first", type=Path)
    against.add_argument("second", type=Path)
    beside = verbs.add_parser("over", help="hold contenders against another one than 1F1B")
    beside.add_argument("source", type=Path, metavar="RESULTS")
    beside.add_argument("base", metavar="CONTENDER")
    beside.add_argument("names", metavar="NAME", nargs="*", help="who is asked about; all if none is named")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "over":
            print("\n".join(over(records_of(options.source, "cpu_duel"), options.base, options.names)))
            return 0
        if options.verb == "keep":
            write_atomically(options.target, table_of(read(options.source, options.experiment).values()))
            return 0
        lines, repeats = compare(read(options.first), read(options.second))
    except (LookupError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if repeats else 1


if __name__ == "__main__":
    sys.exit(main())
