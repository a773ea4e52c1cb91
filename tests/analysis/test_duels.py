"""Duels held against each other: what is the same, what is not, and what only one of them has."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_duel_exhibit import table_of as duel_of

from analysis.driver.duels import Kept, compare, kept_of, main, over, read, sealed, table_of
from analysis.exhibits.figures.duel import MODELS, NAMES
from analysis.exhibits.tables.torch_duel import side_by_side
from analysis.records.experiments import Experiments
from rpbench.records import provenance


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], Kept]:
    about = {"started_at": "2026-01-01T00:00:00+00:00", "git_commit": "0123abc", "hardware": {"processor": "Some, CPU"}}
    return {each.key: each for each in kept_of(row | about for row in duel_of().to_dict("records"))}


def test_a_duel_repeats_itself(kept):
    lines, repeats = compare(kept, kept)
    num = len(MODELS) * len(NAMES)  # 1F1B itself is compared with its twins
    assert len(kept) == num
    assert repeats
    assert lines[-2:] == [
        f"{num} of {num} verdicts that both give are the same",
        f"{num} of {num} intervals meet, at least 95% should",
    ]
    assert kept["half_mid_gpt", "roundpipe"].verdict == "faster"


def test_another_verdict_is_told_and_one_that_is_lacking_is_not_counted(kept):
    key = "half_mid_gpt", "roundpipe"
    lines, repeats = compare(kept, kept | {key: replace(kept[key], verdict="slower", plan="5-3")})
    assert not repeats
    assert lines[1 + list(kept).index(key)].endswith("faster / slower; plans 4×2 and 5-3")
    lines, repeats = compare(kept, kept | {key: replace(kept[key], verdict="no verdict")})
    assert repeats
    assert lines[-2].startswith(f"{len(kept) - 1} of {len(kept) - 1} verdicts")


def test_one_interval_in_twenty_may_lie_apart_and_no_more(kept):
    def moved(number):
        some = list(kept)[:number]
        return kept | {key: replace(kept[key], ratio=2.0, low=1.9, high=2.1) for key in some}

    assert len(kept) == 28
    lines, repeats = compare(kept, moved(1))
    assert repeats
    assert sum("intervals apart" in line for line in lines) == 1
    assert not compare(kept, moved(2))[1]


def test_what_only_one_has_is_named_and_nothing_in_common_is_no_repetition(kept):
    key = "half_fat_head_gpt", "gpipe"
    lines, repeats = compare(kept, {other: each for other, each in kept.items() if other != key})
    assert repeats
    assert lines[-1] == "only in the first: half_fat_head_gpt gpipe"
    assert not compare(kept, {})[1]


def test_a_kept_table_is_read_back_and_compared(kept, tmp_path, capsys):
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.write_text(table_of(kept.values()), encoding="utf-8")
    found = read(one)
    assert {key: each.verdict for key, each in found.items()} == {key: each.verdict for key, each in kept.items()}
    assert all(abs(found[key].low - each.low) < 1e-4 * each.low for key, each in kept.items())
    assert found["half_mid_gpt", "gpipe"].processor == "Some, CPU"
    other.write_text(table_of(replace(each, low=9.0, high=9.5) for each in kept.values()), encoding="utf-8")
    assert main(["compare", str(one), str(one)]) == 0
    assert main(["compare", str(one), str(other)]) == 1
    assert "0 of 28 intervals meet" in capsys.readouterr().out


def test_a_kept_table_that_was_changed_anywhere_is_refused(kept, tmp_path, capsys):
    path, text = tmp_path / "one.csv", table_of(kept.values())
    lines = text.splitlines(keepends=True)
    changed = [text.replace(old, new, 1) for old, new in (("faster", "slower"), ("1", "2"), ("\n", "\r\n"), ("d", "D"))]
    for other in (*changed, "".join(lines[:-1]), "".join([*lines[:2], *lines[3:]]), text + lines[1], ""):
        path.write_text(other, encoding="utf-8", newline="")
        assert main(["compare", str(path), str(path)]) == 2
        assert "no duel as it was kept" in capsys.readouterr().err
    assert main(["compare", "/dev/zero", "/dev/zero"]) == 2
    assert "it is a device" in capsys.readouterr().err


def test_a_duel_of_an_earlier_version_is_kept_with_its_commit(
    full_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "code_version", lambda: "later")
    path = tmp_path / "duel.csv"
    assert main(["keep", str(full_results), str(path)]) == 0
    assert read(path).keys() == read(full_results).keys() == {(model, name) for model in MODELS for name in NAMES}


def test_a_duel_that_lost_a_record_is_not_kept(
    full_results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Experiments(full_results).find("cpu_duel", {"model": "half_mid_gpt"}, "gpipe")
    assert lost is not None
    for path in full_results.iterdir():
        if path.name != lost["run_id"]:
            (tmp_path / path.name).symlink_to(path)
    assert main(["keep", str(tmp_path), str(tmp_path / "duel.csv")]) == 2
    assert "1 of 28 records are gone; run python -m rpbench -m experiment=cpu_duel" in capsys.readouterr().err


def test_the_report_shows_two_duels_side_by_side(kept, tmp_path):
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.write_text(table_of(kept.values()), encoding="utf-8")
    key = "half_mid_gpt", "gpipe"
    rest = [replace(each, started_at="2026-01-02T00:00") for name, each in kept.items() if name != key]
    other.write_text(table_of(rest), encoding="utf-8")
    found = side_by_side((one, other))
    assert found.columns == ("contender", "model", "2026-01-01 00:00", "2026-01-02 00:00")
    assert len(found.rows) == len(kept)
    rows = {(row[0].text, row[1].text): [cell.text for cell in row[2:]] for row in found.rows}
    assert all("), faster; 4×2" in text for text in rows["RoundPipe", "mid GPT, half as wide"])
    gpipe, missing = rows["GPipe", "mid GPT, half as wide"]
    assert gpipe.startswith(f"{kept[key].ratio:.3f} (")
    assert gpipe.endswith("), slower; 4×2")
    assert missing == "not in it"


def test_whoever_has_run_can_be_the_base(kept):
    rows = duel_of().to_dict("records")
    head, *lines = over(rows, "gpipe")
    assert head.split() == ["model", "contender", "over", "gpipe", "verdict"]
    assert len(lines) == len(kept) - len(MODELS)
    (line,) = [line.split() for line in lines if line.startswith("half_mid_gpt       roundpipe ")]
    expected = kept["half_mid_gpt", "roundpipe"].ratio / kept["half_mid_gpt", "gpipe"].ratio
    assert float(line[2]) == pytest.approx(expected, abs=2e-3)
    assert line[-1] == "faster"
    assert over(rows, "gpipe", ["roundpipe"])[1:] == [each for each in lines if each.split()[1] == "roundpipe"], (
        "a verdict that stands when it is one of 26 stands when it is one of two"
    )
    for base, names, words in (
        ("nobody", (), "nobody: no contender with runs; one of 1f1b, "),
        ("gpipe", ["nobody"], "nobody: not held against gpipe; one of 1f1b, "),
        ("gpipe", ["roundpipe", "gpipe"], "gpipe: not held against gpipe"),
    ):
        with pytest.raises(LookupError, match=words):
            over(rows, base, names)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no contender"), ("model,ratio\nx,1\n", "line 2"), ("model,ratio\n", "no contender")],
)
def test_what_is_no_kept_duel_is_refused(text, words, tmp_path, capsys):
    path = tmp_path / "duel.csv"
    path.write_text(sealed(text), encoding="utf-8")
    assert main(["compare", str(path), str(path)]) == 2
    assert words in capsys.readouterr().err
    assert main(["keep", str(tmp_path), str(tmp_path / "kept.csv")]) == 2
    assert main(["over", str(tmp_path), "gpipe"]) == 2
    assert main(["over", str(path), "gpipe"]) == 2
    assert "duel.csv: no folder of results" in capsys.readouterr().err
    assert not (tmp_path / "kept.csv").exists()
