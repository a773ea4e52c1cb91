"""Predictions of other people's clusters: every question answered in its form, constants with origins, readers."""

import csv

import pytest

from analysis.predictions.clusters import problems
from analysis.predictions.clusters.case import PUBLISHED, Model, rows_of
from analysis.predictions.clusters.readers.megatron import bloom, cut_with_ends
from analysis.predictions.clusters.writing import COLUMNS, FILE, out_of_memory, row_of
from rpbench.cost.device import CONF

SETS = sorted(path.stem for path in (PUBLISHED / "challenge").glob("*.csv"))


def committed():
    with FILE.open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", SETS)
def test_every_question_is_answered(name):
    answers = committed()
    for row in rows_of("challenge", name):
        answer = answers[row["id"]]
        assert list(answer) == list(COLUMNS)
        assert answer["status"] in ("ok", "OOM", "not_modelled")
        if answer["status"] == "not_modelled":
            assert answer["note"]
        for quantity in ("step_time_s", "peak_memory_bytes"):
            if answer[quantity]:
                low, high = (float(answer[f"{quantity}_{end}"]) for end in ("low", "high"))
                assert 0 < low < float(answer[quantity]) < high


@pytest.mark.parametrize("name", ["bloom_a100_topologies", "internevo", "simumax_b200", "megatron_scaling"])
def test_committed_answers_are_what_the_code_computes(name):
    answers, model = committed(), Model()
    for case in problems.asked(name)[::9]:
        assert row_of(case, model) == answers[case.id]


def test_every_constant_has_a_prior_and_an_origin():
    with (CONF / "software" / "constants.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert float(row["value"]) > 0 < float(row["prior"])
        assert row["origin"] == "fitted" or row["origin"].startswith("as ")
        assert all((PUBLISHED / "measured" / f"{name}.csv").exists() for name in row["rows"].split())


def test_given_rows_are_met_within_a_few_percent():
    model, cases = Model(), problems.given(("bloom_a100_topologies", "internevo"))
    errors = [abs(model.step_time_s(case) / case.step_time_s - 1) for case in cases if case.step_time_s and case.fits]
    assert sorted(errors)[len(errors) // 2] < 0.03


def test_embedding_and_head_count_as_layers_where_the_partition_says_so():
    """106 layers on 12 stages: 108 / 12 = 9, one less on the first and on the last."""
    assert cut_with_ends(106, 12) == (8, *(9,) * 10, 8)


def test_layers_follow_from_the_size_where_they_are_not_stated():
    """200 B with h = 14400 on 10 stages: 10 x round(198.2e9 / (12 h^2) / 10) = 80."""
    row = next(row for row in rows_of("measured", "bloom_a100_topologies") if row["id"].endswith("/13"))
    (case,) = bloom(row)
    assert case.job is not None
    assert len(case.job.architecture.layers) == 80
    assert case.job.architecture.heads == 96


def test_out_of_memory_where_the_source_says_so_and_nowhere_else():
    for case in problems.given(("bloom_a100_topologies",)):
        assert out_of_memory(case, Model()) == (case.verdict == "oom"), case.id
