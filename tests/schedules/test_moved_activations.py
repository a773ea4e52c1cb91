"""Activations that wait elsewhere: how many a rank holds, and whether anybody waits for them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.synchronous.bpipe import most_held
from rpbench.config.loading import load
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis, peak_resident
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.registry import entry
from rpbench.run.recording import run
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight


@settings(deadline=None, max_examples=12)
@given(p=st.integers(1, 16), m=st.integers(1, 64), steps=st.integers(1, 2))
def test_pairs_share_what_1f1b_leaves_uneven(p, m, steps):
    """No rank holds more than ceil((p + 2)/2), where 1F1B has p on the first; compute rows are those of 1F1B."""
    shape = Shape(p, p, m, num_steps=steps)
    schedule, plain = entry("bpipe").build(shape), entry("1f1b").build(shape)
    check(schedule)
    assert [schedule.compute(rank) for rank in range(p)] == [plain.compute(rank) for rank in range(p)]
    assert max(peak_resident(Analysis(schedule))) <= most_held(p)
    assert peak_in_flight(build_graph(schedule)) == peak_resident(Analysis(schedule))
    assert peak_resident(Analysis(plain)) == peak_in_flight(build_graph(plain))


def test_the_bound_is_reached_and_without_moves_it_is_not_kept():
    schedule = entry("bpipe").build(Shape(8, 8, 24))
    assert max(peak_resident(Analysis(schedule))) == most_held(8) == 5
    kept = replace(schedule, rows=tuple({"compute": schedule.compute(rank)} for rank in range(8)))
    assert peak_resident(Analysis(kept)) == [8, 7, 6, 5, 4, 3, 2, 1]


def timed(schedule, transfer: float):
    stages = schedule.shape.num_stages
    table = LayerTimes([1.0] * stages, [0.0] * stages, [2.0] * stages).table(symmetric((1,) * stages))
    return simulate(schedule, replace(table, transfer_time=lambda payload: transfer))


@pytest.mark.parametrize(
    "name, v, base", [("bpipe", 1, "1f1b"), ("pipe_offload", 1, "1f1b"), ("pipe_offload", 2, "interleaved_1f1b")]
)
def test_a_fast_link_hides_every_transfer_and_a_slow_one_does_not(name, v, base):
    shape = Shape(8, 8 * v, 24)
    schedule = entry(name).build(shape)
    plain = timed(entry(base).build(shape), 0.0).makespan
    assert timed(schedule, 0.5).makespan == plain
    assert timed(schedule, 9.0).makespan > plain


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 8), v=st.integers(1, 3), rounds=st.integers(1, 4), share=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_what_goes_to_the_host_is_as_much_as_asked_for_and_lives_longest(p, v, rounds, share):
    m = p * rounds
    schedule = entry("pipe_offload").build(Shape(p, p * v, m), share=share)
    check(schedule)
    for rank in range(p):
        row = schedule.compute(rank)
        place = {(action.kind, action.stage, action.microbatch): number for number, action in enumerate(row)}
        lives = {key[1:]: place[Kind.B, *key[1:]] - number for key, number in place.items() if key[0] is Kind.F}
        stores = schedule.lanes[rank].get("d2h", ())
        gone = {(action.stage, action.microbatch) for action in stores if action.kind is Kind.STORE}
        assert len(gone) <= round(share * len(lives))
        longest_kept = max((life for key, life in lives.items() if key not in gone), default=0)
        assert all(lives[key] >= max(longest_kept, 5) for key in gone) or len(gone) == round(share * len(lives))
        assert all(lives[key] > 4 for key in gone)


def test_memory_falls_faster_than_traffic_grows():
    """Half of the activations offloaded, the longest-lived ones: the first rank keeps less than half of its peak."""
    shape = Shape(8, 16, 32)
    peaks = [max(peak_resident(Analysis(entry("pipe_offload").build(shape, share=share)))) for share in (0.0, 0.5, 1.0)]
    assert peaks[0] == 23
    assert peaks[1] <= peaks[0] / 2 + 1
    assert peaks[2] < peaks[1]


def test_activations_that_never_come_back_are_shown():
    schedule = entry("bpipe").build(Shape(6, 6, 8))
    lanes = [dict(row) for row in schedule.lanes]
    lanes[0]["h2d"] = lanes[0]["h2d"][:-2]
    with pytest.raises(ScheduleError, match="stored, but never loaded again"):
        check(replace(schedule, rows=tuple(lanes)))


def test_transfers_are_timed_on_a_cluster(tmp_path):
    request = ["model=tiny_gpt", "num_devices=4", "num_microbatches=8", f"results_dir={tmp_path}", "model.num_layers=8"]
    (row,) = run(load([*request, "schedule=bpipe"]))
    assert row["status"] == "ok"
    assert row["peak_in_flight"] == peak_resident(Analysis(entry("bpipe").build(Shape(4, 4, 8))))


@pytest.mark.parametrize(
    "name, shape, options, message",
    [
        ("bpipe", Shape(4, 8, 8), {}, "one stage on each rank, got 8 stages on 4 ranks"),
        ("pipe_offload", Shape(4, 6, 8), {}, "multiple of the number of ranks"),
        ("pipe_offload", Shape(4, 4, 8), {"share": 1.5}, "share=1.5: a share of the activations"),
        ("pipe_offload", Shape(4, 4, 8), {"least_gap": 0}, "least_gap=0: at least 1 action"),
    ],
)
def test_what_cannot_be_is_refused(name, shape, options, message):
    with pytest.raises(ValueError, match=message):
        entry(name).build(shape, **options)
