"""Tables: what they hold, what they say, and the files they become."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, label, ours, short_cut, table, theirs
from analysis.exhibits.figures.files import frame, save_table
from analysis.exhibits.figures.own import tuning
from analysis.exhibits.figures.paper import steady_state
from analysis.exhibits.tables import comparison, published_cells
from analysis.records.experiments import Experiments
from analysis.records.published import look_up, published


def test_all_25_cells_agree_in_every_number(experiments: Experiments) -> None:
    exhibit = published_cells.exhibit(experiments)
    assert exhibit.table is not None
    assert len(exhibit.table.rows) == 25
    assert {row[2].text for row in exhibit.table.rows} == {"15 of 15"}
    assert exhibit.caption.endswith("25 of 25 cells agree in every number.")


def test_every_printed_metric_is_compared(experiments: Experiments) -> None:
    inputs = {"scheduler", "model", "num_gpus", "num_microbatches", "comm_per_hop_ms", "source"}
    row = published_cells.numbers(experiments)[0]
    assert set(published_cells.cell_numbers(row)) == set(published("bubble").columns) - inputs


def test_a_number_that_is_off_in_the_fourth_decimal_is_seen(experiments: Experiments) -> None:
    rows = published_cells.numbers(experiments)
    rows[3] = rows[3] | {"fill_s": rows[3]["fill_s"] + 1e-7}
    assert published_cells.num_equal(rows[3]) == (14, 15)
    assert published_cells.answer(rows) == "24 of 25 cells agree in every number."


def test_plans_show_the_known_stage_counts(full_experiments: Experiments) -> None:
    shown = frame(tuning.plans_exhibit(full_experiments).table).set_index(["model", "plan"])
    row = shown.loc[("Qwen3-32B", "published cut")]
    assert (row["forward stages"], row["backward stages"]) == ("22", "65")
    assert (row["known forward stages"], row["known backward stages"]) == ("22", "65")
    assert row["bubble (%)"] == row["known bubble (%)"] == "6.67"
    assert row["layers per stage"] == "2×2-3×20|1×64-0*"
    assert shown.loc[("Qwen3-32B", "greedy (released planner)"), "known forward stages"] == "16"


def test_a_searched_cut_that_is_slower_is_told(full_experiments: Experiments) -> None:
    found = tuning.plans_numbers(full_experiments)
    assert "never slower" in tuning.plans_answer(found)
    found["gpt_oss_20b", "search"]["makespan_s"] *= 2
    assert "slower than GPT-OSS-20B (published), GPT-OSS-20B (even), GPT-OSS-20B (greedy)" in tuning.plans_answer(found)


def test_waiting_is_compared_with_the_same_model(full_experiments: Experiments) -> None:
    data = steady_state.causal_numbers(full_experiments)
    assert data["longer"].to_list() == pytest.approx([1.0] * 5)  # the made-up records take 1 % longer


def test_a_table_keeps_its_shape() -> None:
    with pytest.raises(ValueError, match=r"row 'a' has 1 cells, the table 2 columns"):
        table(("one", "two"), [[label("a")]])


def test_csv_has_values_in_full_and_latex_what_is_shown(tmp_path: Path) -> None:
    rows = [
        [label("RoundPipe"), ours(1 / 3, ".2f", "run"), theirs(None, ".2f", "nowhere"), label("OOM")],
        [label("R&D"), NOTHING, theirs(2.5, ".1f", "somewhere"), label("–")],
    ]
    made = table(("system", "bubble (%)", "published", "published"), rows)
    paths = save_table(made, "sample", tmp_path)
    read = list(csv.reader(paths[0].open(encoding="utf-8")))
    assert read[0] == ["system", "bubble (%)", "published", "published"]
    assert read[1] == ["RoundPipe", repr(1 / 3), "", "OOM"]
    text = paths[1].read_text(encoding="utf-8")
    assert text.startswith(r"\begin{tabular}")
    assert r"RoundPipe & 0.33 & – & OOM" in text
    assert r"R\&D" in text
    assert r"bubble (\%)" in text
    assert list(frame(made).columns)[-2:] == ["published", "published (2)"]


def test_a_published_value_says_where_it_stands() -> None:
    found = look_up("bubble", "makespan_ms", scheduler="gpipe", model="qwen3-1.7b")
    assert found.value == 2896.917
    assert found.source.startswith(
        "analysis/published/bubble.csv, makespan_ms of gpipe, qwen3-1.7b: RoundPipe artifact"
    )
    assert look_up("figure2", "ratio_corrected", model="qwen3-1.7b").value is None
    assert look_up("bubble", "makespan_ms", scheduler="none").value is None


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=30), min_size=1, max_size=2), st.booleans())
def test_a_short_cut_says_the_same_in_fewer_words(halves: list[list[int]], fused: bool) -> None:
    text = "|".join("-".join(map(str, counts)) for counts in halves) + ("*" if fused else "")
    short = short_cut(text)
    assert len(short) <= len(text) + 2 * text.count("|") or "×" in short
    assert _spelled_out(short) == text


def _spelled_out(short: str) -> str:
    halves = []
    for half in short.split("|"):
        counts: list[str] = []
        for group in half.split("-"):
            count, _, times = group.partition("×")
            counts += [count] * int(times or 1)
        halves.append("-".join(counts))
    return "|".join(halves)


def test_every_system_says_why_it_cannot_run(full_experiments: Experiments) -> None:
    shown = frame(comparison.simulated(full_experiments).table).set_index(["model", "system"])
    row = shown.loc[("Qwen3-1.7B", "Data parallel")]
    assert row["why it cannot run"].startswith("infeasible: device 0 needs 41.6 GB")
    row = shown.loc[("Qwen3-1.7B", "ZeRO-3")]
    assert (row["host links (GB a step)"], row["between devices (GB a step)"]) == ("6", "12")
    assert row["why it cannot run"] == "–"
    assert len(shown) == 5 * 56
    # Late updates are rows of their own, and their pace stands beside what a late step is worth.
    flushed, late = (shown.loc[("Qwen3-1.7B", style.method_name(name))] for name in ("roundpipe", "roundpipe_async"))
    assert (flushed["steps late"], flushed["tokens for the same loss"]) == ("0", "–")
    assert flushed["tokens/s of equal progress"] == flushed["tokens/s"]
    assert late["steps late"] == "1"
    multiple = float(late["tokens for the same loss"].split()[0])
    pace = float(late["tokens/s"].replace(",", ""))
    assert float(late["tokens/s of equal progress"].replace(",", "")) == pytest.approx(pace / multiple, rel=0.01)


def test_a_stale_step_is_not_a_full_one(full_experiments: Experiments) -> None:
    shown = frame(comparison.measured(full_experiments).table).set_index("system")
    assert shown["steps late"].to_list() == ["0", "1", "2"]
    assert shown.loc["ZeRO-3", "largest difference"] == "1.0e-09"
    assert "2 of 3 systems agree in every bit" in comparison.measured(full_experiments).caption
