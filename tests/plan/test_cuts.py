"""Where a graph of layers can be cut, against every subset tried one by one."""

import pytest
from hypothesis import given, settings
from layer_graphs import all_cuts, layer, random_graphs

from rpbench.cost.layer_graph import LayerGraph, chain
from rpbench.plan import graph_cuts as cuts_module
from rpbench.plan.graph_cuts import cuts_of

DIAMOND = LayerGraph(
    (layer("a", 1, 10, 1), layer("b", 2, 20, 2), layer("c", 3, 30, 4), layer("d", 4, 40, 8)),
    (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")),
)


def test_a_chain_is_cut_between_any_two_layers():
    cuts = cuts_of(chain([layer(f"n{index}", index + 1, 10.0 * index, index) for index in range(4)]))
    assert cuts.last == 4
    assert cuts.time_s[1, 3] == 0.005
    assert cuts.parameter_bytes[0, 4] == 6
    assert cuts.output_bytes.tolist() == [0, 0, 10, 20, 0]  # the last layer's output goes nowhere
    assert cuts.layers_between(1, 3) == ["n1", "n2"]


def test_branches_are_cut_all_at_once_and_every_output_that_is_still_needed_crosses():
    cuts = cuts_of(DIAMOND)
    names = ["".join(cuts.layers_between(0, cut)) for cut in range(cuts.last + 1)]
    assert names == ["", "a", "ab", "ac", "abc", "abcd"]
    # Behind a and b, b's output crosses, and a's, which c needs.
    assert cuts.output_bytes.tolist() == [0, 10, 30, 40, 50, 0]
    assert not cuts.before[2, 3]  # neither of ab and ac lies within the other
    assert cuts.time_s[1, 4] == 0.005


@settings(max_examples=60, deadline=None)
@given(graph=random_graphs(7))
def test_cuts_are_all_sets_of_layers_that_hold_what_feeds_them(graph):
    cuts, expected = cuts_of(graph), all_cuts(graph)
    found = [frozenset(cuts.layers_between(0, cut)) for cut in range(cuts.last + 1)]
    assert len(found) == len(expected)
    assert set(found) == set(expected)
    for one, first in enumerate(found):
        for other, second in enumerate(found):
            assert cuts.before[one, other] == (first < second)
            if first < second:
                between = [layer for layer in graph.layers if layer.node in second - first]
                assert cuts.activation_bytes[one, other] == sum(layer.activation_bytes for layer in between)


def test_too_many_branches_are_refused():
    branches = [layer(f"n{index}") for index in range(12)]
    ends = layer("first"), layer("last")
    edges = [("first", branch.node) for branch in branches] + [(branch.node, "last") for branch in branches]
    with pytest.raises(ValueError, match="more than 1000 places to cut it"):
        cuts_of(LayerGraph((*branches, *ends), tuple(edges)))
    assert cuts_module.MOST_CUTS < 2**12
