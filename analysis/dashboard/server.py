"""Server: the page and what it shows, on loopback only. It answers reads; nothing here writes.

The charts are drawn by Vega-Lite. Its JavaScript comes out of the installed package vl-convert-python, so that the page
asks nobody outside.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from analysis.dashboard.rows import Rows
from rpbench.records.manifest import PLANNED, Manifest, ManifestError, manifest_names, read_manifest

# Sweeps: what became of the cells of every sweep of a folder, and how fast they end.


RECENT_S = 600.0  # of the pace


def read_sweeps(results: Path, stamps: Mapping[str, float], now: float) -> list[dict[str, Any]]:
    """A line for each sweep that can be read.

    Args:
        stamps: when each record was written, by its name.
        now: on the same clock, in seconds.
    """
    found = []
    for name in manifest_names(results):
        try:
            manifest = read_manifest(results, name)
        except ManifestError:
            continue
        if manifest is not None:
            found.append(_line(manifest, stamps, now))
    return found


def _line(manifest: Manifest, stamps: Mapping[str, float], now: float) -> dict[str, Any]:
    runs = [run for cell in manifest.cells for run in cell.run_ids]
    recent = sorted(stamps[run] for run in runs if now - stamps.get(run, 0.0) < RECENT_S)
    left = manifest.counts[PLANNED]
    # Between n ends lie n - 1 runs; the last one that is under way is not counted.
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
    # Vega writes style attributes; texts of records reach the page as text nodes and marks of a chart alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The page, served until it is closed.

    Args:
        results: the folder of records.
        port: of loopback; 0 takes a free one.
    """

    def __init__(self, results: Path, port: int = 0) -> None:
        rows = Rows(results)
        asked: dict[str, Callable[[str], Any]] = {
            "rows.json": lambda _: rows.read(),
            "sweeps.json": lambda _: read_sweeps(results, rows.stamps, time.time()),
            "record": rows.record,
            "curve": rows.curve,
            "timeline": rows.timeline,
        }
        self._server = _Server(("127.0.0.1", port), lambda *given: _Answer(asked, *given))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def wait(self) -> None:
        """Until interrupted."""
        self._thread.join()

    def __enter__(self) -> "Dashboard":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def serve(results: Path, port: int = 0) -> Dashboard:
    """The page over a folder, to be entered.

    Raises:
        OSError: if the port is taken.
        ValueError: if the chart library is not installed.
    """
    charts_library()
    return Dashboard(results, port)


@cache
def charts_library() -> bytes:
    """Vega, Vega-Lite and Vega-Embed in one script.

    Raises:
        ValueError: if the package that holds them is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise ValueError(
            "dashboard: vl-convert-python, which holds the chart library, is not installed; "
            "pip install vl-convert-python"
        ) from None
    return (
        f"(() => {{\n{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}\n}})()\n".encode()
    )  # its names are its own


class _Server(ThreadingHTTPServer):
    def handle_error(self, *request: Any) -> None:
        """A reader who leaves before the answer is there is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


class _Answer(BaseHTTPRequestHandler):
    """One request. Reads only: every other method is answered 501 by the base class."""

    def __init__(self, asked: Mapping[str, Callable[[str], Any]], *given: Any) -> None:
        self._asked = asked
        super().__init__(*given)

    def do_GET(self) -> None:
        port = self.server.server_address[1]  # type: ignore[index]  # of TCP
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._send(HTTPStatus.FORBIDDEN, b"ask 127.0.0.1\n", "text/plain")  # a page elsewhere asks under its name
            return
        try:
            path = urlsplit(self.path).path
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"no path\n", "text/plain")
            return
        if path in _FILES:
            name, kind = _FILES[path]
            self._send(HTTPStatus.OK, (_HERE / name).read_bytes(), kind)
            return
        if path == "/vega.js":
            self._send(HTTPStatus.OK, charts_library(), "text/javascript")
            return
        kind, _, name = path.removeprefix("/").partition("/")
        if kind in self._asked and bool(name) != kind.endswith(".json"):
            self._send_json(self._asked[kind](name))
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not here\n", "text/plain")

    def _send_json(self, found: Any) -> None:
        self._send(
            HTTPStatus.OK, json.dumps(found, indent=1 if isinstance(found, dict) else None).encode(), "application/json"
        )

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: stderr is for people."""
