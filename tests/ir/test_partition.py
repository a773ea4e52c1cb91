"""Partitions by hand: a remainder away from both ends, holes that are filled, and stages that are counted from one."""

import pytest
from staleness import staleness_of_stages

from rpbench.ir.checks.versions import Versions
from rpbench.ir.partition import filled, split_evenly
from rpbench.ir.policy import LateRest, boundaries


@pytest.mark.parametrize(
    "num_layers, num_stages, counts",
    [(8, 4, (2, 2, 2, 2)), (5, 4, (1, 1, 2, 1)), (6, 4, (1, 2, 2, 1)), (7, 4, (1, 2, 2, 2)), (5, 3, (1, 2, 2))],
)
def test_a_remainder_stands_in_the_middle(num_layers, num_stages, counts):
    assert split_evenly(num_layers, num_stages) == counts


def test_a_stage_in_the_middle_keeps_its_only_layer_where_another_is_filled():
    """The ends hold embedding and head, and may give their last one."""
    assert set(filled((1, 0, 1, 2))) == {(0, 1, 1, 2), (1, 1, 1, 1)}
    assert list(filled((1, 2, 1))) == [(1, 2, 1)]


def test_the_worst_staleness_of_a_stage_is_the_largest_whatever_comes_last():
    found = object.__new__(Versions)
    object.__setattr__(found, "live", (1, 3))
    object.__setattr__(found, "staleness_steps", {(0, 0): 2, (0, 1): 1, (1, 0): 0, (1, 1): 3})
    assert staleness_of_stages(found) == (2, 3)
    assert (found.max_staleness, found.max_live) == (3, 3)


def test_a_run_that_is_shorter_than_its_warm_up_has_a_boundary_for_each_of_its_steps():
    rule = LateRest(0.5, update_interval=2, num_warmup_steps=5)
    assert [end.version for end in boundaries(rule, 3)] == [1, 2, 3]
