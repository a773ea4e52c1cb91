"""RoundPipe over several nodes: an engine in each, gradients scattered, shards stepped, weights gathered."""

import re
from dataclasses import asdict, replace

import pytest

from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import ScheduleError, Shape, to_text
from rpbench.models.data import SyntheticTokens
from rpbench.passes.lower import add_steps
from rpbench.registry import entries
from rpbench.torch_runtime.processes.node_run import NodeRequest, _all_groups
from rpbench.torch_runtime.processes.nodes import NodeData, bytes_per_step, check_nodes
from rpbench.torch_runtime.processes.ranks import Ranks
from rpbench.workload.architecture import Architecture

TINY = Architecture("tiny", num_layers=6, hidden=16, heads=2, vocab=37, seq_len=5)
CUT = Partition((3, 2), (1, 2, 2, 1), fused=True)


def roundpipe(**options):
    shape = Shape(2, 2, 4, 4, num_steps=3, fused=True)
    return add_steps(entries()["roundpipe"].build(shape, **options).with_partition(CUT))


def request_of(schedule, **fields):
    return NodeRequest(to_text(schedule), asdict(TINY), **({"dtype": "float64", "verify": True} | fields))


@pytest.fixture(scope="module")
def nodes():
    with Ranks(2) as found:
        yield found


def check_nodes_train_as_one_plain_loop(nodes, asynchronous, backend):
    answer = nodes.run_nodes(request_of(roundpipe(asynchronous=asynchronous), backend=backend))
    assert answer["grad_max_abs_diff"] == 0.0  # the loop adds up each node's rounds before the nodes, too
    assert answer["weight_max_abs_diff"] == 0.0
    assert answer["copies_max_abs_diff"] == 0.0
    assert answer["sent_bytes"] == answer["expected_bytes"] > 0
    assert answer["losses"] == pytest.approx(answer["reference_losses"], rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous, backend", [(False, "cpu"), (True, "cpu"), (True, "virtual")])
def test_two_nodes_train_as_one_plain_loop(nodes, asynchronous, backend):
    """The fourth is a test of `test_running`, whose ranks are there anyway."""
    check_nodes_train_as_one_plain_loop(nodes, asynchronous, backend)


@pytest.mark.slow
def test_a_flushed_schedule_of_bound_weights_takes_nodes_too(nodes):
    shape = Shape(2, 2, 4, num_steps=2)
    schedule = add_steps(entries()["1f1b"].build(shape).with_partition(symmetric((2, 4))))
    answer = nodes.run_nodes(request_of(schedule))
    assert max(answer["grad_max_abs_diff"], answer["weight_max_abs_diff"]) == 0.0


@pytest.mark.slow
def test_nodes_refuse_what_needs_all_gradients(nodes):
    with pytest.raises(ValueError, match="clip_norm, loss scaling and tied weights"):
        nodes.run_nodes(request_of(roundpipe(), optimizer={"clip_norm": 1.0}))


@pytest.mark.parametrize(
    "schedule, said",
    [
        (
            entries()["pipedream"].build(Shape(2, 2, 1, num_steps=4)),
            "schedule=pipedream: policy stash is asynchronous: .* it stays on one host",
        ),
        (entries()["1f1b"].build(Shape(2, 2, 4)), "schedule=1f1b has no STEP"),
    ],
)
def test_schedules_that_nodes_cannot_share(schedule, said):
    with pytest.raises(ScheduleError, match=said):
        check_nodes(schedule)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"backend": "gpu"}, "backend=gpu: nodes run their engine as virtual or cpu"),
        ({"dtype": "int8"}, "dtype=int8: one of"),
        ({"num_nodes": 0}, "num_nodes=0: at least 1"),
        ({"model": asdict(replace(TINY, num_layers=7))}, "sums to 6 layers, the model has 7"),
    ],
)
def test_requests_that_cannot_be(change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(request_of(roundpipe()), **change).check()


def test_every_node_has_microbatches_of_its_own():
    data = SyntheticTokens(37, 5, 1)
    found = [NodeData(data, node, 2).microbatch(3, i).tokens for node in range(2) for i in range(2)]
    expected = [data.microbatch(3, number).tokens for number in range(4)]
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert _all_groups({(0, 2): ((2, 3),)}, 2, 2) == {(0, 2): ((4, 5), (6, 7))}


def test_bytes_by_hand():
    """Three nodes and 10 parameters of 4 bytes: each gradient goes to two shards' owners less its own, and back."""
    assert bytes_per_step(10, 3, 4) == 2 * 2 * 10 * 4
    assert bytes_per_step(10, 1, 4) == 0
