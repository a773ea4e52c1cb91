"""Predictions of other people's clusters: every question answered in its form, constants with origins, readers."""

import csv
import hashlib

import pytest

from analysis.predictions import tables
from analysis.predictions.clusters import case as cases_module
from analysis.predictions.clusters import fit, league, writing
from analysis.predictions.clusters.case import PUBLISHED, Model, rows_of
from analysis.predictions.clusters.jobs import cases_of_row
from analysis.predictions.clusters.writing import COLUMNS, FILE, out_of_memory, part_of, row_of, score
from rpbench.cost.hardware.device import CONF

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
    for case in fit.asked(name)[::9]:
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
    model, cases = Model(), fit.given(("bloom_a100_topologies", "internevo"))
    errors = [abs(model.step_time_s(case) / case.step_time_s - 1) for case in cases if case.step_time_s and case.fits]
    assert sorted(errors)[len(errors) // 2] < 0.03


def given_case(name):
    (case,) = [case for case in fit.given((name.split("/")[0],)) if case.id == name]
    return case


@pytest.mark.parametrize("name", fit.SETS)
def test_jobs_have_the_sizes_that_their_rows_print(name):
    for folder in ("measured", "challenge"):
        for row in rows_of(folder, name):
            for case in cases_of_row(row):
                if case.job is not None:
                    assert case.job.machine.size == int(row.get("gpus") or case.job.machine.size), case.id
                    assert case.job.seq_len == int(row.get("seq") or case.job.seq_len), case.id


def test_embedding_and_head_count_as_layers_where_the_partition_says_so():
    """106 layers on 12 stages: 108 / 12 = 9, one less on the first and on the last."""
    rows = [row["id"] for row in rows_of("measured", "bloom_a100_topologies") if "embedding" in row["partition"]]
    cuts = {case.job.cut for case in map(given_case, rows) if len(case.job.cut) == 12 and sum(case.job.cut) == 106}
    assert cuts == {(8, *(9,) * 10, 8)}


def test_layers_follow_from_the_size_where_they_are_not_stated():
    """200 B with h = 14400 on 10 stages: 10 x round(198.2e9 / (12 h^2) / 10) = 80."""
    job = given_case("bloom_a100_topologies/13").job
    assert len(job.architecture.layers) == 80
    assert job.architecture.heads == 96


def test_out_of_memory_where_the_source_says_so_and_nowhere_else():
    for case in fit.given(("bloom_a100_topologies",)):
        assert out_of_memory(case, Model()) == (case.verdict == "oom"), case.id


def test_the_first_round_stays_as_it_was_committed():
    """First digits of the SHA-256 of the table of 760beda."""
    assert hashlib.sha256((writing.SEALED / "clusters.csv").read_bytes()).hexdigest()[:16] == "08a9f278bb4632a2"


def test_outcomes_say_what_was_predicted_and_what_was_measured():
    with writing.OUTCOMES_FILE.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert written == writing.rows()
    sealed = {row["id"]: row for row in tables.read("clusters", writing.SEALED)}
    row = next(row for row in written if row["id"] == "bloom_a100_topologies/82" and row["quantity"] == "step_time_s")
    assert float(row["measured"]) == 92.75
    assert float(row["predicted"]) == pytest.approx(float(sealed[row["id"]]["step_time_s"]))
    assert row["inside"] == ("yes" if float(row["low"]) <= 92.75 <= float(row["high"]) else "no")


def test_the_page_of_the_second_round_says_what_its_tables_say():
    text = writing.PAGE.read_text(encoding="utf-8")
    assert text.split("<!--clusters:outcomes-->\n")[1].split("<!--/clusters:outcomes-->\n")[0] == writing.table_text(
        writing.summary()
    )
    with league.FILE.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert written == league.table()
    assert f"<!--clusters:league-->\n{league.table_text(written)}<!--/clusters:league-->\n" in text


def test_given_rows_lie_inside_their_intervals_and_those_never_seen_are_wider():
    """82 to 100 % of sets with twenty rows or more; what no given row has widens an interval, and its note says so."""
    model, cases = Model(), fit.given(tuple(cases_module.STEP))
    timed = [case for case in cases if case.step_time_s and case.fits and (case.job or case.said)]
    for name in {part_of(case) for case in timed}:
        rows = [case for case in timed if part_of(case) == name]
        widths = {case.id: 1.645 * cases_module.step_log_sd(case) for case in rows}
        found = score(rows, {case.id: model.step_time_s(case) for case in rows}, widths)
        assert found.rows < 20 or found.inside >= 0.82, name
    seen = next(case for case in timed if case.id == "mlperf_training/17")
    new = next(case for case in fit.asked("mlperf_training") if case.id == "mlperf_training/33")
    assert cases_module.step_log_sd(new) > 2 * cases_module.step_log_sd(seen)
    assert "never seen" in row_of(new, model)["note"]


def test_degrees_that_a_submission_leaves_out_follow_from_its_batch():
    """64 H100 with 8 sequences and no accumulation: 8 devices a replica, as the row beside it prints them."""
    silent, printed = given_case("mlperf_training/5"), given_case("mlperf_training/21")
    assert silent.job.mesh == printed.job.mesh
    assert silent.job.adapters.rank == 16


def test_a_job_on_ssds_takes_the_larger_of_computing_and_moving():
    """LoHan's 13 B: eight sequences wait for the states, 128 for the device, and one SSD for itself."""
    step = {n: given_case(f"lohan_rtx4090/{n}").said.step_time_s for n in (1, 2, 4, 5, 9, 13)}
    assert step[2] == pytest.approx(step[1], rel=0.02)
    assert step[5] == pytest.approx(2 * step[4], rel=0.02)
    assert step[9] > 3 * step[13]
