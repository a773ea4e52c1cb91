"""Hooks of mkdocs: pages from outside docs/, links, marks of fences, and the methods' facts and drawings."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.structure.files import File

from analysis.site import fences, generated, links, methods, runtime

_LOG = logging.getLogger("mkdocs.plugins.rpbench")


def on_config(config: Any) -> Any:
    """Put a page for each method of the registry under the heading of the methods."""
    for section in config["nav"]:
        for title, below in section.items():
            if title == "Methods":
                below.extend({name: page} for name, page in methods.pages().items())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add documents of the repository, the drawings, and what the page of schedules runs."""
    for path, uri in links.PROJECT.items():
        files.append(File.generated(config, uri, abs_src_path=str(links.ROOT / path)))
    for name, drawing in _drawings():
        files.append(File.generated(config, f"methods/{name}.svg", content=drawing))
    if not runtime.is_there():
        _LOG.info("schedules.md works nothing out: there is no Pyodide; npm ci --prefix analysis/site fetches it")
    files.append(File.generated(config, runtime.NAME, content=runtime.script()))
    return files


def _drawings() -> Iterator[tuple[str, bytes]]:
    with TemporaryDirectory() as scratch:
        for name in filter(methods.can_draw, methods.pages()):
            path = Path(scratch) / f"{name}.svg"
            methods.draw(name, path)
            yield name, path.read_bytes()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page as the site has it."""
    return as_shown(markdown, page.file.src_uri, _LOG.warning)


def as_shown(markdown: str, uri: str, missing: Callable[[str], None]) -> str:
    """The text of a page, by its place on the site; `missing` is told of a link that leads nowhere."""
    name = uri.removeprefix("methods/").removesuffix(".md")
    if uri.startswith("methods/") and name in methods.pages():
        markdown = methods.with_facts(markdown, name)
    return fences.shown(generated.filled(links.relinked(markdown, uri, missing)))
