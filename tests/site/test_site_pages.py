"""Pages of the site: one for each method, paths that are there, and the site itself where mkdocs is installed."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import PIL.Image
import pytest

from analysis.site import fences, generated
from analysis.site.fences import shown
from rpbench.registry import offered
from tests.chromium import needs_axe, needs_chromium
from tests.site.site_pages import DOCS, PAGES, ROOT, name_of

_PATH = re.compile(r"`((?:rpbench|analysis|tests|conf|baselines|docs|\.ci)/[\w./-]*\w/?)`")
# What runs make, and what readers write.
_MADE = ("analysis/figures", "conf/cluster/this_machine.yaml", "analysis/published/measured/NAME.csv")
METHODS = ROOT / "docs" / "methods"
SECTIONS = ("Idea", "What is faithful", "What differs", "The paper's number and ours")


def test_every_schedule_has_a_page_and_every_page_a_schedule():
    assert {path.stem for path in METHODS.glob("*.md")} == set(offered())


@pytest.mark.parametrize("name", sorted(offered()))
def test_a_page_of_a_method_has_its_parts_in_order(name):
    text = (METHODS / f"{name}.md").read_text(encoding="utf-8")
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert text.startswith(f"# {name}\n")
    assert headings[: len(SECTIONS)] == list(SECTIONS)
    assert "**Paper.** " in text
    assert "**Ours.** " in text
    facts = generated.with_facts(text, name)
    assert f"python -m rpbench show {' '.join(generated.words_of(name))}" in facts
    assert all(f"`schedule.{option}=" in facts for option in offered()[name].options)


def test_a_page_without_a_place_for_the_drawing_is_refused():
    with pytest.raises(ValueError, match="facts"):
        generated.with_facts("# gpipe\n", "gpipe")


def test_the_table_of_methods_has_all(monkeypatch):
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(methods/(\w+)\.md\)", text)) <= set(offered())
    mine = replace(offered()["gpipe"], name="mine")
    monkeypatch.setattr(generated, "offered", lambda: {**offered(), "mine": mine})
    rows = generated.filled(text)
    assert set(re.findall(r"\(methods/(\w+)\.md\)", rows)) == {*offered(), "mine"}
    assert "| [mine](methods/mine.md) | GPipe:" in rows


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_paths_on_a_page_are_there(page):
    for path in _PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or path.startswith(_MADE), f"{path} is not there"


def test_links_become_those_of_the_site(tmp_path):
    missing = []
    text = "[a](../CONTRIBUTING.md#x) [b](../rpbench/cli.py) [c](nowhere.md) [d](https://example.org)\n```\n[e](f.md)\n```\n"
    assert fences.relinked(text, "bubbles.md", missing.append) == (
        "[a](project/contributing.md#x) b (`rpbench/cli.py`) [c](nowhere.md) [d](https://example.org)\n"
        "```\n[e](f.md)\n```\n"
    )
    assert missing == ["docs/bubbles.md: nowhere.md is not there"]


def test_a_mark_becomes_a_line_below_its_block():
    page = "```bash no-run: needs a GPU\ntrue\n```\nNext.\n"
    assert shown(page) == "```bash\ntrue\n```\n\n*No test runs this: needs a GPU.*\n\nNext.\n"


def test_generated_parts_name_what_the_program_has(monkeypatch):
    monkeypatch.setattr(generated, "PACKAGES", ("rpbench/ir",))
    pages = {
        path.stem: generated.filled(path.read_text(encoding="utf-8")) for path in (DOCS / "reference").glob("*.md")
    }
    assert "| `advise` |" in pages["verbs"]
    assert "\\|" not in pages["verbs"]  # the site's tables keep a code's bar whole, and would show the backslash
    assert "num_microbatches: 16" in pages["settings"]
    assert "`8x_rtx4090`" in pages["settings"]
    assert "`roundpipe_async`" in pages["settings"]
    assert "| `rpbench/ir/schedule.py` | Shape and Schedule" in pages["code"]
    assert "`0F0 >0B0< 0B1`" in pages["code"]


@pytest.mark.parametrize("top", ["rpbench", "analysis"])
def test_every_folder_of_code_is_on_the_map(top):
    maps = [ROOT / "CONTRIBUTING.md", *([ROOT / "README.md"] if top == "rpbench" else [])]
    for folder in (path for path in (ROOT / top).iterdir() if next(path.glob("*.py"), None) and not path.is_symlink()):
        assert [each.name for each in maps if f"{top}/{folder.name}/" not in each.read_text(encoding="utf-8")] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site. --strict: a link, a heading or a page that is not there ends it."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("no mkdocs: the extra docs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "analysis/site/mkdocs.yml", "-d"]
    ended = subprocess.run([*build, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_the_site_is_built_and_asks_nobody(built):
    assert all(
        (built / "methods" / f"{name}.svg").stat().st_size > 1000 for name in offered() if generated.can_draw(name)
    )
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "no-run:" not in text or page.name == "contributing.html", page  # which explains the mark
        for asked in _requests(text):
            assert not re.match(r"(?:[a-z]+:)?//", asked), f"{page.relative_to(built)} asks for {asked}"
            local = asked.partition("#")[0].partition("?")[0]
            assert page.name == "404.html" or (page.parent / local).exists(), f"{page.relative_to(built)}: {asked}"
    for sheet in built.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


OPENED = ("index", "tutorial", "methods", "methods/roundpipe", "schedules", "findings", "duel", "howto/advise")
OPENED += ("explanation/how_do_i_know", "reference/settings", "project/changelog")


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=("light", "dark"))
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", OPENED)
def test_a_page_on_disk_is_there_for_everybody(built, tab, name, width, dark):
    tab.look(width, dark)
    tab.open((built / f"{name}.html").as_uri(), until="document.body.dataset.mdColorScheme !== undefined")
    assert (tab.read("document.body.dataset.mdColorScheme") == "slate") is dark
    assert not tab.scrolls_sideways()
    assert tab.errors == []
    assert tab.serious() == []


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize(("scheme", "machine"), [("default", True), ("slate", False)], ids=("light", "dark"))
def test_a_drawing_follows_its_page_and_not_the_machine(tmp_path, tab, scheme, machine):
    generated.draw("1f1b", tmp_path / "1f1b.svg")
    theme = "[data-md-color-scheme=slate]{color-scheme:dark}"
    style = theme + (DOCS / "site.css").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(
        f"<!doctype html><style>{style}</style><body data-md-color-scheme={scheme}><article class=md-typeset>"
        "<img src=1f1b.svg>"
    )
    tab.look(1400, machine)
    tab.open((tmp_path / "page.html").as_uri())
    tab.picture(tmp_path / "seen.png")
    with PIL.Image.open(tmp_path / "seen.png") as seen:
        assert (sum(seen.convert("RGB").getpixel((14, 14))) < 150) is (scheme == "slate")


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
def test_a_reader_can_search_the_site_on_disk(built, tab):
    tab.look(1400, False)
    tab.open((built / "index.html").as_uri())
    tab.read("(words = document.querySelector('input[data-md-component=search-query]')).focus()")
    tab.read("words.value = 'weipipe'; words.dispatchEvent(new Event('keyup', { bubbles: true }))")
    found = "[...document.querySelectorAll('a.md-search-result__link')].map((link) => link.href)"
    wait = f"new Promise((done) => setInterval(() => {found}.length && done({found}), 100))"
    assert any("methods/weipipe.html" in link for link in tab.read(wait))


def _requests(text: str) -> list[str]:
    """What a page loads of itself: scripts, sheets, images, frames."""
    found = re.findall(r"<(?:script|img|iframe)\b[^>]*?\bsrc=\"?([^\"\s>]+)", text)
    sheets = re.findall(r"<link\b[^>]*>", text)
    return found + [
        match[1] for each in sheets if "canonical" not in each and (match := re.search(r"href=\"?([^\"\s>]+)", each))
    ]
