"""FREE:A that only says that there is room: what it waits for, where it may stand, and what it does not replace."""

import pytest
from editing import with_action

from rpbench.ir.action import parse
from rpbench.ir.analysis import Analysis, peak_resident
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text


def lanes(**rows: str) -> dict:
    return {lane: tuple(map(parse, row.split())) for lane, row in rows.items()}


# Activations of microbatches 0 and 1 leave; those of 2 stay.
MOVED = Schedule(
    Shape(1, 1, 3),
    (
        lanes(
            compute="0F0 0FREE:A0 0F1 0FREE:A1 0F2 0B2 0B0 0B1",
            d2h="0STORE:A0 0FREE:A0 0STORE:A1 0FREE:A1",
            h2d="0FREE:A1 0FREE:A2 0LOAD:A0 0FREE:A0 0LOAD:A1 0FREE:A1",
        ),
    ),
    placement=((0,),),
)


def edges(schedule: Schedule) -> set[tuple[str, str, str]]:
    """Producer, consumer and the consumer's lane."""
    found = Analysis(schedule)
    index = found.index
    return {
        (str(index.actions[before]), str(index.actions[after]), index.lanes[index.lane_of[after]].name)
        for before, after in found.transfer_edges
    }


def test_room_waits_for_what_makes_it():
    check(MOVED)
    assert from_text(to_text(MOVED)) == MOVED
    found = edges(MOVED)
    assert ("0STORE:A0", "0FREE:A0", "compute") in found
    assert ("0STORE:A1", "0FREE:A1", "h2d") in found  # before its LOAD
    assert ("0B1", "0FREE:A1", "h2d") in found  # behind it
    assert ("0B2", "0FREE:A2", "h2d") in found  # which never moves
    assert peak_resident(Analysis(MOVED)) == [1]


def test_without_it_a_load_comes_early():
    bare = Schedule(
        MOVED.shape,
        (
            lanes(
                compute="0F0 0F1 0F2 0B2 0B0 0B1",
                d2h="0STORE:A0 0FREE:A0 0STORE:A1 0FREE:A1",
                h2d="0LOAD:A0 0LOAD:A1 0FREE:A0 0FREE:A1",
            ),
        ),
    )
    check(bare)
    assert peak_resident(Analysis(bare)) == [3]


@pytest.mark.parametrize(
    "lane, place, token, said",
    [
        ("compute", 1, "0FREE:A0", "0FREE:A0 stands twice"),
        ("h2d", 0, "0FREE:A1", "0FREE:A1 stands twice"),
        ("h2d", 0, "0FREE:A2", "0FREE:A2 stands twice"),
        ("d2h", 0, "0FREE:A2", "0FREE:A2 frees what is not there"),
        ("compute", 0, "0FREE:A2", "0FREE:A2 frees what is not there"),
        ("compute", 0, "0FREE:A1", "0FREE:A1 stands twice"),
    ],
)
def test_it_stands_once_on_a_lane_and_of_what_is_there(lane, place, token, said):
    with pytest.raises(ScheduleError, match=said):
        check(with_action(MOVED, 0, place, token, lane))


def test_it_does_not_end_a_load():
    row = dict(MOVED.lanes[0])
    row["h2d"] = row["h2d"][:-1]
    with pytest.raises(ScheduleError, match="0LOAD:A1 is never freed"):
        check(Schedule(MOVED.shape, (row,)))


def test_room_that_comes_too_late_is_a_deadlock():
    row = dict(MOVED.lanes[0])
    row["h2d"] = lanes(h2d="0FREE:A1 0LOAD:A0 0FREE:A0 0FREE:A2 0LOAD:A1 0FREE:A1")["h2d"]
    row["compute"] = lanes(compute="0F0 0F1 0F2 0B0 0B1 0B2")["compute"]
    with pytest.raises(ScheduleError, match="no rank can move"):
        check(Schedule(MOVED.shape, (row,)))
