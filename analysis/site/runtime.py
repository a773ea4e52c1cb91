"""Runtime: Pyodide and this project's own schedules in one script, which the page of schedules reads without a network.

Pyodide comes from npm: `npm ci --prefix analysis/site`. A site that is built without it says so on the page.
"""

import base64
import gzip
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYODIDE = Path(__file__).parent / "node_modules" / "pyodide"
NAME = "schedules_runtime.js"
_FILES = ("pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
# What `schedule_answer` may import; tests run it with nothing else but the standard library.
_PACKAGES = (
    "rpbench/ir",
    "rpbench/ir/checks",
    "rpbench/ir/waits",
    "rpbench/passes",
    "rpbench/ordering",
    "rpbench/schedules",
    "rpbench/cost",
    "rpbench/cost/footprint",
    "rpbench/cost/hardware",
    "rpbench/workload",
    "rpbench/plan",
    "rpbench/plan/of_pipedream",
    "rpbench/plan/of_mobius",
    "rpbench/sim",
    "rpbench/sim/shared_links",
    "rpbench/config",
    "rpbench/drawing",
    "baselines",
)
_MODULES = ("rpbench", "analysis", "analysis/site")  # their own files, not the folders below
_FIRST = (1980, 1, 1, 0, 0, 0)  # of every file: the same sources make the same script


def script() -> str:
    """The script: file by name, compressed and in letters; with no file where Pyodide is not there."""
    held = {} if not is_there() else {name: _letters(content) for name, content in _contents()}
    return f"self.SCHEDULES_RUNTIME = {json.dumps(held)}\n"


def is_there() -> bool:
    """Whether Pyodide has been fetched."""
    return all((PYODIDE / name).is_file() for name in _FILES)


def _contents() -> Iterator[tuple[str, bytes]]:
    for name in _FILES:
        yield name, (PYODIDE / name).read_bytes()
    yield "project.zip", project()


def project() -> bytes:
    """The Python that the page runs, as an archive to import from."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(_sources()):
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(ROOT)), _FIRST), path.read_bytes())
    return made.getvalue()


def _sources() -> Iterator[Path]:
    for package in _PACKAGES:
        yield from (ROOT / package).glob("*.py")
    yield from (path for path in (ROOT / "baselines").glob("*/*.py") if path.parent.name != "systems")
    for package in _MODULES:
        yield from (ROOT / package).glob("*.py")


def _letters(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")
