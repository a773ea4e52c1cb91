"""The report in a browser: it loads from a file, asks nobody for anything, and everybody can read and search it."""

import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest

from analysis.records.experiments import Experiments
from analysis.report.content import Content
from analysis.report.images import draw_all
from analysis.report.page import gather, rendered
from analysis.report.statements import statements
from tests.chromium import Tab, needs_axe, needs_chromium

pytestmark = [pytest.mark.browser, needs_chromium]

FIGURE17, CELLS = "exhibit-figure17.html", "claims-figure-17-the-simulated-bubbles.html"
PAGES = ("report.html", FIGURE17, CELLS, "claims.html", "findings.html", "discrepancies.html", "method.html")
PAGES += ("sources.html", "records.html", "records-figure17.html")
LOADED = (  # every picture, those further down as well
    "Promise.all([...document.images].filter((image) => image.getAttribute('src')).map((image) => "
    "{ image.loading = 'eager'; return image.decode(); }))"
)


@pytest.fixture(scope="module")
def content(full_experiments: Experiments, tmp_path_factory: pytest.TempPathFactory) -> Content:
    """The report with two of its figures."""
    found = gather(full_experiments)
    found.figures = tmp_path_factory.mktemp("figures")
    found.images = draw_all([each for each in found.exhibits if each.id in ("figure17", "figure3")], found.figures)
    return found


@pytest.fixture(scope="module")
def folder(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages in one folder, as they come beside their figures."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "report_pages").mkdir()
    shutil.copytree(content.figures, folder / "figures")
    for name, text in rendered(content, "report.html", "report_pages"):
        _path(folder, name).write_text(text)
    return folder


def _path(folder: Path, name: str) -> Path:
    return folder / name if name == "report.html" else folder / "report_pages" / name


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=("light", "dark"))
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_for_everybody_and_asks_for_nothing(
    tab: Tab, folder: Path, name: str, width: int, dark: bool
) -> None:
    tab.look(width, dark)
    tab.open(_path(folder, name).as_uri())
    tab.read(f"{LOADED}.then(() => true)")  # fails where a picture is broken
    assert not tab.scrolls_sideways()  # tables scroll inside, the page does not
    assert (
        tab.read("getComputedStyle(document.body).backgroundColor")
        == f"rgb({'20, 24, 29' if dark else '255, 255, 255'})"
    )
    asked = tab.read("performance.getEntriesByType('resource').map((each) => each.name)")
    assert all(each.startswith("file:") for each in asked)
    assert tab.errors == []
    assert tab.serious() == []


@pytest.mark.parametrize("name", PAGES[:2])
def test_a_figure_is_enlarged_by_a_click_and_by_a_key(tab: Tab, folder: Path, name: str) -> None:
    tab.look(1400, False)
    tab.open(_path(folder, name).as_uri())
    tab.read("document.querySelector('button.enlarge').focus()")
    for kind in ("rawKeyDown", "char", "keyUp"):
        tab.ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    large = "document.getElementById('large')"
    assert tab.read(f"{large}.open && {large}.querySelector('img').decode().then(() => true)")
    wide = tab.read(f"[document.querySelector('button.enlarge img').width, {large}.querySelector('img').width]")
    assert wide[1] > 1.2 * wide[0]
    tab.read(f"{large}.querySelector('button').click()")
    assert not tab.read(f"{large}.open")
    files = tab.read(
        "[...document.querySelector('.files').querySelectorAll(':scope > a')].map((link) => link.textContent)"
    )
    assert files == ["PNG", "PDF", "SVG", "CSV"]
    assert tab.read("document.querySelector('.files code').textContent").startswith("python -m rpbench -m experiment=")


def test_a_phone_gets_the_panels_of_a_figure_below_one_another(tab: Tab, folder: Path) -> None:
    for width, ending in ((390, "figure17.narrow.svg"), (1400, "figure17.svg")):
        tab.look(width, False)
        tab.open(_path(folder, FIGURE17).as_uri())
        shown = tab.read(f"{LOADED}.then(() => document.querySelector('.enlarge img').currentSrc)")
        assert shown.endswith(ending)


def test_a_reader_can_search_the_claims(tab: Tab, content: Content, folder: Path) -> None:
    tab.look(1400, False)
    tab.open(_path(folder, CELLS).as_uri())
    words = "roundpipe llama 8b makespan"
    tab.read(
        f"field = document.querySelector('form[data-filters] input'); field.value = '{words}';"
        "field.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    claims = [each.claim for each in content.verdicts if each.claim.section == "Figure 17: the simulated bubbles"]
    searched = {f"claim-{each.id}": f"{each.statement} {each.id} {each.metric}".lower() for each in claims}
    shown = "[...document.querySelectorAll('tr[data-verdict]')].filter((row) => !row.hidden).map((row) => row.id)"
    found = tab.read(shown)
    assert set(found) == {name for name, text in searched.items() if all(word in text for word in words.split())}
    assert 1 <= len(found) <= 10
    assert (
        tab.read("document.querySelector('form[data-filters] output').value") == f"{len(found)} of {len(claims)} cells"
    )
    tab.read("location.hash = '#' + [...document.querySelectorAll('tr[data-verdict]')].find((row) => row.hidden).id")
    pause = "new Promise((done) => setTimeout(done, 60))"
    assert len(tab.read(f"{pause}.then(() => {shown})")) == len(claims)  # a link into what is filtered away shows it


@pytest.mark.parametrize("asked", ["contradicted", "<img src=x onerror=alert(1)>"])
def test_an_address_narrows_the_statements_or_says_that_it_cannot(
    tab: Tab, content: Content, folder: Path, asked: str
) -> None:
    tab.look(1400, False)
    tab.open(f"{_path(folder, 'claims.html').as_uri()}#{urlencode({'verdict': asked})}")
    found = statements(content.verdicts)
    verdicts = tab.read(
        "[...document.querySelectorAll('#statement-list tbody tr')].filter((row) => !row.hidden)"
        ".map((row) => row.dataset.verdict)"
    )
    count = tab.read("(form = document.querySelector('form[data-filters]')).elements.count.value")
    if asked == "contradicted":
        number = sum(each.verdict == asked for each in found)
        assert verdicts == [asked] * number
        assert count == f"{number} of {len(found)} statements"
        tab.read("form.elements.whose.value = \"the paper's\"; form.dispatchEvent(new Event('input'))")
        assert tab.read("location.hash") == "#verdict=contradicted&whose=the+paper%27s"
    else:
        assert len(verdicts) == len(found)
        assert count == f"{len(found)} statements; there is no verdict “{asked}”, so all are shown"


def test_a_printed_page_holds_its_tables(tab: Tab, folder: Path) -> None:
    """On A4 the tables are as wide as the text: nothing stands beyond the page's edge."""
    tab.look(703, False)  # 186 mm
    tab.ask("Emulation.setEmulatedMedia", media="print")
    try:
        tab.open(_path(folder, FIGURE17).as_uri())
        right = tab.read("[...document.querySelectorAll('table')].map((each) => each.getBoundingClientRect().right)")
        assert right
        assert max(right) <= 704
    finally:
        tab.ask("Emulation.setEmulatedMedia", media="")
