"""What the tests of PipeDream's partitioner share: random profiles, and every pipeline there is, tried one by one."""

import math
from collections.abc import Iterator
from itertools import combinations

from hypothesis import strategies as st

from rpbench.cost.layer_graph import Layer, LayerGraph, chain
from rpbench.plan.pipedream import Network, Rules

Cut = frozenset[str]


def layer(name: str, ms: float = 1.0, activation: float = 0, parameters: float = 0) -> Layer:
    """A layer whose forward takes a quarter of its time."""
    return Layer(name, "Linear", ms / 4, 3 * ms / 4, activation, parameters)


@st.composite
def random_layers(draw: st.DrawFn, most: int) -> list[Layer]:
    """Whole milliseconds and megabytes: equal stages, and so ties, are frequent."""
    num = draw(st.integers(1, most))
    return [
        layer(f"n{index}", draw(st.integers(1, 9)), 1e6 * draw(st.integers(0, 9)), 1e6 * draw(st.integers(0, 9)))
        for index in range(num)
    ]


@st.composite
def random_chains(draw: st.DrawFn, most: int = 6) -> LayerGraph:
    return chain(draw(random_layers(most)))


@st.composite
def random_graphs(draw: st.DrawFn, most: int = 6) -> LayerGraph:
    """Every layer but the first is fed by one or two before it."""
    layers = draw(random_layers(most))
    edges = []
    for index in range(1, len(layers)):
        feeders = draw(st.sets(st.integers(0, index - 1), min_size=1, max_size=2))
        edges += [(f"n{feeder}", f"n{index}") for feeder in sorted(feeders)]
    return LayerGraph(tuple(layers), tuple(edges))


def all_cuts(graph: LayerGraph) -> list[Cut]:
    """Every set of layers that holds all that feed them, the smallest first."""
    names = [found.node for found in graph.layers]
    sets = (frozenset(chosen) for size in range(len(names) + 1) for chosen in combinations(names, size))
    return [cut for cut in sets if all(before in cut for before, after in graph.edges if after in cut)]


class Exhaustive:
    """The time of the best pipeline, found by trying all of them: every way to cut and to share out the machines."""

    def __init__(self, graph: LayerGraph, network: Network, rules: Rules) -> None:
        self.graph, self.network, self.rules = graph, network, rules
        self.cuts = all_cuts(graph)

    def best(self) -> float:
        """Seconds a minibatch; infinite where there is no pipeline."""
        return self._level(len(self.network.machines_per_level) - 1, self.cuts[0], self.cuts[-1])

    def _level(self, level: int, first: Cut, last: Cut) -> float:
        num = self.network.machines_per_level[level]
        totals = range(1, num + 1) if self.rules.use_fewer_machines else (num,)
        times = [
            max(self._times(level, stages, total)) for total in totals for stages in self._pipelines(first, last, total)
        ]
        return min(times, default=math.inf)

    def _pipelines(self, first: Cut, last: Cut, machines: int) -> Iterator[list[tuple[Cut, Cut, int]]]:
        """Every pipeline between two cuts on exactly so many machines, as (start, end, machines)."""
        for own in range(1, 2 if self.rules.straight else machines + 1):
            if own == machines:
                yield [(first, last, own)]
            elif own < machines:
                for cut in self.cuts:
                    if first < cut < last:
                        for rest in self._pipelines(cut, last, machines - own):
                            yield [(first, cut, own), *rest]

    def _times(self, level: int, stages: list[tuple[Cut, Cut, int]], total: int) -> Iterator[float]:
        bandwidth = self.network.bandwidth_bytes_per_s[level]
        below = math.prod(self.network.machines_per_level[:level])
        for number, (first, last, own) in enumerate(stages):
            time = self._seconds(first, last) if level == 0 else self._level(level - 1, first, last)
            parameters = sum(found.parameter_bytes for found in self._inside(first, last))
            yield (time + 4 * (own - 1) * parameters / (bandwidth * own) / below) / own
            if self.rules.count_p2p:
                ends = ([first] if number else []) + ([last] if number < len(stages) - 1 else [])
                yield from (2 * self._output_bytes(end) / (bandwidth * own) for end in ends)
            if self.rules.memory_bytes is not None:
                left = total - sum(stage[2] for stage in stages[:number])
                held = sum(found.parameter_bytes + found.activation_bytes for found in self._inside(first, last))
                yield math.inf if math.ceil(left / own) * held > self.rules.memory_bytes else 0.0

    def _inside(self, first: Cut, last: Cut) -> list[Layer]:
        return [found for found in self.graph.layers if found.node in last - first]

    def _seconds(self, first: Cut, last: Cut) -> float:
        return sum(found.forward_ms + found.backward_ms for found in self._inside(first, last)) / 1000

    def _output_bytes(self, cut: Cut) -> float:
        sending = {before for before, after in self.graph.edges if before in cut and after not in cut}
        return sum(found.activation_bytes for found in self.graph.layers if found.node in sending)
