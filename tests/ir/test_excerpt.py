"""Excerpts: marked rows that fit a line."""

from editing import schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.action import Action, Kind, parse
from rpbench.ir.checks.excerpt import MAX_ROWS, broken, elided
from rpbench.ir.schedule import Schedule, Shape

ROW = tuple(Action(Kind.F, 0, mb) for mb in range(100))


def test_a_short_row_is_shown_whole():
    assert elided(ROW[:4], [2], 60) == "0F0 0F1 >0F2< 0F3"


def test_a_long_row_is_shown_around_its_marks():
    assert elided(ROW, [50], 40) == "... 0F47 0F48 0F49 >0F50< 0F51 0F52 ..."
    assert elided(ROW, [0], 30) == ">0F0< 0F1 0F2 0F3 0F4 ..."
    assert elided(ROW, [99], 30) == "... 0F96 0F97 0F98 >0F99<"
    assert elided(ROW, [10, 90], 28) == "... >0F10< ... >0F90< ..."


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 299), st.integers(40, 100))
def test_an_excerpt_shows_its_mark_in_the_room_there_is(length, mark, width):
    row = tuple(Action(Kind.F, 0, mb) for mb in range(length))
    mark %= length
    shown = elided(row, [mark], width)
    assert f">0F{mark}<" in shown
    assert len(shown) <= width
    assert ("..." in shown) == (len(shown.split()) - shown.split().count("...") < length)


def test_rows_are_named_by_rank_and_lane():
    shape = Shape(2, 2, 1)
    compute = schedule_of("0F0 0B0", "1F0 1B0").rows
    host = (parse("0STEP@1"),)
    schedule = Schedule(shape, ({"compute": compute[0][0][1], "host": host}, compute[1]))
    # Numbers go through lanes: 0F0 0B0 | 0STEP@1 | 1F0 1B0.
    error = broken(schedule, "the rule", [3, 2, 0], way_out="the way out", notes={2: "is late"})
    assert str(error).splitlines() == [
        "the rule",
        "  rank 0                >0F0< 0B0",
        "  rank 0/host is late   >0STEP@1<",
        "  rank 1                >1F0< 1B0",
        "  the way out",
    ]


def test_empty_lanes_do_not_shift_the_numbers():
    schedule = schedule_of("", "", "0F0 0B0", "", shape=Shape(4, 1, 1))
    assert str(broken(schedule, "rule", [1])).splitlines()[1] == "  rank 2   0F0 >0B0<"


def test_many_rows_are_counted():
    schedule = schedule_of(*(f"{rank}F0" for rank in range(7)))
    lines = str(broken(schedule, "rule", range(7))).splitlines()
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[-1] == "  ... and 3 more"
