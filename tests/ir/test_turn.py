"""Where the last stage goes back at once."""

from dataclasses import replace

import pytest

from rpbench.ir.checks.residency import turns_at_once
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Shape
from rpbench.passes.lower import add_steps, split_backward
from rpbench.registry import entry


def built(name, devices=3, stages=3, microbatches=6, **shape):
    return entry(name).build(Shape(devices, stages, microbatches, stages, **shape))


@pytest.mark.parametrize("name, turns", [("1f1b", True), ("pipedream_2bw", True), ("gpipe", False)])
def test_one_forward_one_backward_does(name, turns):
    assert turns_at_once(built(name)) is turns


def test_so_do_several_steps_and_the_first_half_of_a_backward():
    schedule = built("1f1b", num_steps=2)
    assert turns_at_once(add_steps(schedule, lane="compute"))
    assert turns_at_once(split_backward(schedule))


def test_anything_in_between_is_in_the_way():
    schedule = built("1f1b")
    lanes = dict(schedule.rows[2])
    first, second, *rest = lanes["compute"]
    other = replace(schedule, rows=(*schedule.rows[:2], {"compute": (first, rest[0], second, *rest[1:])}))
    assert not turns_at_once(other)


def test_a_last_stage_that_differs_between_directions_is_run_again():
    assert not turns_at_once(built("1f1b").with_partition(Partition((2, 2, 1), (2, 1, 2))))
