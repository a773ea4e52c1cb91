"""Timelines: their numbers, and that what is exported can be read back or drawn."""

from array import array
from fractions import Fraction
from itertools import pairwise

import pytest
from editing import schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.timeline import Span, Timeline

# Two ranks, two microbatches, F = 1 s and B = 2 s of which the first half is a recomputation, no hops.
PIPE = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
START = [0, 1, 4, 7, 1, 2, 4, 5]
END = [1, 2, 6, 9, 2, 4, 5, 7]
MAIN = [0, 1, 5, 8, 1, 3, 4, 6]


def timeline(number=float, **fields) -> Timeline:
    start, main, end = ([number(time) for time in times] for times in (START, MAIN, END))
    return Timeline(PIPE, start, main, end, [number(0)] * len(start), number(0), **fields)


@pytest.mark.parametrize("number", [float, Fraction])
def test_numbers_of_a_pipe(number):
    times = timeline(number)
    assert times.makespan == times.last_compute == 9
    assert [times.busy(device) for device in (0, 1)] == [6, 6]
    assert [times.device_span(device) for device in (0, 1)] == [(0, 9), (1, 7)]


def test_the_makespan_counts_from_the_first_start():
    later = [[time + 100 for time in times] for times in (START, MAIN, END)]
    times = Timeline(PIPE, *later, [0] * 8, 0)
    assert times.makespan == 9
    assert times.device_span(1) == (101, 107)


def test_the_sequences_are_kept_and_not_copied():
    columns = [array("d", times) for times in (START, MAIN, END, [0.0] * 8)]
    times = Timeline(PIPE, *columns, 0.0)
    assert times.start is columns[0]
    assert times.end is columns[2]


def test_every_action_needs_its_times():
    with pytest.raises(ValueError, match="7 values for end, its schedule 8 actions"):
        Timeline(PIPE, START, MAIN, END[:-1], [0] * 8, 0)


def test_spans_follow_the_lanes():
    spans = list(timeline().spans())
    assert spans[2] == Span(0, "compute", PIPE.compute(0)[2], 4, 5, 6)
    assert [str(span.action) for span in spans] == ["0F0", "0F1", "0B0", "0B1", "1F0", "1B0", "1F1", "1B1"]
    assert [span.device for span in spans] == [0] * 4 + [1] * 4


def test_other_lanes_count_in_the_makespan_only():
    shape = Shape(1, 1, 1)
    plain = schedule_of("0F0 0B0", shape=shape)
    host = schedule_of("0STEP@1", shape=shape).compute(0)
    both = Schedule(shape, ({"compute": plain.compute(0), "host": host},))
    times = Timeline(both, [0, 1, 3], [0, 1, 3], [1, 3, 6], [0, 0, 0], 0)
    assert times.makespan == 6
    assert times.busy(0) == 3
    assert times.device_span(0) == (0, 3)


def test_a_device_without_work():
    idle = schedule_of("0F0 0B0", "", shape=Shape(2, 1, 1))
    times = Timeline(idle, [0, 1], [0, 1], [1, 3], [0, 0], 0)
    assert times.busy(1) == 0
    assert times.device_span(1) == (0, 0)


# --- export -------------------------------------------------------------------------------------------------


def test_chrome_trace_has_a_process_a_device_and_a_thread_a_lane():
    events = timeline().to_chrome_trace()["traceEvents"]
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", 0, 0, "rank 0"),
        ("thread_name", 0, 0, "compute"),
        ("process_name", 1, 0, "rank 1"),
        ("thread_name", 1, 0, "compute"),
    ]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 8 + 4  # each backward has its recomputation ahead
    assert slices[2] == {
        "ph": "X",
        "name": "0B0 ahead",
        "pid": 0,
        "tid": 0,
        "ts": 4e6,
        "dur": 1e6,
        "args": {"kind": "B", "stage": 0, "microbatch": 0},
    }


def test_exports_are_in_seconds_whatever_the_timeline_counts_in():
    ms = timeline(units_per_second=1000)
    assert next(e for e in ms.to_chrome_trace()["traceEvents"] if e.get("name") == "0F1")["ts"] == 1000.0
    assert "0,compute,0B0,0.004,0.005,0.006,0.0" in ms.to_csv()


@st.composite
def measured(draw) -> Timeline:
    """Times of one lane after another that do not overlap, with the rounding of real clocks."""
    gaps = st.floats(0, 1e3, allow_subnormal=False)
    start, main, end = [], [], []
    for _, _, row in PIPE.items():
        now = draw(gaps)
        for _ in row:
            start.append(now + draw(gaps))
            main.append(start[-1] + draw(gaps))
            now = main[-1] + draw(gaps)
            end.append(now)
    return Timeline(PIPE, start, main, end, [draw(gaps) for _ in start], draw(gaps))


@settings(deadline=None, max_examples=50)
@given(measured())
def test_slices_of_a_thread_do_not_overlap(times):
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in times.to_chrome_trace()["traceEvents"]:
        if event["ph"] == "X":
            # Perfetto keeps whole nanoseconds.
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            threads.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    for slices in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(slices))


@settings(deadline=None, max_examples=50)
@given(measured())
def test_csv_keeps_every_digit(times):
    back = Timeline.from_csv(times.to_csv(), PIPE, comm_total=times.comm_total)
    assert (back.start, back.main, back.end) == (times.start, times.main, times.end)
    assert (back.exposed, back.comm_total) == (times.exposed, times.comm_total)
    assert back.to_csv() == times.to_csv()


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda text: text.replace("start_s", "start_ms"), "expected the header"),
        (lambda text: text.rsplit("\n", 2)[0] + "\n", "8 rows, got 7"),
        (lambda text: text.replace("0B1", "0B3"), "line 5: .* expected a row for 0,compute,0B1"),
        (lambda text: text.replace("0,compute,0F1,1.0,", "0,compute,0F1,"), "line 3"),
        (lambda text: "", "got 0"),
    ],
)
def test_csv_of_another_schedule_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Timeline.from_csv(change(timeline().to_csv()), PIPE, comm_total=0.0)
