"""What backend=device can be asked for; refused before anything runs."""

import torch

from rpbench.config.choices import BackendConfig, ConfigError
from rpbench.config.request import Request
from rpbench.ir.action import COMPUTE, HEAD, SEND, Kind, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import stays_on_devices
from rpbench.ir.communication import hops
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule
from rpbench.ir.waits.moves import has_transfers


def check_device(
    request: Request, schedule: Schedule, backend: BackendConfig, *, has_tied: bool = False, has_frozen: bool = False
) -> None:
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
    if stays_on_devices(schedule):
        _check_resident(schedule, index, has_tied=has_tied, has_frozen=has_frozen)
        return
    loaded, stepped = (
        {action.stage for action in index.actions if action.kind is kind and action.object == what}
        for kind, what in ((Kind.LOAD, "P"), (Kind.STEP, None))
    )
    if not loaded or not stepped <= loaded or (not kinds & SEND and next(hops(index), None) is not None):
        raise ConfigError(
            f"backend=device: {schedule.name} brings weights or boundary tensors of some stages to the devices and not "
            "of all; use schedule=roundpipe offload=all, or the schedule as it is, without offload="
        )


def _check_resident(schedule: Schedule, index: Index, *, has_tied: bool, has_frozen: bool) -> None:
    """Refuse stages that several devices run and nobody sums the gradients of, and shards of what stages share."""
    devices: dict[int, set[int]] = {}
    for number, action in enumerate(index.actions):
        for part in parts_of(action):
            if part.kind in COMPUTE - set(HEAD):
                devices.setdefault(part.stage, set()).add(index.device(number))
    shared = next((stage for stage, found in devices.items() if len(found) > 1), None)
    if shared is not None and Kind.REDUCE_GRAD not in schedule.kinds:
        raise ConfigError(
            f"backend=device: {schedule.name} runs stage {shared} on devices {sorted(devices[shared])} and has no "
            "action that sums their gradients, so that each would keep weights of its own; use backend=cpu"
        )
    if shared is not None and has_frozen:
        raise ConfigError(
            f"backend=device: model.lora_rank freezes weights, and the replicas of {schedule.name} keep those that "
            "train alone on accelerators of their own; leave it out, or use schedule=1f1b or backend=cpu"
        )
    if shared is not None and has_tied and Kind.UNSHARD in schedule.kinds:
        raise ConfigError(
            f"backend=device: model.tied=true is one matrix of two stages, which {schedule.name} cuts into "
            "other shards in each; use model.tied=false, or schedule=data_parallel"
        )


def _kept_on_devices(schedule: Schedule) -> bool:
    return bool(has_transfers(schedule) and Analysis(schedule).moves.handovers.homes)
