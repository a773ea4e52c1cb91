"""Figure 10 at equal tuning and as published: distinct orders, leaders, verdicts of bars, settings behind a gap."""

import pandas as pd
import pytest
from manifests import replaced

from analysis.claims.claim import MISSED, PREDICTED, judge
from analysis.claims.paper import predicted
from analysis.exhibits.figures.own import gains
from analysis.exhibits.tables import comparison, published_runs
from analysis.records.experiments import Experiments, MissingRuns


def rows(*paces: tuple[str, str, float, str]) -> pd.DataFrame:
    """Rows of a model: schedule, order, pace, status."""
    return pd.DataFrame(
        [
            {"model": "qwen3_32b", "schedule": name, "order_sha256": order, "tokens_per_s": pace, "status": status}
            for name, order, pace, status in paces
        ]
    )


def test_orders_count_once_as_their_fastest_and_what_does_not_fit_not_at_all() -> None:
    found = comparison.distinct(
        rows(("a", "x", 1.0, "ok"), ("b", "x", 3.0, "ok"), ("c", "y", 2.0, "ok"), ("d", "z", None, "infeasible"))
    )
    assert found["schedule"].to_list() == ["b", "c"]
    assert found["names"].to_list() == [("b", "a"), ("c",)]


def test_leaders_have_somebody_who_is_never_late() -> None:
    paces = [("a", "1", 5.0, "ok"), ("b", "2", 4.0, "ok"), ("c", "3", 3.0, "ok"), ("d", "4", 2.0, "ok")]
    ranked = comparison.distinct(rows(*paces)).assign(staleness_steps=[1, 1, 1, 0])
    assert [row["schedule"] for row in comparison.leaders(ranked, "qwen3_32b")] == ["a", "b", "c", "d"]
    ranked["staleness_steps"] = [1, 0, 1, 0]
    assert [row["schedule"] for row in comparison.leaders(ranked, "qwen3_32b")] == ["a", "b", "c"]


def test_a_run_that_is_missing_is_named(full_experiments: Experiments) -> None:
    kept = full_experiments.cells("figure10")
    with pytest.raises(MissingRuns, match="5 of 280 runs of experiment=figure10: qwen3_1p7b zb_v"):
        comparison.contest_numbers(replaced(full_experiments, "figure10", kept[kept["schedule"] != "zb_v"]))


def test_bars_are_judged_by_their_error(full_experiments: Experiments) -> None:
    bars = {(bar.row["system"], bar.row["model"]): bar for bar in published_runs.numbers(full_experiments)}
    near = bars["roundpipe", "qwen3_32b"]
    assert near.published.value == 5516.22  # throughput.csv
    assert near.error == pytest.approx(0.1)
    assert near.verdict == "within 15 %"
    assert bars["megatron-pp", "qwen3_1p7b"].verdict == "misses: a term"
    assert bars["megatron-pp", "qwen3_32b"].verdict == "both do not fit"
    wrong = bars["megatron-pp", "qwen3_32b"]._replace(row=bars["roundpipe", "qwen3_32b"].row)
    assert wrong._replace(published=wrong.published._replace(value=None)).verdict == "differs: published OOM, ours ok"
    said = published_runs.answer(list(bars.values()))
    assert said.startswith("5 of 25 bars are within 15 %; of 15 others, 15 fit neither there nor here.")
    assert "within 5 % in 4 of 25" in said, "Mobius alone agrees in the fixture"


def test_the_setting_is_that_of_the_cause_that_changed_most() -> None:
    script = {"status": "ok", "tokens_per_step": 2e6, "step_terms_s": {"computation": 2.0, "recomputation": 1.0}}
    equal = {"status": "ok", "tokens_per_step": 1e6, "step_terms_s": {"computation": 0.9, "recomputation": 0.0}}
    # A token computes for 1.0 and 0.9 microseconds, and recomputes for 0.5 and none.
    said = published_runs._setting(script, equal)
    assert said == "what is recomputed (recomputation -0.50 µs a token)"
    assert published_runs._setting({"status": "infeasible"}, equal).startswith("memory")


def test_claims_on_bars_are_predicted_or_missed(full_experiments: Experiments) -> None:
    found = {claim.id: judge(claim, full_experiments) for claim in predicted.by_action_claims()}
    assert found["by_action/roundpipe/qwen3_32b"].kind == PREDICTED
    assert found["by_action/megatron-pp/qwen3_1p7b"].kind == MISSED
    assert found["by_action/megatron-pp/qwen3_32b"].kind == PREDICTED, "neither fits"


def test_losses_are_told_as_fully_as_wins():
    data = pd.DataFrame(
        [("gpipe", "qwen3_1p7b", 1.5), ("1f1b", "qwen3_1p7b", 0.5), ("zb_v", "llama31_8b", 0.9)],
        columns=["schedule", "model", "slower"],
    )
    told = gains.answer(data)
    assert "Of 3 distinct rivals that fit, RoundPipe is faster than 1 by up to 1.50 times (GPipe on Qwen3-1.7B)" in told
    assert "and slower than 2 by up to 2.00 times (1F1B on Qwen3-1.7B)" in told
