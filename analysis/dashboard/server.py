"""The dashboard's server: read-only, on loopback only.

Vega-Lite draws the charts. Its JavaScript comes from the installed package vl-convert-python, so the page needs no
network.
"""

import csv
import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rpbench.config.choices import ConfigError
from rpbench.config.configuration import BESIDES
from rpbench.records import record
from rpbench.records.describe import under_unit, unit
from rpbench.records.manifest import PLANNED, Manifest, read_manifests
from rpbench.run.recording import TIMELINE
from rpbench.untrusted import is_finite

SHOWN = (
    *("run_id", *record.NAMES, "experiment", "contender", *record.COUNTS, "status", "reason", "evidence"),
    *("tokens_per_s", "step_time_s", "makespan_s", "bubble_makespan", "loss"),
)
_TOLD = (*record.NAMES, *record.COUNTS, "experiment", *BESIDES)  # of the words of a run, those beside its options
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_MOST_SPANS = 20_000


class Rows:
    """The records of a results folder, which runs may be writing to."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._known: dict[str, tuple[int, dict[str, Any] | None]] = {}

    def read(self) -> list[dict[str, Any]]:
        """A row for each readable record, by name."""
        found = {}
        for path in sorted(self._results.glob("*/record.json")):
            name = path.parent.name
            try:
                stamp = path.stat().st_mtime_ns
            except OSError:
                continue
            known = self._known.get(name)
            found[name] = known if known and known[0] == stamp else (stamp, _row(path.parent))
        self._known = found
        return [row for _, row in found.values() if row is not None]

    @property
    def stamps(self) -> dict[str, float]:
        """When each record was written, in seconds of the system clock, by its name."""
        return {name: stamp / 1e9 for name, (stamp, _) in self._known.items()}

    def record(self, run_id: str) -> dict[str, Any] | None:
        """A record as in its file; None if it is missing or unreadable."""
        return record.read(self._results / run_id) if _RUN_ID.fullmatch(run_id) else None

    def curve(self, run_id: str) -> list[list[Any]]:
        """[batch, loss, second of its last gradient] of each batch; empty if the run has no losses."""
        found = self.record(run_id) or {}
        losses, seconds = found.get("loss_curve"), found.get("loss_curve_s")
        if not (isinstance(losses, list) and isinstance(seconds, list) and len(losses) == len(seconds)):
            return []
        points = [[step, loss, second] for step, (loss, second) in enumerate(zip(losses, seconds, strict=True))]
        return [point for point in points if all(map(is_finite, point))]

    def timeline(self, run_id: str) -> list[list[Any]] | None:
        """[device, lane, action, start and end in seconds] of each action; None without the record's own timeline."""
        folder, found = self._results / run_id, self.record(run_id)
        text = None if found is None else record.kept_file(folder, found, TIMELINE)
        if text is None:
            return None
        try:
            return [_span(row) for row in islice(csv.DictReader(io.StringIO(text)), _MOST_SPANS)]
        except (ValueError, KeyError, TypeError, csv.Error):
            return None


def _span(row: dict[str, str]) -> list[Any]:
    start, end = float(row["start_s"]), float(row["end_s"])
    if not (isfinite(start) and isfinite(end)):
        raise ValueError("a time that is no number")
    return [int(row["device"]), row["lane"], row["action"], start, end]


def _row(folder: Path) -> dict[str, Any] | None:
    found = record.read(folder)
    if found is None:
        return None
    row = {under_unit(found, key): found.get(key) for key in SHOWN}
    for key in ("peak_memory_bytes", "peak_in_flight"):  # of the fullest device
        values = found.get(key)
        row[key] = max(filter(is_finite, values), default=None) if isinstance(values, list) else None
    row["times_in"] = unit(found)
    row["has_curve"] = isinstance(found.get("loss_curve"), list)
    typed = [str(item) for item in found.get("overrides") or ()]
    row["command"] = " ".join(["python -m rpbench", *typed])
    row["options"] = " ".join(item for item in typed if item.lstrip("+").partition("=")[0] not in _TOLD)
    identity = record.identity_of(found)
    row["asked"] = record.run_id(identity | {"subject": identity["subject"] | {"seed": None}})  # equal for repetitions
    row["has_timeline"] = (folder / TIMELINE).exists()
    return row


RECENT_S = 600.0  # the pace of a sweep is that of so many seconds


def read_sweeps(results: Path, stamps: Mapping[str, float], now: float) -> list[dict[str, Any]]:
    """Progress of each readable sweep; `stamps` as of `Rows`, `now` on the same clock."""
    return [_line(manifest, stamps, now) for manifest in read_manifests(results)]


def _line(manifest: Manifest, stamps: Mapping[str, float], now: float) -> dict[str, Any]:
    runs = [run for cell in manifest.cells for run in cell.run_ids]
    recent = sorted(stamps[run] for run in runs if now - stamps.get(run, 0.0) < RECENT_S)
    left = manifest.counts[PLANNED]
    # Between the ends of n runs lie n - 1 runs.
    pace = (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 1 and recent[-1] > recent[0] else None
    return {
        "name": manifest.name,
        "command": manifest.command,
        "states": {state: number for state, number in manifest.counts.items() if number},
        "cells": len(manifest.cells),
        "runs": runs,
        "runs_per_minute": None if pace is None else 60 * pace,
        "left_s": left / pace if pace and left else None,
    }


_HERE = Path(__file__).parent
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_HEADERS = {
    # Vega writes style attributes; texts of records reach the page only as text nodes and marks of a chart.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dashboard(ThreadingHTTPServer):
    """The page over a folder of records, served on a port of loopback (0: a free one) until its block ends.

    OSError if the port is taken, ValueError without the chart library.
    """

    def __init__(self, results: Path, port: int = 0) -> None:
        charts_library()
        rows = Rows(results)
        asked: dict[str, Callable[[str], Any]] = {
            "rows.json": lambda _: rows.read(),
            "sweeps.json": lambda _: read_sweeps(results, rows.stamps, time.time()),
            "record": rows.record,
            "curve": rows.curve,
            "timeline": rows.timeline,
        }
        super().__init__(("127.0.0.1", port), lambda *given: _Answer(asked, *given))
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def wait(self) -> None:
        self._thread.join()

    def __enter__(self) -> "Dashboard":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *request: Any) -> None:
        """A client that disconnects early is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


@cache
def charts_library() -> bytes:
    """Vega, Vega-Lite and Vega-Embed in one script; ValueError if the package that holds them is not installed."""
    try:
        import vl_convert
    except ImportError:
        raise ValueError(
            "dashboard: vl-convert-python, which holds the chart library, is not installed; "
            "pip install vl-convert-python"
        ) from None
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return f"(() => {{\n{bundle}\n}})()\n".encode()  # a function keeps its names from the page


class _Answer(BaseHTTPRequestHandler):
    """Answers GET; the base class answers every other method with 501."""

    def __init__(self, asked: Mapping[str, Callable[[str], Any]], *given: Any) -> None:
        self._asked = asked
        super().__init__(*given)

    def do_GET(self) -> None:
        port = self.server.server_address[1]  # type: ignore[index]  # of TCP
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._send(HTTPStatus.FORBIDDEN, b"ask 127.0.0.1\n", "text/plain")  # a page of another host asks
            return
        try:
            path = urlsplit(self.path).path
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"no path\n", "text/plain")
            return
        kind, _, name = path.removeprefix("/").partition("/")
        if path in _FILES:
            file, kind = _FILES[path]
            self._send(HTTPStatus.OK, (_HERE / file).read_bytes(), kind)
        elif path == "/vega.js":
            self._send(HTTPStatus.OK, charts_library(), "text/javascript")
        elif kind in self._asked and bool(name) != kind.endswith(".json"):
            found = self._asked[kind](name)
            text = json.dumps(found, indent=1 if isinstance(found, dict) else None)
            self._send(HTTPStatus.OK, text.encode(), "application/json")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not here\n", "text/plain")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: stderr is for people."""


_USAGE = "dashboard [results_dir=DIR] [port=N], or dashboard wandb [project=NAME] [entity=NAME] [--dry-run]"


def dashboard(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted, or make the W&B workspace; ConfigError for an unknown argument."""
    words = {item for item in arguments if "=" not in item}
    options = dict(item.partition("=")[::2] for item in arguments if "=" in item)
    is_wandb = "wandb" in words
    for word in words - {"wandb", "--dry-run"}:
        raise ConfigError(f"unknown word {word!r}: {_USAGE}")
    if "--dry-run" in words and not is_wandb:
        raise ConfigError(f"--dry-run belongs to dashboard wandb: {_USAGE}")
    for key in options.keys() - ({"project", "entity"} if is_wandb else {"results_dir", "port"}):
        raise ConfigError(f"dashboard takes no {key}: {_USAGE}")
    if is_wandb:
        from rpbench.tracking import dashboard_wandb

        make = dashboard_wandb.specification if "--dry-run" in words else dashboard_wandb.save
        print(json.dumps(make(options.get("project", "rpbench"), options.get("entity", ""))))
        return 0
    results, port = Path(options.get("results_dir", "results")), options.get("port", "0")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"port={port}: a whole number up to 65535; 0 takes a free one")
    if not results.is_dir():
        what = "it is no folder" if results.exists() else "there is no such folder"
        raise ConfigError(f"results_dir={results}: {what}; name one that holds records, or run something first")
    with Dashboard(results, int(port)) as server:
        print(json.dumps({"dashboard": server.url}), flush=True)
        print("rpbench: the page follows the folder; Ctrl-C ends it", file=sys.stderr)
        server.wait()
    return 0
