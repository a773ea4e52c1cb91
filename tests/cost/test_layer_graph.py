"""A profile as a graph and as two tables: the round trip, and everything that can be wrong with one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.cost.layer_graph import Layer, LayerGraph, chain, from_csv, to_csv

NODES = """\
node,operator,forward_ms,backward_ms,activation_bytes,parameter_bytes
a,Input0,0.5,0.000,8.000,0.000
b,Conv2d(3, 64),1.0,2.0,16,4
c,Linear,3.0,4.0,2,32
""".replace("Conv2d(3, 64)", '"Conv2d(3, 64)"')
EDGES = "from_node,to_node\nb,c\na,b\n"

numbers = st.floats(0, 1e15)
names = st.text("abcxyz,\"' _0123", min_size=1).map(str.strip).filter(bool)
layers = st.builds(Layer, names, names, numbers, numbers, numbers, numbers)


def test_a_profile_is_read_from_two_tables():
    graph = from_csv(NODES, EDGES)
    assert graph.layers[1] == Layer("b", "Conv2d(3, 64)", 1.0, 2.0, 16.0, 4.0)
    assert graph.edges == (("b", "c"), ("a", "b"))
    assert graph.order == (0, 1, 2)


def test_data_is_no_layer():
    graph = from_csv(NODES, EDGES).without_inputs()
    assert [layer.node for layer in graph.layers] == ["b", "c"]
    assert graph.edges == (("b", "c"),)


@given(st.lists(layers, min_size=1, max_size=6, unique_by=lambda layer: layer.node).map(chain))
def test_what_is_written_is_read_back(graph):
    assert from_csv(*to_csv(graph)) == graph


BAD_NODES = [
    ("", "no column 'node'"),
    (NODES.replace("backward_ms", "backwards_ms"), "unknown column 'backwards_ms' in the table of nodes"),
    (NODES.replace(",parameter_bytes", ""), "no column 'parameter_bytes'"),
    (NODES.replace("node,operator", "node,node,operator"), "column 'node' stands twice"),
    (NODES.replace("3.0,4.0", "3.0,four"), "backward_ms='four' in line 4 of the table of nodes: a number is needed"),
    (NODES.replace("3.0,4.0", "3.0,-4.0"), "backward_ms=-4.0 of c: times and sizes are finite and not negative"),
    (NODES.replace("3.0,4.0", "nan,4.0"), "forward_ms=nan of c"),
    (NODES.replace("3.0,4.0", "inf,4.0"), "forward_ms=inf of c"),
    (NODES.replace("3.0,4.0", "1e300,4.0"), "forward_ms=1e\\+300 of c"),
    (NODES.replace("3.0,4.0", "3.0"), "line 4 of the table of nodes has 5 cells, not 6"),
    (NODES.replace("\nc,", "\n,"), "a layer without a name"),
    (NODES.replace("\nc,", "\nb,"), "node 'b' stands twice"),
    (NODES.replace("\nc,", "\nd,"), "edge b -> c: there is no node 'c'"),
    (NODES.partition("\n")[0], "the table of nodes has no row"),
    (NODES.replace("Linear", "x" * 200_000), "line 4 of the table of nodes is no CSV: field larger than"),
]


@pytest.mark.parametrize("nodes, message", BAD_NODES)
def test_a_table_of_nodes_that_cannot_be_is_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        from_csv(nodes, EDGES)


BAD_EDGES = [
    (EDGES + "c,b\n", "the edges go round in a circle through or before b, c"),
    (EDGES + "b,b\n", "the edges go round in a circle"),
    (EDGES + "b,z\n", "edge b -> z: there is no node 'z'"),
    (EDGES + "b,c\n", "edge b -> c stands twice"),
    (EDGES.replace("b,c\n", ""), "no path of edges between a and c: the graph falls apart; is an edge missing?"),
    (EDGES.replace("to_node", "to"), "unknown column 'to' in the table of edges"),
    (EDGES + "c\n", "line 4 of the table of edges has 1 cells, not 2"),
    ("", "no column 'from_node'"),
]


@pytest.mark.parametrize("edges, message", BAD_EDGES)
def test_edges_that_cannot_be_are_refused(edges, message):
    with pytest.raises(ValueError, match=message):
        from_csv(NODES, edges)


def test_a_profile_of_data_alone_is_refused():
    with pytest.raises(ValueError, match="a profile without layers"):
        LayerGraph((Layer("a", "Input", 0, 0, 8, 0),), ()).without_inputs()
