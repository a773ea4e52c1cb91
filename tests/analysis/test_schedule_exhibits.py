"""Tuning, prediction, gains, a thousand devices: what is drawn of many schedules."""

import pytest
from manifests import replaced

from analysis.exhibits.figures.own import gains, thousand_devices, tuning
from analysis.exhibits.figures.paper import prediction
from analysis.records import runs
from analysis.records.experiments import Experiments, MissingRuns
from analysis.records.published import PUBLISHED_MODELS, look_up
from rpbench.config.configuration import swept


def test_the_lead_is_best_baseline_over_roundpipe(full_experiments: Experiments) -> None:
    data = tuning.numbers(full_experiments)
    leads = tuning.leads(data).set_index(["model", "cut"])
    call = runs.calls(full_experiments).set_index(["schedule", "model"])["makespan_s"]
    for model in runs.MODELS:
        best = min(call[schedule, model] for schedule in runs.BASELINES)
        plain = best / call["roundpipe", model]
        # The made-up records: a searched cut takes 0.97 of the published one, and 0.9 with recomputation ahead.
        assert leads.loc[(model, "published"), "lead"] == pytest.approx(plain)
        assert leads.loc[(model, "search"), "lead"] == pytest.approx(plain)
        assert leads.loc[(model, tuning.AHEAD), "lead"] == pytest.approx(plain * 0.9 / 0.97)
        assert leads.loc[(model, tuning.ONE_ROUND), "lead"] == pytest.approx(plain * 0.9 / 0.95)
        assert leads.loc[(model, "published"), "best"] == "looped_bfs"


def test_a_lost_lead_is_told(full_experiments: Experiments) -> None:
    data = tuning.numbers(full_experiments)
    assert "not the fastest" in tuning.answer(data)  # of the made-up records
    slow = data["schedule"] != "roundpipe"
    data.loc[slow, "makespan_s"] *= 2
    assert "not the fastest" not in tuning.answer(data)


def test_prediction_meets_the_published_estimates(full_experiments: Experiments) -> None:
    data = prediction.numbers(full_experiments).set_index(["estimate", "model"])
    for model, name in PUBLISHED_MODELS.items():
        for estimate, column in (("sync", "predicted_sync_ktokens_per_s"), ("label", "predicted_async_ktokens_per_s")):
            known = look_up("headline", column, model=name).value
            if known is not None:
                assert float(f"{data.loc[(estimate, model), 'simulated'] / 1000:.3g}") == known


def test_gains_count_what_fits_once_and_losses_as_wins(full_experiments: Experiments) -> None:
    data = gains.numbers(full_experiments).set_index(["schedule", "model"])
    # The fixture's paces rise by 1 with the place of a schedule in its sweep; the late ones have a rival of their own.
    names = swept("figure10", "schedule")
    pace = {name: 1000.0 + place for place, name in enumerate(names)}
    assert data.loc[("gpipe", "qwen3_32b"), "slower"] == pytest.approx(pace["roundpipe"] / pace["gpipe"])
    late = data.loc[("pipedream", "qwen3_32b")]
    assert late["late"]
    assert late["slower"] == pytest.approx(pace["roundpipe_async"] / pace["pipedream"])
    kept = set(data.index.get_level_values("schedule"))
    assert kept.isdisjoint({"roundpipe", "roundpipe_async"})
    assert "data_parallel" not in kept, "it does not fit"
    assert "1f1b" not in kept, "it has the order of the faster dapple"
    assert data.loc[("dapple", "qwen3_32b"), "names"] == ("dapple", "1f1b")
    losses = (data["slower"] < 1).sum()
    assert 0 < losses < len(data)
    assert f"and slower than {losses} by up to" in gains.answer(data.reset_index())


def test_a_thousand_devices_are_told_by_schedule_and_number(full_experiments: Experiments) -> None:
    data = thousand_devices.numbers(full_experiments).set_index(["schedule", "num_devices"])
    # As the records were made up: so much for a place in the list and for a device.
    assert data.loc[("1f1b", 256), "bubble"] == pytest.approx(0.08 * (1 + 256))
    assert data.loc[("zb_v", 64), "span"] == pytest.approx(0.04 * 64)
    assert "1F1B idles 0.7 % of the time on 8 devices" in thousand_devices.answer(data.reset_index())
    rows = full_experiments.cells("thousand_devices_v")
    lost = replaced(full_experiments, "thousand_devices_v", rows[rows["schedule"] != "zb_v"])
    with pytest.raises(MissingRuns, match="experiment=thousand_devices_v"):
        thousand_devices.numbers(lost)
