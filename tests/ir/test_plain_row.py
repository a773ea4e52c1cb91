"""Rows kept as columns: the same as the tuple of their actions, whichever way they are asked."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.ir import action
from rpbench.ir.action import Action, Kind, PlainRow, in_turn, joined, plain
from rpbench.ir.schedule import Shape, from_text
from rpbench.registry import entries
from rpbench.sim.columns import read_columns


def row(*tokens: tuple[Kind, int, int]) -> PlainRow:
    return PlainRow(*(array("i", [token[field] for token in tokens]) for field in range(3)))


ACTIONS = st.lists(st.tuples(st.sampled_from([Kind.F, Kind.B, Kind.W]), st.integers(0, 9), st.integers(0, 99)))


@given(ACTIONS, st.slices(12))
def test_it_is_the_tuple_of_its_actions(tokens, part):
    found, due = row(*tokens), tuple(Action(*token) for token in tokens)
    assert len(found) == len(due)
    assert (found, due, hash(found), repr(found)) == (due, found, hash(due), repr(due))
    assert found == row(*tokens)
    assert found[part] == due[part]
    assert list(found) == list(due)
    assert [found[place] for place in range(-len(due), len(due))] == [*due, *due]
    assert found.kinds() == {action.kind for action in due}
    one = (Action(Kind.F, 0, 0),)
    assert (found + one, one + found) == (due + one, one + due)
    assert (found != due[:-1]) == bool(due)


def test_places_beyond_its_end_are_refused():
    with pytest.raises(IndexError):
        row((Kind.F, 0, 0))[1]


def test_each_microbatch_is_at_its_own_stage_or_all_are_at_one():
    assert list(map(str, plain(Kind.F, [5, 7, 5], [0, 1, 2]))) == ["5F0", "7F1", "5F2"]
    assert list(map(str, plain(Kind.B, 3, range(1, 6, 2)))) == ["3B1", "3B3", "3B5"]


def test_rows_in_turn_and_one_after_another():
    ahead, behind = plain(Kind.F, 0, range(4)), plain(Kind.B, 0, range(4))
    assert list(map(str, in_turn(ahead, behind, 2))) == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"]
    assert in_turn(ahead, behind, 4) == joined([ahead, behind])
    assert list(map(str, in_turn(ahead, behind, 0)))[:3] == ["0F0", "0B0", "0F1"]
    with pytest.raises(ValueError, match="4 and 3 actions"):
        in_turn(ahead, behind[:3], 1)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "pipedream"])
def test_columns_are_those_of_the_same_rows_as_tuples(name):
    entry = entries()[name]
    schedule = entry.build(Shape(3, 6 if entry.looped else 3, 6, num_steps=2))
    again = from_text(str(schedule))
    assert again == schedule
    assert not any(isinstance(actions, PlainRow) for _, _, actions in again.items())
    ours, theirs = read_columns(schedule), read_columns(again)
    for name in ("device", "lane_start", "kind", "stage", "index", "part"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.is_bare
    assert theirs.is_bare


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_a_simulation_makes_no_action(name, rpbench, monkeypatch):
    """That is what their columns are for: 262,144 actions take longer to make than to time."""

    def made(*_):
        raise AssertionError("somebody asked for the actions one by one")

    monkeypatch.setattr(action, "listed", made)
    chunks = ("chunks_per_device=2",) if name == "interleaved_1f1b" else ()
    status, (found,), err = rpbench(f"schedule={name}", "num_devices=4", "num_microbatches=8", "cost=constant", *chunks)
    assert (status, found["num_actions"]) == (0, 128 if chunks else 64), err
