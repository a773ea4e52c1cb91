"""The report in a browser: it loads from a file, asks nobody for anything, and its filter and links work."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_page import Page

from analysis.records.experiments import Experiments
from analysis.report.images import draw_all
from analysis.report.page import Content, gather, render
from analysis.report.views import Sources, claim

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install one (Debian: chromium) to open the report"),
]

# Steps a reader takes; what the page then shows is written where the dump of it can be read.
STEPS = """
<script>
addEventListener("load", async () => {
  const seen = {};
  const settle = () => new Promise((done) => setTimeout(done, 60));
  const claims = () => [...document.querySelectorAll("#claim-table tbody tr")].filter((row) => !row.hidden);
  seen.claims = claims().length;
  const search = document.querySelector("#claim-filter input");
  search.value = "WORDS";
  search.dispatchEvent(new Event("input", { bubbles: true }));
  seen.found = claims().map((row) => row.id);
  seen.count = document.querySelector("#claim-filter output").value;
  document.querySelector("[data-show-verdict='not testable here']").click();
  await settle();
  seen.kinds = [...new Set(claims().map((row) => row.dataset.kind))];
  location.hash = "#claim-RECORDED";
  await settle();
  seen.target_shown = !document.getElementById("claim-RECORDED").hidden;
  const run = document.getElementById("claim-RECORDED").querySelector("a.run").getAttribute("href");
  seen.record_open = [document.querySelector(run).open];
  location.hash = run;
  await settle();
  seen.record_open.push(document.querySelector(run).open);
  seen.images = [...document.images].map((image) => { image.loading = "eager"; return image; }).length;
  await Promise.all([...document.images].map((image) => image.decode().catch(() => {})));
  seen.broken = [...document.images].filter((image) => image.naturalWidth === 0).length;
  seen.wide = document.documentElement.scrollWidth > innerWidth;
  seen.requested = performance.getEntriesByType("resource").map((e) => e.name).filter((n) => !n.startsWith("data:"));
  document.body.dataset.seen = JSON.stringify(seen);
});
addEventListener("error", (event) => { document.body.dataset.error = event.message; });
addEventListener("securitypolicyviolation", (event) => { document.body.dataset.error = event.blockedURI; });
</script>
"""
WORDS = "RoundPipe llama 8b makespan"
RECORDED = "figure17/gpipe/qwen3_1p7b/makespan_ms"


@pytest.fixture(scope="module")
def content(full_experiments: Experiments) -> Content:
    """The report with two of its figures."""
    found = gather(full_experiments)
    found.images = draw_all([each for each in found.exhibits if each.id in ("figure17", "figure3")])
    return found


def _steps() -> str:
    return STEPS.replace("RECORDED", RECORDED).replace("WORDS", WORDS)


def browse(page: Path, profile: Path, *options: str) -> str:
    """What a headless browser made of a page."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-sync", "--no-first-run", "--disable-component-update", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *options, "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.parametrize("width", [1400, 900])
def test_a_reader_can_search_and_follow_links(content: Content, tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(content).replace("</body>", _steps() + "</body>"))
    dump = browse(page, tmp_path / "profile", f"--window-size={width},900")
    body = re.search(r"<body[^>]*>", dump)
    assert body is not None
    assert "data-error" not in body[0], body[0]
    found = re.search(r'data-seen="([^"]*)"', body[0])
    assert found is not None, body[0]
    seen = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))

    assert seen["claims"] == len(content.verdicts)
    searched = {f"claim-{each.claim.id}": claim(each, Sources())["search"] for each in content.verdicts}
    assert seen["found"] == [
        name for name, text in searched.items() if all(word in text for word in WORDS.lower().split())
    ]
    assert 2 <= len(seen["found"]) <= 10
    assert seen["count"] == f"{len(seen['found'])} of {len(content.verdicts)} claims"
    assert seen["kinds"] == ["not testable here"]
    assert seen["target_shown"]
    assert seen["record_open"] == [False, True]
    assert (seen["images"], seen["broken"]) == (2, 0)
    assert not seen["wide"]  # tables scroll inside, the page does not sideways
    assert seen["requested"] == []


def test_links_still_resolve_once_scripts_have_run(content: Content, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(content))
    loaded = Page(browse(page, tmp_path / "profile"))
    assert {link[1:] for link in loaded.links} - set(loaded.ids) == set()
    assert loaded.fetched == []
