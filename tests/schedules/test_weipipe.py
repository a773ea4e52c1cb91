"""WeiPipe: the rings that turn, what they carry, and when ranks wait for them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import LayerSize, model_bytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

# The interleaved rows of the released code for 3 ranks and 6 microbatches, written down by hand.
GOLDEN = """
    0F0 1F0 2F0 2B0 0F3 1B0 1F3 0B0 2F3 2B3 1B3 0B3
    0F1 1F1 2F1 2B1 0F4 1B1 1F4 0B1 2F4 2B4 1B4 0B4
    0F2 1F2 2F2 2B2 0F5 1B2 1F5 0B2 2F5 2B5 1B5 0B5
"""


def order(p: int, rounds: int, num_steps: int = 1) -> Schedule:
    shape = Shape(p, p, p * rounds, num_steps=num_steps)
    return entry("weipipe").build(shape).with_partition(symmetric((1,) * p))


def complete(p: int, rounds: int, num_steps: int = 1, buffers: int = 4) -> Schedule:
    return entry("weipipe").lower(order(p, rounds, num_steps), prefetch=1, buffers=buffers)


def test_order():
    rows = [" ".join(map(str, order(3, 2).compute(rank))) for rank in range(3)]
    assert rows == [line.strip() for line in GOLDEN.strip().splitlines()]


def test_a_rank_steps_its_own_slice_behind_all_its_work_of_a_step():
    """A row of a step has each of p slices forward and backward for each of its microbatches: 2 m actions."""
    for rank in range(3):
        row = complete(3, 2, num_steps=3).compute(rank)
        steps = {place: action.version for place, action in enumerate(row) if action.kind is Kind.STEP}
        assert steps == {12: 1, 25: 2, 38: 3}


# --- the rings, turn by turn ----------------------------------------------------------------------------------


def backward_turns(p: int, rounds: int, step: int, start: list[int]) -> Iterator[tuple[int, int]]:
    """(slice on a rank, slice its row runs) of every rank and turn of a ring that moves by `step`."""
    held = list(start)
    for turn in range(1, rounds * p + p):
        for rank in range(p):
            if rank < turn <= rank + rounds * p:
                yield held[rank], p - 1 - (turn - rank - 1) % p  # a row runs slices p - 1 to 0, again and again
        held = [held[(rank - step) % p] for rank in range(p)]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_every_rank_meets_the_slice_its_row_runs(p):
    """The ring goes up as the forward ring does, from slice r - 1 on rank r."""
    assert all(held == wanted for held, wanted in backward_turns(p, 3, 1, [(rank - 1) % p for rank in range(p)]))


@pytest.mark.parametrize("p, right", [(2, True), (3, False), (4, False), (8, False)])
def test_the_released_ring_is_right_for_two_ranks_only(p, right):
    """It goes down, and starts with the slice of forward turn p: p - 1 - r on rank r."""
    turns = list(backward_turns(p, 3, -1, [p - 1 - rank for rank in range(p)]))
    assert all(held == wanted for held, wanted in turns) is right


@pytest.mark.parametrize("p", [3, 4])
def test_a_ring_that_turns_the_other_way_is_refused(p):
    schedule = complete(p, 2)

    def other_way(rank: int, action: Action) -> Action:
        below = (rank - 1) % p
        return action._replace(peer=(rank + 1) % p) if action.peer == below else action

    rows = [dict(row) for row in schedule.lanes]
    for rank, row in enumerate(rows):
        row["h2d"] = tuple(other_way(rank, action) for action in row["h2d"])
    with pytest.raises(ScheduleError, match=r"takes what rank \d does not have: stage \d is at home on rank \d"):
        check(replace(schedule, rows=tuple(rows)))


def test_a_sum_that_goes_astray_is_refused():
    schedule = complete(3, 2)
    rows = [dict(row) for row in schedule.lanes]
    first, *others = rows[0]["d2h"]
    rows[0]["d2h"] = (first._replace(peer=2), *others)
    with pytest.raises(ScheduleError, match=r"2STORE:G>2 is followed by 2STORE:G>2 on rank 1"):
        check(replace(schedule, rows=tuple(rows)))


@pytest.mark.parametrize("p, rounds, steps", [(1, 2, 2), (2, 1, 1), (3, 2, 2), (4, 3, 1), (6, 2, 1)])
def test_with_all_it_moves_it_runs(p, rounds, steps):
    check(complete(p, rounds, steps))


# --- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p, rounds", [(2, 1), (3, 2), (5, 3)])
def test_slices_over_links(p, rounds):
    """Received: rounds (p - 1) forward and rounds p backward, but that rank 0 has slice 0 at home; sums likewise."""
    found: list[Counter[str]] = [Counter() for _ in range(p)]
    schedule = complete(p, rounds)
    for rank, _, row in schedule.items():
        found[rank].update(action.kind.name for action in row if action.peer not in (None, rank))
    assert [counts["LOAD"] for counts in found] == [rounds * (2 * p - 1) - (rank == 0) for rank in range(p)]
    assert [counts["STORE"] for counts in found] == [rounds * p - (rank == p - 1) for rank in range(p)]
    model = Architecture("equal", num_layers=p, hidden=8, heads=2, vocab=16, seq_len=4)
    sizes = model_bytes(model, 4)
    moved = moved_bytes(schedule, sizes)
    assert all(set(device) == {"net LOAD:P", "net STORE:G"} for device in moved)
    slices = [layer.weights for layer in sizes.layers]
    slices[0] += sizes.embedding.weights
    slices[-1] += sizes.head.weights
    at_home = Counter(-rank % p for rank in range(p))  # copied on its own rank, once a round
    for rank, device in enumerate(moved):
        every = 2 * rounds * sum(slices) - rounds * slices[-rank % p] - (rank == 0) * slices[0]
        assert device["net LOAD:P"] == every
        assert at_home[-rank % p] == 1


def test_a_rank_holds_its_own_slice_and_two_of_each_ring():
    p, model = 4, Architecture("equal", num_layers=4, hidden=8, heads=2, vocab=16, seq_len=4)
    sizes = model_bytes(model, 4)
    none = LayerSize(0, 0, 0, 0)
    bare = replace(sizes, embedding=none, head=none)
    layer = bare.layers[0]
    for classes in classes_of(complete(p, 2), bare, [p] * p):
        assert classes["weights"] == layer.weights
        assert classes["optimizer state"] == layer.optimizer
        assert classes["gathered weights"] == 4 * layer.weights
        assert classes["gradients on their way"] == 2 * layer.gradients
        assert classes["kept stage inputs"] == p * bare.boundary


def test_one_microbatch_is_in_flight_on_every_rank():
    assert peak_in_flight(build_graph(order(5, 3))) == [5] * 5


# --- time -----------------------------------------------------------------------------------------------------


def last_backward(schedule: Schedule, f: Fraction, b: Fraction, hop: Fraction) -> Fraction:
    p = schedule.shape.num_ranks
    costs = LayerTimes([f] * p, [Fraction(0)] * p, [b] * p).table(symmetric((1,) * p))
    timeline = simulate(schedule, replace(costs, transfer_time=lambda payload: hop if payload.share else 0))
    return max(span.end for span in timeline.spans() if span.action.kind is Kind.B)


@pytest.mark.parametrize("p, rounds, buffers", [(2, 2, 4), (4, 1, 4), (4, 3, 6), (6, 2, 8)])
@pytest.mark.parametrize("hop", [Fraction(0), Fraction(1, 2), Fraction(1)])
def test_with_room_a_rank_waits_only_until_the_first_slice_has_come(p, rounds, buffers, hop):
    """The last backward ends (p - 1)h after the work, for a time h of a slice no longer than a forward's."""
    schedule = complete(p, rounds, buffers=buffers)
    assert last_backward(schedule, Fraction(1), Fraction(2), hop) == rounds * p * 3 + (p - 1) * hop


@pytest.mark.parametrize("p, rounds, buffers", [(4, 2, 4), (5, 3, 4), (8, 2, 4), (8, 2, 6), (3, 4, 4)])
@pytest.mark.parametrize("f, b", [(Fraction(1), Fraction(2)), (Fraction(3), Fraction(5))])
def test_without_room_ranks_wait_for_one_another(p, rounds, buffers, f, b):
    """max(0, (p - n)(f + b) + b) for n buffers, where links take no time; in lockstep it is (p - 1)(f + b)."""
    found = last_backward(complete(p, rounds, buffers=buffers), f, b, Fraction(0)) - rounds * p * (f + b)
    assert found == max(0, (p - buffers) * (f + b) + b)
    assert found < (p - 1) * (f + b)


def test_two_rings_need_room_for_two_slices_each():
    with pytest.raises(ValueError, match=r"buffers=3: room for two slices of each ring, 4, or more; try 4"):
        entry("weipipe").build(Shape(4, 4, 4), buffers=3)


@pytest.mark.parametrize(
    "shape, message",
    [
        (Shape(4, 8, 8), "8 slices for 4 ranks: there must be one for each; set chunks_per_device=1"),
        (Shape(4, 4, 6), "6 microbatches to 4 ranks: they must be a multiple of 4; take num_microbatches=8"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        entry("weipipe").build(shape)
