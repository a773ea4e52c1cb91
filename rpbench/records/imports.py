"""Imports of other people's numbers, as a timeline or as records; evidence `measured elsewhere`, or as they say.

Their files are data: parsed as JSON or CSV, with sizes and numbers checked, and nothing is run.
"""

import csv
import difflib
import gzip
import hashlib
import io
import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpbench import whole_file
from rpbench.config.choices import ConfigError
from rpbench.records import provenance, record
from rpbench.records.record import Record
from rpbench.untrusted import MOST_DIGITS, parsed

MEASURED_ELSEWHERE = "measured elsewhere"
MOST_BYTES = 256 * 2**20
_GZIP = b"\x1f\x8b"  # how such a file begins
ALIKE = 0.88  # of a metric's name and another: tokens_per_sec is, tokens_per_s_low is not
NANOSECOND = 1e-3  # in a trace's microseconds; less is rounding

# Fields about the program that wrote a record: those of another program are left out.
_OURS = ("run_id", "config", "choices", "started_at", "schema", "digest", "surroundings", "code_version", "overrides")
_TEXTS = (*record.NAMES, "experiment", "evidence", "reason", "contender", "partition", "partition_layers")
# Evidence that stays what it is: a simulation that is exported and imported was not measured anywhere.
_NOT_MEASURED = ("published", "derived", "simulated", "predicted", "emulated", "dry")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler for work of a device


def read_text(path: Path) -> str:
    """The text of a file, which may be packed by gzip; ConfigError if it is missing, no file, too large, or not UTF-8.

    The profiler's handler for TensorBoard packs its traces.
    """
    try:
        content = whole_file.read_bytes(path, MOST_BYTES)
        return whole_file.text_of(_unpacked(content) if content.startswith(_GZIP) else content)
    except (OSError, ValueError) as error:
        reason = f"{error.strerror}; name a file of JSON or CSV" if isinstance(error, OSError) else error
        raise ConfigError(f"import {path}: {reason}") from None


def _unpacked(content: bytes) -> bytes:
    try:
        found = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it begins as gzip does and cannot be unpacked ({error}); write it again") from None
    if len(found) > MOST_BYTES:
        raise ValueError(f"unpacked more than {MOST_BYTES:,} bytes; no more are read, so profile fewer steps")
    return found


def records_of_csv(text: str) -> list[Record]:
    """A record for each row, with columns named as in records, at least `schedule`; ConfigError for a bad line."""
    if "\0" in text:
        number = text[: text.index("\0")].count("\n") + 1
        raise ConfigError(f"import csv: line {number} holds a NUL; export it as text")
    try:
        return _records_of_rows(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"import csv: {error}; write a row a line, with fields of at most 128 KiB") from None


def _records_of_rows(rows: "csv.DictReader[str]") -> list[Record]:
    names = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
    if "schedule" not in names:
        raise ConfigError(
            f"import csv: the header is {','.join(names)!r:.100}; name at least `schedule` in it, as records do, with "
            "commas between, as in schedule,model,tokens_per_s"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"import csv: column {twice!r:.60} stands twice in the header; leave one")
    _tell_of_strange(names)
    found = []
    for row in rows:
        if None in row or None in row.values():
            raise ConfigError(f"import csv: line {rows.line_num} has more or fewer fields than the header")
        place = f"line {rows.line_num}"
        found.append((place, _record(_values(row), place)))
    if not found:
        raise ConfigError("import csv: a header and no row beneath it; write a row a run")
    return _once_each(found)


def _tell_of_strange(names: Sequence[str]) -> None:
    """Name the columns on stderr whose names are nearly those of a metric: no table would find their numbers."""
    known = (*record.NAMES, *record.COUNTS, *record.METRICS)
    for name in names:
        near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
        if near and name not in known:
            words = f"column {name!r:.60} is kept under that name; did you mean {near[0]}, in its unit?"
            print(f"rpbench: import csv: {words}", file=sys.stderr)


def records_of_wandb(text: str) -> list[Record]:
    """Exported runs: an object with `config` and `summary`, a list of them, or one a line; else ConfigError."""
    return _once_each(
        [(place := f"run {number}", _record(_flat(run), place)) for number, run in enumerate(_runs(text))]
    )


def _runs(text: str) -> list[Mapping[str, Any]]:
    try:
        whole = parsed(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        try:
            found = [parsed(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"import wandb: not JSON ({error})") from None
    if not found:
        raise ConfigError("import wandb: no run in it; export one JSON object a run, with `config` and `summary`")
    for run in found:
        if not isinstance(run, dict) or not isinstance(run.get("summary"), dict):
            raise ConfigError("import wandb: a run is an object with `config` and `summary`")
    return found


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """Summary and configuration in one dictionary; a group of the configuration by its name."""
    config = run.get("config")
    flat: dict[str, Any] = {}
    for key, value in (config if isinstance(config, dict) else {}).items():
        plain = value.get("value", value) if isinstance(value, dict) else value
        flat[str(key)] = plain.get("name") if isinstance(plain, dict) else plain
    flat |= {str(key): value for key, value in run["summary"].items() if not str(key).startswith("_")}
    return {key: value for key, value in flat.items() if isinstance(value, (str, int, float))}


def _values(row: Mapping[str, str]) -> dict[str, Any]:
    """The values of a row by column, without empty cells; those of columns that hold text stay text."""
    cells = {key: text.strip() for key, text in row.items()}
    return {key: text if key in _TEXTS else _value(text) for key, text in cells.items() if text != ""}


def _value(text: str) -> Any:
    """The value of a cell: a number, True or False, or an object or a list, which `export` writes as JSON."""
    if text in ("True", "False"):
        return text == "True"
    if text[0] in "{[":
        try:
            return parsed(text)
        except ValueError:
            return text
    try:
        number = float(text)
    except ValueError:
        return text
    is_whole = number.is_integer() and "." not in text and "e" not in text.lower()
    return int(text) if is_whole and len(text) <= MOST_DIGITS else number


def _record(given: Mapping[str, Any], place: str) -> Record:
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"import: {place}: {key}={value} is no number to keep; leave the field empty")
    if not isinstance(given.get("schedule"), str):
        raise ConfigError(f"import: {place}: no schedule; every record says which one it ran")
    for key in record.COUNTS:
        if type(given.get(key, 0)) is not int or given.get(key, 0) < 0:
            raise ConfigError(f"import: {place}: {key}={given[key]!r}: a whole number of at least 0")
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]
    found = {
        **{key: value for key, value in given.items() if key not in _OURS},
        **{key: str(given.get(key, "elsewhere")) for key in record.NAMES},
        **{key: given.get(key) for key in record.COUNTS},
        "run_id": digest,
        "status": given.get("status", "ok"),
        "reason": given["reason"] if isinstance(given.get("reason"), str) else None,
        "evidence": given["evidence"] if given.get("evidence") in _NOT_MEASURED else MEASURED_ELSEWHERE,
        "choices": {},
        "config": {},
        "files": [],
        "started_at": provenance.now(),
    }
    if problem := record.defect(found, digest):
        raise ConfigError(f"import: {place}: {problem}; mend the field, or leave it out")
    return found


def _once_each(placed: Sequence[tuple[str, Record]]) -> list[Record]:
    """The rows without those that are the same as an earlier one, which stderr names: they would be one record."""
    first: dict[str, str] = {}
    same = []
    for place, row in placed:
        if first.setdefault(row["run_id"], place) != place:
            same.append(f"{place} as {first[row['run_id']]}")
    if same:
        named = ", ".join(same[:3]) + (", ..." if same[3:] else "")
        print(
            f"rpbench: {len(same)} of {len(placed)} are the same as an earlier one and left out: {named}; if they were "
            "measured again, give them a column in which they differ, such as repeat",
            file=sys.stderr,
        )
    return list({row["run_id"]: row for _, row in placed}.values())


def trace_of_kineto(text: str) -> dict[str, Any]:
    """A torch profiler's trace as a trace of ours: a process a device, a thread a stream, with kernels alone.

    Without kernels, as on a CPU, the outermost operators of each thread take their place. Slices of a thread do not
    overlap. Raises ConfigError for what is no trace.
    """
    events = list(_slices(text))
    device = [event for event in events if event.get("cat") in _KERNELS]
    chosen = device or [event for event in events if event.get("cat") == "cpu_op"]
    if not chosen:
        raise ConfigError("import kineto: no kernels and no operators in it; profile with activities=[CPU, CUDA]")
    lanes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in chosen:
        lanes.setdefault((str(event.get("pid")), str(event.get("tid"))), []).append(event)
    processes = {pid: number for number, pid in enumerate(sorted({pid for pid, _ in lanes}))}
    threads = {lane: number for number, lane in enumerate(sorted(lanes))}
    begin = min(event["ts"] for event in chosen)
    out: list[dict[str, Any]] = []
    for (pid, tid), slices in sorted(lanes.items()):
        out.append({"ph": "M", "name": "process_name", "pid": processes[pid], "tid": 0, "args": {"name": pid}})
        where = {"pid": processes[pid], "tid": threads[pid, tid]}
        out.append({"ph": "M", "name": "thread_name", **where, "args": {"name": tid}})
        for event in _outermost(slices):
            times = {"ts": event["ts"] - begin, "dur": event["dur"]}
            out.append({"ph": "X", "name": str(event.get("name", "")), **where, **times})
    return {"traceEvents": out, "displayTimeUnit": "ms", "evidence": MEASURED_ELSEWHERE}


def _slices(text: str) -> Iterator[dict[str, Any]]:
    try:
        trace = parsed(text)
    except ValueError as error:
        raise ConfigError(f"import kineto: not JSON ({error})") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ConfigError("import kineto: no traceEvents; export it by torch.profiler's export_chrome_trace")
    for number, event in enumerate(events):
        if isinstance(event, dict) and event.get("ph") == "X":
            times = (event.get("ts"), event.get("dur"))
            if not all(isinstance(time, (int, float)) and math.isfinite(time) for time in times) or event["dur"] < 0:
                raise ConfigError(f"import kineto: event {number}: ts={times[0]!r} dur={times[1]!r}: microseconds")
            yield event


def _outermost(slices: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Slices of a lane without those within an earlier one; one that begins in it and outlasts it follows it."""
    free = -math.inf
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        if event["ts"] >= free:
            yield event
        elif end - free >= NANOSECOND:
            yield {**event, "ts": free, "dur": end - free}
        free = max(free, end)


def summary_of_trace(trace: Mapping[str, Any]) -> dict[str, float]:
    """Seconds from first start to last end, and the mean fraction of them in which lanes are idle."""
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes: dict[tuple[int, int], float] = {}
    for event in slices:
        lane = event["pid"], event["tid"]
        lanes[lane] = lanes.get(lane, 0.0) + event["dur"]
    span = max((event["ts"] + event["dur"] for event in slices), default=0.0)
    idle = 1 - sum(lanes.values()) / (len(lanes) * span) if span else 0.0
    return {"makespan_s": span / 1e6, "bubble_makespan": idle}


_FORMS = ("kineto", "wandb", "csv")
_USAGE = "import kineto|wandb|csv FILE [results_dir=DIR] [out=FILE]"


def import_file(arguments: Sequence[str]) -> list[dict[str, object]]:
    """The records or the timeline made from a file; ConfigError, with nothing written, for a wrong form or file."""
    words = [item for item in arguments if "=" not in item]
    options = dict(item.partition("=")[::2] for item in arguments if "=" in item)
    if len(words) != 2 or words[0] not in _FORMS or set(options) - {"results_dir", "out"}:
        raise ConfigError(f"import takes one form and one file: {_USAGE}")
    form, path = words[0], Path(words[1])
    if (other := "results_dir" if form == "kineto" else "out") in options:
        made = "a timeline, and out= names it" if form == "kineto" else "records, and results_dir= names their folder"
        raise ConfigError(f"import {form}: {other}={options[other]} is of no use: it makes {made}")
    text = read_text(path)
    if form == "kineto":
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        out = Path(options.get("out", plain.with_suffix(".timeline.json")))
        if out.resolve() == path.resolve():
            raise ConfigError(f"import kineto: out={out} is the trace itself, and is left alone; name another file")
        trace = trace_of_kineto(text)
        record.write_atomically(out, json.dumps(trace) + "\n")
        found = summary_of_trace(trace)
        return [{"timeline": str(out), "evidence": MEASURED_ELSEWHERE, **found}]
    rows = records_of_csv(text) if form == "csv" else records_of_wandb(text)
    folder = Path(options.get("results_dir", "results"))
    record.check_writable(folder, "results_dir")
    return [record.write(folder / row["run_id"], row) for row in rows]
