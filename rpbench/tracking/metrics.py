"""Metrics of a tracked run, each with its unit and better direction, and the feed of rows to a tracker."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

Row = dict[str, Any]
Listener = Callable[[Row], None]


@dataclass
class StepFeed:
    """Rows that a run reports while it lasts, to a listener if there is one."""

    listener: Listener | None = None
    _rows: "SimpleQueue[Row | None]" = field(default_factory=SimpleQueue)

    def put(self, row: Row) -> None:
        """Queue a row; returns at once."""
        self._rows.put(row)

    @contextmanager
    def heard_by(self, listener: Listener | None) -> Iterator[None]:
        """Rows go to a listener until the block ends, all of them by then."""
        if listener is None:
            yield
            return
        self.listener = listener
        thread = threading.Thread(target=self._hand_on, args=(listener,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._rows.put(None)
            thread.join()

    def _hand_on(self, listener: Listener) -> None:
        while (row := self._rows.get()) is not None:
            listener(row)


STEP = "train/step"  # the axis of the history: batches that are done, counted from 0


@dataclass(frozen=True)
class Metric:
    """One number of a run, its unit ("1": a fraction or count), and whether it is best low or high, if either."""

    unit: str
    goal: str | None = None


HISTORY = {
    "train/loss": Metric("nat", "minimize"),
    "train/step_time_s": Metric("s", "minimize"),
    "train/tokens_per_s": Metric("tokens/s", "maximize"),
    "train/bubble": Metric("1", "minimize"),
    "train/gradient_norm": Metric("1"),
    "train/tokens": Metric("tokens"),
    "train/time_s": Metric("s"),
    "train/step_time_slots": Metric("slots", "minimize"),
    "train/time_slots": Metric("slots"),
    "train/wall_s": Metric("s"),
}
MEMORY = "train/memory_bytes/device"  # followed by the device's number

SUMMARY = {
    "tokens_per_s": Metric("tokens/s", "maximize"),
    "step_time_s": Metric("s", "minimize"),
    "makespan_s": Metric("s", "minimize"),
    "step_time_slots": Metric("slots", "minimize"),
    "makespan_slots": Metric("slots", "minimize"),
    "bubble_makespan": Metric("1", "minimize"),
    "bubble_span": Metric("1", "minimize"),
    "bubble_over_ideal": Metric("1", "minimize"),
    "comm_exposed_s": Metric("s", "minimize"),
    "peak_memory_bytes_max": Metric("B", "minimize"),
    "peak_in_flight_max": Metric("1", "minimize"),
    "staleness_steps": Metric("1", "minimize"),
    "replay_makespan_s": Metric("s", "minimize"),
    "loss": Metric("nat", "minimize"),
}
TIMELINE = "timeline"  # the picture of a run's timeline


_SLOTS = {"train/step_time_s": "train/step_time_slots", "train/time_s": "train/time_slots"}


def in_slots(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the history of a run whose costs are slots: its times are named so, and it has no pace."""
    return {_SLOTS.get(name, name): value for name, value in row.items() if name != "train/tokens_per_s"}


def units() -> dict[str, str]:
    """The unit of every metric by name, as a run's configuration holds it."""
    return {name: metric.unit for name, metric in (HISTORY | SUMMARY).items()} | {f"{MEMORY}*": "B"}
