"""TawPipe: who owns a slice, who takes it from whom, what crosses groups, and how long a step is."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from baselines.data_parallel.tawpipe import owner
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import LayerSize, model_bytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

# Rows and owners of the released code for 4 ranks in 2 groups, written down by hand; its idle turn is a WAIT.
GOLDEN = """
    0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0
    0F1 1F1 2F1 3F1 3B1 2B1 1B1 0B1
    0WAIT0 0F2 1F2 2F2 3F2 3B2 2B2 1B2 0B2
    0WAIT1 0F3 1F3 2F3 3F3 3B3 2B3 1B3 0B3
"""
# What rank 2 of these brings and sends, by hand from the rules: it keeps slice 1, relays slices of rank 0 into its
# group, and sends the sums of its group.
RANK_2_BRINGS = """
    0LOAD:P@0>0 2LOAD:P@0>3 0FREE:P 3LOAD:P@0>3 2FREE:P 3LOAD:P@0>3 3FREE:P 2LOAD:P@0>3 3FREE:P 0LOAD:P@0>0 2FREE:P
    0FREE:P
"""
RANK_2_SENDS = "3STORE:G>3 3FREE:G 2STORE:G>1 2FREE:G 1STORE:G>2 1FREE:G 0STORE:G>0 0FREE:G"

# 6 ranks in 3 groups, by hand: rank -> for each slice the rank it is taken from; own: it is kept there.
OWN = -1
TAKEN_FROM = [
    [OWN, 2, 4, 1, 1, 1],
    [0, 0, 0, OWN, 3, 5],
    [0, OWN, 4, 3, 3, 3],
    [2, 2, 2, 1, OWN, 5],
    [0, 2, OWN, 5, 5, 5],
    [4, 4, 4, 1, 3, OWN],
]
# The same ranks: who takes the gradient of each slice.
SENT_TO = [
    [0, 2, 4, 1, 3, 5],
    [0, 0, 0, 1, 0, 0],
    [0, 2, 4, 1, 3, 5],
    [2, 2, 2, 2, 3, 2],
    [0, 2, 4, 1, 3, 5],
    [4, 4, 4, 4, 4, 5],
]
SIZES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3)]


def order(p: int, groups: int, rounds: int, num_steps: int = 1) -> Schedule:
    shape = Shape(p, p, p * rounds, num_steps=num_steps)
    return entry("tawpipe").build(shape, groups=groups).with_partition(symmetric((1,) * p))


def complete(p: int, groups: int, rounds: int, num_steps: int = 1) -> Schedule:
    return entry("tawpipe").lower(order(p, groups, rounds, num_steps), prefetch=1, groups=groups)


def words(row) -> str:
    return " ".join(map(str, row))


def test_order():
    rows = [words(order(4, 2, 1).compute(rank)) for rank in range(4)]
    assert rows == [line.strip() for line in GOLDEN.strip().splitlines()]


def test_owners():
    assert [owner(stage, 4, 2) for stage in range(4)] == [0, 2, 1, 3]
    assert [owner(stage, 6, 2) for stage in range(6)] == [0, 3, 1, 4, 2, 5]
    assert [owner(stage, 6, 3) for stage in range(6)] == [0, 2, 4, 1, 3, 5]
    steps = [[a.stage for a in complete(6, 3, 1).compute(rank) if a.kind is Kind.STEP] for rank in range(6)]
    assert steps == [[0], [3], [1], [4], [2], [5]]


def test_a_relay_brings_what_its_group_needs():
    lanes = complete(4, 2, 1).lanes[2]
    assert words(lanes["h2d"]) == " ".join(RANK_2_BRINGS.split())
    assert words(lanes["d2h"]) == RANK_2_SENDS


def test_six_ranks_in_three_groups():
    for rank, lanes in enumerate(complete(6, 3, 2).lanes):
        comes = {(a.stage, a.peer) for a in lanes["h2d"] if a.kind is Kind.LOAD}
        assert comes == {(stage, peer) for stage, peer in enumerate(TAKEN_FROM[rank]) if peer != OWN}
        assert {(a.stage, a.peer) for a in lanes["d2h"] if a.kind is Kind.STORE} == set(enumerate(SENT_TO[rank]))


@pytest.mark.parametrize("p, groups", SIZES)
@pytest.mark.parametrize("rounds, num_steps", [(1, 1), (2, 2), (3, 1)])
def test_with_all_it_moves_it_runs(p, groups, rounds, num_steps):
    check(complete(p, groups, rounds, num_steps))


# --- what takes part in a handover ----------------------------------------------------------------------------


def test_a_member_takes_what_its_relay_has_brought_for_the_same_visit():
    schedule = complete(4, 2, 2)
    handovers, index = build_graph(schedule).analysis.moves.handovers, build_graph(schedule).analysis.index
    for number, origin in handovers.origins.items():
        stage, member = index.actions[number].stage, index.device(number)
        assert (origin is None) == (index.actions[number].peer == owner(stage, 4, 2))
        if origin is not None:
            pair = [index.actions[visit.first].microbatch for visit in (origin.visits[0], _visit(schedule, number))]
            assert pair[0] // 4 == pair[1] // 4
            assert pair[1] % 4 == member


def _visit(schedule: Schedule, number: int):
    loads = build_graph(schedule).analysis.moves.transfers[Kind.LOAD, "P"]
    return next(load.visits[0] for load in loads if number in load.pieces)


def test_sums_of_groups_by_hand():
    """Slice 0 is owned by rank 0, slice 1 by rank 2: the other group's sum comes in one piece."""
    handovers = build_graph(complete(4, 2, 2)).analysis.moves.handovers
    assert not handovers.carried
    found = {
        stage: [[part.visits[0].device for part in one.parts] for one in handovers.grouped[stage, 0]]
        for stage in range(4)
    }
    assert found[0] == found[2] == [[0], [1], [2, 3]] * 2
    assert found[1] == found[3] == [[0, 1], [2], [3]] * 2


def test_a_rank_that_brings_nothing_and_keeps_nothing_is_refused():
    schedule = complete(4, 2, 1)
    rows = [dict(row) for row in schedule.lanes]
    rows[1]["h2d"] = tuple(action for action in rows[1]["h2d"] if action.stage != 0)
    with pytest.raises(ScheduleError, match=r"stage 0 has 2 visits in 1 steps on rank 1 and 0 LOAD:P"):
        check(replace(schedule, rows=tuple(rows)))


def test_a_sum_that_does_not_come_home_is_refused():
    schedule = complete(4, 2, 1)
    rows = [dict(row) for row in schedule.lanes]
    first, *others = rows[3]["d2h"]
    assert str(first) == "3STORE:G>3"
    rows[3]["d2h"] = (first._replace(peer=2), *others)  # which sends its own of slice 3 to rank 3
    check(replace(schedule, rows=tuple(rows)))
    rows[3]["d2h"] = (first._replace(peer=1), *others)  # which sends it to rank 0
    with pytest.raises(ScheduleError, match=r"is followed by 3STORE:G>\d on rank \d"):
        check(replace(schedule, rows=tuple(rows)))


# --- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p, groups", SIZES)
def test_what_crosses_groups(p, groups):
    """3 (Q - 1) models a round between groups; inside each group q - 1 copies of every slice forth, back and summed."""
    rounds, size = 2, p // groups
    found: Counter[tuple[str, bool]] = Counter()
    for rank, _, row in complete(p, groups, rounds).items():
        for action in row:
            if action.peer not in (None, rank):
                found[action.kind.name, action.peer // size != rank // size] += 1
    assert found["LOAD", True] == 2 * rounds * (groups - 1) * p
    assert found["STORE", True] == rounds * (groups - 1) * p
    assert found["LOAD", False] == 2 * rounds * groups * p * (size - 1)
    assert found["STORE", False] == rounds * groups * p * (size - 1)


@pytest.mark.parametrize("p, groups", [(4, 2), (6, 3), (4, 1)])
def test_bytes_over_links(p, groups):
    """Every slice goes to all ranks but its owner, forth and back, and its gradients to all but them once."""
    model = Architecture("equal", num_layers=p, hidden=8, heads=2, vocab=16, seq_len=4)
    sizes = model_bytes(model, 4)
    moved = moved_bytes(complete(p, groups, 2), sizes)
    whole = sum(layer.weights for layer in (*sizes.layers, sizes.embedding, sizes.head))
    assert all(set(device) == {"net LOAD:P", "net STORE:G"} for device in moved)
    assert sum(device["net LOAD:P"] for device in moved) == 2 * 2 * (p - 1) * whole
    assert sum(device["net STORE:G"] for device in moved) == 2 * (p - 1) * whole  # as wide as weights


@pytest.mark.parametrize("p, groups", [(4, 2), (6, 3), (6, 2), (4, 4), (4, 1)])
def test_a_rank_holds_three_slices_of_weights_and_three_of_gradients(p, groups):
    model = Architecture("equal", num_layers=p, hidden=8, heads=2, vocab=16, seq_len=4)
    none = LayerSize(0, 0, 0, 0)
    bare = replace(model_bytes(model, 4), embedding=none, head=none)
    layer = bare.layers[0]
    for classes in classes_of(complete(p, groups, 2), bare, [p] * p):
        assert classes["weights"] == layer.weights
        assert classes["gathered weights"] == 2 * layer.weights
        assert classes["gradients"] == layer.gradients
        assert classes["gradients on their way"] == 2 * layer.gradients
        assert classes["optimizer state"] == layer.optimizer
        assert classes["kept stage inputs"] == p * bare.boundary


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_rank_has_a_buffer_for_each_slice_that_comes_ahead_and_one_more(prefetch):
    schedule = entry("tawpipe").lower(order(6, 3, 2), prefetch=prefetch, groups=3)
    check(schedule)
    sizes = model_bytes(Architecture("equal", num_layers=6, hidden=8, heads=2, vocab=16, seq_len=4), 4)
    none = LayerSize(0, 0, 0, 0)
    bare = replace(sizes, embedding=none, head=none)
    for classes in classes_of(schedule, bare, [6] * 6):
        assert classes["gathered weights"] == (prefetch + 1) * bare.layers[0].weights


def test_slices_cannot_come_less_than_none_ahead():
    with pytest.raises(ValueError, match=r"prefetch=-1: slices that come ahead, 0 for none; take 1"):
        entry("tawpipe").lower(order(4, 2, 1), prefetch=-1, groups=2)


def test_one_microbatch_is_in_flight_on_every_rank():
    assert peak_in_flight(build_graph(order(6, 2, 3))) == [6] * 6


# --- time -----------------------------------------------------------------------------------------------------


def turns(schedule: Schedule, groups: int) -> list[list[tuple[int, Kind, int]]]:
    """(group, kind, slice) of the groups that work in each turn, group g starting g turns late."""
    p = schedule.shape.num_ranks
    rows = [
        [action for action in schedule.compute(group * (p // groups)) if action.kind is not Kind.WAIT]
        for group in range(groups)
    ]
    found: list[list[tuple[int, Kind, int]]] = [[] for _ in range(len(rows[0]) + groups - 1)]
    for group, row in enumerate(rows):
        for place, action in enumerate(row):
            found[place + group].append((group, action.kind, action.stage))
    return found


@pytest.mark.parametrize("p, groups", [(4, 1), (4, 2), (6, 3), (8, 4), (4, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("f, b", [(1, 2), (3, 5), (2, 2)])
def test_time_by_turns(p, groups, rounds, f, b):
    """Where only the start is late the bubble is (Q - 1) f; with a barrier after every turn it is longer."""
    schedule, work = order(p, groups, rounds), rounds * p * (f + b)
    late = [
        group * f
        + sum(f if kind is Kind.F else b for turn in turns(schedule, groups) for g, kind, _ in turn if g == group)
        for group in range(groups)
    ]
    assert max(late) == work + (groups - 1) * f
    barrier = sum(max(f if kind is Kind.F else b for _, kind, _ in turn) for turn in turns(schedule, groups))
    assert barrier == work + (groups - 1) * (rounds * b - (rounds - 1) * f)


@pytest.mark.parametrize("p, groups", [(4, 2), (6, 3), (8, 4), (9, 3)])
def test_in_a_turn_every_group_takes_from_another_one(p, groups):
    """Where all that work go the same way."""
    for turn in turns(order(p, groups, 2), groups):
        if len({kind for _, kind, _ in turn}) == 1:
            owners = [owner(stage, p, groups) // (p // groups) for _, _, stage in turn]
            assert len(set(owners)) == len(owners)


@pytest.mark.parametrize("p, groups", [(1, 1), (4, 1), (4, 2), (6, 3), (6, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("hop", [Fraction(0), Fraction(1, 3), Fraction(1, 2)])
def test_a_step_is_longer_than_its_work_by_a_forward_for_each_group_but_one(p, groups, hop):
    """G p (f + b) + (Q - 1) f; h of the first slice more where a group has several ranks; for h up to f / 2."""
    schedule, f, b = complete(p, groups, 2), Fraction(1), Fraction(2)
    costs = LayerTimes([f] * p, [Fraction(0)] * p, [b] * p).table(symmetric((1,) * p))
    timeline = simulate(schedule, replace(costs, transfer_time=lambda payload: hop if payload.share else 0))
    last = max(span.end for span in timeline.spans() if span.action.kind is Kind.B)
    assert last == 2 * p * (f + b) + (groups - 1) * f + hop * (p > groups)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [0, 3, 5, -2, 2.0, True])
def test_groups_that_cannot_be_are_refused(groups):
    with pytest.raises(ValueError, match=rf"groups={groups}: 4 ranks form equal groups .* numbers: 1, 2, 4$"):
        entry("tawpipe").build(Shape(4, 4, 4), groups=groups)


@pytest.mark.parametrize(
    "shape, message",
    [
        (Shape(4, 8, 8), "tawpipe has 8 slices for 4 ranks: there must be one for each; set chunks_per_device=1"),
        (Shape(4, 4, 6), "tawpipe deals 6 microbatches to 4 ranks: .* multiple of 4; take num_microbatches=8"),
    ],
)
def test_a_shape_that_cannot_be_dealt_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        entry("tawpipe").build(shape)
