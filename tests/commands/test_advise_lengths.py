"""`advise lengths=`: sequences of unequal lengths, searched by means and told as their commands run."""

import io
import shlex

import pytest

from rpbench.advice.unequal import dealt, weighted
from rpbench.cli import dispatch
from rpbench.commands.advising.advise import advise_on

WORDS = ("num_layers=4", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "gpu=l40s", "num_devices=2")
LENGTHS = (512, 64, 64, 64, 300, 20, 512, 8)


def test_rows_are_plain_runs_with_these_lengths(rpbench, tmp_path):
    file = tmp_path / "own lengths.txt"
    file.write_text("\n".join(map(str, LENGTHS)))
    names = "schedules=1f1b,zb_v,roundpipe,seq1f1b"
    answer = advise_on([*WORDS, names, f"lengths={file}"], people := io.StringIO())
    assert answer["tokens_per_step"] == sum(LENGTHS) == 1544
    assert "8 sequences of 8 to 512 tokens, 1,544 a step" in " ".join(people.getvalue().split())
    assert any("mean cost" in note for note in answer["notes"])
    rows = [*answer["ranking"], *answer["ranking_late"]]
    assert {row["schedule"] for row in rows} >= {"1f1b", "zb_v", "roundpipe", "seq1f1b"}
    for row in rows:
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"]) == (0, "ok")
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-12)
        assert max(record["peak_memory_bytes"]) == row["peak_memory_bytes"] <= sum(row["memory"].values())
        assert record["host_memory_bytes"] == row["host_memory_bytes"]
        assert row["tokens_per_day"] == pytest.approx(86_400 * row["tokens_per_s"])
    paces = [row["tokens_per_s"] for row in answer["ranking"]]
    assert paces == sorted(paces, reverse=True)


def test_layers_that_run_again_are_those_of_the_run_and_of_the_export(rpbench, capsys):
    """The largest microbatch of the search is on every device at once; its own leave room for more layers."""
    sizes = ("num_layers=26", "hidden=1024", "heads=8", "vocab=8000", "gpu=rtx3090", "num_devices=3", "schedules=1f1b")
    words = (*sizes, "device_memory_bytes=5.5e9", "lengths=[2048,512,512,300,1024,64,2048,700]", "seconds=1")
    (row,) = advise_on(words, io.StringIO())["ranking"]
    _, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
    kept = row["options"]["kept_layers"]
    assert kept == record["kept_layers"]
    assert "-".join(map(str, kept)) == row["options"]["partition"]  # nothing runs again
    capsys.readouterr()
    assert dispatch(shlex.split(row["export"])[3:]) == 0
    text = capsys.readouterr().out
    assert 'mode = "none"' in text
    assert "sequences of 64 to 2048 tokens, in their order" in text


@pytest.mark.parametrize("schedule", ["1f1b", "seq1f1b"])
def test_lengths_that_are_all_alike_change_nothing(schedule):
    words = [*WORDS, f"schedules={schedule}", "sequences_per_step=16"]
    alike, plain = (advise_on([*words, *more], io.StringIO()) for more in ([f"lengths=[{','.join(['512'] * 16)}]"], []))
    assert alike["ranking"][0] == plain["ranking"][0]


def test_squares_over_sums():
    """3 and 1: (9 + 1) / 4 = 2.5 tokens, rounded to even; 4, 4, 2: 36 / 10."""
    assert (weighted((3, 1)), weighted((4, 4, 2))) == (2, 4)
    assert dealt((1, 2, 3, 4), 2) == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    "words, expected",
    [
        (("lengths=[12,x]",), "number 2 is 'x'"),
        (("lengths=[12,513]",), "more than seq_len=512 has positions for"),
        (("lengths=nowhere.txt",), "lengths=nowhere.txt"),
        (("lengths=[12,13]", "batch=16"), "batch=16 with lengths=, which has 2, one for each"),
        (("lengths=[12,13]", "batch=max"), "lengths= and batch=: "),
        (("lengths=[12,13]", "num_devices=16", "devices_per_node=8"), "lengths= on 2 nodes"),
    ],
)
def test_lengths_that_cannot_be_are_answered(words, expected, capsys):
    own = [word for word in WORDS if not (word.startswith("num_devices=") and words[-1].startswith("devices"))]
    assert dispatch(("advise", *own, *words)) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert "searching" not in err
    assert out == ""
