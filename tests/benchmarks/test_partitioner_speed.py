"""How long PipeDream's partitioner takes. Prints figures, asserts none.

python -m pytest tests/benchmarks/test_partitioner_speed.py -m benchmarks -n 0 -s
"""

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from sizes import sized

from rpbench.cost.layer_graph import Layer, LayerGraph, chain
from rpbench.plan.graph_cuts import cuts_of
from rpbench.plan.pipedream import Network, Rules, plan_pipeline

pytestmark = pytest.mark.benchmarks

REPEATS = sized(3, 1)


def layers(num):
    draw = random.Random(num)
    return [
        Layer(f"n{index}", "", draw.random(), draw.random(), 1e9 * draw.random(), 1e8 * draw.random())
        for index in range(num)
    ]


def blocks_of_two_branches(num_blocks):
    """Blocks of 8 layers: one that forks, two branches of 3, one that joins."""
    edges, all_layers = [], layers(8 * num_blocks)
    for start in range(0, len(all_layers), 8):
        fork, *inner, join = (layer.node for layer in all_layers[start : start + 8])
        for branch in (inner[:3], inner[3:]):
            path = [fork, *branch, join]
            edges += list(pairwise(path))
        if start:
            edges.append((all_layers[start - 1].node, fork))
    return LayerGraph(tuple(all_layers), tuple(edges))


def test_seconds_a_plan():
    print("\nseconds a plan, transfers counted (median of 3)")
    graphs = {f"{num} layers": chain(layers(num)) for num in sized((40, 200), (6,))} | {
        "branches": blocks_of_two_branches(sized(12, 2))
    }
    for name, graph in graphs.items():
        for levels, links in (((16,), (1e9,)), ((8, 8), (1e10, 1e9)), ((16, 16), (1e10, 1e9))):
            took = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                cuts = cuts_of(graph)
                plan_pipeline(cuts, Network(levels, links), Rules(count_p2p=True))
                took.append(time.perf_counter() - began)
            print(f"  {name:12} {len(cuts.members):4} cuts  machines {levels!s:9} {float(np.median(took)):6.2f} s")
