"""Tries mutants in a copy of the tree: one process holds all tests collected, and a fork of it has the fault.

A plugin of pytest. The fork's functions get the mutant's code; what its child processes import lies mutated on the
disk. A mutant in what a module does when it is imported is tried by a fresh process. A fork ends with its first failed
test, with a test that takes twenty times its processor time, or with one that says nothing for minutes.
"""

import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from .mutants import Mutant

SILENT_S = 200.0  # a loaded machine may be slow
SIGNS = {signal.SIGPROF: "hung", signal.SIGKILL: "hung", signal.SIGXCPU: "hung"}


class Trials:
    """Mutants with the tests that may see each; `told` gets a result as soon as there is one.

    Args:
        known: tests that were there when it was noted what they reach; a mutant's own package's others come first.
    """

    def __init__(self, root: Path, asked: Iterable[tuple[Mutant, dict[str, float]]], told, known=None) -> None:
        self._root, self._asked, self._told, self._known = root, asked, told, known

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions, caches = _ours(self._root)
        gc.collect()
        gc.freeze()  # forks share what is there
        for mutant, tests in self._asked:
            own = f"tests/{mutant.package}/"
            new = [name for name in items if self._known and name.startswith(own) and name not in self._known]
            tests = dict.fromkeys(new, 1.0) | tests
            chosen = {items[each]: s for name, s in tests.items() for each in _named(items, name)}
            began = time.monotonic()
            with _written(self._root, mutant) as codes:
                known = any(name in functions for name, _ in codes) or not _is_imported(self._root / mutant.file)
                if mutant.block and known:
                    status, by = self._forked(session, chosen, functions, codes, caches)
                else:
                    status, by = _fresh(self._root, [item.nodeid for item in chosen])
            self._told(mutant, status, by, len(chosen), time.monotonic() - began)
        return True

    def _forked(self, session, chosen, functions, codes, caches) -> tuple[str, str]:
        reads, writes = os.pipe()
        folder = tempfile.mkdtemp(prefix="mutant")
        child = os.fork()
        if child == 0:
            os.close(reads)
            _be_mutated(functions, codes, caches)
            _run(session, chosen, writes, Path(folder))
        os.close(writes)
        try:
            return _watched(child, reads)
        finally:
            os.close(reads)
            shutil.rmtree(folder, ignore_errors=True)


def _named(items: dict[str, pytest.Item], name: str) -> list[str]:
    """A test, or those of a file."""
    return [name] if name in items else [each for each in items if each.startswith(f"{name}::")]


# --- the fault ---------------------------------------------------------------------------------------------------

Name = tuple[str, str, int]


class _written:  # noqa: N801  reads as a verb
    """A mutant's file in place, with a time of its own so that no old bytecode answers for it; its functions' code."""

    _times = iter(range(10**9))

    def __init__(self, root: Path, mutant: Mutant) -> None:
        self._path, self._mutant = root / mutant.file, mutant
        self._before = self._path.read_bytes()
        self._stat = self._path.stat()

    def __enter__(self) -> list[tuple[Name, CodeType]]:
        changed = self._mutant.applied(self._before)
        self._path.write_bytes(changed)
        then = time.time() + 1000 + 2 * next(self._times)
        os.utime(self._path, (then, then))
        code = compile(changed, str(self._path), "exec")
        return [((each.co_filename, each.co_qualname, each.co_firstlineno), each) for each in _outermost(code)
                if each.co_qualname == self._mutant.function and each.co_firstlineno <= self._mutant.line]  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)
        os.utime(self._path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


def _outermost(code: CodeType) -> Iterator[CodeType]:
    """Functions of a module and of its classes."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & 2:  # CO_NEWLOCALS: a function, no class
                yield each
            else:
                yield from _outermost(each)


def _ours(root: Path) -> tuple[dict[Name, list[FunctionType]], list[_lru_cache_wrapper]]:
    """The functions that were made from the tree, by name, and the caches of the project."""
    functions: dict[Name, list[FunctionType]] = {}
    caches = []
    inside = str(root / "rpbench")
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(inside):
            code = each.__code__
            functions.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
        elif type(each) is _lru_cache_wrapper and (each.__module__ or "").startswith("rpbench"):
            caches.append(each)
    return functions, caches


def _is_imported(path: Path) -> bool:
    return any(getattr(module, "__file__", None) == str(path) for module in list(sys.modules.values()))


def _be_mutated(functions, codes, caches) -> None:
    for name, code in codes:
        for function in functions.get(name, ()):
            function.__code__ = code
    for each in caches:
        each.cache_clear()


# --- running -----------------------------------------------------------------------------------------------------


class _Telling:
    """Says each test's name before it runs, and how one failed; a test gets a share of processor time."""

    def __init__(self, writes: int, seconds: dict[str, float]) -> None:
        self._writes, self._seconds = writes, seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, 20 + 20 * self._seconds.get(nodeid, 1.0))
        self._say("test", nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self._say("failed", report.nodeid)
            os._exit(1)

    def _say(self, what: str, name: str) -> None:
        os.write(self._writes, (json.dumps([what, name]) + "\n").encode())


def _run(session: pytest.Session, chosen: dict[pytest.Item, float], writes: int, folder: Path) -> None:
    """In the fork: the chosen tests, and the end."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        tempfile.tempdir = str(folder)
        session.items[:] = list(chosen)
        seconds = {item.nodeid: taken for item, taken in chosen.items()}
        session.config.pluginmanager.register(_Telling(writes, seconds), "telling")
        for number, item in enumerate(session.items):
            after = session.items[number + 1] if number + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        status = 0
    finally:
        os._exit(status)


def _watched(child: int, reads: int) -> tuple[str, str]:
    """How a fork ended, and with which test."""
    last, failed, said = "", "", b""
    heard = time.monotonic()
    while True:
        ready, _, _ = select.select([reads], [], [], 1.0)
        more = os.read(reads, 65536) if ready else b""
        if more:
            heard = time.monotonic()
            said += more
            *lines, said = said.split(b"\n")
            for what, name in map(json.loads, lines):
                last, failed = name, name if what == "failed" else failed
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() - heard > SILENT_S:
            break
        if ready:  # closed, and about to end
            time.sleep(0.01)
    _kill(child)
    if not ended:
        os.waitpid(child, 0)
        return "hung", last
    if failed:
        return "killed", failed
    if os.WIFSIGNALED(status):
        return SIGNS.get(signal.Signals(os.WTERMSIG(status)), "killed"), last
    return ("survived", "") if os.WEXITSTATUS(status) == 0 else ("killed", last)


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _fresh(root: Path, tests: list[str]) -> tuple[str, str]:
    """A mutant of what a module does when imported: tests of a process that imports everything anew."""
    lost = subprocess.run([sys.executable, "-c", "import rpbench.cli"], cwd=root, capture_output=True, check=False)
    if lost.returncode:
        return "refused at import", ""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(tests))
        names.flush()
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", f"@{names.name}"]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            return "hung", ""
    words = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ("survived", "") if done.returncode == 0 else ("killed", words[0] if words else "at collection")
