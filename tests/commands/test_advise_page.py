"""The page of `advise --open`, and what a terminal sees."""

import sys

import pytest
from test_advise_table import ANSWER, ROW

from rpbench.cli import dispatch
from rpbench.commands.advising import advise, advise_page


@pytest.fixture
def answered(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advise, "advise_on", lambda arguments, people, with_around: dict(ANSWER))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="has a screen always")
def test_open_writes_a_page_and_goes_on_without_a_screen(answered, capsys):
    assert dispatch(("advise", "model=m", "--open")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("{")
    assert "advice.html; there is no screen" in err
    text = (answered / "advice.html").read_text()
    for words in ("zb_h1", "54,518", "24.1 GB of the host", "devices twice as fast: +83.4 %", "inter_bytes_per_s"):
        assert words in text


def test_a_page_asks_nobody_and_escapes_names():
    text = advise_page.page(ANSWER | {"model": "<script>alert(1)</script>", "ranking": [ROW | {"command": "a <b>"}]})
    assert "<script" not in text
    assert "a &lt;b&gt;" in text
    assert "http" not in text
    assert "src=" not in text


def test_limits_and_rents_are_on_it():
    row = {"schedule": "1f1b", "seq_len": 21312, "beyond": 22080, "proven": True, "tokens_per_s": 1e4, "command": "x"}
    text = advise_page.page(
        {"model": "m", "cluster": "c", "num_devices": 4, "question": "max_seq_len", "limits": [row]}
    )
    assert "21,312" in text
    assert "not 22,080, proven" in text
    rents = [{"num_devices": 2, "days": 3.0, "usd": 72.0, "why": "zero_2"}]
    text = advise_page.page(ANSWER | {"rents": rents, "cheapest": rents[0], "deadline_days": 4.0})
    assert "2 devices: 3.0 days, 72 US dollars, zero_2" in text
    assert "cheapest within 4 days: 2 devices" in text


def test_bars_of_causes_are_as_long_as_their_seconds():
    """The longest step fills the width: 1.0 of 1.1 seconds is 90.909 %."""
    text = advise_page.page(ANSWER)
    assert 'style="width:90.909%' in text
    assert 'style="width:9.091%' in text


def test_a_page_that_cannot_be_written_leaves_the_answer(answered, capsys):
    (answered / "advice.html").mkdir()
    assert dispatch(("advise", "model=m", "--open")) == 2
    out, err = capsys.readouterr()
    assert out.startswith("{")
    assert "advice.html is no regular file" in err


@pytest.mark.parametrize("words, is_there", [((), False), (("--json",), True)])
def test_a_terminal_gets_the_json_where_it_is_asked_for(answered, words, is_there, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert dispatch(("advise", "model=m", *words)) == 0
    assert capsys.readouterr().out.startswith("{") is is_there
