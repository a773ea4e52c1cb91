"""The local page: what the server answers, and in a browser what a reader sees, also of hostile names."""

import json
import re
import shutil
import urllib.error
import urllib.request

import pytest

from analysis.dashboard.server import serve
from rpbench.harness.record import REQUIRED, put_file

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
    fields = {"schedule": "1f1b", "model": "m", "bubble_makespan": 0.2, "peak_memory_bytes": [1 << 30, 2 << 30]}
    rows = [record_of(number, tokens_per_s=100.0 + number, **fields) for number in range(3)]
    rows.append(record_of(3, schedule=HOSTILE, model=HOSTILE, tokens_per_s=50.0, overrides=[HOSTILE]))
    rows.append(record_of(4, schedule="gpipe", model="m", status="infeasible", reason="too large"))
    timeline = "device,lane,action,start_s,main_s,end_s,exposed_s\n0,compute,0F0,0,0,1,0\n1,compute,1F0,1,1,2,0\n"
    rows[0]["file_digests"] = put_file(tmp_path / rows[0]["run_id"], "timeline.csv", timeline)
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
    with serve(results) as server:
        assert server.url.startswith("http://127.0.0.1:")
        rows = json.loads(asked(f"{server.url}rows.json")[0])
        assert len(rows) == 5
        assert rows[0]["peak_memory_bytes"] == 2 << 30
        assert json.loads(asked(f"{server.url}timeline/{0:016x}")[0])[1] == [1, "compute", "1F0", 1.0, 2.0]
        write(results, record_of(9))
        assert len(json.loads(asked(f"{server.url}rows.json")[0])) == 6


def test_nothing_writes_and_no_path_leaves_the_folder(results):
    with serve(results) as server:
        for path in ("../secret", "timeline/../../etc", f"{0:016x}/record.json", "page.py"):
            with pytest.raises(urllib.error.HTTPError, match="404") if "timeline" not in path else no_error():
                assert asked(f"{server.url}{path}")[0] == "null"
        post = urllib.request.Request(f"{server.url}rows.json", data=b"{}")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(post, timeout=20)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            asked(server.url, Host="evil.example")
        assert "default-src 'none'" in asked(server.url)[1]["Content-Security-Policy"]


class no_error:  # noqa: N801  # reads as a context
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_bars_intervals_verdicts_and_a_chosen_run(results, tmp_path_factory):
    import subprocess

    with serve(results) as server:
        link = f"{server.url}#schedule=1f1b&schedule=gpipe&metric=tokens_per_s&run={0:016x}"
        whole = browse(link, tmp_path_factory.mktemp("p"), subprocess)
        everything = browse(server.url, tmp_path_factory.mktemp("q"), subprocess)
    assert "4 of 5 runs shown" in whole
    assert whole.count('class="bar mark"') == 1
    assert whole.count('class="interval"') == 1
    assert whole.count('class="dot mark"') == 3
    assert whole.count('class="action"') == 2
    assert "python -m rpbench schedule=1f1b" in whole
    assert "too large" in whole
    assert "<title>rpbench: schedules compared</title>" in everything
    assert "&lt;img src=x" in everything
    assert not re.search(r"<img|<script>", everything)


def browse(link, profile, subprocess):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-sync", "--disable-component-update"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom", link]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
