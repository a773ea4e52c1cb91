"""Calls back to back: the bubble between calls 20 and 50 of 60 as a table has it, and that of whole rotations."""

import csv
from dataclasses import replace
from math import gcd
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby
from spared import spared

from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Action, Kind, parse
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entries, entry
from rpbench.sim.columns import read_columns
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import _steps, bubble_between_ends, measure, rotation_of, steady_bubble, step_ends, step_time

ROWS = [
    row
    for row in csv.DictReader((Path(__file__).parents[2] / "analysis/published/async_bubble.csv").open())
    if row["num_microbatches_per_call"].isdigit()
]


def test_the_table_has_four_sizes_of_five_models():
    assert len(ROWS) == 20


# By default the shortest calls of every model, whose bubbles are largest, and all of the model with the most layers.
DEFAULT = [row for row in ROWS if row["num_microbatches_per_call"] == "8" or row["model"] == "qwen3-235b-lora"]
CELLS = spared(ROWS, DEFAULT.__contains__)


@pytest.mark.parametrize("row", CELLS, ids=lambda row: f"{row['model']}-{row['num_microbatches_per_call']}")
def test_bubble_between_ends_agrees_to_a_hundredth_of_a_percent(row, published_cell):
    microbatches = int(row["num_microbatches_per_call"])
    schedule, costs = published_cell(
        "roundpipe",
        row["model"],
        num_microbatches=microbatches,
        num_steps=60,
        round_size=microbatches,
        asynchronous=True,
    )
    graph = build_graph(schedule)
    ours = measure(graph, simulate_graph(graph, costs), costs, switch_after_last_forward=True)
    assert 100 * ours["bubble_between_ends"] == pytest.approx(float(row["bubble_percent"]), abs=0.00501)
    # What whole rotations say may be off from that by what part of a rotation is worth, and is no other number.
    assert 100 * ours["bubble_steady"] == pytest.approx(float(row["bubble_percent"]), abs=0.15)


# --- whole rotations ----------------------------------------------------------------------------------------------


def back_to_back(p: int, forward: tuple[int, ...], backward: tuple[int, ...], m: int, num_steps: int, **options):
    """Asynchronous RoundPipe of unit layers."""
    partition = Partition(forward, backward, fused=True)
    shape = Shape(p, len(forward), m, len(backward), num_steps=num_steps, fused=True)
    schedule = entry("roundpipe").build(shape, round_size=m, asynchronous=True, **options).with_partition(partition)
    ones = [1.0] * partition.num_layers
    graph = build_graph(schedule)
    return graph, simulate_graph(graph, LayerTimes(ones, ones, ones).table(partition, recompute_ahead=True))


@pytest.mark.parametrize(
    "p, forward, backward",
    [
        (2, (2,), (2, 0)),
        (4, (1, 1), (1, 1, 0)),
        (4, (1, 1, 1), (1, 2, 0)),
        (6, (2, 2), (4, 0)),
        (8, (2, 2), (2, 1, 1, 0)),
        (8, (3, 3), (6, 0)),
        (5, (2, 2), (2, 2, 0)),
    ],
)
def test_a_rotation_of_roundpipe_is_p_over_its_common_divisor_with_the_jobs(p, forward, backward):
    graph, _ = back_to_back(p, forward, backward, 2, 24)
    num_jobs = len(forward) + len(backward)
    assert rotation_of(graph.columns, graph.schedule.shape) == p // gcd(num_jobs, p)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "gpipe", "zero_3", "zb_v", "dualpipe_v", "weipipe"])
def test_stages_that_stay_rotate_every_step(name):
    p, v, m = nearby(name, 4, 1, 8)
    shape = Shape(p, p * v, m, num_steps=5)
    graph = build_graph(entry(name).build(shape).with_partition(symmetric((1,) * p * v)))
    assert rotation_of(graph.columns, graph.schedule.shape) == 1


@pytest.mark.parametrize("p, m", [(2, 2), (4, 8), (5, 7)])
def test_steps_that_flush_have_the_bubble_of_one(p, m):
    """(p - 1) / (m + p - 1), and whole steps as long as one."""
    shape = Shape(p, p, m, num_steps=7)
    graph = build_graph(entry("1f1b").build(shape).with_partition(symmetric((1,) * p)))
    ones = [1.0] * p
    timeline = simulate_graph(graph, LayerTimes(ones, ones, ones).table(symmetric((1,) * p)))
    assert steady_bubble(graph, timeline) == pytest.approx((p - 1) / (m + p - 1))
    assert bubble_between_ends(graph, timeline) == pytest.approx((p - 1) / (m + p - 1))
    assert step_time(graph, timeline) == pytest.approx(3 * (m + p - 1))


@st.composite
def runs(draw):
    """Some steps of a registered schedule, late ones among them, with random cuts and times; and its timeline."""
    name = draw(st.sampled_from(sorted(entries())))
    p, m, num_steps = (draw(st.integers(*bounds)) for bounds in ((1, 5), (1, 6), (3, 14)))
    generator = entries()[name]
    if generator.separate_cuts:
        forward = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
        first = draw(st.integers(0, sum(forward)))
        partition = Partition(forward, (first, sum(forward) - first, 0), fused=True)
    else:
        p, v, m = nearby(name, p, draw(st.integers(1, 2)), m)
        partition = symmetric(tuple(draw(st.lists(st.integers(1, 3), min_size=p * v, max_size=p * v))))
    shape = Shape(p, len(partition.forward), m, len(partition.backward), num_steps=num_steps, fused=partition.fused)
    late = {option: draw(st.sampled_from([True, False])) for option in generator.late or {}}
    schedule = generator.build(shape, **late).with_partition(partition)
    times = [draw(st.floats(0.01, 5)) for _ in range(5)]
    each = [[time * draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in range(partition.num_layers)] for time in times]
    head = dict(zip(("head_forward", "head_backward", "head_input_grad", "head_weight_grad"), times, strict=False))
    halves = {"input_grad": each[3], "weight_grad": each[4]}
    costs = LayerTimes(*each[:3], **head, **halves, hop=draw(st.sampled_from([0.0, 0.3])))
    table = costs.table(partition, num_head_shards=schedule.shape.num_head_shards)
    graph = build_graph(schedule)
    return graph, simulate_graph(graph, table)


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_no_run_of_any_schedule_has_a_bubble_below_0(run):
    found = steady_bubble(*run)
    assert 0 <= found < 1


def test_what_is_below_0_between_two_ends_is_not_between_a_devices_own():
    """Two devices, three jobs: they change places with every step, and three steps are no whole rotation."""
    graph, timeline = back_to_back(2, (3,), (3, 0), 1, 6)
    assert rotation_of(graph.columns, graph.schedule.shape) == 2
    assert bubble_between_ends(graph, timeline) == pytest.approx(-0.125)
    assert steady_bubble(graph, timeline) == 0.0


def test_two_steps_that_end_together_have_a_time_none_the_less():
    """Five devices, three jobs: three steps are on other devices each, and the last two end at the same time."""
    graph, timeline = back_to_back(5, (3,), (3, 0), 1, 3)
    assert bubble_between_ends(graph, timeline) is None
    assert step_time(graph, timeline) == pytest.approx(step_ends(graph, timeline)[-1] / 3)
    assert steady_bubble(graph, timeline) == 0.0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_step_of_one_or_two_takes_its_part_of_the_run(num_steps):
    shape = Shape(2, 2, 3, num_steps=num_steps)
    graph = build_graph(entry("1f1b").build(shape).with_partition(symmetric((1, 1))))
    timeline = simulate_graph(graph, LayerTimes([1.0] * 2, [1.0] * 2, [1.0] * 2).table(symmetric((1, 1))))
    assert steady_bubble(graph, timeline) is None
    assert step_time(graph, timeline) == pytest.approx(3 * (3 + 2 - 1))


def test_two_steps_beside_each_other_take_half_of_the_run_each():
    """Not the distance between their ends, which lacks what it took to fill the devices."""
    graph, timeline = back_to_back(2, (2,), (2, 0), 2, 2)
    first, last = sorted(step_ends(graph, timeline))
    assert step_time(graph, timeline) == last / 2 > last - first


@pytest.mark.parametrize(("num_steps", "pace"), [(3, 20), (6, 10), (12, 10)])
def test_the_last_of_steps_that_overlap_is_not_in_their_pace(num_steps, pace):
    """One device, steps of 10 s but for the first two, of 15 and 20, and the last, which has the links to itself."""
    ends = np.cumsum([15, 20, *[10] * (num_steps - 3), 1])
    shape = Shape(1, 1, 1, num_steps=num_steps)
    graph = build_graph(entry("pipedream_2bw").build(shape).with_partition(symmetric((1,))))
    timeline = simulate_graph(graph, LayerTimes([1.0], [1.0], [0.0]).table(symmetric((1,))))
    backward = np.flatnonzero(graph.columns.kind == Kind.B)
    moved = np.array(timeline.end, float)
    moved[backward] = ends
    assert step_time(graph, replace(timeline, end=moved)) == pytest.approx(pace)


@pytest.mark.parametrize("name", ["pipedream_2bw", "xpipe", "pipedream"])
def test_steps_that_overlap_are_as_far_apart_as_in_the_longest_run(name):
    """Six microbatches over four devices and slow hops: steps of 20 and of 22 take turns."""
    shape = Shape(4, 4, 6, num_steps=12)
    graph = build_graph(entry(name).build(shape).with_partition(symmetric((1,) * 4)))
    times = LayerTimes([1.0] * 4, [1.0] * 4, [0.0] * 4, hop=1.0)
    assert step_time(graph, simulate_graph(graph, times.table(symmetric((1,) * 4)))) == pytest.approx(21)


def test_a_device_without_work_is_idle_for_as_long_as_the_others_are_watched():
    """One of two devices has all the work, without a gap: half of the time of both is idle."""
    rows = tuple(Action(kind, 0, mb) for mb in range(4) for kind in (Kind.F, Kind.B)), ()
    schedule = Schedule(Shape(2, 1, 1, num_steps=4), rows).with_partition(symmetric((1,)))
    graph = build_graph(schedule)
    timeline = simulate_graph(graph, LayerTimes([1.0], [1.0], [1.0]).table(symmetric((1,))))
    assert steady_bubble(graph, timeline) == pytest.approx(0.5)


def test_an_overlap_computes_for_the_earlier_of_its_steps():
    """Two microbatches a step: 1 belongs to step 0, 2 and 3 to step 1; a STEP computes nothing."""
    rows = "0F0 (0F2;0B1)OVERLAP (0B1;0F2)OVERLAP 0STEP@1 0F3"
    schedule = Schedule(Shape(1, 1, 2, num_steps=2), (tuple(map(parse, rows.split())),))
    assert _steps(read_columns(schedule), schedule.shape).tolist() == [0, 0, 0, -1, 1]
