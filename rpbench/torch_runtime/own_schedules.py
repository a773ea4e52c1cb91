"""torch's own schedule of a name, on the same stages and under the same clock as a table of ours."""

from typing import Any

import torch

from rpbench.torch_runtime.recorded.recording import Recorder, listen, recorded
from rpbench.torch_runtime.request import TorchRequest
from rpbench.torch_runtime.versions import load_runtime

# Ours -> torch's of the same order, where it has one.
SAME_NAME = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
ONE_STAGE = ("GPipe", "1F1B")


def own_runtime(request: TorchRequest, recorder: Recorder, stages: list[Any]) -> Any:
    """torch's schedule `request.order_of`.

    Its single-stage classes run no lowered actions, so that only their computations are timed.

    Raises:
        ValueError: if torch has none of that name, or it takes other stages.
    """
    name = request.order_of
    if name not in SAME_NAME.values():
        raise ValueError(f"order_of={name}: torch has {', '.join(SAME_NAME.values())}")
    if name in ONE_STAGE and len(stages) != 1:
        raise ValueError(f"order_of={name}: torch runs one stage a rank there, this partition has {len(stages)}")
    schedules, _, _ = load_runtime()
    kind = schedules.get_schedule_class(name)
    settled = {"loss_fn": _sum, "scale_grads": False}
    if name in ONE_STAGE:  # GPipe's own names of its loop's turns are no lowered actions
        _listen_alone(stages[0], recorder)
        return kind(stages[0], request.lowered.num_microbatches, **settled)

    class Recording(kind):  # type: ignore[misc, valid-type]  # one of several
        """torch's schedule under our clock."""

        def _step_microbatches(self, *arguments: Any, **options: Any) -> Any:
            with recorded(schedules, recorder):
                return super()._step_microbatches(*arguments, **options)

    listen(stages, recorder)
    return Recording(stages, request.lowered.num_microbatches, **settled)


def _sum(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss.sum()


def _listen_alone(stage: Any, recorder: Recorder) -> None:
    """Make an action of each computation: the single-stage classes have loops of their own."""
    for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        call = getattr(stage, name)

        def timed(microbatch: int, *arguments: Any, _call: Any = call, _kind: str = kind, **options: Any) -> Any:
            with recorder.action(f"{stage.stage_index}{_kind}{microbatch}"):
                return recorder.computes(_call)(microbatch, *arguments, **options)

        setattr(stage, name, timed)
