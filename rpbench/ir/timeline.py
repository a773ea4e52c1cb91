"""Timeline: when and on which lane each action of a schedule ran; the simulator and all executors return one."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpbench.ir.action import Action, text
from rpbench.ir.schedule import Schedule

Column = Any  # list, array or numpy array of times, one for each action

_HEADER = ["device", "lane", "action", "start_s", "main_s", "end_s", "exposed_s"]


class Span(NamedTuple):
    """One action in time, in the units of its timeline; a recomputation or forward inside it ends at `main`."""

    device: int
    lane: str
    action: Action
    start: Any
    main: Any
    end: Any


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule and the times of its actions, in the order of `schedule.items()`.

    The sequences (arrays, lists, exact fractions) are kept as given, not copied. Their unit is a second or a fraction
    of it, so that times which are whole milliseconds stay exact.
    """

    schedule: Schedule  # what ran
    start: Column  # first moment of each action
    main: Column  # end of a recomputation or forward inside the action; equals `start` if there is none
    end: Column  # last moment of each action
    exposed: Column  # how much later each action started than it would have with free hops
    comm_total: Any  # time of all hops together
    units_per_second: int = 1  # 1000 when the times are milliseconds

    def __post_init__(self) -> None:
        expected = self.schedule.num_actions
        for name in ("start", "main", "end", "exposed"):
            if len(getattr(self, name)) != expected:
                raise ValueError(
                    f"timeline has {len(getattr(self, name))} values for {name}, its schedule {expected} "
                    "actions: give one value for each, in the order of schedule.items()"
                )

    @property
    def makespan(self) -> Any:
        """First start to last end, over all lanes; 0 without actions."""
        return max(self.end) - min(self.start) if len(self.end) else 0

    @property
    def last_compute(self) -> Any:
        """The end of the last computation; transfers may still run then."""
        return max(self.device_span(device)[1] for device in range(self.schedule.shape.num_ranks))

    def spans(self) -> Iterator[Span]:
        """Every action with its times, lane after lane."""
        number = 0
        for device, lane, row in self.schedule.items():
            for action in row:
                yield Span(device, lane, action, self.start[number], self.main[number], self.end[number])
                number += 1

    def busy(self, device: int) -> Any:
        """Time the compute lane of a device works."""
        return sum(self.end[number] - self.start[number] for number in self._compute(device))

    def device_span(self, device: int) -> tuple[Any, Any]:
        """First start and last end on the compute lane of a device; (0, 0) where it has no actions."""
        numbers = self._compute(device)
        return (self.start[numbers[0]], self.end[numbers[-1]]) if numbers else (0, 0)

    def _compute(self, device: int) -> range:
        number = 0
        for owner, lane, row in self.schedule.items():
            if owner == device and lane == "compute":
                return range(number, number + len(row))
            number += len(row)
        return range(0)

    # --- export ---

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format of chrome://tracing and Perfetto; times in microseconds.

        A process is a device and a thread is a lane. A recomputation or forward inside an action has its own slice, so
        slices of a thread never overlap.
        """
        events: list[dict[str, Any]] = []
        threads: dict[tuple[int, str], int] = {}
        for device, lane, _ in self.schedule.items():
            thread = threads[device, lane] = sum(owner == device for owner, _ in threads)
            if not thread:
                events.append(_name("process_name", device, 0, f"rank {device}"))
            events.append(_name("thread_name", device, thread, lane))
        scale = 1e6 / self.units_per_second
        for span in self.spans():
            thread = threads[span.device, span.lane]
            start, main, end = (float(time) * scale for time in (span.start, span.main, span.end))
            if main > start:
                events.append(_slice(span, thread, f"{text(span.action)} ahead", start, main))
            events.append(_slice(span, thread, text(span.action), main, end))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def to_csv(self) -> str:
        """One row an action: device, lane, action; start, main, end, exposed in seconds, digits in full."""
        out = io.StringIO()
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(_HEADER)
        for span, exposed in zip(self.spans(), self.exposed, strict=True):
            seconds = (float(time) / self.units_per_second for time in (span.start, span.main, span.end, exposed))
            rows.writerow([span.device, span.lane, text(span.action), *map(repr, seconds)])
        return out.getvalue()

    @classmethod
    def from_csv(cls, source: str, schedule: Schedule, *, comm_total: float) -> "Timeline":
        """The timeline that `to_csv` wrote for this schedule, in seconds.

        Raises ValueError naming the first row that does not belong to the schedule. `comm_total`: time of all hops
        together, in seconds; the rows lack it.
        """
        rows = list(csv.reader(io.StringIO(source)))
        expected = [[str(device), lane, text(action)] for device, lane, row in schedule.items() for action in row]
        if not rows or rows[0] != _HEADER or len(rows) != len(expected) + 1:
            raise ValueError(
                f"not a timeline of this schedule: expected the header {','.join(_HEADER)} and "
                f"{len(expected)} rows, got {max(0, len(rows) - 1)}; read it with its own schedule"
            )
        for number, (row, place) in enumerate(zip(rows[1:], expected, strict=True), start=2):
            if row[:3] != place or len(row) != len(_HEADER):
                raise ValueError(f"line {number}: {','.join(row)!r}: expected a row for {','.join(place)}")
        start, main, end, exposed = ([float(row[column]) for row in rows[1:]] for column in range(3, 7))
        return cls(schedule, start, main, end, exposed, comm_total)


def _name(what: str, device: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": device, "tid": thread, "args": {"name": name}}


def _slice(span: Span, thread: int, name: str, start: float, end: float) -> dict[str, Any]:
    action = span.action
    return {
        "ph": "X",
        "name": name,
        "pid": span.device,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {"kind": action.kind.name, "stage": action.stage, "microbatch": action.microbatch},
    }
