"""Compensation: what asynchronous methods do about late gradients besides choosing a version of the weights.

    rescheduling   PipeMare T1: a stage that is late by tau steps learns slower by tau^p, p falling from 1 to 0
    correction     PipeMare T2: backward on w - lateness * delta, delta a running mean of how the weights move
    prediction     forward on w - horizon * d, d the optimizer's own direction (PipeOptim, SpecTrain, XPipe,
                   pipelined backpropagation)
    spikes         a late gradient takes part at once with what it has missed (pipelined backpropagation,
                   `rpbench.engine.state.updates.spike_compensation`)

Delays are measured on the schedule by replay: the steps published between what a forward reads and the step that
adds its gradient, for every stage and microbatch.

Sources: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", MLSys'21 (arXiv 1910.05124), section 3;
Guan et al., PipeOptim (arXiv 2312.00839); Chen et al., SpecTrain (arXiv 1809.02839); Guan et al., XPipe (arXiv
1911.04610); Kosson et al., "Pipelined Backpropagation at Scale", MLSys'21 (arXiv 2003.11666).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule

Predictor = Literal["", "pipelined_backprop", "pipeoptim", "spectrain", "xpipe"]


@dataclass(frozen=True)
class Compensation:
    """How a run makes up for late gradients; left alone, not at all.

    Args:
        predictor: whose prediction forward (and SpecTrain's backward) reads.
        rescheduling_steps: K of T1, the steps until every stage learns at the full rate; 0: no rescheduling.
        correction_decay: D of T2, what is left of an old move after as many steps as a gradient is late; None: no
            correction.
        num_sync_steps: T3, steps at the start that are flushed and need no compensation.
        spike_compensation: a step makes up for what its late gradients have missed.
    """

    predictor: Predictor = ""
    rescheduling_steps: int = 0
    correction_decay: float | None = None
    num_sync_steps: int = 0
    spike_compensation: bool = False

    def __post_init__(self) -> None:
        if self.predictor not in get_args(Predictor):
            raise ValueError(f"predictor={self.predictor!r}: one of {', '.join(filter(None, get_args(Predictor)))}")
        if self.rescheduling_steps < 0 or self.num_sync_steps < 0:
            raise ValueError(
                f"rescheduling_steps={self.rescheduling_steps}, num_sync_steps={self.num_sync_steps}: numbers of "
                "steps, 0 for none"
            )
        if self.correction_decay is not None and not 0 < self.correction_decay < 1:
            raise ValueError(
                f"correction_decay={self.correction_decay}: between 0 and 1; PipeMare takes exp(-2) = 0.135"
            )

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        slows_or_corrects = self.rescheduling_steps or self.correction_decay is not None
        return bool(self.predictor or slows_or_corrects or self.spike_compensation)

    @property
    def made_for(self) -> str:
        """A schedule that is compensated so."""
        if self.predictor:
            return self.predictor
        return "pipelined_backprop" if self.spike_compensation else "pipemare"


class Delays:
    """How late the gradients of a schedule are.

    Attributes:
        tau: per stage, the mean over the microbatches of the last step; the same in every step once warm.
    """

    def __init__(self, analysis: Analysis) -> None:
        schedule, versions = analysis.schedule, analysis.versions
        self._late, self._drift = versions.staleness_steps, versions.drift
        window = schedule.shape.batches[-1]
        stages = range(schedule.shape.num_backward_stages)
        self.tau = [sum(self._late[stage, mb] for mb in window) / len(window) for stage in stages]
        self._first = {mb: batch.start for batch in schedule.shape.batches for mb in batch}

    def drift(self, stage: int, microbatch: int) -> int:
        """Steps between a microbatch's forward and its backward."""
        return self._drift[stage, microbatch]

    def horizons(self, predictor: Predictor, stage: int, microbatch: int) -> tuple[int, int]:
        """Steps to look ahead in forward and in backward.

        The forward of a step's first microbatch predicts for all of them. SpecTrain looks further, to when the
        microbatch is back at the first stage: stage k is half of k steps away from that.
        """
        if not predictor:
            return 0, 0
        late = self._late[stage, self._first[microbatch]]
        beyond = stage // 2 if predictor == "spectrain" else 0
        return late + beyond, beyond


def slowdown(tau: float, version: int, settings: Compensation) -> float:
    """T1: the factor on a stage's learning rate at the step to `version`; stages less than a step late keep theirs.

    Source: PipeMare, section 3.1: alpha_k = alpha / tau^p_k, p_k = 1 - min(k / K, 1), k counted from the first
    asynchronous step.
    """
    step = version - 1 - settings.num_sync_steps
    if not settings.rescheduling_steps or step < 0:
        return 1.0
    return max(1.0, tau) ** -(1 - min(step / settings.rescheduling_steps, 1.0))


def correction_share(tau: float, settings: Compensation) -> float:
    """T2: gamma = D^(1 / tau), the share of the old mean in the new one."""
    assert settings.correction_decay is not None
    return float(settings.correction_decay ** (1 / tau)) if tau > 0 else 0.0


def largest_stable_rate(curvature: float, tau: int) -> float:
    """The learning rate above which gradient descent with a fixed delay diverges on a parabola.

    Source: PipeMare, section 3.1, lemma 1: (2 / lambda) sin(pi / (4 tau + 2)).
    """
    return 2 / curvature * math.sin(math.pi / (4 * tau + 2))


def check_compensation(schedule: Schedule, settings: Compensation, *, has_tied: bool) -> None:
    """Refuse a compensation that the schedule has no use for.

    Raises:
        ValueError: with the policy it takes.
    """
    if not settings.is_needed:
        return
    wanted = Policy.PREDICT if settings.predictor else Policy.LATEST
    if schedule.policy is not wanted:
        raise ValueError(
            f"compensation of late gradients takes a schedule of policy {wanted.value}, {schedule.name} has "
            f"{schedule.policy.value}; use schedule={settings.made_for}"
        )
    if schedule.shape.num_parts > 1:
        raise ValueError(
            f"num_parts={schedule.shape.num_parts}: late gradients are compensated for whole sequences only"
        )
    if has_tied:
        raise ValueError(
            f"schedule={schedule.name} compensates stage by stage, but the model's embedding and head share weights, "
            "which belong to two stages; set model.tied=false"
        )
    if Kind.R in schedule.plain_kinds:
        raise ValueError(f"schedule={schedule.name} has recomputation of its own, which would not be compensated")


def check_momentum(settings: Compensation, optimizer: OptimizerSettings) -> None:
    """Refuse an optimizer without what late gradients are compensated with: pipelined backpropagation has a velocity.

    Raises:
        ValueError: with the optimizer it takes, and what to leave out for another.
    """
    asked = {
        "spike_compensation": settings.spike_compensation,
        "weight_prediction": settings.predictor == "pipelined_backprop",
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    if settings.is_needed and optimizer.name not in ("adamw", "sgd"):
        raise ValueError(
            f"optimizer={optimizer.name}: late gradients are compensated with the moments of adamw or the momentum of "
            "sgd; use optimizer=adamw"
        )
    if names and not (optimizer.name == "sgd" and optimizer.momentum):
        raise ValueError(
            f"optimizer={optimizer.name} optimizer.momentum={optimizer.momentum}: {' and '.join(names)} of "
            "pipelined_backprop must have the velocity of gradient descent with momentum; use optimizer=sgd "
            f"optimizer.momentum=0.9, or {' '.join(f'schedule.{name}=false' for name in names)}"
        )
