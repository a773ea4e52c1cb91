"""Figure 17 and calls back to back: bars, their parts, and what is published of them."""

import pandas as pd
import pytest
from manifests import replaced
from page_texts import check_texts

from analysis.exhibits.figures.paper import figure17, steady_state
from analysis.records import runs
from analysis.records.experiments import Experiments


def test_figure17_meets_every_published_bar(full_experiments: Experiments) -> None:
    data = figure17.numbers(full_experiments)
    assert len(data) == 5 * 8
    known = data.dropna(subset="published")
    assert len(known) == 5 * 6
    for row in known.itertuples():
        digits = 2 if row.bar == "relabelled" else 4
        assert round(row.total, digits) == row.published, (row.model, row.bar)
    assert "30 of 30 published bars" in figure17.answer(data)


def test_a_wrong_bar_is_not_counted_as_met(full_experiments: Experiments) -> None:
    data = figure17.numbers(full_experiments)
    data.loc[0, "total"] += 0.001
    assert "29 of 30 published bars" in figure17.answer(data)


def test_figure17_parts_sum_to_their_bar(full_experiments: Experiments) -> None:
    data = figure17.numbers(full_experiments)
    split = data.dropna(subset="switch")
    assert split[list(figure17.PARTS)].sum(axis=1).to_list() == pytest.approx(split["total"].to_list(), abs=1e-9)


def test_figure17_draws_the_numbers_it_tabulates(full_experiments: Experiments) -> None:
    data = figure17.numbers(full_experiments)
    panels = figure17.draw(data).axes
    for axes, model in zip(panels, runs.MODELS, strict=True):
        drawn: dict[int, float] = {}
        for bar in axes.patches:
            height = round(bar.get_y() + bar.get_height() / 2)
            drawn[height] = drawn.get(height, 0) + bar.get_width()
        totals = data[data["model"] == model]["total"].to_list()
        assert [drawn[height] for height in sorted(drawn)] == pytest.approx(totals)


def test_the_relabelled_bar_is_the_sync_record_without_fill_and_drain(full_experiments: Experiments) -> None:
    bars = figure17.numbers(full_experiments).set_index(["model", "bar"])
    for model in runs.MODELS:
        sync, relabelled = bars.loc[(model, "roundpipe-sync")], bars.loc[(model, "relabelled")]
        assert relabelled["total"] == sync["switch"] + sync["intra"]
        assert relabelled["run_id"] == sync["run_id"]
        assert relabelled[["fill", "drain"]].isna().all()


def test_steady_state_shows_what_was_run(full_experiments: Experiments) -> None:
    without = replaced(full_experiments, "steady_causal", pd.DataFrame())
    data = steady_state.numbers(without)
    assert data["bubble"].to_list() == pytest.approx([40 / count for count in data["num_microbatches"]])
    assert data["bubble_causal"].isna().all()
    columns = steady_state.tabulate(data).columns
    assert not any("waits" in column for column in columns)


def test_steady_state_adds_causal_runs_where_they_are(full_experiments: Experiments) -> None:
    steady = full_experiments.cells("steady_state")
    chosen = steady[(steady["model"] == "gpt_oss_20b") & (steady["num_microbatches"] == 9)]
    waits = chosen.assign(run_id="waits", bubble_steady=0.25)
    data = steady_state.numbers(replaced(full_experiments, "steady_causal", waits))
    assert data["bubble_causal"].count() == 1
    table = steady_state.tabulate(data)
    row = next(row for row in table.rows if row[0].text == "GPT-OSS-20B")
    assert row[table.columns.index("N = 9, the head waits (%)")].text == "25.00"
    assert row[table.columns.index("N = 9, the head waits (%)")].run_ids == ("waits",)
    check_texts(steady_state.draw(data))
