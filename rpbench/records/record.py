"""The record of a run: `<results>/<run_id>/record.json`, written atomically and last.

`run_id` is a hash of the request, the code and everything else that can change a result. So a repeated sweep finds the
runs that have ended, and a changed program, package, file or machine never reuses old numbers.
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

NAMES = ("schedule", "model", "cluster", "workload", "cost", "mode", "backend")
COUNTS = ("num_devices", "num_microbatches", "seed")
# Fields that may differ between two runs of one request.
PASSING = ("started_at", "git_commit", "hardware", "versions", "surroundings", "digest")
# Fields of every record; `analysis` relies on them.
REQUIRED = ("run_id", *NAMES, "choices", *COUNTS, "status", "evidence", "config", "started_at")
STATUSES = ("ok", "oom", "infeasible", "failed", "not applicable")
# 2: records have surroundings, and readers verify the run_id; 3: readers also verify a digest of all values.
SCHEMA = 3
_NEVER_NEGATIVE = ("makespan_s", "step_time_s", "tokens_per_s")
_FRACTIONS = ("bubble_makespan", "bubble_span")
METRICS = (*_NEVER_NEGATIVE, *_FRACTIONS, "bubble_over_ideal")

_LARGEST = 2**63
_MOST_BYTES = 2**28  # of a file beside a record
# Types that readers rely on, and the words of the error.
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
    """The name of a run: 16 hex digits of a hash of its identity (`rpbench.run.recording.identity`)."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: Path) -> Record | None:
    """The record of a run folder; None if there is none, or with a line on stderr if it is broken."""
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
    """The fault of a parsed record of the run `name`; None for a sound one."""
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
    for key in _FRACTIONS:
        if (record.get(key) or 0) > 1:
            return f"{key} {record[key]!r:.80} is above 1: it is a fraction, and no percentage"
    for key in ("overrides", "notes", "files"):
        if not all(isinstance(item, str) for item in record.get(key) or ()):
            return f"{key} holds what is no text"
    return _falsified(record, name)


def _falsified(record: Record, name: str) -> str | None:
    """The sign that a record was changed after it was written; None without one."""
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
    """The values with their digest, by which readers notice changes."""
    return values | {"digest": digest(values)}


def is_sealed(parsed_values: dict[str, Any]) -> bool:
    """Whether values match their digest; ValueError, RecursionError or OverflowError for what JSON cannot hold."""
    return parsed_values.get("digest") == _digest_of_parsed(parsed_values)


def digest(record: Record) -> str:
    """16 hex digits over all other values; ValueError for a number that is not finite."""
    return _digest_of_parsed(json.loads(dump(record)))  # as when it is read: with texts as keys


def _digest_of_parsed(record: Record) -> str:
    values = {key: value for key, value in record.items() if key != "digest"}
    return _digest_of_text(json.dumps(values, sort_keys=True, allow_nan=False))


def identity_of(record: Record) -> dict[str, Any]:
    """The identity behind the run_id of a record (`rpbench.run.recording.identity`), from its fields."""
    return {
        "subject": record["config"],
        "choices": record["choices"],
        "code_version": record.get("code_version"),
        **(record.get("surroundings") or {}),
    }


def read_all(results: Path, beginning: str = "") -> Iterator[Record]:
    """Every sound record of a results folder whose run_id has a beginning, by run_id; stderr counts unsealed ones."""
    unsealed = []
    for folder in sorted(path.parent for path in results.glob("*/record.json")):
        if folder.name.startswith(beginning) and (record := read(folder)) is not None:
            unsealed += [] if "digest" in record else [folder.name]
            yield record
    if unsealed:
        count = f"{len(unsealed)} without a digest, such as {unsealed[0]}"
        words = "nothing says whether their values were changed since; run them again, and remove these"
        print(plain(f"rpbench: records of {results}: {count}: {words}"), file=sys.stderr)


def find(results: Path, name: str) -> Record:
    """The record whose run_id is, or begins with, a name; ValueError with the nearest names unless there is one."""
    found = list(read_all(results, name))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"run {name!r}: {len(found)} records of {results} begin with it; give more digits")
    known = sorted(path.parent.name for path in results.glob("*/record.json"))
    if any(each.startswith(name) for each in known):
        raise ValueError(f"run {name!r}: its record of {results} is damaged; make it again, by its command")
    near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.0))
    way_out = f"nearest: {near}" if near else "there are no records; run something, or give results_dir=DIR"
    raise ValueError(f"run {name!r}: no record of {results} begins with it; {way_out}")


def write(folder: Path, record: Record) -> Record:
    """Write a record to its folder, whole or not at all; returns it with its digest."""
    found = sealed(record)
    write_atomically(folder / "record.json", dump(found) + "\n")
    return found


def put_file(folder: Path, name: str, text: str) -> dict[str, str]:
    """Write a file beside a record; returns {name: digest}, for the record's `file_digests`."""
    write_atomically(folder / name, text)
    return {name: _digest_of_text(text)}


def kept_file(folder: Path, record: Record, name: str) -> str | None:
    """The text of a file beside a record; None if it is missing or does not match the record's digest."""
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
    """Raise ValueError, before any work, for a folder that cannot be made or written."""
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
    """Whether a folder can be made in it. It is tried, because /proc only says so; a full disk is reported later."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rpbench-", dir=existing))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return True


def check_target(path: Path) -> None:
    """Raise ValueError for a target that is a device, a pipe or a folder."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, and is left alone; name a file")


def write_atomically(path: Path, text: str | bytes) -> None:
    """Replace a file in one step, by a temporary one beside it that is flushed to disk first."""
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
    """Errors inside name this file, and no temporary one; the system names none for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def _remove_left(path: Path) -> None:
    """Remove temporary files of writers that were killed on this host."""
    host = provenance.host_word()
    for left in path.parent.glob(f".{glob.escape(path.name)}.{host}-*"):
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and not began(int(number)):
            left.unlink(missing_ok=True)


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as CSV, by default in the columns of the first row; ValueError for a row with another column."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def boundary() -> None:
    """Marks a point between two steps of a write, where tests pull the plug."""


def create(path: Path, text: str) -> bool:
    """Create a file; False if it exists. Exactly one of several processes succeeds."""
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
    """Append a line to a journal, behind the end of a line that was torn by a kill."""
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


def add_event(folder: Path, event: str, **details: Any) -> None:
    """Append a line to `events.jsonl` of a run, so that a killed run leaves a trace."""
    append_line(folder / "events.jsonl", json.dumps({"event": event, **details}))
