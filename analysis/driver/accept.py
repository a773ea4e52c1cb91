"""Accept the values of a folder of results as the expected ones.

    python -m analysis.driver.accept [--results DIR] [--only NAME ...] [--because "..."]

Prints a line for each value that changes. Writes `analysis/claims/expected/`: a table for each experiment that was run
in full (`analysis.claims.own.regression`), the values of declared contradictions, and those of our own statements with
their present digits; `because.jsonl` there records reason, date and commit. Nothing is written without a reason, or
while a claim is red that no accepted value can make green.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from analysis.claims.catalogue import all_claims, evaluate, red_text
from analysis.claims.claim import CONTRADICTED, EVALUATED, MISSED, Verdict
from analysis.claims.expected import BECAUSE, CONTRADICTIONS, FOLDER, STATEMENTS, read_table
from analysis.claims.own.regression import CONTENDER, row_of
from analysis.driver.sweeps import ROOT, experiments
from analysis.records.experiments import Experiments, MissingRuns
from analysis.records.published import Printed
from rpbench.records import provenance
from rpbench.records.manifest import ENDED, manifest_names, no_sweep_in
from rpbench.records.record import append_line, as_csv, write_atomically

Rows = Sequence[Mapping[str, str]]

_DIGITS = 4  # significant digits of a new statement


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the changes; exit status 1 while something else is red, 2 without a reason or a sweep."""
    parser = argparse.ArgumentParser(prog="python -m analysis.driver.accept", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="folder of the records")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="tables to write; default: all that can be")
    parser.add_argument("--because", metavar="WHY", help="why these values change; kept beside the tables")
    options = parser.parse_args(arguments)
    if not manifest_names(options.results):
        print(no_sweep_in(options.results), file=sys.stderr)
        return 2
    found = Experiments(options.results)
    verdicts = evaluate(
        all_claims(),
        found,
        lambda need: bool(found.manifest(need.experiment)) and found.plans(need.experiment, need.choices),
    )
    tables = dict(_tables(found, verdicts, options.only))
    changes = {name: lines for name, rows in tables.items() if (lines := list(changed(name, rows)))}
    for name, lines in changes.items():
        print("\n".join(f"{name}: {line}" for line in lines))
    if blocking := _blocking(found, verdicts):
        print("nothing is accepted while this is red, which no accepted value makes green:", file=sys.stderr)
        print(blocking, file=sys.stderr)
        return 1
    if changes and not (options.because or "").strip():
        print('nothing is written without a reason: give --because "why these values change"', file=sys.stderr)
        return 2
    for name in changes:
        columns = dict.fromkeys(key for row in tables[name] for key in row)
        filled = [key for key in columns if any(row.get(key) for row in tables[name])]
        rows = [{key: row.get(key, "") for key in filled} for row in tables[name]]
        write_atomically(FOLDER / f"{name}.csv", as_csv(rows))
    if changes:
        reason = {
            "accepted_at": provenance.now(),
            "commit": provenance.git_commit(),
            "because": options.because.strip(),
            "changed": {name: len(lines) for name, lines in changes.items()},
        }
        append_line(FOLDER / BECAUSE, json.dumps(reason))
    print(f"{sum(map(len, changes.values()))} values of {len(changes)} tables changed", file=sys.stderr)
    return 0


def _blocking(found: Experiments, verdicts: Iterable[Verdict]) -> str:
    """A line for each verdict that stays red whatever is accepted."""

    def can_be_accepted(each: Verdict) -> bool:
        declared = each.kind in (CONTRADICTED, MISSED) and bool(each.claim.contradiction)
        return declared or (each.claim.whose == "ours" and each.kind in EVALUATED)

    red = [each for each in verdicts if each.red and not can_be_accepted(each)]
    return "\n".join(filter(None, (*(f"  {line}" for line in found.refusals()), red_text(red))))


def _tables(found: Experiments, verdicts: Sequence[Verdict], only: Sequence[str] | None) -> Iterator[tuple[str, Rows]]:
    """The tables that can be made of the records, with their names."""
    made = {CONTRADICTIONS: _contradictions, STATEMENTS: _statements}
    for name in sorted({*experiments(), *made}):
        if only is not None and name not in only:
            continue
        if name in made:
            merged = {row["claim"]: row for row in (*read_table(name), *made[name](verdicts))}
            yield name, [merged[claim] for claim in sorted(merged)]  # rows without a new value stay
        elif rows := list(_cells(found, name)):
            yield name, rows


def changed(name: str, rows: Rows) -> Iterator[str]:
    """A line for each changed value of a table: row, field, old and new value."""
    before, now = ({_key(row): row for row in each} for each in (read_table(name), rows))
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if old is None or new is None:
            yield f"{' '.join(filter(None, key))}: {'a new row' if old is None else 'the row goes'}"
            continue
        for field in dict.fromkeys((*old, *new)):
            was, becomes = old.get(field) or "nothing", new.get(field) or "nothing"
            if was != becomes:
                yield f"{' '.join(filter(None, key))}: {field} {was} -> {becomes}"


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    """The claim of a row, or the choices and the contender of its cell."""
    named = {name: text for name, text in row.items() if name in ("claim", CONTENDER) or name.startswith("cell.")}
    return tuple(named[name] or "" for name in sorted(named) if named[name])


def _cells(found: Experiments, experiment: str) -> Iterable[dict[str, str]]:
    """A row for each record of an experiment; none if it was not run in full."""
    try:
        rows, manifest = found.checked(experiment), found.manifest(experiment)
    except MissingRuns:
        return
    if manifest is None or manifest.overrides or any(cell.state not in ENDED for cell in manifest.cells):
        return
    swept = [key for key in manifest.cells[0].overrides if len({cell.overrides[key] for cell in manifest.cells}) > 1]
    for row in rows:
        overrides = manifest.cells[row["cell"]].overrides
        yield row_of({key: overrides[key] for key in swept}, row)


def _contradictions(verdicts: Iterable[Verdict]) -> Iterable[dict[str, str]]:
    for verdict in verdicts:
        declared = verdict.kind == CONTRADICTED and verdict.claim.contradiction
        if declared or verdict.kind == MISSED:
            value = verdict.value
            text = value if isinstance(value, str) else f"{value:.8g}"
            tolerance = "" if isinstance(value, str) else f"{1e-6 * abs(value or 0) + 1e-9:.2g}"
            yield {"claim": verdict.claim.id, "value": text, "tolerance": tolerance}


def _statements(verdicts: Iterable[Verdict]) -> Iterable[dict[str, str]]:
    """Our statements with their present digits and tolerances; new ones with `_DIGITS` and half a unit."""
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
            tolerance = 1e-3 * abs(float(text)) if "e" in text else Printed(text, "").half_unit
            yield {"claim": claim.id, "value": text, "tolerance": f"{tolerance:g}"}
        else:
            decimals = Printed(before["value"], "").decimals
            yield {"claim": claim.id, "value": f"{value:.{decimals}f}", "tolerance": before["tolerance"]}


if __name__ == "__main__":
    sys.exit(main())
