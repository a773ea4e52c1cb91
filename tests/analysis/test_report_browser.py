"""The report in a browser: it loads from a file, asks nobody for anything, and its filter and links work."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from analysis.records.experiments import Experiments
from analysis.report.content import Content
from analysis.report.images import draw_all
from analysis.report.page import gather
from analysis.report.pages import render_all
from analysis.report.statements import statements

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install one (Debian: chromium) to open the report"),
]

# What a page says of itself once it has loaded; written where the dump of it can be read.
LOOK = """
<script>
addEventListener("load", async () => {
  const seen = {};
  const settle = () => new Promise((done) => setTimeout(done, 60));
  const shown = () => [...document.querySelectorAll("tr.claim")].filter((row) => !row.hidden);
  const search = document.querySelector("form[data-filters] input");
  if (search) {
    search.value = "WORDS";
    search.dispatchEvent(new Event("input", { bubbles: true }));
    seen.found = shown().map((row) => row.id);
    seen.count = document.querySelector("form[data-filters] output").value;
    location.hash = "#" + [...document.querySelectorAll("tr.claim")].find((row) => row.hidden)?.id;
    await settle();
    seen.hidden_left = shown().length;
  }
  const figure = document.querySelector("button.enlarge");
  if (figure) {
    figure.focus();
    seen.focus = document.activeElement === figure;
    figure.click();
    seen.large = document.getElementById("large").open;
    document.querySelector("#large button").click();
    seen.closed = !document.getElementById("large").open;
  }
  const images = [...document.images].filter((image) => image.src);
  await Promise.all(images.map((image) => image.decode().catch(() => {})));
  seen.images = images.length;
  seen.broken = images.filter((image) => image.naturalWidth === 0).length;
  seen.wide = document.documentElement.scrollWidth > innerWidth;
  seen.dark = getComputedStyle(document.body).backgroundColor;
  seen.requested = performance.getEntriesByType("resource").map((e) => e.name).filter((n) => !n.startsWith("file:"));
  document.body.dataset.seen = JSON.stringify(seen);
});
addEventListener("error", (event) => { document.body.dataset.error = event.message; });
addEventListener("securitypolicyviolation", (event) => { document.body.dataset.error = event.blockedURI; });
</script>
"""
WORDS = "RoundPipe llama 8b makespan"
PAGES = ("report.html", "exhibit-figure17.html", "claims-figure-17-the-simulated-bubbles.html", "records.html")


@pytest.fixture(scope="module")
def content(full_experiments: Experiments, tmp_path_factory: pytest.TempPathFactory) -> Content:
    """The report with two of its figures."""
    found = gather(full_experiments)
    found.figures = tmp_path_factory.mktemp("figures")
    found.images = draw_all([each for each in found.exhibits if each.id in ("figure17", "figure3")], found.figures)
    return found


@pytest.fixture(scope="module")
def folder(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, each with what reads it; no link to a page of the folder leaves it."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "report_pages").mkdir()
    shutil.copytree(content.figures, folder / "figures")
    for name, text in render_all(content, "report.html", "report_pages").items():
        watched = text.replace("</body>", LOOK.replace("WORDS", WORDS) + "</body>")
        (folder if name == "report.html" else folder / "report_pages").joinpath(name).write_text(watched)
    return folder


def browse(page: Path, profile: Path, *options: str, anchor: str = "") -> dict[str, Any]:
    """What a headless browser saw on a page."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-sync", "--no-first-run", "--disable-component-update", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *options, "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri() + anchor], capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None
    assert "data-error" not in body[0], body[0]
    found = re.search(r'data-seen="([^"]*)"', body[0])
    assert found is not None, body[0]
    return dict(json.loads(unescape(found[1])))


def _path(folder: Path, name: str) -> Path:
    return folder / name if name == "report.html" else folder / "report_pages" / name


@pytest.mark.parametrize("width", [1400, 500])  # the least that a headless window takes; the phone's is emulated below
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_asks_for_nothing_and_does_not_scroll_sideways(
    folder: Path, tmp_path: Path, name: str, width: int
) -> None:
    seen = browse(_path(folder, name), tmp_path / "profile", f"--window-size={width},900")
    assert seen["broken"] == 0
    assert not seen["wide"]  # tables scroll inside, the page does not
    assert seen["requested"] == []
    if name in PAGES[:2]:
        assert seen["images"] > 0
        assert (seen["focus"], seen["large"], seen["closed"]) == (True, True, True)


def test_a_phone_shows_every_page_without_scrolling_sideways(folder: Path, tmp_path: Path) -> None:
    """A frame of 390 pixels has the layout of a phone of that width."""
    for name in PAGES:
        frame = tmp_path / "frame.html"
        address = _path(folder, name).as_uri()
        frame.write_text(
            f'<body><iframe width="390" height="844" src="{address}"></iframe><script>'
            "addEventListener('message', (e) => { document.body.dataset.seen = JSON.stringify(e.data); });</script>"
        )
        text = (
            _path(folder, name)
            .read_text()
            .replace("document.body.dataset.seen =", "parent.postMessage(seen, '*'); document.body.dataset.seen =")
        )
        _path(folder, name).write_text(text)
        seen = browse(frame, tmp_path / "profile", "--allow-file-access-from-files")
        assert not seen["wide"], name


def test_a_dark_screen_gets_a_dark_page(folder: Path, tmp_path: Path) -> None:
    light = browse(folder / "report.html", tmp_path / "light")["dark"]
    dark = browse(folder / "report.html", tmp_path / "dark", "--blink-settings=preferredColorScheme=0")["dark"]
    assert light == "rgb(255, 255, 255)"
    assert dark == "rgb(20, 24, 29)"


def test_a_reader_can_search_the_claims(content: Content, folder: Path, tmp_path: Path) -> None:
    seen = browse(_path(folder, PAGES[2]), tmp_path / "profile")
    claims = [each for each in content.verdicts if each.claim.section == "Figure 17: the simulated bubbles"]
    words = WORDS.lower().split()
    searched = {
        f"claim-{each.claim.id}": f"{each.claim.statement} {each.claim.id} {each.claim.metric}".lower()
        for each in claims
    }
    assert set(seen["found"]) == {name for name, text in searched.items() if all(word in text for word in words)}
    assert 1 <= len(seen["found"]) <= 10
    assert seen["count"] == f"{len(seen['found'])} of {len(claims)} cells"
    assert seen["hidden_left"] == len(claims)  # a link into what is filtered away shows it


# What an address makes of the list of statements: what is shown, what is chosen, and what is said.
ADDRESS = """
<script>
addEventListener("load", () => setTimeout(() => {
  const form = document.querySelector("form[data-filters]");
  const shown = [...document.querySelectorAll("#statement-list tbody tr")].filter((row) => !row.hidden);
  const seen = { verdicts: [...new Set(shown.map((row) => row.dataset.verdict))], number: shown.length };
  seen.count = form.elements.count.value;
  form.elements.whose.value = "the paper's";
  form.dispatchEvent(new Event("input", { bubbles: true }));
  seen.address = location.hash;
  document.body.dataset.seen = JSON.stringify(seen);
}, 200));
addEventListener("error", (event) => { document.body.dataset.error = event.message; });
</script>
"""


@pytest.mark.parametrize("asked", ["contradicted", "<img src=x onerror=alert(1)>"])
def test_an_address_narrows_the_statements_or_says_that_it_cannot(content: Content, tmp_path: Path, asked: str) -> None:
    page = tmp_path / "claims.html"
    page.write_text(render_all(content, "report.html", "report_pages")["claims.html"].replace("</body>", ADDRESS))
    found = statements(content.verdicts)
    seen = browse(page, tmp_path / "profile", anchor=f"#{urlencode({'verdict': asked})}")
    if asked == "contradicted":
        number = sum(each.verdict == asked for each in found)
        assert (seen["verdicts"], seen["number"]) == ([asked], number)
        assert seen["count"] == f"{number} of {len(found)} statements"
        assert seen["address"] == "#verdict=contradicted&whose=the+paper%27s"
    else:
        assert seen["number"] == len(found)
        assert seen["count"] == f"{len(found)} statements; there is no verdict “{asked}”, so all are shown"


def test_a_printed_page_holds_its_tables(folder: Path, tmp_path: Path) -> None:
    """On A4 the tables are as wide as the text: nothing stands beyond the page's edge."""
    path = _path(folder, PAGES[1])
    printed = tmp_path / "printed.html"
    style = re.search(r"@media print \{(.*)\n\}\n", (path.parent / "page.css").read_text(), re.DOTALL)
    assert style is not None
    sheet = f"<style>{style[1]}\nhtml {{ width: 186mm; }}</style></head>"
    printed.write_text(path.read_text().replace("page.css", (path.parent / "page.css").as_uri()))
    printed.write_text(printed.read_text().replace("</head>", sheet))
    printed.write_text(printed.read_text().replace("</body>", LOOK_WIDE + "</body>"))
    seen = browse(printed, tmp_path / "profile", "--window-size=720,1000")
    assert seen["beyond"] == []


# Tables that stand out of the page's width.
LOOK_WIDE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const width = document.documentElement.getBoundingClientRect().right + 1;
  const seen = JSON.parse(document.body.dataset.seen || "{}");
  const right = (table) => table.getBoundingClientRect().right;
  seen.beyond = [...document.querySelectorAll("table")].map(right).filter((at) => at > width);
  document.body.dataset.seen = JSON.stringify(seen);
}, 600));
</script>
"""
