"""The released planner against the numbers published about it, and its counterpart for bound stages."""

import csv
from itertools import pairwise

import pytest
from evaluated import graph_of
from hypothesis import given
from hypothesis import strategies as st
from problems import MODELS, ROOT, load, published, small, uniform

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition
from rpbench.plan.even_and_greedy import LIMIT_24GB_CARD_BYTES, fill_stages, plan_even, plan_greedy, plan_released
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import measure

with (ROOT / "analysis" / "published" / "planner.csv").open(newline="", encoding="utf-8") as lines:
    ROWS = list(csv.DictReader(lines))


def released(model: str, limit: int | None) -> Partition:
    sizes = model_bytes(load(model), published_tokens_per_microbatch(model))
    return plan_released(published_times(model), 8, sizes=sizes, memory_limit_bytes=limit)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['model']}-{row['memory_cap']}" for row in ROWS])
def test_stage_counts_of_the_released_planner(row):
    partition = released(row["model"], None if row["memory_cap"] == "none" else LIMIT_24GB_CARD_BYTES)
    counts = len(partition.forward), len(partition.backward)
    assert counts == (int(row["forward_stages"]), int(row["backward_stages"]))
    partition.check_layers(published_times(row["model"]).num_layers)


def test_every_model_is_checked_with_and_without_a_memory_limit():
    assert {(row["model"], row["memory_cap"]) for row in ROWS} == {
        (model, cap) for model in MODELS for cap in ("none", "24 GB card")
    }


def test_literal_output_for_the_smallest_model():
    assert str(released("qwen3-1.7b", None)) == "1-9-9-9|2-3-3-3-3-3-3-3-3-2-0*"


@pytest.mark.parametrize("row", [row for row in ROWS if row["switch_plus_intra_percent"]], ids=lambda row: row["model"])
def test_bubble_of_the_released_planner(row):
    problem = published("roundpipe", row["model"])
    partition = plan_greedy(problem)
    graph, costs = graph_of(problem, partition), problem.costs(partition)
    metrics = measure(graph, simulate_graph(graph, costs), costs, switch_after_last_forward=True)
    inner = (metrics["switch_s"] + metrics["intra_s"]) / (8 * metrics["makespan_s"])
    found = {"sync_bubble_percent": 100 * metrics["bubble_makespan"], "switch_plus_intra_percent": 100 * inner}
    for column, value in found.items():
        digits = len(row[column].partition(".")[2])
        assert not row[column] or f"{value:.{digits}f}" == row[column]


def test_a_layer_above_the_limit_raises_it_to_twice_that_layer():
    sizes = model_bytes(load("qwen3-1.7b"), 8192)
    times = published_times("qwen3-1.7b")
    largest = sizes.head.weights + sizes.head.gradients
    small_limit = plan_released(times, 8, sizes=sizes, memory_limit_bytes=1)
    assert small_limit == plan_released(times, 8, sizes=sizes, memory_limit_bytes=2 * largest)
    assert small_limit != plan_released(times, 8, sizes=sizes, memory_limit_bytes=2 * largest + 10**9)


def test_a_fused_stage_takes_layers_while_its_budget_lasts():
    # Recomputation and backward take 6 in one layer, 3 in the others: budgets lie between 6 and 6.6.
    def fused(backward):
        return plan_released(LayerTimes([1.0] * 6, [1.0] * 6, backward), 1).num_layers_fused

    assert fused([5.0, 2.0, 2.0, 2.0, 2.0, 2.0]) == 2
    assert fused([2.0, 2.0, 2.0, 2.0, 2.0, 5.0]) == 1


@given(layers=st.lists(st.integers(1, 9), min_size=1, max_size=7), head=st.integers(0, 9), stages=st.integers(1, 6))
def test_bound_stages_get_the_smallest_budget_there_is(layers, head, stages):
    counts = fill_stages(layers, head, stages)
    assert (len(counts), sum(counts)) == (stages, len(layers))
    assert longest(layers, head, counts) == min(longest(layers, head, cut) for cut in every_cut(len(layers), stages))
    # With layers enough no stage is empty; the head is enough for the last one.
    if len(layers) + (head > 0) >= stages:
        assert all(counts[:-1])
        assert counts[-1] or head


def longest(layers, head, counts):
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    totals = [sum(layers[start:stop]) for start, stop in pairwise(ends)]
    return max(*totals[:-1], totals[-1] + head, 0)


def every_cut(layers, stages):
    if stages == 1:
        return [(layers,)]
    return [(first, *rest) for first in range(layers + 1) for rest in every_cut(layers - first, stages - 1)]


def test_even_partitions():
    assert str(plan_even(small("1f1b", uniform(10), 4))) == "2-3-3-2"
    assert str(plan_even(small("looped_bfs", uniform(10), 2, chunks_per_rank=3))) == "1-2-2-2-2-1"
    assert str(plan_even(small("looped_bfs", uniform(10), 2))) == "2-3-3-2"
    assert str(plan_even(small("looped_bfs", uniform(3), 2))) == "1-2"
    with pytest.raises(ValueError, match=r"3 layers make no 4 stages .* as in partition=1-1-1-0"):
        plan_even(small("looped_bfs", uniform(3), 2, chunks_per_rank=2))
    # Backward with recomputation takes 3, forward 1: a third as many forward stages.
    assert str(plan_even(small("roundpipe", uniform(12), 3, chunks_per_rank=2))) == "6-6|2-2-2-2-2-2-0*"
    assert str(plan_even(published("roundpipe", "qwen3-1.7b"))) == "7-7-7-7|2-3-3-3-3-3-3-3-3-2-0*"
