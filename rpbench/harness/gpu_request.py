"""What backend=cuda can be asked for; refused before anything runs."""

import torch

from rpbench.harness.config import ConfigError, RunConfig
from rpbench.ir.action import SEND, Kind
from rpbench.ir.communication import hops
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule


def check_cuda(config: RunConfig, schedule: Schedule, recompute_grain: str) -> None:
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
    if config.verify:
        raise ConfigError(
            "verify=true: a GPU does not round as the processor does, which the reference runs on; verify the same "
            "schedule with backend=cpu or backend=virtual"
        )
    if recompute_grain != "stage":
        raise ConfigError(f"backend.recompute_grain={recompute_grain}: on GPUs it is stage")
    index = Index(schedule)
    kinds = {action.kind for action in index.actions}
    loads = any(action.kind is Kind.LOAD and action.object == "P" for action in index.actions)
    if not loads or (not kinds & SEND and next(hops(index), None) is not None):
        raise ConfigError(
            f"backend=cuda: {schedule.name} does not say how its weights and boundary tensors get to the GPUs and "
            "back; use schedule=roundpipe offload=all"
        )
