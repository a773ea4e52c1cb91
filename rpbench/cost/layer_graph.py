"""LayerGraph: time and size of each layer of a model, and which layer feeds which; PipeDream's profile.

As two tables: nodes (node, operator, forward_ms, backward_ms, activation_bytes, parameter_bytes; one minibatch) and
edges (from_node, to_node).

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19, section 3.1: the
profiler records for every layer its compute time, the size of its output and the size of its parameters.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

LARGEST = 1e18  # milliseconds or bytes; sums of them stay finite


@dataclass(frozen=True)
class Layer:
    """One layer of a profile, for one minibatch.

    Args:
        node: its name, as edges have it.
        operator: what it computes; names that begin with `Input` stand for data, not for work.
        activation_bytes: of its output.

    Raises:
        ValueError: if the name is empty, or a number is negative, not a number, or above `LARGEST`.
    """

    node: str
    operator: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    def __post_init__(self) -> None:
        if not self.node:
            raise ValueError("a layer without a name: the column node names every row")
        for name in NUMBERS:
            value = getattr(self, name)
            if not 0 <= value <= LARGEST:
                raise ValueError(f"{name}={value} of {self.node}: times and sizes are finite and not negative")

    @property
    def is_input(self) -> bool:
        return self.operator.startswith("Input")


NODE_COLUMNS = tuple(column.name for column in fields(Layer))
NUMBERS = NODE_COLUMNS[2:]
T = TypeVar("T")
EDGE_COLUMNS = ("from_node", "to_node")


@dataclass(frozen=True)
class LayerGraph:
    """Layers and the edges between them, one connected graph without cycles.

    Raises:
        ValueError: if there is no layer, two have one name, an edge names no layer or stands twice, layers are not
            connected, or edges go round in a circle.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile without layers: the table of nodes has no row")
        names = [layer.node for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError(f"node {_first_twice(names)!r} stands twice: every layer has a name of its own")
        if len(set(self.edges)) < len(self.edges):
            raise ValueError(f"edge {' -> '.join(_first_twice(self.edges))} stands twice")
        for edge in self.edges:
            for name in edge:
                if name not in self.position:
                    raise ValueError(f"edge {' -> '.join(edge)}: there is no node {name!r} in the table of nodes")
        self._check_connected()
        if len(self.order) < len(self.layers):
            rest = [name for name in names if name not in {self.layers[layer].node for layer in self.order}]
            raise ValueError(
                f"the edges go round in a circle through or before {', '.join(rest[:5])}"
                f"{' ...' if len(rest) > 5 else ''}: a layer feeds later layers only"
            )

    @cached_property
    def position(self) -> dict[str, int]:
        """Name of a layer -> its number in `layers`."""
        return {layer.node: number for number, layer in enumerate(self.layers)}

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The layers that each layer feeds, by number."""
        found: list[list[int]] = [[] for _ in self.layers]
        for before, after in self.edges:
            found[self.position[before]].append(self.position[after])
        return tuple(tuple(sorted(after)) for after in found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Layers so that each comes after those that feed it; shorter than `layers` if there is a cycle."""
        waiting = [0] * len(self.layers)
        for after in self.successors:
            for layer in after:
                waiting[layer] += 1
        ready = [layer for layer, count in enumerate(waiting) if not count]
        for layer in ready:  # it grows during the loop
            for other in self.successors[layer]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return tuple(ready)

    def without_inputs(self) -> "LayerGraph":
        """The graph without nodes of data, which are the first stage's; ValueError if the rest falls apart."""
        inputs = {layer.node for layer in self.layers if layer.is_input}
        return LayerGraph(
            tuple(layer for layer in self.layers if layer.node not in inputs),
            tuple(edge for edge in self.edges if not inputs.intersection(edge)),
        )

    def _check_connected(self) -> None:
        neighbours: dict[str, list[str]] = {layer.node: [] for layer in self.layers}
        for before, after in self.edges:
            neighbours[before].append(after)
            neighbours[after].append(before)
        seen = [self.layers[0].node]
        known = set(seen)
        for name in seen:
            fresh = [other for other in neighbours[name] if other not in known]
            seen += dict.fromkeys(fresh)
            known.update(fresh)
        lost = [layer.node for layer in self.layers if layer.node not in known]
        if lost:
            raise ValueError(
                f"no path of edges between {seen[0]} and {lost[0]}: the graph falls apart; is an edge missing?"
            )


def chain(layers: Sequence[Layer]) -> LayerGraph:
    """A graph in which each layer feeds the next."""
    names = [layer.node for layer in layers]
    return LayerGraph(tuple(layers), tuple(pairwise(names)))


# --- as tables ----------------------------------------------------------------------------------------------


def from_csv(nodes: str, edges: str) -> LayerGraph:
    """The graph that the texts of two CSV tables stand for.

    Raises:
        ValueError: for a column that is missing or not known, a cell that is no number, or a graph that cannot be.
    """
    layers = []
    for line, row in _rows(nodes, NODE_COLUMNS, "nodes"):
        numbers = {name: _number(row[name], name, line) for name in NUMBERS}
        layers.append(Layer(row["node"], row["operator"], **numbers))
    pairs = [(row["from_node"], row["to_node"]) for _, row in _rows(edges, EDGE_COLUMNS, "edges")]
    return LayerGraph(tuple(layers), tuple(pairs))


def to_csv(graph: LayerGraph) -> tuple[str, str]:
    """The tables of nodes and edges as CSV; the inverse of `from_csv`."""
    nodes = [[getattr(layer, name) for name in NODE_COLUMNS] for layer in graph.layers]
    return _table(NODE_COLUMNS, nodes), _table(EDGE_COLUMNS, graph.edges)


def _rows(text: str, columns: Sequence[str], table: str) -> list[tuple[int, dict[str, str]]]:
    header, lines = _cells(text, table)
    for name in header:
        if name not in columns:
            raise ValueError(f"unknown column {name!r} in the table of {table}; it has {', '.join(columns)}")
    if missing := [name for name in columns if name not in header]:
        raise ValueError(f"the table of {table} has no column {missing[0]!r}; it has {', '.join(columns)}")
    if len(header) > len(columns):
        raise ValueError(f"column {_first_twice(header)!r} stands twice in the table of {table}")
    for number, cells in lines:
        if len(cells) != len(header):
            raise ValueError(f"line {number} of the table of {table} has {len(cells)} cells, not {len(header)}")
    return [(number, dict(zip(header, cells, strict=True))) for number, cells in lines]


def _cells(text: str, table: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and the cells of every line that is not empty, with its number."""
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of the table of {table} is no CSV: {error}") from None
    return (lines[0][1], lines[1:]) if lines else ([], [])


def _number(text: str, column: str, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{column}={text!r} in line {line} of the table of nodes: a number is needed") from None


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return target.getvalue()


def _first_twice(names: Sequence[T]) -> T:
    return next(name for number, name in enumerate(names) if name in names[:number])
