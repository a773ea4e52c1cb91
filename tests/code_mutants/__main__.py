"""What the default suite notices of faults in the code.

    python -m tests.code_mutants reach --work DIR    run the suite once in a marked copy: which tests run which block
    python -m tests.code_mutants try --work DIR      draw the mutants; for each, run the tests that reach it
    python -m tests.code_mutants table --work DIR    write `kept.csv` and the page's table
    python -m tests.code_mutants sample --work DIR   forty of them by the tests that are known to notice, and the faults
                                                     that engine and reference would share; exit 1 if one lives

`reach` takes the suite's time once. `try` can be stopped and taken up again, and works in several processes with
`--part 0/2` and `--part 1/2`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from . import kept, shared
from .choice import Reach
from .mutants import Mutant
from .reach import ROOT, mark, named_blocks
from .trial import Trials

SEED, EACH, SAMPLE = 20261124, 43, 40
CAP_S = 5.0  # of processor time, as tests took without a fault
_PLAIN = ("-n", "0", "-q", "-p", "no:cacheprovider")
Asked = list[tuple[Mutant, dict[str, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.code_mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("reach", "try", "table", "sample"))
    parser.add_argument("--work", type=Path, required=True, help="a folder for copies of the tree and what was found")
    parser.add_argument("--part", default="0/1", help="try: which of how many processes")
    parser.add_argument("--only", help="try: mutants of files whose path has this in it, also again")
    parser.add_argument("--again", action="store_true", help="try: those that survived, new tests first")
    parser.add_argument("--cap", type=float, default=CAP_S, help="try: seconds of tests for a mutant")
    parser.add_argument("tests", nargs="*", help="reach: these instead of all")
    given = parser.parse_intermixed_args()
    given.work = given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.verb == "reach":
        return _reach(given)
    if given.verb == "table":
        kept.keep(given.work, kept.current(SEED, EACH), SEED)
        return 0
    part, parts = map(int, given.part.split("/"))
    copy = given.work / f"copy-{given.verb}-{part}"
    if Path.cwd() == copy:
        return _sample(given) if given.verb == "sample" else _try(given, part, parts)
    _copied(copy)
    begun = [sys.executable, "-m", "tests.code_mutants", *sys.argv[1:]]
    begun[begun.index("--work") + 1] = str(given.work)
    return subprocess.run(begun, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, check=False).returncode


def _copied(to: Path) -> None:
    """A copy of the working tree as git sees it; what is there already is brought up to date."""
    to.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    names = b"\0".join(name for name in listed.stdout.split(b"\0") if name and os.path.lexists(ROOT / name.decode()))
    packed = subprocess.run(
        ["tar", "--null", "-T", "-", "-cf", "-"], cwd=ROOT, input=names, capture_output=True, check=True
    )
    subprocess.run(["tar", "-xf", "-", "-C", str(to)], input=packed.stdout, check=True)


def _reach(given: argparse.Namespace) -> int:
    root, folder = given.work / "marked", given.work / "reach"
    if not root.exists():
        _copied(root)
        mark(root)
    folder.mkdir(exist_ok=True)
    lent = {"REACH_FOLDER": str(folder), "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.code_mutants.reach", *_PLAIN, *given.tests]
    return subprocess.run(command, cwd=root, env=os.environ | lent, check=False).returncode


def _try(given: argparse.Namespace, part: int, parts: int) -> int:
    reach = Reach(given.work / "reach", named_blocks())
    done = {row.key: row.status for row in kept.rows()}
    done |= {tuple(row["key"]): row["status"] for row in kept.tried(given.work)}
    mine = [mutant for number, mutant in enumerate(kept.current(SEED, EACH)) if number % parts == part]
    if given.only:
        chosen = [mutant for mutant in mine if given.only in mutant.file]
    else:
        chosen = [mutant for mutant in mine if mutant.key not in done or (given.again and mutant.key in _alive(done))]
    asked = [(mutant, reach.tests(mutant, given.cap)) for mutant in chosen]
    return _run(asked, given.work / f"tried-{part}.jsonl", reach.known)


def _alive(done: dict) -> set:
    """Those that no test has failed for yet, but for what is known to change nothing."""
    equal = {row.key for row in kept.rows() if row.status == kept.EQUAL}
    return {key for key, status in done.items() if status not in kept.DEAD} - equal


def _run(asked: Asked, out: Path, known: set[str] | None = None) -> int:
    """Try mutants, and write down what became of each; tests that are not known are new, and run first."""

    def told(mutant: Mutant, status: str, by: str, number: int, seconds: float) -> None:
        row = {"key": mutant.key, "status": status, "by": by, "tests": number}
        with out.open("a") as file:
            file.write(json.dumps(row | {"seconds": round(seconds, 1), "at": time.time()}) + "\n")

    own = {str(path) for mutant, _ in asked if known for path in Path(f"tests/{mutant.package}").rglob("test_*.py")}
    named = sorted({test.partition("::")[0] for _, tests in asked for test in tests} | own)
    print(f"{len(asked)} mutants, tests of {len(named)} files", flush=True)
    return pytest.main([*_PLAIN, *named], plugins=[Trials(ROOT, asked, told, known)])


def _sample(given: argparse.Namespace) -> int:
    """Each mutant by the test that noticed it before; one that lived lives on, and one whose text is gone is named."""
    out = given.work / "sample.jsonl"
    out.unlink(missing_ok=True)
    pairs = kept.found_again(kept.sample(SAMPLE, SEED))
    gone = [row for row, mutant in pairs if mutant is None]
    asked = [
        (mutant, {row.by: 30.0, row.by.partition("::")[0]: 1.0})  # random cases may differ: then the rest of its file
        for row, mutant in pairs
        if mutant is not None and row.status in kept.DEAD
    ]
    asked += [(mutant, dict.fromkeys(tests, 30.0)) for mutant, tests in shared.faults()]
    unchanged = shared.nothing()
    asked.append((unchanged, {test: 30.0 for _, tests in asked for test in tests if "::" in test}))
    _run(asked, out)
    found = {tuple(row["key"]): row["status"] for row in map(json.loads, out.read_text().splitlines())}
    living = [mutant for mutant, _ in asked if found.get(mutant.key) not in kept.DEAD and mutant != unchanged]
    for row in gone:
        print(f"gone: {row.file} {row.function}: {row.old}")
    for mutant in living:
        print(f"lives: {mutant.file}:{mutant.line} {mutant.old} -> {mutant.new}: {found.get(mutant.key)}")
    dead = sum(found.get(mutant.key) in kept.DEAD for _, mutant in pairs if mutant is not None)
    print(f"{dead} of {SAMPLE - len(gone)} mutants of the sample are noticed; without a fault: {found[unchanged.key]}")
    enough = dead >= kept.BAR * (SAMPLE - len(gone)) and len(gone) <= SAMPLE // 10
    return 0 if enough and not living and found[unchanged.key] == "survived" else 1


if __name__ == "__main__":
    sys.exit(main())
