"""Layer graph: time and size of each layer of a model, and which layer feeds which; PipeDream's profile.

As CSV, two tables: nodes (node, operator, forward_ms, backward_ms, activation_bytes, parameter_bytes; one minibatch)
and edges (from_node, to_node).

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19, section 3.1: the
profiler records for every layer its compute time, the size of its output and the size of its parameters.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

LARGEST = 1e18  # milliseconds or bytes; sums of them stay finite


@dataclass(frozen=True)
class Layer:
    """One layer of a profile, for one minibatch.

    Raises ValueError if the name is empty, or a number is negative, not a number, or above `LARGEST`.
    """

    node: str  # its name in the edges
    operator: str  # names that begin with `Input` stand for data, not for work
    forward_ms: float
    backward_ms: float
    activation_bytes: float  # of its output
    parameter_bytes: float

    def __post_init__(self) -> None:
        if not self.node:
            raise ValueError("a layer without a name: the column node names every row")
        for name in NUMBERS:
            value = getattr(self, name)
            if not 0 <= value <= LARGEST:
                raise ValueError(f"{name}={value} of {self.node}: times and sizes are finite and not negative")


NODE_COLUMNS = tuple(column.name for column in fields(Layer))
NUMBERS = NODE_COLUMNS[2:]
EDGE_COLUMNS = ("from_node", "to_node")
T = TypeVar("T")


@dataclass(frozen=True)
class LayerGraph:
    """Layers and the edges between them, one connected graph without cycles.

    Raises ValueError if there is no layer, two have one name, an edge names no layer or stands twice, layers are not
    connected, or there is a cycle.
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
        return {layer.node: number for number, layer in enumerate(self.layers)}

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers that each layer feeds."""
        found: list[list[int]] = [[] for _ in self.layers]
        for before, after in self.edges:
            found[self.position[before]].append(self.position[after])
        return tuple(tuple(sorted(after)) for after in found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Numbers of the layers, each after those that feed it; shorter than `layers` if there is a cycle."""
        waiting = Counter(self.position[after] for _, after in self.edges)
        ready = [layer for layer in range(len(self.layers)) if not waiting[layer]]
        for layer in ready:  # it grows during the loop
            for other in self.successors[layer]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return tuple(ready)

    def without_inputs(self) -> "LayerGraph":
        """The graph without nodes of data, which the first stage has; ValueError if the rest is not connected."""
        inputs = {layer.node for layer in self.layers if layer.operator.startswith("Input")}
        return LayerGraph(
            tuple(layer for layer in self.layers if layer.node not in inputs),
            tuple(edge for edge in self.edges if not inputs.intersection(edge)),
        )

    def _check_connected(self) -> None:
        neighbours: dict[str, list[str]] = {layer.node: [] for layer in self.layers}
        for before, after in self.edges:
            neighbours[before].append(after)
            neighbours[after].append(before)
        start = self.layers[0].node
        known, waiting = {start}, [start]
        while waiting:
            fresh = set(neighbours[waiting.pop()]) - known
            known |= fresh
            waiting += fresh
        if lost := [layer.node for layer in self.layers if layer.node not in known]:
            between = f"between {start} and {lost[0]}"
            raise ValueError(f"no path of edges {between}: the graph falls apart; is an edge missing?")


def chain(layers: Sequence[Layer]) -> LayerGraph:
    """A graph in which each layer feeds the next."""
    return LayerGraph(tuple(layers), tuple(pairwise(layer.node for layer in layers)))


def from_csv(nodes: str, edges: str) -> LayerGraph:
    """The graph of two CSV tables, given as texts.

    Raises ValueError for a column that is missing or not known, a cell that is no number, or a graph that cannot be.
    """
    layers = []
    for line, row in _rows(nodes, NODE_COLUMNS, "nodes"):
        numbers = {name: _number(row[name], name, line) for name in NUMBERS}
        layers.append(Layer(row["node"], row["operator"], **numbers))
    pairs = [(row["from_node"], row["to_node"]) for _, row in _rows(edges, EDGE_COLUMNS, "edges")]
    return LayerGraph(tuple(layers), tuple(pairs))


def to_csv(graph: LayerGraph) -> tuple[str, str]:
    """The tables of nodes and edges as CSV; the inverse of `from_csv`."""
    return _table(NODE_COLUMNS, map(astuple, graph.layers)), _table(EDGE_COLUMNS, graph.edges)


def _rows(text: str, columns: Sequence[str], table: str) -> list[tuple[int, dict[str, str]]]:
    """The cells of each line by column, with its number; lines without a cell are skipped."""
    reader = csv.reader(io.StringIO(text))
    try:
        (_, header), *lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row] or [(0, [])]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of the table of {table} is no CSV: {error}") from None
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


def _number(text: str, column: str, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{column}={text!r} in line {line} of the table of nodes: a number is needed") from None


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    target = io.StringIO()
    csv.writer(target, lineterminator="\n").writerows([header, *rows])
    return target.getvalue()


def _first_twice(names: Sequence[T]) -> T:
    return next(name for number, name in enumerate(names) if name in names[:number])
