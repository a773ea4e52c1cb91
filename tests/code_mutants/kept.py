"""What was found of each mutant: `kept.csv`, with the reasons of those that live, and the table of the page."""

import csv
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .mutants import Fault, Mutant, drawn, mutants_of
from .reach import PACKAGES, ROOT

KEPT = Path(__file__).with_name("kept.csv")
PAGE = ROOT / "docs" / "explanation" / "evidence.md"
BEGIN, END = "<!-- faults in the code -->", "<!-- end of the faults in the code -->"
BAR = 0.92
DEAD = ("killed", "hung")
EQUAL = "changes nothing"
_STATES = (*DEAD, "refused at import", EQUAL, "survived")
_FIELDS = ("file", "function", "kind", "old", "new", "place", "line", "status", "by", "why")


@dataclass(frozen=True)
class Row(Fault):
    """A fault, what became of it, the test that failed first, and why it lives if it does."""

    status: str
    by: str
    why: str = ""


def rows() -> list[Row]:
    """Everything in `kept.csv`."""
    if not KEPT.exists():
        return []
    with KEPT.open(newline="") as file:
        return [Row(**each | {"place": int(each["place"]), "line": int(each["line"])}) for each in csv.DictReader(file)]


def tried(work: Path) -> list[dict]:
    """Results of all processes, of each mutant the last one: that of a test which failed, if one has."""
    found = [json.loads(line) for path in sorted(work.glob("tried*.jsonl")) for line in path.read_text().splitlines()]
    return list(
        {tuple(row["key"]): row for row in sorted(found, key=lambda row: (row["status"] in DEAD, row["at"]))}.values()
    )


def keep(work: Path, mutants: Iterable[Mutant], seed: int) -> None:
    """Write `kept.csv` and the page; what was not tried again is as it was.

    Reasons are written by hand; one stays as long as its mutant lives.
    """
    results = {row.key: {"status": row.status, "by": row.by} for row in rows()}
    results |= {tuple(row["key"]): row for row in tried(work)}
    reasons = {row.key: (row.status, row.why) for row in rows() if row.why}
    found = []
    for mutant in mutants:
        status, by = results[mutant.key]["status"], results[mutant.key]["by"]
        before, why = reasons.get(mutant.key, ("", ""))
        status = EQUAL if status == "survived" and before == EQUAL else status
        line = (mutant.file, mutant.function, mutant.kind, mutant.old, mutant.new, mutant.place, mutant.line)
        found.append(Row(*line, status, by, why if status in (EQUAL, "survived") else ""))
    with KEPT.open("w", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({field: getattr(row, field) for field in _FIELDS} for row in found)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{page(found, seed, datetime.now(UTC).date().isoformat())}{END}{after}")


# --- the page ----------------------------------------------------------------------------------------------------


def share(found: Iterable[Row]) -> float:
    """Of those that change something and can be imported, how many the suite notices."""
    counted = [row.status in DEAD for row in found if row.status in (*DEAD, "survived")]
    return sum(counted) / len(counted)


def page(found: list[Row], seed: int, date: str) -> str:
    """The table by package, and everything that lives."""
    lines = [f"{len(found)} mutants, drawn with seed {seed}, tried on {date}.", ""]
    lines += ["| package | mutants | " + " | ".join(_STATES) + " | share |", "| --- |" + " --- |" * (len(_STATES) + 2)]
    groups = [(package, [row for row in found if row.package == package]) for package in PACKAGES]
    for name, group in [*groups, ("all", found)]:
        states = Counter(row.status for row in group)
        numbers = " | ".join(str(states[state]) for state in _STATES)
        lines.append(f"| {name} | {len(group)} | {numbers} | {100 * share(group):.1f} % |")
    for state, title in (("survived", "Not noticed:"), (EQUAL, "Changing nothing:")):
        living = [row for row in found if row.status == state]
        if living:
            lines += ["", title, "", *(_told(row) for row in living)]
    return "\n".join([*lines, ""])


def _told(row: Row) -> str:
    old, new = (" ".join(each.split()).replace("`", "'") for each in (row.old, row.new))
    short = [each if len(each) <= 100 else f"{each[:97]}..." for each in (old, new)]
    place = ", ".join(f"`{each}`" for each in (row.file.removeprefix("rpbench/"), row.function) if each)  # lines move
    return f"- {place}, {row.kind}: `{short[0]}` → `{short[1]}`. {row.why}"


# --- what is kept, in the tree as it is --------------------------------------------------------------------------


def current(seed: int, each: int) -> list[Mutant]:
    """The mutants of `kept.csv` that the tree still has; others of their package, newly drawn, for those that are gone.

    Where nothing is kept yet, all are drawn.
    """
    there = {mutant.key: mutant for _, mutant in found_again(rows()) if mutant is not None}
    chosen = list(there.values())
    lines = {(mutant.file, mutant.line) for mutant in chosen}
    left = {package: each - sum(mutant.package == package for mutant in chosen) for package in PACKAGES}
    for mutant in drawn(seed, 2 * each):
        if left[mutant.package] > 0 and (mutant.file, mutant.line) not in lines:
            left[mutant.package] -= 1
            chosen.append(mutant)
    return sorted(chosen, key=lambda mutant: PACKAGES.index(mutant.package))


# --- the sample --------------------------------------------------------------------------------------------------


def sample(size: int, seed: int) -> list[Row]:
    """Some of the mutants that change something, always the same."""
    return random.Random(f"sample {seed}").sample([row for row in rows() if row.status in (*DEAD, "survived")], size)


def found_again(wanted: Iterable[Row], root: Path = ROOT) -> list[tuple[Row, Mutant | None]]:
    """The mutants of rows in the tree as it is now; None where a row's text is gone."""
    by_file: dict[str, list[Row]] = defaultdict(list)
    for row in wanted:
        by_file[row.file].append(row)
    pairs: list[tuple[Row, Mutant | None]] = []
    for name, group in by_file.items():
        there = mutants_of(root / name, root) if (root / name).exists() else []
        keyed = {mutant.key: mutant for mutant in there}
        pairs += [(row, keyed.get(row.key)) for row in group]
    return pairs
