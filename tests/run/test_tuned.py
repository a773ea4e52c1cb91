"""tuning_budget: the record is that of the plan that the search found, and says what was chosen and what it cost."""

import csv
from dataclasses import replace
from io import StringIO

import pytest

from rpbench.config.loading import load
from rpbench.config.request import Request
from rpbench.plan.contest.contender import contenders
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import tune
from rpbench.records.record import read
from rpbench.run.recording import run
from rpbench.run.scheduled import TRIED, contender_of, terms_of_request

# Six layers on two devices: everything about it is fast.
SMALL = (
    "model=tiny_gpt",
    "model.num_layers=6",
    "model.hidden=1024",
    "model.heads=8",
    "model.seq_len=1024",
    "cluster=8x_rtx4090",
    "cost=analytic",
    "cluster.device_memory_bytes=2_340_000_000",
    "num_devices=2",
    "num_microbatches=2",
    "num_steps=3",
    "tuning_budget=60",
)


@pytest.fixture(scope="module")
def small() -> Request:
    return load([*SMALL, "schedule=zb_h1"])


def test_a_record_is_that_of_the_plan_that_was_found(small: Request, tmp_path) -> None:
    (row,) = run(replace(small, results_dir=tmp_path))
    plan = tune(contender_of(small), terms_of_request(small), Budget(60, row["budget_sketched_actions"]))
    assert row["status"] == "ok"
    assert row["tokens_per_s"] == pytest.approx(plan.outcome.tokens_per_s, rel=1e-9)
    assert max(row["peak_memory_bytes"]) == plan.outcome.peak_bytes <= 1_500_000_000
    assert row["host_memory_bytes"] == plan.outcome.host_bytes
    assert row["kept_layers"] == list(plan.outcome.keeps)
    assert (row["spent_timelines"], row["budget_timelines"]) == (plan.work, 60)
    assert row["num_microbatches"] * row["microbatch_sequences"] == 8
    assert sum(row["step_terms_s"].values()) == pytest.approx(row["step_time_s"])
    assert read(tmp_path / row["run_id"]) == row


def test_what_was_tried_stands_beside_the_record(small: Request, tmp_path) -> None:
    (row,) = run(replace(small, results_dir=tmp_path))
    assert row["files"] == [TRIED]
    tried = list(csv.DictReader(StringIO((tmp_path / row["run_id"] / TRIED).read_text())))
    assert len(tried) == row["num_settings_tried"]
    (chosen,) = [each for each in tried if each["chosen"] == "True"]
    assert float(chosen["tokens_per_s"]) == pytest.approx(row["tokens_per_s"])
    assert {each["recompute"] for each in tried} >= {"all", row["recompute"]}
    fitting = [float(each["tokens_per_s"]) for each in tried if each["fits"] == "True"]
    assert max(fitting) <= 1.01 * row["tokens_per_s"], "but for the difference between few and all steps"


def test_a_memory_that_nothing_fits_is_a_verdict(small: Request, tmp_path) -> None:
    tight = replace(small, cluster=replace(small.cluster, device_memory_bytes=841_000_000), results_dir=tmp_path)
    (row,) = run(replace(tight, subject={**tight.subject, "tight": True}))
    assert row["status"] == "infeasible"
    assert "and has 0.0 GB with the plan that lacks least of" in row["reason"]


def test_options_that_say_which_method_it_is_stay() -> None:
    late = contender_of(load([*SMALL, "schedule=roundpipe_async"]))
    assert late.fixed == (("asynchronous", True),)
    assert contender_of(load([*SMALL, "schedule=roundpipe"])).fixed == ()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tuning_budget=0"], "tuning_budget=0: a whole number of at least 1"),
        (["recompute=none"], "recompute=none with tuning_budget=60: the search chooses it"),
        (["charge=bytes"], "charged by its bytes; leave it out"),
        (["cost=unit"], "use cost=published or cost=analytic"),
        (["num_steps=1"], "num_steps=1: the pace is that of a step among others"),
        (["mode=predict"], "use mode=simulate"),
    ],
)
def test_what_leaves_nothing_to_search_is_refused(words: list[str], says: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=says):
        run(replace(load([*SMALL, *words]), results_dir=tmp_path))


def test_everybody_takes_part_in_figure_10_or_is_named_beside_it(monkeypatch) -> None:
    from analysis.exhibits.tables import comparison

    monkeypatch.setattr(comparison, "swept", lambda experiment, key: ["1f1b"])
    able = {each.entry.name for each in contenders()}
    assert set(comparison.not_compared()) == able - {"1f1b"}
