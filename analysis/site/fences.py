"""Fences: the blocks of commands and files on a page, and what a test does with each.

```bash                        runs in the default suite, inside the test's process
```bash slow: REASON           runs under the marker `slow`, in a copy of the clone
```bash no-run: REASON         is not run; the reason begins with one of `GROUNDS`
```yaml title="NAME"           a file that the commands below it read
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rpbench.yaml_file import read_keys

ROOT = Path(__file__).parents[2]
DECLARED = read_keys(Path(__file__).with_name("site.yaml"))
PROJECT: dict[str, str] = DECLARED["project"]
_HERE = {"README.md": "index.md", **PROJECT}
_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def source_of(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return next((path for path, page in PROJECT.items() if page == uri), f"docs/{uri}")


def page_of(path: str) -> str | None:
    """The page that a path in the repository is on the site; None if it is none."""
    if path in _HERE:
        return _HERE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def relinked(text: str, uri: str, missing: Callable[[str], None]) -> str:
    """The text of a page with links as the site has them.

    A link to a document that is no page becomes the words with its path. `missing` is told of a path that is nowhere.
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


GROUNDS = tuple(DECLARED["grounds"])
_OPENING = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]+)(?P<rest>[^`\n]*)$")
_MARK = re.compile(r"^(?P<mark>slow|no-run): (?P<reason>.+)$")
_TITLE = re.compile(r'^title="(?P<title>[^"]+)"$')


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page.

    Args:
        language: the word behind the fence.
        text: the lines inside.
        line: of the page, where it begins.
        mark: "slow", "no-run" or "".
        reason: behind the mark.
        title: the file it is, or "".
    """

    language: str
    text: str
    line: int
    mark: str = ""
    reason: str = ""
    title: str = ""


def fences(text: str) -> Iterator[Fence]:
    """Every fenced block of a page in its order.

    Raises:
        ValueError: for words behind a fence that are no mark and no title, or a fence that never ends.
    """
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        found = _OPENING.match(line)
        if found is None:
            continue
        inside = []
        for _, each in lines:
            if each.strip() == "```":
                break
            inside.append(each.removeprefix(found["indent"]))
        else:
            raise ValueError(f"line {number}: this fence never ends; close it with ```")
        yield Fence(found["language"], "\n".join(inside) + "\n", number, **_words(found["rest"].strip(), number))


def _words(rest: str, line: int) -> dict[str, str]:
    if not rest:
        return {}
    if mark := _MARK.match(rest):
        return mark.groupdict()
    if title := _TITLE.match(rest):
        return title.groupdict()
    raise ValueError(f'line {line}: cannot read {rest!r}; write `slow: REASON`, `no-run: REASON` or title="FILE"')


def commands(text: str) -> Iterator[str]:
    """The commands of a block: lines that go on are joined, comments and empty lines are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield " ".join(line.split())


def shown(text: str) -> str:
    """A page as readers see it: a mark behind a fence becomes a line below the block."""
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
