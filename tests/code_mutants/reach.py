"""Which tests run which block of statements: a copy of the code in which each block says that it was reached.

`mark` writes the copy's packages anew, `pytest -p tests.code_mutants.reach` in the copy notes what each test reached. A
block is named by its file and the line of its first statement. What a module does when it is imported, and what numba
compiles, is not marked.
"""

import ast
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Compiled by numba, which may use no list of ours.
COMPILED = ("rpbench/sim/fair_shares.py", "rpbench/sim/kernels.py")
PACKAGES = ("ir", "sim", "cost", "plan", "mesh", "engine", "torch_runtime")

_BEGIN = """
def _note_what_is_reached():
    import atexit, builtins, json, multiprocessing.util, os
    builtins.__reached__ = reached = bytearray({count})
    test, folder, parent = os.environ.get("PYTEST_CURRENT_TEST"), os.environ.get("REACH_FOLDER"), os.getpid()
    def leave():
        blocks = [number for number, hit in enumerate(reached) if hit]
        with open(folder + "/children.jsonl", "a") as out:
            out.write(json.dumps([test.rpartition(" (")[0], blocks]) + "\\n")
        reached[:] = bytes(len(reached))
    if test and folder:
        atexit.register(leave)
        multiprocessing.util.Finalize(None, leave, exitpriority=1)
_note_what_is_reached()
"""


def sources(root: Path = ROOT) -> list[Path]:
    """The files that mutants are drawn from."""
    return sorted(path for package in PACKAGES for path in (root / "rpbench" / package).rglob("*.py"))


def blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Lists of statements inside functions, outer ones first."""

    def inside(node: ast.AST, in_function: bool) -> Iterator[list[ast.stmt]]:
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for _, value in ast.iter_fields(node):
            statements = isinstance(value, list) and value and isinstance(value[0], ast.stmt)
            if statements and in_function and not isinstance(node, ast.ClassDef):
                yield value
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from inside(child, in_function)

    yield from inside(tree, False)


def named_blocks(root: Path = ROOT) -> list[str]:
    """`file:line` of every block, in the order of their numbers."""
    return [f"{path.relative_to(root)}:{block[0].lineno}" for path, _, found in _marked(root) for block in found]


def mark(root: Path) -> None:
    """Let every block of a copy of the tree say that it was reached."""
    number = 0
    for path, tree, found in list(_marked(root)):
        for block in found:
            after = int(isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant) and len(block) > 1)
            block.insert(after, ast.parse(f"__reached__[{number}] = 1").body[0])
            number += 1
        path.write_text(ast.unparse(tree))
    first = root / "rpbench" / "__init__.py"
    first.write_text(first.read_text() + _BEGIN.format(count=number))


def _marked(root: Path) -> Iterator[tuple[Path, ast.Module, list[list[ast.stmt]]]]:
    for path in sources(root):
        if str(path.relative_to(root)) not in COMPILED:
            tree = ast.parse(path.read_text())
            yield path, tree, list(blocks(tree))


class Noting:
    """Writes for each test file what its tests reached, how long each took, and whether it passed."""

    def __init__(self, folder: Path) -> None:
        import builtins

        import rpbench  # noqa: F401  the copy's, which makes the list

        self._reached, self._folder = builtins.__reached__, folder  # type: ignore[attr-defined]
        self._began = 0.0
        self._passed = True
        self._tests: dict[str, dict[str, tuple[float, bool, list[int]]]] = defaultdict(dict)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reached[:] = bytes(len(self._reached))
        self._began, self._passed = time.process_time(), True

    def pytest_runtest_logreport(self, report) -> None:
        self._passed = self._passed and report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found = [number for number, hit in enumerate(self._reached) if hit]
        took = time.process_time() - self._began
        file = nodeid.partition("::")[0]
        if file not in self._tests:
            self._write()
        self._tests[file][nodeid] = (round(took, 4), self._passed, found)

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        for file, tests in self._tests.items():
            (self._folder / f"{file.replace('/', '.')}.json").write_text(json.dumps(tests))
        self._tests.clear()


def pytest_configure(config) -> None:
    if folder := os.environ.get("REACH_FOLDER"):
        config.pluginmanager.register(Noting(Path(folder)))
