"""Pages whose commands are run: all of `docs/`, and the documents of the repository that are pages of the site.

```bash                        runs in the default suite, inside the test's process
```bash slow: REASON           runs under the marker `slow`, in a copy of the clone
```bash no-run: REASON         is not run; the reason begins with one of `GROUNDS`
```yaml title="NAME"           a file that the commands below it read
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from analysis.site.fences import _MARK, _OPENING, DECLARED, PROJECT, ROOT

GROUNDS = tuple(DECLARED["grounds"])
_TITLE = re.compile(r'^title="(?P<title>[^"]+)"$')
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / path for path in PROJECT if path != "CHANGELOG.md")])


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


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path) -> list[Fence]:
    return list(fences(path.read_text(encoding="utf-8")))


def write_file(fence: Fence, folder):
    target = folder / fence.title
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(fence.text, encoding="utf-8")
