"""Interlaced pipeline: the released order, its wait and its memory, and training with tensors."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spared import slow

from rpbench.config.loading import load
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic, Traffic
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.run.recording import run
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import architecture

# Worked out by hand from the rule in the released code: 4 ranks, 8 microbatches.
GOLDEN = """
F0 F1 F2 F3 F4 F5 S0 S1 S2 S3 B0 S4 F6 B1 S5 F7 B2 S6 B3 S7 B4 B5 B6 B7
F0 F1 F2 F3 F4 S0 S1 S2 B0 S3 B1 F5 S4 B2 F6 S5 B3 F7 S6 B4 S7 B5 B6 B7
F0 F1 F2 F3 S0 S1 B0 S2 B1 S3 F4 B2 S4 F5 B3 S5 F6 B4 S6 F7 B5 S7 B6 B7
F0 F1 F2 S0 B0 S1 B1 S2 B2 F3 S3 B3 F4 S4 B4 F5 S5 B5 F6 S6 B6 F7 S7 B7
"""


def build(p: int, m: int) -> Schedule:
    return entry("interlaced").build(Shape(p, p, m))


def test_order():
    names = {Kind.F: "F", Kind.B: "B", Kind.HF: "S"}
    rows = [
        " ".join(
            f"{names[action.kind]}{action.microbatch}" for action in build(4, 8).compute(rank) if action.kind in names
        )
        for rank in range(4)
    ]
    assert rows == GOLDEN.strip().splitlines()
    for rank in range(4):
        row = build(4, 8).compute(rank)
        halves = [place for place, action in enumerate(row) if action.kind is Kind.HF]
        assert all(row[place + 1] == row[place]._replace(kind=Kind.HB) for place in halves), "S is in one go"


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("head", [Fraction(0), Fraction(1, 2), Fraction(1)])
def test_the_head_adds_its_time_and_no_wait(p, head):
    """(p - 1)(F + B) for S = 0, F/2 and F on every rank."""
    m = 4 * p
    times = LayerTimes(
        [Fraction(1)] * p, [0] * p, [Fraction(2)] * p, head_forward=p * head / 2, head_backward=p * head / 2
    )
    made = simulate(build(p, m), times.table(symmetric((1,) * p), num_head_shards=p)).makespan
    assert made == m * (3 + head) + 3 * (p - 1)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_head_whose_exchanges_take_time_delays_every_microbatch_by_two(p):
    """An all-reduce of a boundary tensor after either half of S, which nothing hides: 2 (p - 1) / p of it each."""
    m, sizes = 4 * p, model_bytes(architecture("tiny_gpt"), 16)
    cluster = Machine("x", copy_bytes_per_s=1e4, collective_bytes_per_s=1e4)
    times = LayerTimes([1.0] * p, [0] * p, [2.0] * p, head_forward=p / 2, head_backward=p / 2)
    schedule = build(p, m).with_partition(symmetric((1,) * p))
    plain = times.table(symmetric((1,) * p), num_head_shards=p)
    sizes = replace(sizes, layers=(sizes.layers[0],) * p)
    charged = Traffic(sizes, cluster, optimizer=OptimizerTraffic(0.0, 1.0, 1e30)).charged(schedule, plain)
    exchange = 2 * (p - 1) / p * sizes.boundary / 1e4
    assert simulate(schedule, charged).makespan == pytest.approx(m * (4 + 2 * exchange) + 3 * (p - 1))


@pytest.mark.parametrize("keeps", [(), (0, 2, 1), (2, 2, 2)])
def test_stages_that_keep_their_activations_recompute_nothing(keeps):
    times = LayerTimes([1.0] * 6, [1.0] * 6, [2.0] * 6, head_forward=1.5, head_backward=1.5)
    found = times.table(symmetric((2, 2, 2)), num_head_shards=3, keeps=keeps)
    assert [work.pre for work in found.work[Kind.B]] == [2.0 - kept for kept in keeps or (0, 0, 0)]


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 9), m=st.integers(1, 24))
def test_half_a_pipeline_more_is_in_flight(p, m):
    schedule = build(p, m)
    check(schedule)
    assert peak_in_flight(build_graph(schedule)) == [min(3 * p // 2 - rank, m) for rank in range(p)]


@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("backend, devices", [slow(("virtual", 4)), ("cpu", 2)])
@pytest.mark.slow
def test_it_trains_as_plain_training_does(backend, devices, recompute, tmp_path):
    request = ["schedule=interlaced", f"backend={backend}", "model=tiny_gpt", "verify=true", "dtype=float64"]
    request.append(f"recompute={recompute}")
    (row,) = run(
        load([*request, f"num_devices={devices}", f"num_microbatches={2 * devices}", f"results_dir={tmp_path}"])
    )
    assert row["status"] == "ok"
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0


def test_several_stages_on_a_rank_are_refused():
    with pytest.raises(ValueError, match="one stage on each rank, got 8 stages on 4 ranks; set chunks_per_device=1"):
        entry("interlaced").build(Shape(4, 8, 8))
