"""The public entry: methods, partitions as text, and what a user can get wrong."""

import re

import pytest
from evaluated import plan
from problems import published, small, uniform

from rpbench.cost.footprint.sizes import DeviceMemory, LayerSize, ModelBytes
from rpbench.plan import METHODS


@pytest.mark.parametrize("method", [method for method in METHODS if method != "mobius"])  # see test_mobius_partition
def test_every_method_gives_a_plan_that_covers_the_model(method):
    found = plan(method, published("interleaved_1f1b", "qwen3-1.7b"), budget=1_000_000)
    found.partition.check_layers(28)
    assert found.method == method
    assert (found.num_evaluated > 1) == (method == "search")


def test_makespan_of_a_given_partition():
    # Three equal stages of F = 2 and R + B = 6, a head and hops of nothing: (m + p - 1) * 8.
    found = plan("2-2-2", small("gpipe", uniform(6, hop=0.0), 3, num_microbatches=4))
    assert (found.method, found.makespan, found.num_evaluated) == ("given", 48.0, 1)


def test_cuts_of_either_direction_can_be_given():
    found = plan("7-7-7-7|2-2-3-3-3-3-3-3-3-3-0*", published("roundpipe", "qwen3-1.7b"))
    assert found.makespan == plan("published", published("roundpipe", "qwen3-1.7b")).makespan


@pytest.mark.parametrize(
    "method, message",
    [
        (
            "serch",
            "unknown partition 'serch'; did you mean search? Known: published, even, greedy, pipedream, mobius, sea",
        ),
        ("2-2-x", "bad partition '2-2-x'"),
        ("2-2-1", "sums to 5 layers, the model has 6"),
        ("2-2-1-1", "1f1b puts one stage on each rank, got 4 stages on 3 ranks"),
        ("published", "none is published for schedule 1f1b"),
    ],
)
def test_what_cannot_be_planned_is_refused(method, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(method, small("1f1b", uniform(6), 3))


def test_stages_that_a_schedule_cannot_hold_are_refused_by_search_too():
    with pytest.raises(ValueError, match="puts one stage on each rank"):
        plan("search", small("1f1b", uniform(6), 3, chunks_per_rank=2))
    with pytest.raises(ValueError, match="rounds of equal size"):
        plan("search", small("interleaved_1f1b", uniform(6), 2, num_microbatches=5))


def test_a_published_partition_for_other_sizes_is_no_seed():
    found = plan("search", published("1f1b", "qwen3-1.7b", num_ranks=4), budget=1_000_000)
    assert len(found.partition.forward) == 4


@pytest.mark.parametrize(
    "changes, message",
    [({"chunks_per_rank": 0}, "chunks_per_device=0"), ({"num_microbatches": 0}, "num_microbatches=0")],
)
def test_sizes_below_one_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan("even", small("looped_bfs", uniform(6), 2, **changes))


def test_sizes_of_another_model_are_refused():
    memory = DeviceMemory(ModelBytes((LayerSize(1, 1, 1),) * 5, LayerSize(0, 0, 0), LayerSize(0, 0, 0), 0, 0, 0), 9)
    with pytest.raises(ValueError, match="sizes of 5 layers beside times of 6"):
        small("1f1b", uniform(6), 3, memory=memory)
    with pytest.raises(ValueError, match="num_layers=0"):
        small("1f1b", uniform(0), 3)
