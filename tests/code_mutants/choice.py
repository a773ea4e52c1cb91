"""Which tests may see a mutant, in the order to run them."""

import json
from collections import defaultdict
from pathlib import Path

from .mutants import Mutant


class Reach:
    """What each test reached, and how long it took; tests that fail without a fault are left out.

    Args:
        folder: what `python -m tests.code_mutants reach` wrote.
        names: of the blocks, in the order of their numbers.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.seconds: dict[str, float] = {}
        self.known: set[str] = set()  # also those that fail without a fault, or are left out here
        self._of_block: dict[str, set[str]] = defaultdict(set)
        for path in sorted(folder.glob("*.json")):
            for test, (seconds, passed, blocks) in json.loads(path.read_text()).items():
                self.known.add(test)
                if passed:
                    self.seconds[test] = seconds
                    for number in blocks:
                        self._of_block[names[number]].add(test)
        children = folder / "children.jsonl"
        for test, blocks in map(json.loads, children.read_text().splitlines() if children.exists() else ()):
            for number in blocks if test in self.seconds else ():
                self._of_block[names[number]].add(test)

    def tests(self, mutant: Mutant, cap: float) -> dict[str, float]:
        """Tests with their seconds, at most `cap` seconds of them.

        The quickest of each file come first, files of the package's own tests before others, those of analysis last.
        A test that reads what an earlier one of its file made reaches nothing by itself: the rest of the files that
        reach the block comes at the end.
        """
        found, own = self._found(mutant), f"tests/{mutant.package}/"
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self.seconds.__getitem__):
            by_file[test.partition("::")[0]].append(test)

        def near(file: str) -> tuple[bool, bool]:
            return file.startswith("tests/analysis/"), not file.startswith(own)

        files = sorted(by_file, key=lambda file: (near(file), self.seconds[by_file[file][0]]))
        order = [test for file in files for test in by_file[file][:12]]
        order += [test for file in files for test in by_file[file][12:]]
        order.sort(key=lambda test: near(test)[0])
        order += [test for test in self.seconds if test.partition("::")[0] in by_file and test not in found]
        chosen: dict[str, float] = {}
        spent = 0.0
        for test in order:
            if spent + self.seconds[test] <= cap:
                chosen[test] = self.seconds[test]
                spent += self.seconds[test]
        return chosen

    def _found(self, mutant: Mutant) -> set[str]:
        """The tests that reach a mutant's block; where it has no mark, its file; where that has none, its package."""
        of_block = self._of_block.get(f"{mutant.file}:{mutant.block}", set())
        if of_block:
            return of_block
        of_file = set().union(*(tests for name, tests in self._of_block.items() if name.startswith(f"{mutant.file}:")))
        return of_file or {test for test in self.seconds if test.startswith(f"tests/{mutant.package}/")}
