"""Deadlocks: found exactly when there is one, and shown by the smallest circle of ranks."""

import pytest
from editing import edit, schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.checks.deadlock import in_rounds
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.registry import entries
from tests.one_by_one import waits_for


def runs(schedule: Schedule) -> bool:
    """Whether the rows run to their end, by trying: a second opinion on plain F and B rows."""
    rows = [list(schedule.compute(device)) for device in range(schedule.shape.num_ranks)]
    top, done = schedule.shape.num_stages - 1, set()

    def ready(action: Action) -> bool:
        stage, mb = action.stage, action.microbatch
        if action.kind is Kind.F:
            return stage == 0 or (Kind.F, stage - 1, mb) in done
        return (Kind.F, stage, mb) in done and (stage == top or (Kind.B, stage + 1, mb) in done)

    while any(rows):
        able = [row for row in rows if row and ready(row[0])]
        if not able:
            return False
        for row in able:
            done.add(row.pop(0)[:3])
    return True


@settings(deadline=None, max_examples=50)
@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.lists(st.tuples(*[st.integers(0, 63)] * 3), min_size=1, max_size=4),
)
def test_a_deadlock_is_found_exactly_when_the_rows_cannot_run(ranks, microbatches, swaps):
    schedule = entries()["1f1b"].build(Shape(ranks, ranks, microbatches))
    for device, first, second in swaps:

        def swap(row: list[Action], first: int = first, second: int = second) -> None:
            a, b = first % len(row), second % len(row)
            row[a], row[b] = row[b], row[a]

        schedule = edit(schedule, device % ranks, swap)
    if runs(schedule):
        check(schedule)
    else:
        with pytest.raises(ScheduleError, match="no rank can move"):
            check(schedule)


def test_ranks_that_wait_for_each_other_are_shown():
    stuck = schedule_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(ScheduleError) as caught:
        check(stuck)
    assert str(caught.value).splitlines() == [
        "no rank can move",
        "  rank 0 waits at 0B0 for 1B0   0F0 >0B0< 0F1 0B1",
        "  rank 1 waits at 1F1 for 0F1   >1F1< 1B1 1F0 1B0",
    ]


def test_only_the_smallest_circle_is_shown():
    """Ranks 0 and 1 wait for each other; ranks 2 and 3 wait for them and are left out."""
    stuck = schedule_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", "2F0 2B0 2F1 2B1", "3F0 3B0 3F1 3B1")
    with pytest.raises(ScheduleError) as caught:
        check(stuck)
    lines = str(caught.value).splitlines()
    assert [line.split(" waits")[0].strip() for line in lines[1:]] == ["rank 0", "rank 1"]


def test_a_smaller_circle_is_preferred_to_the_first():
    """Ranks 0 to 5 wait in a circle as below, rank 6 for itself."""
    rows = [f"{rank + 6}F0 {rank}F0 {rank + 6}B0 {rank}B0" for rank in range(6)]
    with pytest.raises(ScheduleError) as caught:
        check(schedule_of(*rows, "12B0 12F0"))
    assert str(caught.value).splitlines()[1:] == ["  rank 6 waits at 12B0 for 12F0   >12B0< 12F0"]


def test_a_long_circle_shows_four_ranks():
    """Two chunks a rank, the upper one first: each rank waits for the one before, the first for the last."""
    with pytest.raises(ScheduleError) as caught:
        check(schedule_of(*(f"{rank + 6}F0 {rank}F0 {rank + 6}B0 {rank}B0" for rank in range(6))))
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert lines[1].startswith("  rank 0 waits at 6F0 for 5F0 ")
    assert lines[-1] == "  ... and 2 more"


def test_long_rows_are_elided_around_the_mark():
    good = entries()["gpipe"].build(Shape(2, 2, 60))
    stuck = edit(good, 0, lambda row: row.insert(30, row.pop(70)))  # 0B10 before most forwards
    with pytest.raises(ScheduleError) as caught:
        check(stuck)
    for line in str(caught.value).splitlines()[1:]:
        assert len(line) <= 102
        assert "..." in line
        assert line.count(">") == 1


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 5), st.integers(1, 6))
def test_the_execution_order_respects_lanes_and_needs(name, ranks, microbatches):
    found = Analysis(entries()[name].build(Shape(ranks, ranks, microbatches)))
    index, order = found.index, in_rounds(found.rounds)
    place = {number: tick for tick, number in enumerate(order)}
    assert sorted(order) == list(range(len(index.actions)))
    for number, action in enumerate(index.actions):
        assert all(place[producer] < place[number] for producer, _ in waits_for(index, action))
    for lane in index.lanes:
        ticks = [place[number] for number in range(lane.start, lane.stop)]
        assert ticks == sorted(ticks)
