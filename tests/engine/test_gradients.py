"""Adding up gradients: in a fixed order, without writing into what autograd may still share."""

import itertools

import pytest
import torch

from rpbench.engine.state.gradients import Gradients, Sum


def test_a_sum_never_writes_into_what_it_was_given():
    """Autograd may return one tensor as the gradient of two parameters."""
    shared = torch.ones(3)
    total = Sum()
    total.add({(0, "a"): shared, (0, "b"): shared})
    total.add({(0, "a"): torch.ones(3)})
    total.add({(0, "a"): torch.ones(3)})
    assert total.values[0, "a"].tolist() == [3, 3, 3]
    assert total.values[0, "b"].tolist() == [1, 1, 1]
    assert shared.tolist() == [1, 1, 1]


def test_the_total_does_not_depend_on_which_group_is_ready_first():
    groups = ((0, 1), (2,), (3, 4))
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    expected = (values[0] + values[1]) + values[2] + (values[3] + values[4])
    other = values[0] + values[1] + values[2] + values[3] + values[4]
    assert not torch.equal(expected, other), "a wrong order would show"
    for order in itertools.permutations(groups):
        gradients = Gradients({(0, 1): groups})
        for microbatch in itertools.chain.from_iterable(order):
            gradients.add(0, 1, microbatch, {(0, "a"): values[microbatch]})
        assert torch.equal(gradients.total(0, 1)[0, "a"], expected)


def test_a_total_is_taken_once_complete_and_can_be_let_go():
    gradients = Gradients({(0, 1): ((0, 1),)})
    gradients.add(0, 1, 0, {(0, "a"): torch.ones(1)})
    with pytest.raises(RuntimeError, match="stage 0 for version 1 is taken before it is complete"):
        gradients.total(0, 1)
    gradients.add(0, 1, 1, {(0, "a"): torch.ones(1)})
    assert gradients.total(0, 1)[0, "a"].item() == 2
    gradients.drop(0, 1)
    assert gradients.total(0, 1) == {}


def test_parameters_without_a_gradient_are_missing():
    gradients = Gradients({(0, 1): ((0,), (1,))})
    gradients.add(0, 1, 0, {})
    gradients.add(0, 1, 1, {(0, "b"): torch.ones(1)})
    assert gradients.total(0, 1) == {(0, "b"): torch.ones(1)}
