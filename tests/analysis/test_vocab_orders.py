"""Orders with a cut head: tables by hand, what they wait for, and the known runs they are calibrated on."""

import csv

import pytest

from analysis.predictions import schedules_measured, vocab_stage_times
from analysis.predictions.tables import FOLDER
from analysis.predictions.vocab_stage_times import METHODS, build_order, tokens
from rpbench.cost.published import published_rows
from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.sim.longest_path import simulate

# 4 ranks, 8 microbatches, F = 1 and B = 2: derived by hand from the rules of the released code.
GOLDEN = {
    ("vocab", 0): "F0 F1 F2 F3 S0 F4 S1 S2 S3 B0 F5 S4 B1 F6 S5 B2 F7 S6 B3 S7 B4 B5 B6 B7 S8",
    ("vocab", 1): "F0 F1 F2 S0 F3 S1 S2 B0 S3 F4 B1 S4 F5 B2 S5 F6 B3 S6 F7 B4 S7 B5 B6 B7 S8",
    ("vocab", 2): "F0 F1 S0 F2 S1 B0 S2 F3 B1 S3 F4 B2 S4 F5 B3 S5 F6 B4 S6 F7 B5 S7 B6 B7 S8",
    ("vocab", 3): "F0 S0 F1 B0 S1 F2 B1 S2 F3 B2 S3 F4 B3 S4 F5 B4 S5 F6 B5 S6 F7 B6 S7 B7 S8",
    ("synctwice", 0): "F0 F1 F2 F3 S0 F4 S1 F5 S2 S3 S4 B0 F6 S5 B1 F7 S6 B2 S7 B3 S8 B4 B5 B6 B7",
    ("synctwice", 3): "F0 S0 F1 S1 F2 B0 S2 F3 B1 S3 F4 B2 S4 F5 B3 S5 F6 B4 S6 F7 B5 S7 B6 S8 B7",
    ("interlaced", 0): "F0 F1 F2 F3 F4 F5 S0 S1 S2 S3 B0 S4 F6 B1 S5 F7 B2 S6 B3 S7 B4 B5 B6 B7",
    ("interlaced", 1): "F0 F1 F2 F3 F4 S0 S1 S2 B0 S3 B1 F5 S4 B2 F6 S5 B3 F7 S6 B4 S7 B5 B6 B7",
    ("interlaced", 2): "F0 F1 F2 F3 S0 S1 B0 S2 B1 S3 F4 B2 S4 F5 B3 S5 F6 B4 S6 F7 B5 S7 B6 B7",
    ("interlaced", 3): "F0 F1 F2 S0 B0 S1 B1 S2 B2 F3 S3 B3 F4 S4 B4 F5 S5 B5 F6 S6 B6 F7 S7 B7",
}


@pytest.mark.parametrize(("method", "rank"), list(GOLDEN))
def test_rows_are_those_of_the_released_code(method, rank):
    assert " ".join(f"{kind}{mb}" for kind, mb in tokens(method, rank, 4, 8, 1, 2)) == GOLDEN[method, rank]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_free_head_leaves_the_bubble_of_1f1b(method, num_ranks):
    num, forward, backward = 4 * num_ranks, 1.0, 2.0
    schedule = build_order(method, num_ranks, num, forward, backward)
    work = {
        kind: (Work(time),) * num_ranks
        for kind, time in ((Kind.F, forward), (Kind.B, backward), (Kind.HF, 0.0), (Kind.HB, 0.0))
    }
    makespan = simulate(schedule, CostTable(work)).makespan
    assert makespan - num * (forward + backward) == pytest.approx((num_ranks - 1) * (forward + backward))


@pytest.mark.parametrize(
    ("method", "most"),
    [("vocab", [5, 4, 3, 2]), ("synctwice", [6, 5, 4, 3]), ("interlaced", [6, 5, 4, 3])],
)
def test_microbatches_in_flight_are_those_of_the_paper(method, most):
    for rank, limit in enumerate(most):
        held = peak = 0
        for kind, _ in tokens(method, rank, 4, 16, 1, 2):
            held += {"F": 1, "B": -1, "S": 0}[kind]
            peak = max(peak, held)
        assert peak == limit


def test_too_few_microbatches_are_refused():
    with pytest.raises(ValueError, match=r"num_microbatches=4.*at least 8"):
        build_order("vocab", 4, 4, 1, 2)
    with pytest.raises(ValueError, match="one of vocab, synctwice, interlaced"):
        build_order("nobody", 4, 8, 1, 2)


def test_known_runs_of_plain_1f1b_are_met_but_for_one_overhead():
    overhead = vocab_stage_times.overhead_ms()
    assert 40 < overhead < 120
    for run, measured, peak in vocab_stage_times.known().values():
        assert vocab_stage_times.simulated_ms(run) + overhead == pytest.approx(measured, rel=0.005), run.id
        assert vocab_stage_times.peak_bytes(run) == pytest.approx(peak, rel=0.004), run.id


def _committed(name):
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as source:
        return {row["id"]: row for row in csv.DictReader(source)}


def test_committed_iterations_are_what_the_code_computes():
    committed = _committed("vocab_stage_times")
    asked = {row["id"]: row for row in published_rows("challenge/vocab_stage_times.csv")}
    assert committed.keys() == asked.keys()
    overhead = vocab_stage_times.overhead_ms()
    for identity in ("vocab_stage_times/3", "vocab_stage_times/24", "vocab_stage_times/40"):
        run = vocab_stage_times.read_run(asked[identity])
        found = vocab_stage_times.simulated_ms(run, vocab_stage_times.embedding_us(run)) + overhead
        assert committed[identity]["iteration_ms"] == f"{found:.1f}"


def test_committed_paces_are_what_the_code_computes():
    committed = _committed("schedules_measured")
    asked = {row["id"]: row for row in published_rows("challenge/schedules_measured.csv")}
    assert committed.keys() == asked.keys()
    group = schedules_measured.GROUPS[5]
    pair = [asked[f"schedules_measured/{number}"] for number in (25, 26)]
    first, second = (schedules_measured.find(group, row).efficiency for row in pair)
    assert committed[pair[1]["id"]]["relative_pace"] == f"{second / first:.3f}"
    assert second > first  # a split backward fills the bubble of four ranks and eight microbatches
