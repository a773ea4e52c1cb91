"""Steps: rows that a training run reports while it runs, one for each batch.

The work of a device is timed around its handlers. On a virtual clock times follow from the costs beforehand, so that a
row equals what the timeline will say.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from rpbench.engine.executor import Gate, Handler
from rpbench.engine.training import Training
from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.index import GRADIENT
from rpbench.ir.timeline import Timeline
from rpbench.tracking.metrics import MEMORY, STEP, Row, StepFeed


@dataclass(frozen=True)
class Clocked:
    end_s: float  # end of its last gradient
    busy_s: float  # work of all devices until then


class StepWatch:
    """Watches the handlers of a training run and feeds a row for each batch of microbatches and tokens.

    Times are those of the `known` timeline on a virtual clock, else of the wall clock.
    """

    def __init__(
        self, training: Training, feed: StepFeed, batch: int, tokens: int, known: Timeline | None = None
    ) -> None:
        self._training, self._feed, self._batch, self._tokens = training, feed, batch, tokens
        self._missing = _gradients_of(training, batch)
        self._known = None if known is None else clocked(known, batch)
        self._lock, self._next, self._busy_s = threading.Lock(), 0, 0.0
        steps = training.schedule.shape.num_steps
        self._is_clipped = training.settings.optimizer.clip_norm is not None and steps == len(self._missing)
        self._began = perf_counter()
        self._last = Clocked(0.0, 0.0)

    def watched(self, handlers: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        return {kind: self._timed(kind, each) for kind, each in handlers.items()}

    def _timed(self, kind: Kind, handler: Handler) -> Handler:
        def timed(action: Action, number: int, gate: Gate) -> None:
            waited = 0.0

            def open_gate() -> None:
                nonlocal waited
                came = perf_counter()
                gate()
                waited += perf_counter() - came

            began = perf_counter()
            handler(action, number, open_gate)
            self._ended(action, perf_counter() - began - waited)

        def stepped(action: Action, number: int, gate: Gate) -> None:
            handler(action, number, gate)
            self._ended(action, 0.0)

        if kind in (Kind.STEP, Kind.VALIDATE):  # they compute the norm for clipping
            return stepped if self._is_clipped else handler
        return timed if kind in COMPUTE else handler

    def _ended(self, action: Action, seconds: float) -> None:
        with self._lock:
            self._busy_s += seconds
            if action.kind in GRADIENT and action.microbatch is not None:
                self._missing[action.microbatch // self._batch] -= 1
            while self._next in self._missing and not self._missing[self._next]:
                if self._is_clipped and self._next + 1 not in self._training.optimizer.gradient_norms:
                    break
                self._feed.put(self._row(self._next))
                self._next += 1

    def _row(self, batch: int) -> Row:
        wall_s = perf_counter() - self._began
        now = self._known[batch] if self._known else Clocked(wall_s, self._busy_s)
        passed, busy = now.end_s - self._last.end_s, now.busy_s - self._last.busy_s
        self._last = now
        window = range(batch * self._batch, (batch + 1) * self._batch)
        training = self._training
        losses = [training.passes.losses[microbatch] * training.workload.num_microbatches for microbatch in window]
        row: Row = {
            STEP: batch,
            "train/loss": sum(losses) / len(losses),
            "train/tokens": (batch + 1) * self._tokens,
            "train/time_s": now.end_s,
            "train/wall_s": wall_s,
        }
        if passed > 0:
            row["train/step_time_s"] = passed
            row["train/tokens_per_s"] = self._tokens / passed
            row["train/bubble"] = 1 - busy / (passed * training.schedule.shape.num_ranks)
        if self._is_clipped:
            row["train/gradient_norm"] = float(training.optimizer.gradient_norms[batch + 1])
        peaks = training.memory.peak_bytes if training.memory is not None else ()
        return row | {f"{MEMORY}{device}": value for device, value in enumerate(peaks)}


def _gradients_of(training: Training, batch: int) -> Counter[int]:
    flat = (part for _, _, row in training.schedule.items() for action in row for part in parts_of(action))
    return Counter(part.microbatch // batch for part in flat if part.kind in GRADIENT and part.microbatch is not None)


def clocked(timeline: Timeline, batch: int) -> list[Clocked]:
    """The end of the last gradient of each batch, and the work of all devices until then, with parts of actions."""
    second = timeline.units_per_second
    ends: dict[int, float] = {}
    spans: list[tuple[float, float]] = []
    for span in timeline.spans():
        if span.lane == "compute":
            spans.append((float(span.start) / second, float(span.end) / second))
            for action in parts_of(span.action):
                if action.kind in GRADIENT and action.microbatch is not None:
                    number = action.microbatch // batch
                    ends[number] = max(ends.get(number, 0.0), spans[-1][1])
    moments = list(accumulate((ends[number] for number in sorted(ends)), max))
    work = (sum(max(0.0, min(end, moment) - start) for start, end in spans) for moment in moments)
    return [Clocked(moment, busy) for moment, busy in zip(moments, work, strict=True)]
