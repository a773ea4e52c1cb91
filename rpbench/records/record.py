"""The row a run leaves behind: `<results>/<run_id>/record.json`, written atomically and last.

`run_id` is a hash of what was asked for, of the code and of what else can change a result, so a sweep that is started
again finds what is finished, and a changed program, package, file or machine never passes off old numbers as its own.
"""

import csv
import difflib
import errno
import glob
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpbench.records import provenance
from rpbench.records.provenance import began
from rpbench.untrusted import parsed, plain
from rpbench.whole_file import read_text

Record = dict[str, Any]

# What was chosen, by name and by number; and times of day and the machine: what differs between two runs of one sweep.
NAMES = ("schedule", "model", "cluster", "workload", "cost", "mode", "backend")
COUNTS = ("num_devices", "num_microbatches", "seed")
PASSING = ("started_at", "git_commit", "hardware", "versions", "surroundings", "digest")
# What every record holds; `analysis` relies on it.
REQUIRED = ("run_id", *NAMES, "choices", *COUNTS, "status", "evidence", "config", "started_at")
STATUSES = ("ok", "oom", "infeasible", "failed", "not applicable")


# 2: what surrounds a run is in its record, and its run_id is verified when it is read; 3: so is a digest of all values
SCHEMA = 3
_NEVER_NEGATIVE = ("makespan_s", "step_time_s", "tokens_per_s")
METRICS = (*_NEVER_NEGATIVE, "bubble_makespan", "bubble_span", "bubble_over_ideal")

_LARGEST = 2**63
_MOST_BYTES = 2**28  # of a file beside a record
# What readers rely on: the types of values, and in which words one is refused.
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(METRICS, (int | float | None, "no number")),
    **dict.fromkeys(COUNTS, (int | None, "no whole number")),
    **dict.fromkeys((*NAMES, "experiment", "evidence", "reason"), (str | None, "no text")),
    **dict.fromkeys(("started_at", "code_version", "contender"), (str | None, "no text")),
    **dict.fromkeys(
        ("choices", "config", "surroundings", "versions", "hardware", "file_digests"), (dict | None, "no object")
    ),
    **dict.fromkeys(("overrides", "notes", "files"), (list | None, "no list")),
}


def run_id(identity: dict[str, Any]) -> str:
    """Name of a run: 16 hex digits that follow from its identity (`rpbench.run.recording.identity`)."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: Path) -> Record | None:
    """The record of a run folder; None if there is none or it is torn, which is said on stderr."""
    path = folder / "record.json"
    try:
        record = parsed(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        print(plain(f"rpbench: skipping {path}: not a readable record ({error})"), file=sys.stderr)
        return None
    problem = defect(record, folder.name)
    if problem:
        print(plain(f"rpbench: skipping {path}: {problem}"), file=sys.stderr)
        return None
    return dict(record)


def defect(record: Any, name: str) -> str | None:
    """The fault that keeps a parsed file from being the record of the run `name`; None for a sound one."""
    if not isinstance(record, dict):
        return "a record is one JSON object"
    missing = [key for key in REQUIRED if key not in record]
    if missing:
        return f"no {', '.join(missing)}"
    if record.get("schema", 1) not in range(1, SCHEMA + 1):
        return f"schema {record['schema']!r:.80} is not known here; versions 1 to {SCHEMA} are"
    if record["run_id"] != name:
        return f"run_id {record['run_id']!r:.80} does not match its folder"
    if record["status"] not in STATUSES:
        return f"status {record['status']!r:.80} is none of {', '.join(STATUSES)}"
    for key, (kinds, words) in _KINDS.items():
        if isinstance(record.get(key), bool) or not isinstance(record.get(key), kinds):
            return f"{key} {record[key]!r:.80} is {words}"
        if isinstance(record.get(key), int) and abs(record[key]) > _LARGEST:
            return f"{key} {record[key]!r:.80} is too large a number"
    for key in _NEVER_NEGATIVE:
        if (record.get(key) or 0) < 0:
            return f"{key} {record[key]!r:.80} is below 0"
    for key in ("overrides", "notes", "files"):
        if not all(isinstance(item, str) for item in record.get(key) or ()):
            return f"{key} holds what is no text"
    return _falsified(record, name)


def _falsified(record: Record, name: str) -> str | None:
    """The sign that values of a record are not those that were written."""
    if "surroundings" in record and run_id(identity_of(record)) != name:
        return "its configuration is not the one that its run_id was made of"
    try:
        is_whole = is_sealed(record)
    except (ValueError, RecursionError, OverflowError) as error:
        return f"not all of it is JSON that can be written ({error})"
    if (record.get("schema", 1) > 2 or "digest" in record) and not is_whole:
        return "its values are not those that its digest was made of"
    return None


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values with their digest, as written: readers can check that none has changed."""
    return values | {"digest": digest(values)}


def is_sealed(parsed_values: dict[str, Any]) -> bool:
    """Whether values that were read are those that their digest was made of.

    Raises ValueError, RecursionError or OverflowError for what is no JSON that can be written.
    """
    return parsed_values.get("digest") == _digest_of_parsed(parsed_values)


def digest(record: Record) -> str:
    """16 hex digits of every other value, all finite (ValueError): a change is noticed when it is read."""
    return _digest_of_parsed(json.loads(dump(record)))  # as it is read back: its keys are texts


def _digest_of_parsed(record: Record) -> str:
    values = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity_of(record: Record) -> dict[str, Any]:
    """The identity behind the run_id of a record (`rpbench.run.recording.identity`), as the record says it."""
    return {
        "subject": record["config"],
        "choices": record["choices"],
        "code_version": record.get("code_version"),
        **(record["surroundings"] or {}),
    }


def read_all(results: Path) -> Iterator[Record]:
    """Every sound record under a results folder, oldest name first."""
    for folder in sorted(path.parent for path in results.glob("*/record.json")):
        record = read(folder)
        if record is not None:
            yield record


def beginning_with(results: Path, name: str) -> list[Record]:
    """The sound records under a results folder whose run_id begins with a name."""
    folders = sorted(path.parent for path in results.glob("*/record.json") if path.parent.name.startswith(name))
    return [found for folder in folders if (found := read(folder)) is not None]


def find(results: Path, name: str) -> Record:
    """The record whose run_id is, or begins with, a name; ValueError with the nearest names where it is not one."""
    found = beginning_with(results, name)
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"run {name!r}: {len(found)} records of {results} begin with it; give more digits")
    known = sorted(path.parent.name for path in results.glob("*/record.json"))
    near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.0))
    way_out = f"nearest: {near}" if near else "there are no records; run something, or give results_dir=DIR"
    raise ValueError(f"run {name!r}: no record of {results} begins with it; {way_out}")


def write(folder: Path, record: Record) -> Record:
    """Put the record in its folder, whole or not at all; as it was written, with its digest."""
    found = sealed(record)
    write_atomically(folder / "record.json", dump(found) + "\n")
    return found


def put_file(folder: Path, name: str, text: str) -> dict[str, str]:
    """Write a file that is to stand beside a record; its digest by its name, for the record's `file_digests`."""
    write_atomically(folder / name, text)
    return {name: _digest_of_text(text)}


def kept_file(folder: Path, record: Record, name: str) -> str | None:
    """The text of a file beside a record; None where it is not there, or not what the record was written with."""
    try:
        text = read_text(folder / name, _MOST_BYTES)
    except (OSError, ValueError):
        return None
    digests = record.get("file_digests")
    return text if isinstance(digests, dict) and digests.get(name) == _digest_of_text(text) else None


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dump(record: Record) -> str:
    """The record as one line of strict JSON; ValueError for a number that is not finite."""
    return json.dumps(record, allow_nan=False)


def check_writable(folder: Path, key: str) -> None:
    """Refuse, before any work, a folder that cannot be made or written: a ValueError with its key."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a link to itself, a name that is too long
        raise ValueError(f"{key}={folder}: {error.strerror}; name another folder") from None
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir() or not _takes_a_folder(existing):
        raise ValueError(f"{key}={folder}: {existing} is no folder that can be written; name another")


def _takes_a_folder(existing: Path) -> bool:
    """Whether a folder can be made in it: tried, because /proc says yes and does not. A full disk is told later."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rpbench-", dir=existing))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return True


def check_target(path: Path) -> None:
    """Refuse to put a file in the place of a device, a pipe or a folder: a ValueError naming it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, and is left alone; name a file")


def write_atomically(path: Path, text: str | bytes) -> None:
    """Replace a file in one step, through a temporary one beside it that reaches the disk first."""
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    temporary = path.with_name(f".{path.name}.{provenance.host_word()}-{os.getpid()}")
    content = text if isinstance(text, bytes) else text.encode()
    try:
        with _naming(path):
            boundary()
            with temporary.open("wb") as target:
                target.write(content[: len(content) // 2])
                target.flush()
                boundary()
                target.write(content[len(content) // 2 :])
                target.flush()
                os.fsync(target.fileno())
            boundary()
            os.replace(temporary, path)
            boundary()
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Writes inside are of this file: what the system refuses says so, which by itself names none for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def _remove_left(path: Path) -> None:
    """Remove what writers of a file have left beside it that were killed here; another host's is its own."""
    host = provenance.host_word()
    for left in path.parent.glob(f".{glob.escape(path.name)}.{host}-*"):
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and not began(int(number)):
            left.unlink(missing_ok=True)


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as CSV in some columns, those of the first row if left out; ValueError for a row that has another."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def boundary() -> None:
    """Between two steps of a write. Nothing happens here; tests pull the plug."""


def create(path: Path, text: str) -> bool:
    """Create a file; False if it exists. Of several processes exactly one succeeds."""
    try:
        with _naming(path):
            boundary()
            file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with _naming(path), file:
            boundary()
            file.write(text)
        boundary()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def append_line(path: Path, line: str) -> None:
    """Append a line to a journal; a line before it that a kill has torn ends there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), path.open("a+b") as journal:
        if journal.tell():
            journal.seek(-1, os.SEEK_END)
            line = line if journal.read(1) == b"\n" else "\n" + line
        boundary()
        journal.write(line.encode())
        journal.flush()
        boundary()
        journal.write(b"\n")
    boundary()


class Events:
    """`events.jsonl` of a run: appended line by line as the run goes, so that a killed run leaves its trace."""

    def __init__(self, folder: Path, now: str) -> None:
        self._path = folder / "events.jsonl"
        self.add("started", at=now)

    def add(self, event: str, **details: Any) -> None:
        append_line(self._path, json.dumps({"event": event, **details}))
