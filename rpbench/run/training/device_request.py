"""What backend=device can be asked for; refused before anything runs."""

import torch

from rpbench.config.choices import BackendConfig, ConfigError
from rpbench.config.request import Request
from rpbench.ir.action import SEND, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.communication import hops
from rpbench.ir.index import Index
from rpbench.ir.moves import has_transfers
from rpbench.ir.schedule import Schedule


def check_device(request: Request, schedule: Schedule, backend: BackendConfig) -> None:
    """Refuse what cannot run on accelerators.

    Raises:
        ConfigError: without an accelerator, real or dry; for a schedule that does not say how its tensors get
            there; for options that only hold on the processor.
    """
    is_dry = backend.dry_accelerators is not None
    if not is_dry and not torch.accelerator.is_available():
        raise ConfigError(
            "backend=device: torch finds no accelerator on this machine; use backend=cpu for real tensors, "
            "backend.dry_accelerators=1 to check the order of its streams, or backend=emulated for the engine's timing "
            "with modelled durations"
        )
    if backend.recompute_grain != "stage":
        raise ConfigError(f"backend.recompute_grain={backend.recompute_grain}: on accelerators it is stage")
    index = Index(schedule)
    kinds = {action.kind for action in index.actions}
    if Kind.ROLLBACK in kinds:
        raise ConfigError(
            f"backend=device: {schedule.name} takes steps back, and what has been loaded of them is not brought again "
            "on accelerators; use schedule.speculate=false, or backend=cpu"
        )
    if Kind.STEP_REST in kinds:
        raise ConfigError(
            f"backend=device: {schedule.name} steps columns on the devices, where the optimizer is not; use "
            "schedule=zero_offload, or backend=cpu"
        )
    if _kept_on_devices(schedule):
        raise ConfigError(
            f"backend=device: {schedule.name} keeps its stages on devices and hands them from one to another, and the "
            "optimizer is on the host; use schedule=roundpipe offload=all, or backend=cpu"
        )
    loaded, stepped = (
        {action.stage for action in index.actions if action.kind is kind and action.object == what}
        for kind, what in ((Kind.LOAD, "P"), (Kind.STEP, None))
    )
    if not loaded or not stepped <= loaded or (not kinds & SEND and next(hops(index), None) is not None):
        raise ConfigError(
            f"backend=device: {schedule.name} does not say how its weights and boundary tensors get to the devices and "
            "back, or steps on them, where the optimizer is not; use schedule=roundpipe offload=all, "
            "schedule=zero_offload, schedule=zero_infinity, or schedule=zero_3 schedule.offload=true"
        )


def _kept_on_devices(schedule: Schedule) -> bool:
    return bool(has_transfers(schedule) and Analysis(schedule).moves.handovers.homes)
