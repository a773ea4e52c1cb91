"""Edges and payloads of kept activations found on columns are those that are matched action by action."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rpbench.ir.action import Action, Kind, PlainRow, parse
from rpbench.ir.analysis import Analysis
from rpbench.ir.schedule import Schedule, Shape, from_text
from rpbench.registry import entries
from rpbench.sim.columns import read_columns
from rpbench.sim.graph import carried_alike, kept_edges


def built(name, *sizes, **options):
    return entries()[name].build(Shape(*sizes), **options)


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([1.0, 0.5, 0.2]),
    st.integers(1, 4),
    st.booleans(),
)
def test_both_find_the_same(ranks, chunks, rounds, share, least_gap, as_text):
    schedule = built("pipe_offload", ranks, ranks * chunks, ranks * rounds, share=share, least_gap=least_gap)
    assume(Kind.STORE in schedule.kinds)
    schedule = from_text(str(schedule)) if as_text else schedule
    columns, analysis = read_columns(schedule), Analysis(schedule)
    found = kept_edges(schedule, columns)
    assert found is not None
    assert sorted(zip(*map(list, found), strict=True)) == sorted(analysis.transfer_edges)
    carried = carried_alike(schedule, columns)
    payload = {n: carried.distinct[w] for n, w in zip(carried.numbers.tolist(), carried.which.tolist(), strict=True)}
    assert {number: of for number, (_, of) in payload.items()} == analysis.payload
    assert all(analysis.index.actions[number].kind is kind for number, (kind, _) in payload.items())


@pytest.mark.parametrize("stage, microbatch, part", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, -1, 0)])
def test_what_is_out_of_the_shape_in_one_number_is_left_to_those_who_say_so(stage, microbatch, part):
    def moved(kind):
        return Action(kind, stage, microbatch, part=part, object="A")

    lanes = {
        "compute": [Action(kind, stage, microbatch, part=part) for kind in (Kind.F, Kind.B)],
        "d2h": [moved(Kind.STORE), moved(Kind.FREE)],
        "h2d": [moved(Kind.LOAD), moved(Kind.FREE)],
    }
    schedule = Schedule(Shape(1, 1, 1), (lanes,))
    assert kept_edges(schedule, read_columns(schedule)) is None


def test_readers_of_several_kinds_are_found_though_some_kinds_end_early():
    """The first microbatch has a whole backward, the second one its halves: no B stands as late as its activations."""
    lanes = {
        "compute": [parse(token) for token in ["0F0", "0F1", "0B0", "0I1", "0W1"]],
        "d2h": [parse(token) for token in ["0STORE:A0", "0FREE:A0", "0STORE:A1", "0FREE:A1"]],
        "h2d": [parse(token) for token in ["0LOAD:A0", "0FREE:A0", "0LOAD:A1", "0FREE:A1"]],
    }
    schedule = Schedule(Shape(1, 1, 2), (lanes,))
    found = kept_edges(schedule, read_columns(schedule))
    assert found is not None
    assert sorted(zip(*map(list, found), strict=True)) == sorted(Analysis(schedule).transfer_edges)


def test_what_recomputes_ahead_or_splits_its_backward_is_awaited_by_its_first_and_left_by_its_last():
    lanes = {
        "compute": [Action(kind, 0, 0) for kind in (Kind.F, Kind.R, Kind.I, Kind.W)],
        "d2h": [Action(kind, 0, 0, object="A") for kind in (Kind.STORE, Kind.FREE)],
        "h2d": [Action(kind, 0, 0, object="A") for kind in (Kind.LOAD, Kind.FREE)],
    }
    schedule = Schedule(Shape(1, 1, 1), (lanes,))
    found = kept_edges(schedule, read_columns(schedule))
    assert found is not None
    names = [str(action) for _, _, row in schedule.items() for action in row]
    assert {(names[a], names[b], b) for a, b in zip(*map(list, found), strict=True)} == {
        ("0F0", "0STORE:A0", names.index("0STORE:A0")),
        ("0STORE:A0", "0FREE:A0", names.index("0STORE:A0") + 1),
        ("0STORE:A0", "0LOAD:A0", names.index("0LOAD:A0")),
        ("0LOAD:A0", "0R0", 1),
        ("0W0", "0FREE:A0", names.index("0LOAD:A0") + 1),
    }
    assert sorted(zip(*map(list, found), strict=True)) == sorted(Analysis(schedule).transfer_edges)


@pytest.mark.parametrize("name", ["bpipe", "mobius", "zero_offload", "1f1b"])
def test_what_moves_in_another_way_is_left_to_the_actions(name):
    schedule = built(name, 4, 4, 8)
    assert kept_edges(schedule, read_columns(schedule)) is None


def test_moves_of_a_large_schedule_stay_columns():
    rows = built("pipe_offload", 2, 4, 8).rows
    assert all(isinstance(row, PlainRow) for lanes in rows for _, row in lanes)
