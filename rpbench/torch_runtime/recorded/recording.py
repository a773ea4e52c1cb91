"""Recording: torch's runtime with a clock at every lowered action, and a line on the board of where it stands.

torch runs every action inside `record_function("PP:<token>")`, which is replaced while a step runs. Computations are
timed at the three methods of a stage that compute: the time from an action's start until then is waiting for a message.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rpbench.torch_runtime.processes.diagnosis import Phase, Place
from rpbench.torch_runtime.request import ONE_STAGE, SAME_NAME
from rpbench.torch_runtime.versions import load_runtime

COMPUTING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
PREFIX = "PP:"


@dataclass
class Moment:
    """One lowered action as it ran; seconds by this rank's clock."""

    token: str
    start: float
    end: float = 0.0  # from `start` on, waiting included
    begun: Any = None  # start of its computation; None for an action that computes nothing
    done: Any = None  # end of its computation


@dataclass
class Recorder:
    """The actions of one step on a rank, in the order they ran; on a GPU timed by CUDA events, read after the step."""

    place: Place
    positions: dict[str, int]  # the token of a row's action -> its place, for the board
    on_gpu: bool = False
    moments: list[Moment] = field(default_factory=list)
    before: Callable[[str], None] = lambda token: None  # a test makes a rank fail here

    def begin(self, step: int) -> None:
        self.moments = []
        self.place.write(Phase.BETWEEN, -1, step)

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Wraps all that torch does for an action."""
        token = name.removeprefix(PREFIX)
        self.place.write(Phase.WAITING, self.positions.get(token))
        self.before(token)
        moment = Moment(token, time.perf_counter())
        self.moments.append(moment)
        yield
        moment.end = time.perf_counter()
        self.place.write(Phase.BETWEEN)

    def computes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call with its times noted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if not self.moments or self.moments[-1].end:  # torch looks at shapes before the first step
                return call(*arguments, **options)
            moment = self.moments[-1]
            self.place.write(Phase.COMPUTING)
            begun = self._now()
            moment.begun = begun if moment.begun is None else moment.begun
            found = call(*arguments, **options)
            moment.done = self._now()
            self.place.write(Phase.WAITING)
            return found

        return timed

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self, zero: Any, zero_s: float) -> None:
        """Turn CUDA events into seconds: `zero` was recorded at `zero_s`, when the device was idle."""
        torch.cuda.synchronize()
        for moment in self.moments:
            if moment.begun is not None:
                moment.begun = zero_s + zero.elapsed_time(moment.begun) / 1e3
                moment.done = zero_s + zero.elapsed_time(moment.done) / 1e3
                moment.end = max(moment.end, moment.done)


def recording_runtime(recorder: Recorder, stages: list[Any], num_microbatches: int, order_of: str) -> Any:
    """torch's runtime for tables, whose rows must still be loaded, or its own schedule `order_of`; with recording.

    torch's single-stage schedules run no lowered actions: only their computations are timed. ValueError if torch has no
    schedule of that name, or it takes one stage a rank and there are more.
    """
    schedules: Any
    schedules, base, _ = load_runtime()
    if order_of != "table":
        if order_of not in SAME_NAME.values():
            raise ValueError(f"order_of={order_of}: torch has {', '.join(SAME_NAME.values())}")
        if order_of in ONE_STAGE and len(stages) != 1:
            raise ValueError(
                f"order_of={order_of}: torch runs one stage a rank there, this partition has {len(stages)}"
            )
        base = schedules.get_schedule_class(order_of)
    if order_of in ONE_STAGE:  # GPipe's own names of its loop's turns are no lowered actions
        _listen_alone(stages[0], recorder)
        return base(stages[0], num_microbatches, loss_fn=_sum, scale_grads=False)

    class Recording(base):  # type: ignore[misc, valid-type]  # found where torch has it
        """A runtime of torch with its profiler's name replaced while it steps."""

        def _step_microbatches(self, *arguments: Any, **options: Any) -> Any:
            plain = schedules.record_function
            schedules.record_function = recorder.action
            try:
                return super()._step_microbatches(*arguments, **options)
            finally:
                schedules.record_function = plain

    for stage in stages:
        for name in COMPUTING:
            setattr(stage, name, recorder.computes(getattr(stage, name)))
    return Recording(stages, num_microbatches, loss_fn=_sum, scale_grads=False)


def _sum(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """torch requires a loss function, although the last stage computes the loss."""
    return loss.sum()


def _listen_alone(stage: Any, recorder: Recorder) -> None:
    """Record each computation as an action: the single-stage classes have loops of their own."""
    for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        call = getattr(stage, name)

        def timed(microbatch: int, *arguments: Any, _call: Any = call, _kind: str = kind, **options: Any) -> Any:
            with recorder.action(f"{stage.stage_index}{_kind}{microbatch}"):
                return recorder.computes(_call)(microbatch, *arguments, **options)

        setattr(stage, name, timed)
