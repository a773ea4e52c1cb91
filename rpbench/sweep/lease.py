"""Leases: only one process works on a run, on all hosts that share the folder, as long as it lives.

    <results>/.leases/<run>.<generation>        host, process and boot of the owner

The newest generation counts. A process takes a lease by creating the file of the next generation, which only one
process can, also over a network. The owner touches it every few seconds. A lease lapses when its process is gone from
this host, or when an observer has seen it untouched for a while on the observer's own steady clock: no two clocks are
compared.
"""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rpbench.records import provenance
from rpbench.records.provenance import began, boot
from rpbench.records.record import create
from rpbench.untrusted import parsed
from rpbench.whole_file import read_text

FOLDER = ".leases"
BEAT_S = 5.0  # an owner touches its leases this often
LAPSE_S = 30.0  # after so long without a touch, a lease of another host has lapsed


@dataclass(frozen=True)
class Owner:
    """The identity of a process, unique over hosts and reboots."""

    host: str
    boot: str
    pid: int
    began: str

    @classmethod
    def me(cls) -> "Owner":
        return cls(provenance.host_word(), boot(), os.getpid(), began(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Whether it has certainly ended; never known of another host."""
        is_here = self.host == provenance.host_word()
        return is_here and (self.boot != boot() or began(self.pid) != self.began)


class Leases:
    """The leases of a folder of results, as one process sees and holds them."""

    def __init__(self, results: Path) -> None:
        self._folder = results / FOLDER
        self._held: set[Path] = set()
        self._seen: dict[Path, tuple[int, float]] = {}  # lease -> its last touch, and when we first saw that
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self, run: str) -> Path | None:
        """The lease of a run, which the caller gives back; None while another worker has it."""
        before = self._touched(run)
        newest = self._newest(run)
        if newest is not None and not self._has_lapsed(newest):
            return None
        generation = 1 if newest is None else _generation(newest) + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{run}.{generation}"
        if not create(path, json.dumps(Owner.me().__dict__)):
            return None
        if {each for each in self._touched(run) if each[0] != path} - before:
            path.unlink(missing_ok=True)  # the lease that we saw was released, and another worker took a new one
            return None
        self._held.add(path)
        if self._beating is None:
            self._beating = threading.Thread(target=self._touch_all, name="lease", daemon=True)
            self._beating.start()
        return path

    def give_back(self, path: Path) -> None:
        """Release a lease, and lapsed ones before it."""
        self._held.discard(path)
        generation = _generation(path)
        for other in sorted(self._of(path.stem), key=_generation):  # its own last, so that no worker begins meanwhile
            if _generation(other) <= generation:
                with suppress(OSError):  # a file that cannot be removed lapses with its process
                    other.unlink()

    def remove_lapsed(self) -> None:
        """Take and release leases of owners that are gone: nobody else takes those of ended runs."""
        for run in sorted({path.stem for path in self._folder.glob("*.*")}):
            if (lease := self.take(run)) is not None:
                self.give_back(lease)

    def is_held(self, run: str) -> bool:
        newest = self._newest(run)
        return newest is not None and not self._has_lapsed(newest)

    def _newest(self, run: str) -> Path | None:
        return max(self._of(run), key=_generation, default=None)

    def _touched(self, run: str) -> set[tuple[Path, int]]:
        """The leases of a run, each with the time of its last touch."""
        found = set()
        for path in self._of(run):
            with suppress(OSError):  # given back just now
                found.add((path, path.stat().st_mtime_ns))
        return found

    def _of(self, run: str) -> list[Path]:
        return [path for path in self._folder.glob(f"{run}.*") if path.suffix[1:].isdecimal()]

    def _has_lapsed(self, path: Path) -> bool:
        try:
            touched = path.stat().st_mtime_ns
            owner = _owner(path) if path.is_file() else None
        except OSError:
            return True  # given back just now
        if owner is not None and owner.is_gone:
            return True
        before, since = self._seen.setdefault(path, (touched, time.monotonic()))
        if before != touched:
            self._seen[path] = (touched, time.monotonic())
            return False
        return time.monotonic() - since > LAPSE_S

    def _touch_all(self) -> None:
        while not self._ended.wait(BEAT_S):
            for path in list(self._held):
                with suppress(OSError):  # the folder may be unreachable for a moment
                    os.utime(path)

    def close(self) -> None:
        """Stop the thread and release all leases."""
        self._ended.set()
        for path in list(self._held):
            self.give_back(path)


def _generation(path: Path) -> int:
    return int(path.suffix[1:])


def _owner(path: Path) -> Owner | None:
    """The owner of a lease; None while its file is being written, or was torn."""
    try:
        found = Owner(**parsed(read_text(path)))
    except (ValueError, TypeError):
        return None
    texts = (found.host, found.boot, found.began)
    return found if type(found.pid) is int and all(isinstance(text, str) for text in texts) else None
