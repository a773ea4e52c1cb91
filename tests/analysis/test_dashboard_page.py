"""The local page: what the server answers, and in a browser what a reader sees, also of hostile names."""

import http.client
import json
import re
import sys
import threading
import urllib.error
import urllib.request

import pytest

from analysis.dashboard import server
from analysis.dashboard.server import Dashboard, read_sweeps
from rpbench.records.manifest import Journal, write_plan
from rpbench.records.record import REQUIRED, put_file
from tests.chromium import needs_axe, needs_chromium

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


def test_a_reader_who_leaves_is_no_error(results, monkeypatch, capfd):
    gone = threading.Event()

    def leave(answer, *_):
        gone.set()
        raise BrokenPipeError("the reader has left")

    monkeypatch.setattr(server._Answer, "_send", leave)
    with Dashboard(results) as served, pytest.raises((OSError, http.client.HTTPException)):
        asked(served.url)
    assert gone.is_set()
    assert capfd.readouterr().err == ""


def test_states_and_pace_of_a_sweep_come_from_its_manifest_and_records(tmp_path):
    cells = [(f"seed={number}",) for number in range(6)]
    plan = write_plan(tmp_path, None, ["sweep"], cells)
    for number in range(3):
        Journal(tmp_path, plan, number).ended([record_of(number)])
    Journal(tmp_path, plan, 3).refused("too small")
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
        server.Dashboard(tmp_path)


def test_the_chart_library_is_served_from_the_installed_package(results):
    pytest.importorskip("vl_convert")
    with server.Dashboard(results) as served:
        library, headers = asked(f"{served.url}vega.js")
    assert "vegaEmbed" in library
    assert "text/javascript" in headers["Content-Type"]
    assert len(library) < 2_000_000


# --- in a browser ----------------------------------------------------------------------------------------------

SEEN = """(() => {
  const texts = (id) => [...document.querySelectorAll(`#${id} svg text`)].map((each) => each.textContent);
  return Object.fromEntries(["bars", "scatter", "curves", "timeline-0", "timeline-1"].map((id) => [id, texts(id)]));
})()"""


@pytest.fixture
def page(results, tab):
    """Opens the page of the records, in a width and a mode, at what an address chooses; it must break nowhere."""
    pytest.importorskip("vl_convert")
    with server.Dashboard(results) as served:

        def opened(width, dark, choice):
            tab.look(width, dark)
            tab.open(f"{served.url}#{choice}", until="document.body.dataset.drawn !== undefined")
            requested = tab.read("performance.getEntriesByType('resource').map((each) => each.name)")
            assert all(each.startswith((served.url, "data:")) for each in requested)
            assert tab.errors == []
            return tab

        yield opened


@pytest.mark.browser
@needs_chromium
@needs_axe
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True], ids=("light", "dark"))
def test_a_browser_shows_charts_with_units_and_links_to_everybody(page, width, dark):
    tab = page(width, dark, f"metric=tokens_per_s&run={0:016x}&beside={1:016x}")
    assert not tab.scrolls_sideways()
    assert tab.serious() == []
    assert (tab.read("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)") is dark
    seen = tab.read(SEEN)
    assert {"throughput (tokens/s)", "what ran", "schedule", "1f1b"} <= set(seen["bars"])
    assert {"bubble (%)", "peak memory of the fullest device (GB)", "schedule"} <= set(seen["scatter"])
    assert {"loss (nat)", "step", "schedule"} <= set(seen["curves"])
    for place in (0, 1):
        assert {"time (s)", "device", "F forward"} <= set(seen[f"timeline-{place}"])
    ticks = [float(text.replace(",", "")) for text in seen["bars"] if re.fullmatch(r"[\d,.]+", text)]
    assert len(ticks) >= 3
    assert all(tick % 500 == 0 for tick in ticks), f"{ticks}: these are no round numbers"
    text = tab.read("document.body.innerText")
    for words in (
        "5 of 5 runs shown",
        "1 of the 5 runs do not",
        "too large",
        "python -m rpbench schedule=1f1b",
        "<img src=x",
    ):
        assert words in text
    assert tab.read(f"document.querySelector('a[href=\"record/{0:016x}\"]') !== null")
    assert tab.read("document.title") == "rpbench: runs compared"  # which a hostile name would change
    assert tab.read("document.querySelector('img, body script') === null")


@pytest.mark.browser
@needs_chromium
def test_a_bar_holds_repetitions_of_one_question_alone(page, results):
    """Three runs that differ in their seed; two of other options; two of the same words by other code."""
    same = {"schedule": "1f1b", "model": "m", "tokens_per_s": 4000.0}
    for number, recompute in ((5, "all"), (6, "none")):
        fields = {"overrides": ["schedule=1f1b", f"recompute={recompute}"], "config": {"recompute": recompute}}
        write(results, record_of(number, **same, **fields))
    for number in (7, 8):
        write(results, record_of(number, **same, code_version=str(number)))
    tab = page(1400, False, "schedule=1f1b&metric=tokens_per_s")
    assert tab.read("document.querySelectorAll('#bars .mark-rect path').length") == 5
    bars = " ".join(tab.read(SEEN)["bars"])
    for words in ("recompute=all", "recompute=none", f"[{7:016x}"[:9], f"[{8:016x}"[:9]):
        assert words in bars


@pytest.mark.browser
@needs_chromium
def test_sweeps_that_have_ended_are_folded_where_they_are_many(page, results):
    for number in range(6):
        plan = write_plan(results, None, [f"sweep={number}"], [(f"seed={number}",)])
        if number:
            Journal(results, plan, 0).ended([record_of(number)])
    tab = page(1400, False, "")
    assert tab.read("[...document.querySelectorAll('#sweeps li')].map((each) => each.textContent)") == [
        "python -m rpbench -m sweep=0 1 cell: 1 planned"
    ]
    assert tab.read("document.querySelector('details > #ended').parentElement.open") is False
    assert tab.read("document.getElementById('ended').previousElementSibling.textContent") == "5 sweeps have ended"
    assert tab.read("document.querySelectorAll('#ended li').length") == 5


@pytest.mark.browser
@needs_chromium
def test_a_bar_chooses_its_run(page):
    tab = page(1400, False, "schedule=1f1b&metric=tokens_per_s")
    box = "document.querySelector('#bars .mark-rect path').getBoundingClientRect()"
    bar = tab.read(f"(({{ x, y }}) => [x + 9, y + 5])({box})")
    for kind in ("mousePressed", "mouseReleased"):
        tab.ask("Input.dispatchMouseEvent", type=kind, x=bar[0], y=bar[1], button="left", clickCount=1)
    found = "new URLSearchParams(location.hash.slice(1))"
    assert re.fullmatch("0{15}[012]", tab.read(f"{found}.get('run')"))
    assert tab.read(f"{found}.getAll('schedule')") == ["1f1b"]  # what was chosen before stays
