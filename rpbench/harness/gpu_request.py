"""What backend=cuda can be asked for; refused before anything runs."""

import torch

from rpbench.harness.choices import ConfigError
from rpbench.harness.request import Request
from rpbench.ir.action import SEND, Kind
from rpbench.ir.communication import hops
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule


def check_cuda(request: Request, schedule: Schedule, recompute_grain: str) -> None:
    """Refuse what cannot run on GPUs.

    Raises:
        ConfigError: without a GPU; for a schedule that does not say how its tensors get there; for options that
            only hold on the processor.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "backend=cuda: torch finds no CUDA device on this machine; use backend=cpu for real tensors, or "
            "backend=emulated for the engine's timing with modelled durations"
        )
    if request.verify:
        raise ConfigError(
            "verify=true: a GPU does not round as the processor does, which the reference runs on; verify the same "
            "schedule with backend=cpu or backend=virtual"
        )
    if recompute_grain != "stage":
        raise ConfigError(f"backend.recompute_grain={recompute_grain}: on GPUs it is stage")
    index = Index(schedule)
    kinds = {action.kind for action in index.actions}
    if Kind.ROLLBACK in kinds:
        raise ConfigError(
            f"backend=cuda: {schedule.name} takes steps back, and what has been loaded of them is not brought again on "
            "GPUs; use schedule.speculate=false, or backend=cpu"
        )
    if Kind.STEP_REST in kinds:
        raise ConfigError(
            f"backend=cuda: {schedule.name} steps columns on the devices, where the optimizer is not; use "
            "schedule=zero_offload, or backend=cpu"
        )
    loaded, stepped = (
        {action.stage for action in index.actions if action.kind is kind and action.object == what}
        for kind, what in ((Kind.LOAD, "P"), (Kind.STEP, None))
    )
    if not loaded or not stepped <= loaded or (not kinds & SEND and next(hops(index), None) is not None):
        raise ConfigError(
            f"backend=cuda: {schedule.name} does not say how its weights and boundary tensors get to the GPUs and "
            "back, or steps on them, where the optimizer is not; use schedule=roundpipe offload=all, "
            "schedule=zero_offload, schedule=zero_infinity, or schedule=zero_3 schedule.offload=true"
        )
