"""MegaTrain: blocks that run forward again, what streams for them, what stays, and how long a step is."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.replicas import host_bytes
from rpbench.cost.footprint.sizes import LayerSize, model_bytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.checks.residency import peak_kept_inputs
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate
from rpbench.workload.architecture import Architecture

# The row of the released code for 4 layers and a block of 2, written down by hand: what is loaded, what runs and what
# is stored, one after another. The second run of a layer in a backward is inside its B.
GOLDEN = """
    LOAD0 F0 LOAD1 F1 LOAD2 F2 LOAD3 F3
    LOAD2 R2 LOAD3 R3 LOAD3 B3 STORE3 LOAD2 B2 STORE2
    LOAD0 R0 LOAD1 R1 LOAD1 B1 STORE1 LOAD0 B0 STORE0
"""
MODEL = Architecture("small", num_layers=8, hidden=16, heads=2, vocab=32, seq_len=8)


def complete(p: int, layers: int, m: int, interval: int, num_steps: int = 1) -> Schedule:
    method = entry("megatrain")
    order = method.build(Shape(p, layers, m, num_steps=num_steps), checkpoint_interval=interval)
    return method.lower(order.with_partition(symmetric((1,) * layers)), prefetch=1, checkpoint_interval=interval)


def in_turn(schedule: Schedule) -> str:
    """The k-th load before the k-th layer that runs, and a gradient's store behind its backward."""
    lanes = schedule.lanes[0]
    loads = iter([action for action in lanes["h2d"] if action.kind is Kind.LOAD])
    stores = iter([action for action in lanes["d2h"] if action.kind is Kind.STORE])
    words: list[str] = []
    for action in lanes["compute"]:
        words += [f"LOAD{next(loads).stage}", f"{action.kind.name}{action.stage}"]
        words += [f"STORE{next(stores).stage}"] if action.kind is Kind.B else []
    assert next(loads, None) is None
    assert next(stores, None) is None
    return " ".join(words)


def test_order():
    assert in_turn(complete(1, 4, 1, 2)) == " ".join(GOLDEN.split())


def test_a_block_that_is_shorter_than_the_others():
    row = " ".join(map(str, complete(1, 5, 1, 2).compute(0)))
    assert row == "0F0 1F0 2F0 3F0 4F0 4R0 4B0 2R0 3R0 3B0 2B0 0R0 1R0 1B0 0B0"


@pytest.mark.parametrize(
    "p, layers, m, interval, steps",
    [(1, 4, 1, 2, 2), (1, 5, 3, 4, 1), (2, 4, 4, 2, 2), (3, 1, 3, 2, 2), (1, 3, 2, 9, 2)],
)
def test_with_all_it_moves_it_runs(p, layers, m, interval, steps):
    schedule = complete(p, layers, m, interval, steps)
    check(schedule)
    assert from_text(to_text(schedule)) == schedule
    assert Analysis(schedule).versions.max_staleness == 0


def test_the_host_steps_when_the_backward_is_nearly_over():
    """Layer 1 first, which waits for all backwards but that of layer 0; layer 0 last, for the next forward."""
    host = complete(1, 4, 2, 2, num_steps=2).lanes[0]["host"]
    assert " ".join(map(str, host)) == "1STEP@1 2STEP@1 3STEP@1 0STEP@1 1STEP@2 2STEP@2 3STEP@2 0STEP@2"


# --- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers, interval, m", [(4, 2, 1), (8, 4, 1), (8, 4, 3), (6, 3, 2), (5, 2, 1)])
def test_six_bytes_a_parameter_come_and_two_go(layers, interval, m):
    sizes = model_bytes(replace(MODEL, num_layers=layers), 16)
    parameters = sum(part.weights for part in (*sizes.layers, sizes.embedding, sizes.head)) // 2
    (moved,) = moved_bytes(complete(1, layers, m, interval), sizes)
    assert moved == {"h2d LOAD:P": 6 * parameters * m, "d2h STORE:G": 2 * parameters * m}


def test_devices_share_the_bytes_of_their_microbatches():
    sizes = model_bytes(replace(MODEL, num_layers=4), 16)
    parameters = sum(part.weights for part in (*sizes.layers, sizes.embedding, sizes.head)) // 2
    assert all(
        moved == {"h2d LOAD:P": 12 * parameters, "d2h STORE:G": 4 * parameters}
        for moved in moved_bytes(complete(3, 4, 6, 2), sizes)
    )


@pytest.mark.parametrize(
    "layers, interval, by_hand",
    [(4, 2, 3), (8, 4, 5), (8, 2, 5), (6, 3, 4), (5, 2, 3), (1, 4, 1), (4, 9, 4)],
)
def test_inputs_that_stay(layers, interval, by_hand):
    """L/K - 1 of blocks, K - 1 of the block that goes back, and the head's, where K divides L.

    Of 5 layers in blocks of 2 the last block has one: 2 of blocks and the head's; then 1 of a block and 1 in it.
    """
    found = peak_kept_inputs(complete(1, layers, 2, interval), 0)
    assert found == by_hand
    if layers % interval == 0:
        assert found == layers // interval + interval - 1


def test_two_layers_and_the_inputs_are_on_the_device():
    sizes = model_bytes(MODEL, 16)
    none = LayerSize(0, 0, 0, 0)
    bare = replace(sizes, embedding=none, head=none)
    layer = bare.layers[0]
    (classes,) = classes_of(complete(1, 8, 2, 4), bare, [1])
    assert classes["weights"] == classes["prefetched weights"] == layer.weights
    assert classes["gradients"] == layer.gradients
    assert classes["recomputed activations"] == layer.activations
    assert classes["kept stage inputs"] == 5 * bare.boundary
    assert classes["boundary tensors"] == 2 * bare.boundary


def test_the_host_has_the_model_and_no_inputs():
    sizes = model_bytes(MODEL, 16)
    everything = sum(sum(part[:3]) for part in (*sizes.layers, sizes.embedding, sizes.head))
    assert host_bytes(complete(1, 8, 2, 4), sizes) == everything


# --- time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers, interval, m", [(4, 2, 1), (8, 4, 2), (6, 3, 2)])
def test_a_layer_runs_forward_three_times(layers, interval, m):
    """m L (f + r + r + b) where links take no time."""
    f, r, b = Fraction(2), Fraction(3), Fraction(5)
    costs = LayerTimes([f] * layers, [r] * layers, [b] * layers).table(symmetric((1,) * layers))
    timeline = simulate(complete(1, layers, m, interval), replace(costs, transfer_time=lambda payload: Fraction(0)))
    assert timeline.makespan == m * layers * (f + 2 * r + b)


def test_loads_hide_behind_layers_that_run_as_long():
    """What remains is the first load; with loads twice as long as a forward the device waits."""
    costs = LayerTimes([Fraction(1)] * 4, [Fraction(1)] * 4, [Fraction(2)] * 4).table(symmetric((1,) * 4))

    def makespan(load: int) -> Fraction:
        loaded = replace(costs, transfer_time=lambda payload: Fraction(load if payload.object == "P" else 0))
        return simulate(complete(1, 4, 1, 2), loaded).makespan

    work = 4 * (1 + 1 + 3)
    assert makespan(0) == work
    assert makespan(1) == work + 1
    assert makespan(2) > work + 2


# --- refusals -------------------------------------------------------------------------------------------------


def test_an_input_that_nobody_makes_is_refused():
    schedule = complete(1, 4, 1, 2)
    lanes = [dict(row) for row in schedule.lanes]
    lanes[0]["compute"] = tuple(each for each in lanes[0]["compute"] if each != Action(Kind.R, 2, 0))
    with pytest.raises(ScheduleError, match=r"2R0 is missing"):
        check(replace(schedule, rows=tuple(lanes)))


@pytest.mark.parametrize(
    "shape, options, message",
    [
        (Shape(3, 3, 4), {}, "4 microbatches to 3 devices: they must be a multiple of 3; take num_microbatches=6"),
        (
            Shape(1, 3, 4),
            {"checkpoint_interval": 1},
            "checkpoint_interval=1: layers of which one .* 2 or more, .*; try 4",
        ),
        (Shape(1, 3, 4), {"checkpoint_interval": 2.0}, "checkpoint_interval=2.0"),
        (Shape(1, 3, 4), {"checkpoint_interval": True}, "checkpoint_interval=True"),
    ],
)
def test_what_cannot_be_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        entry("megatrain").build(shape, **options)


def test_inputs_are_made_again_of_whole_sequences_only():
    with pytest.raises(ValueError, match=r"keeps_every=2: .* keep all inputs, keeps_every=1"):
        Shape(1, 2, 1, num_parts=2, keeps_every=2)


def test_loads_of_a_layer_that_runs_twice_in_a_row():
    """The last layer of a block is loaded for its R and again for its B, as in the release."""
    loads = Counter(action.stage for action in complete(1, 4, 1, 2).lanes[0]["h2d"] if action.kind is Kind.LOAD)
    assert loads == dict.fromkeys(range(4), 3)
