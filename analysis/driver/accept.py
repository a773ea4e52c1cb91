"""Accept what a folder of results says as what is expected from now on; the diff of the tables is for review.

    python -m analysis.driver.accept [--results DIR] [--only NAME ...]

Writes `analysis/claims/expected/`: a table for each experiment that was run whole (`analysis.claims.regression`), the
values of declared contradictions, and those of our own statements in as many digits as they have now.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path

from analysis.claims.catalogue import all_claims, evaluate
from analysis.claims.claim import CONTRADICTED, EVALUATED, MISSED, Verdict
from analysis.claims.expected import CONTRADICTIONS, FOLDER, STATEMENTS, read_table
from analysis.claims.regression import row_of
from analysis.driver.sweeps import ROOT, experiments
from analysis.records.experiments import ENDED, Experiments, MissingRuns
from rpbench.harness.record import write_atomically

_DIGITS = 4  # significant, of a statement that is new


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m analysis.driver.accept", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="folder of the records")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="tables to write; default: all that can be")
    options = parser.parse_args(arguments)
    found = Experiments(options.results)
    tables = {name: rows for name in experiments() if (rows := list(_cells(found, name)))}
    verdicts = evaluate(all_claims(), found)
    tables[CONTRADICTIONS] = _merged(CONTRADICTIONS, _contradictions(verdicts))
    tables[STATEMENTS] = _merged(STATEMENTS, _statements(verdicts))
    for name in sorted(tables if options.only is None else set(options.only) & set(tables)):
        _write(name, tables[name])
        print(f"{name}: {len(tables[name])} rows", file=sys.stderr)
    return 0


def _cells(found: Experiments, experiment: str) -> Iterable[dict[str, str]]:
    """A row for each record of an experiment that was run whole; nothing for one that was not."""
    try:
        frame, manifest = found.cells(experiment), found.manifest(experiment)
    except MissingRuns:
        return
    if manifest is None or manifest.overrides or any(cell.state not in ENDED for cell in manifest.cells):
        return
    swept = [key for key in manifest.cells[0].overrides if len({cell.overrides[key] for cell in manifest.cells}) > 1]
    for row in (row for row in found.rows if row["run_id"] in set(frame["run_id"])):
        cell = next(cell for cell in manifest.cells if row["run_id"] in cell.run_ids)
        yield row_of({key: cell.overrides[key] for key in swept}, row)


def _contradictions(verdicts: Iterable[Verdict]) -> Iterable[dict[str, str]]:
    for verdict in verdicts:
        declared = verdict.kind == CONTRADICTED and verdict.claim.contradiction
        if declared or verdict.kind == MISSED:
            value = verdict.value
            text = value if isinstance(value, str) else f"{value:.8g}"
            tolerance = "" if isinstance(value, str) else f"{1e-6 * abs(value or 0) + 1e-9:.2g}"
            yield {"claim": verdict.claim.id, "value": text, "tolerance": tolerance}


def _statements(verdicts: Iterable[Verdict]) -> Iterable[dict[str, str]]:
    """Statements with the digits and the tolerance that they have; new ones in a few digits and half a unit."""
    known = {row["claim"]: row for row in read_table(STATEMENTS)}
    for verdict in verdicts:
        claim, value = verdict.claim, verdict.value
        if STATEMENTS not in (claim.published.source if claim.published else "") or verdict.kind not in EVALUATED:
            continue
        before = known.get(claim.id)
        if isinstance(value, str) or value is None:
            yield {"claim": claim.id, "value": str(value), "tolerance": ""}
        elif before is None:
            text = f"{value:.{_DIGITS}g}"
            yield {"claim": claim.id, "value": text, "tolerance": f"{_half_unit(text):g}"}
        else:
            decimals = len(before["value"].partition(".")[2])
            yield {"claim": claim.id, "value": f"{value:.{decimals}f}", "tolerance": before["tolerance"]}


def _half_unit(text: str) -> float:
    return 0.5 * 10.0 ** -len(text.partition(".")[2]) if "e" not in text else 1e-3 * abs(float(text))


def _merged(name: str, rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The rows over those that the table has: what was not looked at stays."""
    merged = {row["claim"]: dict(row) for row in read_table(name)} | {row["claim"]: row for row in rows}
    return [merged[claim] for claim in sorted(merged)]


def _write(name: str, rows: Sequence[Mapping[str, str]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if any(row.get(key) for row in rows)]
    text = StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(FOLDER / f"{name}.csv", text.getvalue())


if __name__ == "__main__":
    sys.exit(main())
