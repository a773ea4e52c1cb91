"""The local page: what the server answers, and in a browser what a reader sees, also of hostile names."""

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from html import unescape

import pytest

from analysis.dashboard import server
from analysis.dashboard.server import Dashboard
from analysis.dashboard.sweeps import read_sweeps
from rpbench.records.manifest import Journal, write_plan
from rpbench.records.record import REQUIRED, put_file

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


def record_of(number, **fields):
    row = dict.fromkeys(REQUIRED, "x") | {"run_id": f"{number:016x}", "status": "ok", "evidence": "simulated"}
    row |= {
        "config": {},
        "choices": {},
        "num_devices": 2,
        "num_microbatches": 4,
        "seed": number,
        "overrides": ["schedule=1f1b"],
        "reason": None,
    }
    return row | fields


@pytest.fixture
def results(tmp_path):
    fields = {"schedule": "1f1b", "model": "m", "bubble_makespan": 0.2, "peak_memory_bytes": [10**9, 2 * 10**9]}
    rows = [record_of(number, tokens_per_s=5000.0 + 70 * number, **fields) for number in range(3)]
    rows[1] |= {"loss_curve": [5.5, 5.25, 5.0], "loss_curve_s": [1.0, 2.0, 3.0]}
    rows.append(record_of(3, schedule=HOSTILE, model=HOSTILE, tokens_per_s=50.0, overrides=[HOSTILE]))
    rows.append(record_of(4, schedule="gpipe", model="m", status="infeasible", reason="too large"))
    timeline = "device,lane,action,start_s,main_s,end_s,exposed_s\n0,compute,0F0,0,0,1,0\n1,compute,1F0,1,1,2,0\n"
    for row in rows[:2]:
        row["file_digests"] = put_file(tmp_path / row["run_id"], "timeline.csv", timeline)
    for row in rows:
        write(tmp_path, row)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "record.json").write_text("{")
    return tmp_path


def write(results, row):
    folder = results / row["run_id"]
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_text(json.dumps(row))


def asked(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.read().decode(), answer.headers


def test_the_server_reads_records_and_follows_the_folder(results):
    with Dashboard(results) as served:
        assert served.url.startswith("http://127.0.0.1:")
        rows = json.loads(asked(f"{served.url}rows.json")[0])
        assert len(rows) == 5
        assert rows[0]["peak_memory_bytes"] == 2 * 10**9
        assert json.loads(asked(f"{served.url}timeline/{0:016x}")[0])[1] == [1, "compute", "1F0", 1.0, 2.0]
        assert json.loads(asked(f"{served.url}curve/{1:016x}")[0])[2] == [2, 5.0, 3.0]
        assert json.loads(asked(f"{served.url}record/{1:016x}")[0])["loss_curve"] == [5.5, 5.25, 5.0]
        write(results, record_of(9))
        assert len(json.loads(asked(f"{served.url}rows.json")[0])) == 6


def test_nothing_writes_and_no_path_leaves_the_folder(results):
    with Dashboard(results) as served:
        for path in ("../secret", f"{0:016x}/record.json", "page.py", "record", "rows.json/x", "record/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                asked(f"{served.url}{path}")
        for path in ("timeline/../../etc", "record/../../etc", f"record/{9:016x}"):
            assert asked(f"{served.url}{path}")[0] == "null"
        assert asked(f"{served.url}curve/../../etc")[0] == "[]"
        post = urllib.request.Request(f"{served.url}rows.json", data=b"{}")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(post, timeout=20)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            asked(served.url, Host="evil.example")
        assert "default-src 'none'" in asked(served.url)[1]["Content-Security-Policy"]


def test_states_and_pace_of_a_sweep_come_from_its_manifest_and_records(tmp_path):
    cells = [(f"seed={number}",) for number in range(6)]
    name, _, plan = write_plan(tmp_path, None, ["sweep"], cells).partition("@")
    for number in range(3):
        Journal(tmp_path / "manifests" / name, plan, number).ended([record_of(number)])
    Journal(tmp_path / "manifests" / name, plan, 3).refused("too small")
    stamps = {f"{number:016x}": 1000.0 + 30 * number for number in range(3)}
    (line,) = read_sweeps(tmp_path, stamps, now=1070.0)
    assert line["states"] == {"done": 3, "not applicable": 1, "planned": 2}
    assert (line["cells"], line["runs_per_minute"], line["left_s"]) == (6, 2.0, 60.0)
    (later,) = read_sweeps(tmp_path, stamps, now=5000.0)
    assert (later["runs_per_minute"], later["left_s"]) == (None, None)


def test_without_the_chart_library_nothing_begins(tmp_path, monkeypatch):
    server.charts_library.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ValueError, match="pip install vl-convert-python"):
        server.serve(tmp_path)


def test_the_chart_library_is_served_from_the_installed_package(results):
    pytest.importorskip("vl_convert")
    with server.serve(results) as served:
        library, headers = asked(f"{served.url}vega.js")
    assert "vegaEmbed" in library
    assert "text/javascript" in headers["Content-Type"]
    assert len(library) < 2_000_000


# --- in a browser ----------------------------------------------------------------------------------------------

LOOK = """
addEventListener("load", () => setInterval(() => {
  const texts = (id) => [...document.querySelectorAll(`#${id} svg text`)].map((each) => each.textContent);
  const ids = ["bars", "scatter", "curves", "timeline-0", "timeline-1"];
  document.body.dataset.seen = JSON.stringify({ ...Object.fromEntries(ids.map((id) => [id, texts(id)])),
    wide: document.documentElement.scrollWidth > innerWidth, width: innerWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    requested: performance.getEntriesByType("resource").map((e) => e.name) });
}, 50));
addEventListener("error", (event) => { document.body.dataset.broken = event.message; });
addEventListener("unhandledrejection", (event) => { document.body.dataset.broken = String(event.reason); });
addEventListener("securitypolicyviolation", (event) => {
  document.body.dataset.broken = event.blockedURI + event.violatedDirective;
});
"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True], ids=("light", "dark"))
def test_a_browser_shows_charts_with_units_and_links(results, tmp_path_factory, monkeypatch, width, dark):
    pytest.importorskip("vl_convert")
    page = (server._HERE / "page.js").read_bytes()
    monkeypatch.setitem(server._FILES, "/page.js", ("looked.js", "text/javascript"))
    monkeypatch.setattr(server, "_HERE", looked := tmp_path_factory.mktemp("page"))
    for name in ("page.html", "page.css", "charts.js"):
        (looked / name).write_bytes((server.Path(server.__file__).parent / name).read_bytes())
    (looked / "looked.js").write_bytes(page + LOOK.encode())
    with server.serve(results) as served:
        link = f"{served.url}#metric=tokens_per_s&run={0:016x}&beside={1:016x}"
        whole = browse(link, tmp_path_factory.mktemp("profile"), width, dark)
    assert "data-broken" not in whole
    seen = json.loads(unescape(re.search(r'data-seen="([^"]*)"', whole)[1]))
    assert not seen["wide"], seen["width"]
    assert (seen["paper"] == "rgb(22, 24, 28)") is dark
    assert {"throughput (tokens/s)", "what ran", "schedule", "1f1b"} <= set(seen["bars"])
    assert {"bubble (%)", "peak memory of the fullest device (GB)", "schedule"} <= set(seen["scatter"])
    assert {"loss (nat)", "step", "schedule"} <= set(seen["curves"])
    for place in (0, 1):
        assert {"time (s)", "device", "F forward"} <= set(seen[f"timeline-{place}"])
    ticks = [float(text.replace(",", "")) for text in seen["bars"] if re.fullmatch(r"[\d,.]+", text)]
    assert len(ticks) >= 3
    assert all(tick % 500 == 0 for tick in ticks), f"{ticks}: these are no round numbers"
    assert seen["width"] <= max(width, 500)  # some builds open no narrower window
    assert all(each.startswith((served.url, "data:")) for each in seen["requested"])
    assert "5 of 5 runs shown" in whole
    assert "too large" in whole
    assert f'href="record/{0:016x}"' in whole
    assert "python -m rpbench schedule=1f1b" in whole
    assert "<title>rpbench: runs compared</title>" in whole
    assert "&lt;img src=x" in whole
    assert not re.search(r"<img|<script>", whole)


def browse(link, profile, width, dark):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-sync", "--disable-component-update"]
    command += [f"--window-size={width},900", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=15000", "--dump-dom", link]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
