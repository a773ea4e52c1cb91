"""Every page says the same to every reader: CommonMark and the site's own engine make of it what it means.

What a page means is read off its lines by rules of our own, which know no engine: how many headings, lists, items,
tables and blocks of code it has. A mark that ends a list early, or a table without its blank line, changes a count.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest
import yaml
from markdown_it import MarkdownIt

from analysis.site import fences
from analysis.site.fences import shown
from tests.site.site_pages import PAGES, ROOT, name_of

ALL = [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]
_ITEM = re.compile(r"^(?P<indent> *)(?P<mark>[-*]|\d+\.) +\S")
_DELIMITER = re.compile(r"^\s*\|( ?:?-+:? ?\|)+$")
_LITERAL = re.compile(r"`|\*\*|\]\(|\| ---|<!--|^#+ ", re.MULTILINE)
_TAGS = {"ul": "lists", "ol": "lists", "li": "items", "table": "tables", "pre": "code"}
_TAGS |= {f"h{level}": "headings" for level in range(1, 7)}


def meant(text: str) -> Counter[str]:
    """What a page has, by its lines: a list goes on until an unindented paragraph follows a blank line."""
    found: Counter[str] = Counter()
    lists: list[tuple[int, bool]] = []  # the open ones, outermost first: their indent, and whether they are numbered
    fence, blank, code = "", True, False
    for line in text.splitlines():
        words = line.strip()
        if fence:
            fence = "" if words == fence else fence
            continue
        indent = len(line) - len(line.lstrip())
        if words and blank and not indent and not _ITEM.match(line):
            lists = []
        is_code = bool(words) and indent >= 4 * (bool(lists) + 1) and (blank or code)
        if words.startswith("```"):
            fence = "```"
            found["code"] += 1
        elif is_code:
            found["code"] += not code
        elif item := _ITEM.match(line):
            lists = _opened(lists, item, found)
        elif line.startswith("<"):  # HTML of the page's own
            found += Rendered(line).parts
        elif re.match(r"#{1,6} ", line):
            found["headings"] += 1
        elif _DELIMITER.match(line):
            found["tables"] += 1
        code = is_code or (code and not words)
        blank = not words
    assert not fence, "a fence never ends"
    found.pop("", None)
    return found


def _opened(lists: list[tuple[int, bool]], item: re.Match[str], found: Counter[str]) -> list[tuple[int, bool]]:
    """The lists that are open at an item."""
    here = (len(item["indent"]), item["mark"][0].isdigit())
    kept = [each for each in lists if each[0] < here[0] or each == here]
    found["items"] += 1
    found["lists"] += here not in kept
    return kept if here in kept else [*kept, here]


class Rendered(HTMLParser):
    """What an engine made of a page: its parts, and the words outside of code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: Counter[str] = Counter()
        self.words = ""
        self._code = 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.parts[_TAGS.get(tag, "")] += 1
        self._code += tag in ("pre", "code")

    def handle_endtag(self, tag):
        self._code -= tag in ("pre", "code")

    def handle_data(self, data):
        self.words += "" if self._code else data


def commonmark(text: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(text)


def of_the_site(text: str) -> str:
    import markdown

    config = (ROOT / "analysis" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    listed = yaml.safe_load(config)["markdown_extensions"]
    options = dict(next(iter(each.items())) if isinstance(each, dict) else (each, {}) for each in listed)
    return markdown.markdown(text, extensions=list(options), extension_configs=options)


def _problems(text: str, html: str) -> Iterator[str]:
    page, due = Rendered(html), meant(text)
    for part in ("headings", "lists", "items", "tables", "code"):
        if page.parts[part] != due[part]:
            yield f"{page.parts[part]} {part}, but the page means {due[part]}"
    for literal in _LITERAL.finditer(page.words):
        yield f"shows its markup: {page.words[max(0, literal.start() - 40) : literal.end() + 20]!r}"


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_commonmark_makes_of_a_page_what_it_means(page):
    text = page.read_text(encoding="utf-8")
    assert list(_problems(text, commonmark(text))) == []


@pytest.mark.skipif(find_spec("pymdownx") is None, reason="no site's engine here: the extra docs")
@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_the_site_makes_of_a_page_what_it_means(page):
    from analysis.site import hooks  # which needs mkdocs

    text = page.read_text(encoding="utf-8")
    uri = fences.page_of(name_of(page))
    if uri is not None:
        text = hooks.as_shown(text, uri, logging.getLogger("rpbench").warning)
    else:
        text = shown(text)
    assert list(_problems(text, of_the_site(text))) == []


BROKEN = """\
# A page

- one number is
  <!--=ID-->5.377<!--/--> %; `code` stands.
- another
"""


def test_a_mark_at_the_beginning_of_a_line_is_seen():
    assert list(_problems(BROKEN, commonmark(BROKEN)))
    mended = BROKEN.replace("<!--=ID-->5.377<!--/-->", "5.377<!--=ID-->")
    assert list(_problems(mended, commonmark(mended))) == []


@pytest.mark.parametrize(
    "text, due",
    [
        ("- a\n- b\n\nText\n\n- c\n", {"lists": 2, "items": 3}),
        ("1. a\n\n    more\n\n        code\n2. b\n", {"lists": 1, "items": 2, "code": 1}),
        ("- a\n    - b\n- c\n", {"lists": 2, "items": 3}),
        ("Text\n\n    code\n\n    code\n\n| a |\n| --- |\n| b |\n", {"code": 1, "tables": 1}),
        ("```\n- no item\n| --- |\n```\n\n## H\n", {"code": 1, "headings": 1}),
    ],
)
def test_the_rules_agree_with_commonmark_on_small_pages(text, due):
    assert meant(text) == Counter(due)
    assert list(_problems(text, commonmark(text))) == []
