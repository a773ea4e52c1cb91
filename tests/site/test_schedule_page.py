"""The page of schedules: its answers are those of the command line, also where there is the standard library alone."""

import json
import random
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from urllib.parse import urlencode

import pytest

from analysis.site import hooks
from analysis.site.schedule_answer import answer, catalogue, read
from rpbench.cli import dispatch
from rpbench.config.loading import load
from rpbench.run.assemble import assemble
from rpbench.sim.longest_path import simulate_graph
from tests.chromium import needs_chromium
from tests.site.site_pages import DOCS

BROKEN = """# rpbench-schedule 1
# name=broken ranks=2 stages=2 backward_stages=2 microbatches=1 steps=1 parts=1 fused=0 policy=flush weights=bound \
placement=0,1 partition=1-1
0/compute: 0B0 0F0
1/compute: 1F0 1B0
"""


def random_addresses(number, seed):
    """Addresses over all schedules, sizes and times; some ask for what a schedule does not serve."""
    rng, names = random.Random(seed), [each["name"] for each in catalogue()]
    for place in range(number):
        words = {
            "schedule": names[place % len(names)],
            "num_devices": rng.choice((2, 3, 4, 5, 6, 8)),
            "num_microbatches": rng.choice((4, 6, 8, 12, 16)),
            "num_steps": rng.choice((1, 1, 2, 3)),
            "cost.recompute_ms": rng.choice((0, 0, 1.3)),
            "cost.hop_ms": rng.choice((0, 0.1, 0.7)),
        }
        words |= {
            f"cost.{part}_ms": rng.choice((0.5, 1, 1.7, 3.25)) for part in ("forward", "input_grad", "weight_grad")
        }
        if rng.random() < 0.3:
            words["chunks_per_device"] = rng.choice((1, 2, 3))
        yield urlencode(words)


def on_the_command_line(address):
    """Makespan in milliseconds, bubble and activations held as a record has them, or the sentence of a refusal."""
    try:
        run = assemble(load(read(address).words))
    except ValueError as error:
        return str(error)
    row = run.metrics(simulate_graph(run.graph, run.costs), run.costs, run.graph)
    return row["makespan_s"] * 1000, row["bubble_makespan"], row["peak_in_flight"]


def test_a_hundred_random_addresses_are_answered_as_on_the_command_line():
    refused = 0
    for address in random_addresses(110, seed=34):
        found, expected = answer(address), on_the_command_line(address)
        if isinstance(expected, str):
            refused += 1
            assert found == {"sentence": expected}, address
        else:
            makespan, bubble, held = expected
            assert found["makespan_ms"] == pytest.approx(makespan, rel=1e-12), address
            assert found["bubble"] == pytest.approx(bubble, abs=1e-12), address
            assert found["held"] == held, address
    assert 10 < refused < 60


def test_an_option_is_read_as_on_the_command_line():
    for words in (
        "schedule=chimera&schedule.backward_halving=true",
        "schedule=bpipe&num_devices=6",
        "schedule=zb_auto",
    ):
        makespan, *_ = on_the_command_line(words)
        assert answer(words)["makespan_ms"] == pytest.approx(makespan)
    for wrong in ("schedule=gpipe&schedule.depth=2", "schedule=hanayo&schedule.waves=many"):
        assert "sentence" in answer(wrong)


def test_an_address_that_cannot_be_is_answered_with_a_sentence():
    sentences = {
        "schedule=1f2b": "unknown schedule '1f2b'; did you mean 1f1b?",
        "num_devices=10000": "at most 64; the command line takes more",
        "num_devices=9" + "9" * 5000: "at most 64",
        "num_devices=0": "a whole number, at least 1",
        "num_devices=²": "a whole number",
        "num_devices=64&num_microbatches=512": "at most 8,000",
        "cost.forward_ms=soon": "a time in milliseconds",
        "cost.forward_ms=-1": "finite and not negative",
        "cost.forward_ms=0&cost.input_grad_ms=0&cost.weight_grad_ms=0": "some work is needed",
        "colour=red": "an address has no colour=red",
        "order=hello": "not a schedule",
        "schedule=gpipe&schedule.x=" + "[" * 5000: "no option",
        "x" * 300_000: "at most 200,000",
    }
    for address, words in sentences.items():
        assert words in answer(address)["sentence"], address


def test_an_order_of_your_own_is_checked_with_the_words_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = answer("schedule=zb_h1&num_devices=3&num_microbatches=5&cost.hop_ms=0.2")
    again = answer(urlencode({"order": own["order"], "cost.hop_ms": 0.2}))
    assert (again["makespan_ms"], again["bubble"], again["held"]) == (own["makespan_ms"], own["bubble"], own["held"])
    for text in (BROKEN, own["order"].replace("0F1 ", "", 1), own["order"].replace("0F1 ", "0F1 0X1 ", 1)):
        (tmp_path / "order.txt").write_text(text, encoding="utf-8")
        with redirect_stderr(StringIO()) as said:
            assert dispatch(["show", "schedule_file=order.txt"]) == 2
        assert answer(urlencode({"order": text}))["sentence"] in said.getvalue()


def test_a_hostile_name_of_an_order_is_text_in_the_drawing():
    own = answer("schedule=gpipe&num_devices=2&num_microbatches=2")["order"]
    found = answer(urlencode({"order": own.replace("name=gpipe", "name=<script>alert(1)</script>")}))
    assert "&lt;script&gt;" in found["svg"]
    assert "<script" not in found["svg"]


def test_the_archive_answers_with_the_standard_library_alone(tmp_path):
    """What the browser has: no installed package can be imported."""
    archive = tmp_path / "project.zip"
    archive.write_bytes(hooks.project())
    assert archive.read_bytes() == hooks.project()
    lines = f"import sys, json\nsys.path.insert(0, {str(archive)!r})\nfrom analysis.site import schedule_answer\n"
    lines += "names = [each['name'] for each in schedule_answer.catalogue()]\n"
    lines += "found = [schedule_answer.answer(f'schedule={name}') for name in names]\n"
    lines += "print(json.dumps([[each.get('makespan_ms'), each.get('sentence')] for each in found]))"
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", lines], capture_output=True, text=True, check=True)
    here = [answer(f"schedule={each['name']}") for each in catalogue()]
    assert json.loads(ran.stdout) == [[each.get("makespan_ms"), each.get("sentence")] for each in here]


# --- in a browser ----------------------------------------------------------------------------------------------


@pytest.mark.browser
@needs_chromium
@pytest.mark.skipif(not hooks.is_there(), reason="no Pyodide here: npm ci --prefix analysis/site")
def test_a_browser_answers_a_hundred_random_addresses_as_python_does(tab, tmp_path):
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(
        f'<meta charset="utf-8"><body>{text[text.index("<form") : text.index("## What")]}', encoding="utf-8"
    )
    (tmp_path / "schedules.js").write_bytes((DOCS / "schedules.js").read_bytes())
    (tmp_path / hooks.NAME).write_text(hooks.script(), encoding="utf-8")
    answered = "document.body.dataset.answer !== undefined"
    tab.open(page.as_uri(), until=answered, seconds=120)
    for address in [*random_addresses(100, seed=9), "schedule=1f2b", "num_devices=10000"]:
        tab.read(f"delete document.body.dataset.answer; location.hash = {json.dumps(address)}")
        wait = f"new Promise((done) => setInterval(() => {answered} && done(document.body.dataset.answer), 5))"
        makespan, bubble, *sentence = json.loads(tab.read(wait))
        here = answer(address)
        assert sentence == [here.get("sentence")], address
        if sentence == [None]:  # sums of a later Python differ in their last bits
            assert (makespan, bubble) == pytest.approx((here["makespan_ms"], here["bubble"]), rel=1e-9), address
    assert tab.errors == []
