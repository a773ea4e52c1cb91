"""The rows of `advise --open` at other settings: each number is what a plain run of its command prints."""

import io
import json
import re
import shlex

import pytest
from chromium import browser, needs_chromium

from rpbench.commands.advising import advise_page
from rpbench.commands.advising.advise import advise_on
from rpbench.commands.advising.advise_around import template

SMALL = ("num_layers=6", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "gpu=l40s")
NODES = ("num_layers=8", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "gpu=h100", "sequences_per_step=32")


def held(words):
    """What the page of an answer holds, read from the page itself."""
    answer = advise_on(words, io.StringIO(), with_around=True)
    moves = answer.pop("around")
    text = advise_page.page(answer, moves)
    assert "src=" not in text
    found = json.loads(re.search(r'<script type="application/json" id="around">(.*?)</script>', text, re.DOTALL)[1])
    points = [dict(zip(found["fields"], point, strict=True)) for row in found["rows"] for point in row["points"]]
    commands = [row["command"] for row in found["rows"] for _ in row["points"]]
    return answer, found, list(zip(points, commands, strict=True))


def ran(rpbench, point, command):
    for name, value in point.items():
        command = command.replace("{" + name + "}", str(value))
    assert "{" not in command
    status, records, _ = rpbench(*shlex.split(command)[3:])
    assert status == 0
    return records[0]


def named(row):
    """The schedule of a row of the page, whose label may add what others call it."""
    return row["label"].split(" (")[0]


@pytest.mark.parametrize("memory, sequences, names", [("48e9", 6, "1f1b,zb_v,zero_3"), ("1.1e9", 12, "1f1b,zero_3")])
def test_points_of_one_host_are_plain_runs(memory, sequences, names, rpbench):
    words = [*SMALL, "num_devices=3", f"device_memory_bytes={memory}"]
    words += [f"sequences_per_step={sequences}", f"schedules={names}"]
    answer, found, points = held(words)
    assert found["values"]["num_devices"] == [1, 2, 3]
    assert {named(row) for row in found["rows"]} == {row["schedule"] for row in answer["ranking"]}
    sizes, modes = found["values"]["microbatch_sequences"], found["values"]["recompute"]
    assert len(points) == len(found["rows"]) * 3 * len(sizes) * len(modes)
    plans = [(point, command) for point, command in points if not point["why"]]
    assert {point["num_devices"] for point, _ in plans} == {1, 2, 3}
    for point, command in plans[:: max(1, len(plans) // 5)]:
        record = ran(rpbench, point, command)
        assert (record["status"] == "ok") is point["fits"], (point, command, record["reason"])
        if point["fits"]:  # what does not is not run
            assert record["tokens_per_s"] == pytest.approx(point["tokens_per_s"], rel=1e-9)
            assert record["step_time_s"] == pytest.approx(point["step_time_s"], rel=1e-9)
        assert max(record["peak_memory_bytes"]) == point["peak_memory_bytes"]
    own = {(row["schedule"], row["tokens_per_s"]) for row in answer["ranking"]}
    pace = found["fields"].index("tokens_per_s")
    assert own <= {(named(row), point[pace]) for row in found["rows"] for point in row["points"]}


def test_a_step_of_the_page_has_the_tokens_of_the_answer():
    """PipeDream updates after each microbatch."""
    words = [*SMALL, "num_devices=2", "sequences_per_step=8", "schedules=1f1b,pipedream", "late=yes", "seconds=1"]
    answer, _, points = held(words)
    for point in (point for point, _ in points if not point["why"]):
        assert point["tokens_per_s"] * point["step_time_s"] == pytest.approx(answer["tokens_per_step"])


@pytest.mark.browser
@needs_chromium
def test_controls_move_the_rows(tmp_path):
    """Every choice shows the fastest point that fits of those that it leaves; light and dark, wide and narrow."""
    names = ("num_devices", "microbatch_sequences", "recompute")
    answer = advise_on(
        [*SMALL, "sequences_per_step=12", "num_devices=2", "schedules=1f1b,zero_2"], io.StringIO(), with_around=True
    )
    moves = answer.pop("around")
    path = advise_page.write_page(answer, moves, tmp_path / "page.html")
    points = [dict(zip(moves["fields"], point, strict=True)) for row in moves["rows"] for point in row["points"]]
    with browser() as tab:
        for dark, width in ((False, 1200), (True, 390)):
            tab.look(width, dark)
            tab.open(path.as_uri(), "document.querySelectorAll('#rows tr').length > 0")
            assert tab.errors == []
            assert not tab.scrolls_sideways()
            for chosen in (("2", "best", "best"), ("1", "1", "best"), ("2", "4", "all")):
                for name, value in zip(names, chosen, strict=True):
                    tab.read(f"{name}.value = '{value}'; {name}.dispatchEvent(new Event('input')); true")
                asked = [(name, value) for name, value in zip(names, chosen, strict=True) if value != "best"]
                fitting = [point for point in points if point["fits"]]
                left = [each["tokens_per_s"] for each in fitting if all(str(each[n]) == value for n, value in asked)]
                assert f"{max(left):,.0f} tokens/s" in tab.read("told.textContent")


def test_points_of_meshes_are_plain_runs(rpbench):
    _, found, points = held([*NODES, "num_devices=16", "devices_per_node=8", "schedules=1f1b"])
    assert found["values"]["num_devices"] == [1, 2, 4, 8, 16]
    assert set(re.findall(r"\brow\.(\w+)", advise_page.SCRIPT.read_text())) <= found["rows"][0].keys()
    plans = [(point, command) for point, command in points if point["fits"]]
    for point, command in plans[:: max(1, len(plans) // 4)]:
        record = ran(rpbench, point, command)
        assert record["tokens_per_s"] == pytest.approx(point["tokens_per_s"])


def test_only_what_a_point_changes_is_left_open_in_its_command():
    command = "x cost=analytic num_devices=4 ++model.num_devices=4 'partition=\"1-2\"' recompute=all recomputes=all"
    assert template(command) == (
        "x cost=analytic num_devices={num_devices} ++model.num_devices=4 'partition=\"{partition}\"' "
        "recompute={recompute} recomputes=all"
    )
