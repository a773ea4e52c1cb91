"""`python -m tests.code_mutants reach`, then `try`, then `table`: what the default suite notices of 301 faults.

`reach` runs the suite once in a marked copy of the tree and notes which tests run which block. `try` draws the mutants,
runs for each the tests that reach it, nearest and fastest first, in another copy, and can be stopped and taken up again.
`table` writes `kept.csv` and the table of the page.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from . import kept
from .mutants import Mutant, drawn
from .reach import ROOT, mark, named_blocks
from .trial import Trials

SEED, EACH = 20261124, 43
CAP_S = 60.0  # of processor time, as the tests took without a fault
TRIED_S = "tried.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.code_mutants", description=__doc__)
    parser.add_argument("verb", choices=("reach", "try", "table"))
    parser.add_argument("--work", type=Path, required=True, help="a folder for copies and what was found")
    parser.add_argument("--part", default="0/1", help="try: one of several processes, as 0/2 and 1/2")
    parser.add_argument("--only", default="", help="try: mutants of files whose path has this in it, also again")
    parser.add_argument("--cap", type=float, default=CAP_S, help="try: seconds of tests for a mutant")
    parser.add_argument("tests", nargs="*", help="reach: these instead of all")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    return {"reach": _reach, "try": _try, "table": _table}[given.verb](given)


def copied(to: Path) -> Path:
    """A copy of the working tree, as git would see it."""
    to.mkdir(parents=True)
    names = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    there = [name for name in names.stdout.decode().split("\0") if name and os.path.lexists(ROOT / name)]
    packed = subprocess.Popen(["tar", "--null", "-T", "-", "-cf", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    unpacked = subprocess.Popen(["tar", "-xf", "-", "-C", str(to)], stdin=packed.stdout)
    packed.stdin.write("\0".join(there).encode())
    packed.stdin.close()
    if packed.wait() or unpacked.wait():
        raise OSError(f"the tree could not be copied to {to}")
    return to


def _reach(given: argparse.Namespace) -> int:
    root = (given.work / "marked").resolve()
    if not root.exists():
        mark(copied(root))
    folder = (given.work / "reach").resolve()
    folder.mkdir(exist_ok=True)
    lent = {"REACH_FOLDER": str(folder), "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.code_mutants.reach", "-p", "no:cacheprovider", "-n", "0", "-q"]
    return subprocess.run([*command, *given.tests], cwd=root, env=os.environ | lent, check=False).returncode


# --- which tests -------------------------------------------------------------------------------------------------


class Reach:
    """What each test reached, how long it took; tests that fail without a fault are left out."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.seconds: dict[str, float] = {}
        self._of_block: dict[str, set[str]] = defaultdict(set)
        for path in folder.glob("*.json"):
            for test, (seconds, passed, blocks) in json.loads(path.read_text()).items():
                if passed:
                    self.seconds[test] = seconds
                    for number in blocks:
                        self._of_block[names[number]].add(test)
        children = folder / "children.jsonl"
        for test, blocks in map(json.loads, children.read_text().splitlines() if children.exists() else ()):
            if test in self.seconds:
                for number in blocks:
                    self._of_block[names[number]].add(test)

    def tests(self, mutant: Mutant, cap: float) -> dict[str, float]:
        """Tests for a mutant in the order to run them: of its folder first, then those that others' files have too.

        A test that shares what an earlier one of its file made reaches nothing by itself, so that the whole files of
        those that reach the block come last.
        """
        found = self._of_block.get(f"{mutant.file}:{mutant.block}", set())
        if not found:  # not marked: those that reach anything of the file, or the package's own
            of_file = (tests for name, tests in self._of_block.items() if name.startswith(f"{mutant.file}:"))
            near = f"tests/{mutant.package}/"
            found = set().union(*of_file) or {test for test in self.seconds if test.startswith(near)}
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self.seconds.__getitem__):
            by_file[test.partition("::")[0]].append(test)
        near = lambda file: (not file.startswith(f"tests/{mutant.package}/"), file.startswith("tests/analysis/"))  # noqa: E731
        files = sorted(by_file, key=lambda file: (near(file), self.seconds[by_file[file][0]]))
        rounds = [test for first, last in ((0, 12), (12, None)) for file in files for test in by_file[file][first:last]]
        rounds.sort(key=lambda test: near(test)[1])
        rounds += [test for test in self.seconds if test.partition("::")[0] in by_file and test not in found]
        chosen, spent = {}, 0.0
        for test in rounds:
            if spent + self.seconds[test] <= cap:
                chosen[test] = self.seconds[test]
                spent += self.seconds[test]
        return chosen


def _try(given: argparse.Namespace) -> int:
    part, parts = map(int, given.part.split("/"))
    root = (given.work / f"copy{part}").resolve()
    if not root.exists():
        copied(root)
    if Path.cwd() != root:  # again, in the copy, whose modules are then imported
        command = [sys.executable, "-m", "tests.code_mutants", *sys.argv[1:]]
        command[command.index("--work") + 1] = str(given.work.resolve())
        return subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=False).returncode
    reach = Reach(given.work / "reach", named_blocks())
    out = given.work / f"tried{part}.jsonl"
    done = {tuple(each["key"]) for each in kept.read(given.work)}
    mutants = [mutant for number, mutant in enumerate(drawn(SEED, EACH)) if number % parts == part]
    chosen = [each for each in mutants if (given.only in each.file if given.only else each.key not in done)]
    files: set[str] = set()

    def asked():
        for mutant in chosen:
            yield mutant, reach.tests(mutant, given.cap)

    def told(mutant: Mutant, status: str, by: str, number: int, seconds: float) -> None:
        row = {"key": mutant.key, "line": mutant.line, "kind": mutant.kind, "status": status, "by": by}
        with out.open("a") as file:
            file.write(json.dumps(row | {"tests": number, "seconds": round(seconds, 1)}) + "\n")

    for mutant in chosen:
        files |= {test.partition("::")[0] for test in reach.tests(mutant, given.cap)}
    print(f"{len(chosen)} mutants, tests of {len(files)} files", flush=True)
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    return pytest.main([*options, *sorted(files)], plugins=[Trials(root, asked(), told)])


def _table(given: argparse.Namespace) -> int:
    return kept.write(given.work, SEED)


if __name__ == "__main__":
    sys.exit(main())
