"""GreedySnake: layer by layer to and fro, what that moves, and steps beside the next forward."""

from collections import Counter
from dataclasses import replace

import pytest

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate
from rpbench.workload.architecture import Architecture

# Worked out by hand: 3 layers, 4 microbatches; the last microbatch of a layer is the first of the next.
GOLDEN = "0F0 0F1 0F2 0F3 1F3 1F2 1F1 1F0 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 1B0 1B1 1B2 1B3 0B3 0B2 0B1 0B0"
MODEL = Architecture("small", num_layers=5, hidden=16, heads=2, vocab=32, seq_len=8)


def complete(p: int, layers: int, m: int, num_steps: int = 1, delayed: float = 0.0) -> Schedule:
    method = entry("greedysnake")
    order = method.build(Shape(p, layers, m, num_steps=num_steps), delayed=delayed)
    return method.lower(order.with_partition(symmetric((1,) * layers)), prefetch=1, delayed=delayed)


def test_order():
    assert " ".join(map(str, complete(1, 3, 4).compute(0))) == GOLDEN


@pytest.mark.parametrize("p, layers, m, steps", [(1, 3, 4, 2), (1, 5, 1, 1), (2, 4, 6, 2), (3, 1, 3, 2)])
def test_with_all_it_moves_it_runs(p, layers, m, steps):
    check(complete(p, layers, m, steps, delayed=0.5))


@pytest.mark.parametrize("layers, n", [(5, 4), (5, 1), (3, 6)])
def test_what_vertical_and_horizontal_order_move(layers, n):
    """By the table of the method: weights twice, a gradient once; boundary tensors instead."""
    sizes = model_bytes(replace(MODEL, num_layers=layers), 16)
    every = [*sizes.layers, sizes.embedding, sizes.head]
    weights, gradients = (sum(getattr(layer, name) for layer in every) for name in ("weights", "gradients"))
    tensors = (layers - 1) * sizes.boundary
    (vertical,) = moved_bytes(complete(1, layers, n), sizes)
    found = Counter(dict.fromkeys(("h2d RECV_F", "d2h SEND_F", "h2d RECV_B", "d2h SEND_B"), 0)) | Counter(vertical)
    assert found["h2d LOAD:P"] == 2 * weights
    assert found["d2h STORE:G"] == gradients
    assert found["d2h SEND_F"] + found["d2h STORE:A"] == n * tensors, "each boundary tensor goes out once"
    assert found["h2d LOAD:A"] == n * tensors
    assert found["h2d RECV_F"] == found["h2d RECV_B"] == found["d2h SEND_B"] == (n - 1) * tensors

    method = entry("zero_infinity")
    order = method.build(Shape(1, layers, n)).with_partition(symmetric((1,) * layers))
    (horizontal,) = moved_bytes(method.lower(order, prefetch=1, reduce_each_microbatch=True), sizes)
    assert horizontal["h2d LOAD:P"] == 2 * n * weights
    assert horizontal["d2h STORE:G"] == n * gradients


def test_a_tensor_that_goes_out_and_never_comes_back_is_refused():
    schedule = complete(1, 3, 2)
    lanes = [dict(row) for row in schedule.lanes]
    lanes[0]["h2d"] = tuple(action for action in lanes[0]["h2d"] if action.kind is not Kind.RECV_F)
    with pytest.raises(ScheduleError, match=r"SEND_F\d>0 moves nothing"):
        check(replace(schedule, rows=tuple(lanes)))


# --- steps that are put off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("delayed, steps", [(0.0, "3 2 1 0"), (0.5, "2 0 1 3"), (0.25, "2 1 0 3"), (1.0, "0 1 2 3")])
def test_late_steps_come_in_the_order_of_the_next_forward(delayed, steps):
    schedule = complete(1, 4, 2, 2, delayed)
    host = [action for action in schedule.lanes[0]["host"] if action.version == 1]
    assert " ".join(str(action.stage) for action in host) == steps
    assert Analysis(schedule).versions.max_staleness == 0


def test_some_steps_beside_the_next_forward_are_better_than_none_and_than_all():
    """A layer's step takes as long as four passes of it: 3 steps of 16 passes each, and what the host keeps waiting."""

    def makespan(delayed: float) -> float:
        layers = 4
        ones = [1.0] * layers
        table = LayerTimes(ones, [0.0] * layers, ones, step=[4.0] * layers).table(symmetric((1,) * layers))
        return simulate(complete(1, layers, 2, 3, delayed), replace(table, transfer_time=lambda payload: None)).makespan

    plain, half, late = map(makespan, (0.0, 0.5, 1.0))
    assert half < plain
    assert half < late


@pytest.mark.parametrize(
    "shape, options, message",
    [
        (Shape(3, 3, 4), {}, "4 microbatches to 3 devices: they must be a multiple of 3; take num_microbatches=6"),
        (Shape(1, 3, 4), {"delayed": 1.5}, "delayed=1.5: the fraction of the layers, from 0 to 1"),
        (Shape(1, 3, 4), {"delayed": True}, "delayed=True"),
    ],
)
def test_what_cannot_be_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        entry("greedysnake").build(shape, **options)
