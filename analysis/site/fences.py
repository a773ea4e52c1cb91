"""Links between pages, and fenced blocks of commands as readers see them (`tests/site` runs the blocks)."""

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from rpbench.yaml_file import read_keys

ROOT = Path(__file__).parents[2]
DECLARED = read_keys(Path(__file__).with_name("site.yaml"))
PROJECT: dict[str, str] = DECLARED["project"]
_HERE = {"README.md": "index.md", **PROJECT}
_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def source_of(uri: str) -> str:
    """The path in the repository of a page."""
    return next((path for path, page in PROJECT.items() if page == uri), f"docs/{uri}")


def page_of(path: str) -> str | None:
    """The page of a path in the repository, if it has one."""
    if path in _HERE:
        return _HERE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def relinked(text: str, uri: str, missing: Callable[[str], None]) -> str:
    """The text of a page with the site's links; `missing` is called with a message for each broken link.

    A link to a document that is no page becomes its words and path.
    """
    folder = PurePosixPath(source_of(uri)).parent

    def link(found: re.Match[str]) -> str:
        if "://" in found["target"] or found["target"].startswith("mailto:"):
            return found[0]
        path = os.path.normpath(folder / found["target"])
        if not (ROOT / path).exists():
            missing(f"{source_of(uri)}: {found['target']} is not there")
        page = page_of(path)
        if page is None:
            return f"{found['words']} (`{path}`)"
        target = os.path.relpath(page, PurePosixPath(uri).parent)
        return f"[{found['words']}]({target}{found['anchor'] or ''})"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


_OPENING = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]+)(?P<rest>[^`\n]*)$")
_MARK = re.compile(r"^(?P<mark>slow|no-run): (?P<reason>.+)$")


def shown(text: str) -> str:
    """A page whose marks behind fences are notes below the blocks."""
    lines, waiting = [], ""
    for line in text.splitlines():
        found = _OPENING.match(line)
        if found and (mark := _MARK.match(found["rest"].strip())):
            lines.append(f"{found['indent']}```{found['language']}")
            waiting = f"{found['indent']}*{_NOTES[mark['mark']]}: {mark['reason']}.*"
            continue
        lines.append(line)
        if waiting and line.strip() == "```":
            lines += ["", waiting, ""]
            waiting = ""
    return "\n".join(lines) + "\n"


_NOTES = {"slow": "Takes longer than the others", "no-run": "No test runs this"}
