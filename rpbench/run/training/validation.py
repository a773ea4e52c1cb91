"""Losses of a run, on the text it trains on and on held-out text; and checks of its checkpoints.

Stages step at different moments: each stage's weights are copied when it steps, and a version is validated once the
last stage has stepped to it. A method may compute with other weights; those that it would ship are validated.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpbench.config.errors import ConfigError, config_errors
from rpbench.config.request import Request
from rpbench.engine.compute.stage import Shells
from rpbench.engine.executor import Gate, Handler
from rpbench.engine.state import checkpoint
from rpbench.engine.state.checkpoint import Manifest
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.weights import untrained
from rpbench.engine.training import Training
from rpbench.engine.workload import Workload
from rpbench.ir.action import Action, Kind
from rpbench.ir.index import GRADIENT
from rpbench.ir.policy import is_trial
from rpbench.ir.timeline import Timeline
from rpbench.models.data import Batch
from rpbench.records import record
from rpbench.run.recording import Fields
from rpbench.run.training.tensors import optimizer_settings


def checkpoint_subject(request: Request, num_microbatches: int) -> Fields:
    """What must be equal to resume from a checkpoint; `num_microbatches` are those of one optimizer step.

    A text is known by its bytes: its file may move, and another may take its place.
    """
    digests, workload = request.subject["sha256"], dict(request.subject["workload"])
    workload.pop("path", None)
    texts = {f"{key}.sha256": digests[key] for key in ("workload.path", "workload.text") if key in digests}
    return {
        "model": request.subject["model"],
        "dtype": request.dtype,
        "workload": workload | texts,
        "num_microbatches": num_microbatches,
        "seed": request.seed,
        "optimizer": {"name": request.optimizer.name, "momentum": request.optimizer.momentum},
    }


def found_checkpoint(request: Request, subject: Fields) -> Manifest | None:
    """The checkpoint to resume from, if any; ConfigError if it is missing, torn, or of another run."""
    if request.checkpoint.resume_from is None:
        return None
    with config_errors("checkpoint.resume_from="):
        return checkpoint.opened(Path(request.checkpoint.resume_from), subject)


def check_holds(found: Manifest, request: Request, workload: Workload) -> None:
    """Raise ConfigError, naming the first parameter, for a checkpoint that lacks something the workload needs."""
    shapes = {owner: workload.parameter(owner).shape for owner in set(workload.owner_of.values())}
    with config_errors("checkpoint.resume_from="):
        found.check_holds(shapes, optimizer_settings(request.optimizer).moments)


def check_save_to(request: Request) -> None:
    """Raise ConfigError for a folder that cannot be written or holds something else."""
    if request.checkpoint.save_to is None:
        return
    folder = Path(request.checkpoint.save_to)
    above = folder.absolute().parent
    if not above.is_dir():
        raise ConfigError(f"checkpoint.save_to={folder}: {above} is no folder that can be written")
    record.check_writable(folder, "checkpoint.save_to")
    with config_errors("checkpoint.save_to="):
        checkpoint.check_target(folder)


class Validation:
    """Losses of a training on held-out sequences after every `every` updates."""

    def __init__(self, training: Training, unseen: Batch, every: int) -> None:
        self._training, self._unseen, self._every = training, unseen, every
        self._shells = Shells(training.workload.modules)
        self._frozen = list(map(untrained, training.workload.modules))
        self._copies: dict[int, Tensors] = {}
        self._missing: dict[int, set[int]] = {}
        self.losses: dict[int, float] = {}  # update -> mean loss, nats per token

    def watching(self, handlers: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """The handlers, which also copy a stage's weights once a version is final: after its step or rollback."""
        policy, index = self._training.schedule.policy, self._training.analysis.index

        def watched(handler: Handler) -> Handler:
            def run(action: Action, number: int, gate: Gate) -> None:
                handler(action, number, gate)
                assert action.version is not None
                lasts = index.published(action.stage, action.version) == number and not is_trial(policy, action.version)
                if lasts and action.version % self._every == 0:
                    self._take(action.stage, action.version)

            return run

        ends = (kind for kind in (Kind.STEP, Kind.ROLLBACK) if kind in handlers)
        return {**handlers, **{kind: watched(handlers[kind]) for kind in ends}}

    def fields(self) -> dict[str, Any]:
        updates = sorted(self.losses)
        return {"validation_updates": updates, "validation_curve": [self.losses[update] for update in updates]}

    def _take(self, stage: int, version: int) -> None:
        """Copy a stage's weights; once all stages are there, compute the loss."""
        stages = self._training.layout.backward
        copies = self._copies.setdefault(version, {})
        copies |= {place: v.clone() for place, v in self._training.optimizer.seen.items() if place[0] in stages[stage]}
        missing = self._missing.setdefault(version, set(range(len(stages))))
        missing.discard(stage)
        if not missing:
            self.losses[version] = self._loss(self._copies.pop(version))

    @torch.no_grad()
    def _loss(self, weights: Tensors) -> float:
        workload = self._training.workload
        x = self._unseen.tokens
        for module in workload.chain:
            own = {
                name: weights[owner].to(workload.parameter((index, name)).dtype)
                for (index, name), owner in workload.owner_of.items()
                if index == module
            }
            labels = (self._unseen.labels,) if module == workload.head else ()
            x = self._shells[module](self._frozen[module] | own, x, *labels)
        return float(x)


def loss_curve(training: Training, timeline: Timeline, batch: int) -> dict[str, Any]:
    """Mean loss of every `batch` microbatches in the order of the data, and when the last backward of them ended.

    Each point covers the same microbatches, whatever number of them a schedule takes for an optimizer step. Losses are
    those of the training forward, on the weights that it read.
    """
    window, found = training.workload.num_microbatches, sorted(training.passes.losses.items())
    tokens = [training.workload.tokens(microbatch) for microbatch, _ in found]  # 1 where all are equal
    steps = [sum(tokens[place - place % window :][:window]) for place in range(len(found))]
    losses = [share * step for (_, share), step in zip(found, steps, strict=True)]
    ends = np.zeros(len(losses))
    flat = (action for _, _, row in timeline.schedule.items() for action in row)
    for action, end in zip(flat, timeline.end, strict=True):
        if action.kind in GRADIENT and action.microbatch is not None:
            ends[action.microbatch] = max(ends[action.microbatch], float(end) / timeline.units_per_second)
    starts = range(0, len(losses), batch)
    return {
        "loss_curve": [
            math.fsum(losses[start : start + batch]) / math.fsum(tokens[start : start + batch]) for start in starts
        ],
        "loss_curve_s": [float(ends[start : start + batch].max()) for start in starts],
    }
