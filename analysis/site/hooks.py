"""Hooks of mkdocs: pages from outside docs/, links, marks of fences, the methods' facts and drawings, and Pyodide.

`npm ci --prefix analysis/site` installs Pyodide. Without it the page of schedules says that it is missing.
"""

import base64
import gzip
import io
import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis.site import fences, generated

ROOT = Path(__file__).parents[2]
PYODIDE = Path(__file__).parent / "node_modules" / "pyodide"
NAME = "schedules_runtime.js"
_FILES = ("pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_FIRST = (1980, 1, 1, 0, 0, 0)  # the date of every file, so that the same sources make the same script


def script() -> str:
    """A script that holds compressed files by name; none without Pyodide."""
    files = {name: (PYODIDE / name).read_bytes() for name in _FILES} | {"project.zip": project()} if is_there() else {}
    packed = {name: gzip.compress(content, 9, mtime=0) for name, content in files.items()}
    held = {name: base64.b64encode(content).decode("ascii") for name, content in packed.items()}
    return f"self.SCHEDULES_RUNTIME = {json.dumps(held)}\n"


def is_there() -> bool:
    return all((PYODIDE / name).is_file() for name in _FILES)


def project() -> bytes:
    """The Python that the page runs, as an archive to import from."""
    made, sources = io.BytesIO(), [each for each in ROOT.glob("baselines/*/*.py") if each.parent.name != "systems"]
    sources += [path for package in fences.DECLARED["in_the_browser"] for path in (ROOT / package).glob("*.py")]
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(sources):
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(ROOT)), _FIRST), path.read_bytes())
    return made.getvalue()


_LOG = logging.getLogger("mkdocs.plugins.rpbench")


def on_config(config: Any) -> Any:
    """Add a page for each method of the registry."""
    for section in config["nav"]:
        for title, below in section.items():
            if title == "Methods":
                below.extend({name: page} for name, page in generated.pages().items())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add documents of the repository, the drawings, and the script of the page of schedules."""
    from mkdocs.structure.files import File  # imported here because tests use this module without mkdocs

    for path, uri in fences.PROJECT.items():
        files.append(File.generated(config, uri, abs_src_path=str(fences.ROOT / path)))
    with TemporaryDirectory() as scratch:
        for name in filter(generated.can_draw, generated.pages()):
            drawing = Path(scratch) / f"{name}.svg"
            generated.draw(name, drawing)
            files.append(File.generated(config, f"methods/{name}.svg", content=drawing.read_bytes()))
    if not is_there():
        _LOG.info("schedules.md works nothing out: there is no Pyodide; npm ci --prefix analysis/site fetches it")
    files.append(File.generated(config, NAME, content=script()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return as_shown(markdown, page.file.src_uri, _LOG.warning)


def as_shown(markdown: str, uri: str, missing: Callable[[str], None]) -> str:
    """The text of the page `uri` on the site; `missing` as of `fences.relinked`."""
    name = uri.removeprefix("methods/").removesuffix(".md")
    if uri.startswith("methods/") and name in generated.pages():
        markdown = generated.with_facts(markdown, name)
    return fences.shown(generated.filled(fences.relinked(markdown, uri, missing)))
