"""Checkpoints that a request asks for: what they are of, and what is refused before any work."""

import os
from pathlib import Path

from rpbench.config.choices import ConfigError
from rpbench.config.request import Request
from rpbench.engine.state import checkpoint
from rpbench.engine.state.checkpoint import CheckpointError, Manifest
from rpbench.engine.workload import Workload
from rpbench.run.recording import Fields
from rpbench.run.training.tensors import optimizer_settings


def checkpoint_subject(request: Request, num_microbatches: int) -> Fields:
    """What a checkpoint is of: everything that must be the same for training to go on as if it had not stopped.

    Args:
        num_microbatches: of one optimizer step.
    """
    return {
        "model": request.subject["model"],
        "dtype": request.dtype,
        "workload": request.subject["workload"],
        "num_microbatches": num_microbatches,
        "seed": request.seed,
        "optimizer": {"name": request.optimizer.name, "momentum": request.optimizer.momentum},
    }


def found_checkpoint(request: Request, subject: Fields) -> Manifest | None:
    """What to go on from, if anything.

    Raises:
        ConfigError: if it is not there, torn, or of something else.
    """
    if request.checkpoint.resume_from is None:
        return None
    try:
        return checkpoint.opened(Path(request.checkpoint.resume_from), subject)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume_from={error}") from None


def check_holds(found: Manifest, request: Request, workload: Workload) -> None:
    """Refuse a checkpoint without all that a workload needs.

    Raises:
        ConfigError: naming the first parameter.
    """
    shapes = {owner: workload.parameter(owner).shape for owner in set(workload.owner_of.values())}
    try:
        found.check_holds(shapes, optimizer_settings(request.optimizer).moments)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume_from={error}") from None


def check_save_to(request: Request) -> None:
    """Refuse a place that cannot be written, or holds something else.

    Raises:
        ConfigError: naming it.
    """
    if request.checkpoint.save_to is None:
        return
    folder = Path(request.checkpoint.save_to)
    above = folder.absolute().parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"checkpoint.save_to={folder}: {above} is no folder that can be written")
    try:
        checkpoint.check_target(folder)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.save_to={error}") from None
