"""Metrics of a tracked run, from `metrics.yaml`, and the feed of rows to a tracker."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rpbench.yaml_file import read_keys

Row = dict[str, Any]
Listener = Callable[[Row], None]


@dataclass
class StepFeed:
    """Rows that a run reports while it lasts, to a listener if there is one."""

    listener: Listener | None = None
    _rows: "SimpleQueue[Row | None]" = field(default_factory=SimpleQueue)

    def put(self, row: Row) -> None:
        """Queue a row, without waiting."""
        self._rows.put(row)

    @contextmanager
    def heard_by(self, listener: Listener | None) -> Iterator[None]:
        """Rows go to a listener inside the block; it has got all of them when the block ends."""
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


STEP = "train/step"  # the axis of the history: finished batches, counted from 0
_METRICS = read_keys(Path(__file__).with_suffix(".yaml"))
HISTORY: Mapping[str, Mapping[str, str]] = _METRICS["history"]
SUMMARY: Mapping[str, Mapping[str, str]] = _METRICS["summary"]
MEMORY = "train/memory_bytes/device"  # followed by the device's number
TIMELINE = "timeline"  # the picture of a run's timeline
_SLOTS = {"train/step_time_s": "train/step_time_slots", "train/time_s": "train/time_slots"}


def in_slots(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the history of a run whose costs are slots: its times are renamed, and it has no tokens/s."""
    return {_SLOTS.get(name, name): value for name, value in row.items() if name != "train/tokens_per_s"}


def units() -> dict[str, str]:
    return {name: metric["unit"] for name, metric in (*HISTORY.items(), *SUMMARY.items())} | {f"{MEMORY}*": "B"}
