"""Cuts: places where a graph of layers may be cut in two, and the layers between any two of them.

A cut is a set of layers closed under predecessors: the layers that run before that place in the pipeline. Those that
feed later layers are an antichain, PipeDream's state. A chain of n layers has n + 1 cuts, from no layer to all. A cut
through branches cuts all of them:

        b            cuts of a -> b -> d, a -> c -> d:  {} a ab ac abc abcd
      /   \\
    a       d        a cut behind ab sends the output of a (c needs it) and of b
      \\   /
        c

Source: Narayanan et al., SOSP'19, section 3.1, and the released optimizer for graphs that are no chains.
"""

from dataclasses import dataclass

import numpy as np

from rpbench.cost.layer_graph import LayerGraph

MOST_CUTS = 1000  # a level has two tables of cuts x cuts x machines; more cuts would need too much memory and minutes

PICOSECONDS_PER_MS = 1e9


@dataclass(frozen=True)
class Cuts:
    """The cuts of a graph, the smallest first, as numbers 0 (nothing) to `last` (everything)."""

    graph: LayerGraph
    members: tuple[int, ...]  # layers of every cut, as a mask: bit i for layer i
    before: np.ndarray  # (cut, cut) -> whether the first lies within the second and is not the same
    # time_s, activation_bytes, parameter_bytes: (cut, cut) -> of the layers between the two; 0 unless `before`
    time_s: np.ndarray
    activation_bytes: np.ndarray
    parameter_bytes: np.ndarray
    output_bytes: np.ndarray  # cut -> bytes that cross it forward

    @property
    def last(self) -> int:
        return len(self.members) - 1

    def layers_between(self, first: int, second: int) -> list[str]:
        """Names of the layers of a stage, each after those that feed it."""
        inside = self.members[second] & ~self.members[first]
        return [self.graph.layers[layer].node for layer in self.graph.order if inside >> layer & 1]


def cuts_of(graph: LayerGraph) -> Cuts:
    """Every cut of a graph; ValueError if branches side by side make more than `MOST_CUTS`."""
    members = _members(graph)
    layers = range(len(graph.layers))
    inside = np.array([[member >> layer & 1 for layer in layers] for member in members], dtype=float)
    # A cut lies within another if none of its layers is outside.
    before = inside @ (1 - inside.T) == 0
    np.fill_diagonal(before, False)
    # Whole picoseconds add up without rounding, so stages of equal layers take equally long anywhere.
    picoseconds = [round((layer.forward_ms + layer.backward_ms) * PICOSECONDS_PER_MS) for layer in graph.layers]

    def between(values: list[float]) -> np.ndarray:
        total = inside @ np.array(values, dtype=float)
        return np.where(before, total[None, :] - total[:, None], 0.0)

    sends = np.array([_sends(graph, member) for member in members], dtype=float)
    activation = [layer.activation_bytes for layer in graph.layers]
    return Cuts(
        graph,
        members,
        before,
        between([float(time) for time in picoseconds]) / (PICOSECONDS_PER_MS * 1000),
        between(activation),
        between([layer.parameter_bytes for layer in graph.layers]),
        sends @ np.array(activation),
    )


def _members(graph: LayerGraph) -> tuple[int, ...]:
    """Masks of all cuts, by size; each is one layer more than another."""
    needs = [0] * len(graph.layers)
    for layer, after in enumerate(graph.successors):
        for other in after:
            needs[other] |= 1 << layer
    found = {0: None}
    edge = [0]
    while edge:
        larger: dict[int, None] = {}
        for member in edge:
            for layer in graph.order:
                if not member >> layer & 1 and needs[layer] & ~member == 0:
                    larger[member | 1 << layer] = None
        found |= larger
        edge = list(larger)
        if len(found) > MOST_CUTS:
            raise ValueError(
                f"the graph of {len(graph.layers)} layers has more than {MOST_CUTS} places to cut it: too many "
                "branches side by side; join the layers of a branch, or the branches of a block, to one node"
            )
    return tuple(found)


def _sends(graph: LayerGraph, member: int) -> list[bool]:
    """Whether each layer is in the cut and feeds a layer outside of it."""
    return [
        bool(member >> layer & 1) and any(not member >> other & 1 for other in after)
        for layer, after in enumerate(graph.successors)
    ]
