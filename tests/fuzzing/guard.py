"""Guard: one read under watch - time, memory, files, secrets - and what of its end is a finding."""

import contextlib
import faulthandler
import io
import linecache
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .bending import BAIT, CANARY

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5  # of processor time
PATIENCE_S = 600  # on the wall: whoever waits for a pipe takes no processor time, nor does who gets none
MEMORY_BYTES = 2**30
_OURS = tuple(str(ROOT / folder) for folder in ("rpbench", "baselines", "analysis"))
_BAITS = ("/etc/passwd", "/dev/zero", "/dev/full")


class Wrong(Exception):
    """A reader took what it should have refused, or said it badly."""


class Hang(BaseException):
    """A read without an end."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a read; `where` and `what` together tell findings apart."""

    reader: str
    what: str
    where: str
    words: str
    document: bytes


class Guard:
    """Watches reads of this process.

    Args:
        folder: an empty one; each read works in one beneath it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._touched, self._on, self._free = folder / "here", list[str](), False, False
        bait = folder / BAIT
        bait.mkdir(parents=True)
        (bait / "secret.json").write_text("{}")
        self._bait = str(bait)
        os.environ["RPBENCH_CANARY"] = CANARY
        sys.addaudithook(self._hear)
        signal.signal(signal.SIGPROF, self._stop)
        signal.signal(signal.SIGALRM, self._stop)

    def _stop(self, *_: object) -> None:
        raise Hang

    def _hear(self, event: str, given: tuple[object, ...]) -> None:
        if not self._on:
            return
        is_far = event == "socket.connect" and "127.0.0.1" not in repr(given[1:])
        if (is_far or event in ("os.system", "subprocess.Popen", "os.exec")) and not self._free:
            self._touched.append(f"{event} {given[:2]!r}"[:300])
        if event != "open" or not isinstance(given[0], str):
            return
        path = os.path.realpath(given[0])
        if (path.startswith(self._bait) or given[0] in _BAITS) and not self._free:
            self._touched.append(f"open {given[0]}")

    def tried(
        self, reader: str, read: Callable[[Path, bytes], object], document: bytes, *, free: bool = False
    ) -> Finding | None:
        """Read a document once.

        Args:
            free: it is the user's own request, which may name any file.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        os.chdir(self._folder)
        said = io.StringIO()
        self._touched, self._free = [], free
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), limits():
                self._on = True
                read(self._folder, document)
        except BaseException as error:
            self._on = False
            if isinstance(error, KeyboardInterrupt):
                raise
            what = None if free and isinstance(error, OSError) and error.filename else problem(error)
            said.write(str(error) if not isinstance(error, RecursionError) else "")
            if what:
                return Finding(reader, what, _place(error), _tail(error), document)
        finally:
            self._on = False
        if self._touched:
            return Finding(reader, "touched", self._touched[0].split()[0], self._touched[0], document)
        if CANARY in said.getvalue():
            return Finding(reader, "secret", "", said.getvalue()[:500], document)
        return None


@contextlib.contextmanager
def limits():
    """Memory beyond what is mapped now, and time, have an end."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 1)  # again and again: a handler that goes on is not the end
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, 1)
    faulthandler.dump_traceback_later(3 * PATIENCE_S, exit=True, file=sys.__stderr__)  # what no exception can stop
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def problem(error: BaseException) -> str | None:
    """What is wrong with an error; None for a refusal in our own words."""
    if not isinstance(error, ValueError):
        return type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    if not frame.filename.startswith(_OURS) or not line.startswith("raise"):
        return type(error).__name__
    return None


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith((*_OURS, str(ROOT)))]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "?"


def _tail(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-6)
    return "".join(lines)[-3000:]
