"""Published systems: speed-ups and cost; timelines as they ran."""

from pathlib import Path

import pytest
from manifests import replaced

from analysis.exhibits.figures import timelines
from analysis.exhibits.figures.paper import systems
from analysis.records import runs
from analysis.records.experiments import Experiments, MissingRuns
from analysis.records.published import PUBLISHED_MODELS, look_up


def test_speed_ups_are_those_of_the_paper() -> None:
    data = systems.numbers("throughput", "tokens_per_s")
    for name in PUBLISHED_MODELS.values():
        best = systems.best_baseline(data, name)
        known = look_up("headline", "speedup_over_best_baseline", model=name).value
        if known is None:
            assert best is None
        else:
            own = data.loc[(data["system"] == "roundpipe") & (data["model"] == name), "value"].iloc[0]
            assert best is not None
            assert round(own / best["value"], 2) == known
            assert best["system"] == look_up("headline", "best_baseline", model=name).value


def test_cost_is_price_over_throughput() -> None:
    table = systems.cost(Experiments(Path())).table
    assert table is not None
    row = next(row for row in table.rows if row[0].text == "RoundPipe")
    assert row[1].value == pytest.approx(2.32 / (65416.83 * 3600) * 1e9)


def test_a_timeline_is_read_back_as_it_ran(experiments: Experiments, results: Path) -> None:
    rows = runs.calls(experiments)
    for schedule, model in (("roundpipe", "gpt_oss_20b"), ("interleaved_1f1b", "qwen3_1p7b")):
        row = rows[(rows["schedule"] == schedule) & (rows["model"] == model)].iloc[0].to_dict()
        timeline = timelines.read_timeline(row, results)
        assert timeline.schedule.num_actions == row["num_actions"]
        assert [timeline.busy(device) for device in range(8)] == pytest.approx(row["busy_s"])


def test_a_missing_timeline_is_named(experiments: Experiments, tmp_path: Path) -> None:
    elsewhere = replaced(Experiments(tmp_path), "figure17", experiments.cells("figure17"))
    with pytest.raises(MissingRuns, match=r"timeline\.csv of 25 of 25 runs"):
        timelines.exhibit(elsewhere)
