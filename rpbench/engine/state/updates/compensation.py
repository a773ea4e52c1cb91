"""Compensation of late gradients by asynchronous methods.

    rescheduling   PipeMare T1: a stage that is late by tau steps learns slower by tau^p, p falling from 1 to 0
    correction     PipeMare T2: backward on w - lateness * delta, delta a running mean of how the weights move
    prediction     forward on w - horizon * d, d the optimizer's own direction (PipeOptim, SpecTrain, XPipe,
                   pipelined backpropagation)
    spikes         a late gradient takes part at once with what it has missed (pipelined backpropagation)

Delays are measured on the schedule by replay: the steps published between what a forward reads and the step that
adds its gradient, for every stage and microbatch.

Spikes: without delay a gradient g takes part in its own step, and in the steps after that by what the velocity still
holds of it: 1, mu, mu^2, ... of it. With a delay of D steps it comes D steps later. The step that it comes to takes the
contributions of those D steps at once (the spike), and goes on as training without delay would:

    v <- mu v + g          w <- w - eta (a v + b g)          a = mu^D          b = (1 - mu^D) / (1 - mu)

From then on an impulse has moved the weight as far as without delay, in the end by eta (b + a / (1 - mu)) =
eta / (1 - mu). D = 0 is plain momentum, D = 1 is Nesterov's. Weight decay is ours: a part of g, as in torch's SGD.

Sources: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", MLSys'21 (arXiv 1910.05124), section 3;
Guan et al., PipeOptim (arXiv 2312.00839); Chen et al., SpecTrain (arXiv 1809.02839); Guan et al., XPipe (arXiv
1911.04610); Kosson et al., "Pipelined Backpropagation at Scale: Training Large Models without Batches", MLSys'21 (arXiv
2003.11666), after its description; the formula of the spike from memory, its sums derived.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule

Predictor = Literal["", "pipelined_backprop", "pipeoptim", "spectrain", "xpipe"]


@dataclass(frozen=True)
class Compensation:
    """The compensation of late gradients; by default none."""

    predictor: Predictor = ""  # whose prediction forward (and SpecTrain's backward) reads
    rescheduling_steps: int = 0  # K of T1, the steps until every stage learns at the full rate; 0: no rescheduling
    # D of T2, what is left of an old move after as many steps as a gradient is late; None: no correction
    correction_decay: float | None = None
    num_sync_steps: int = 0  # T3, steps at the start that are flushed and need no compensation
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
        slows_or_corrects = self.rescheduling_steps or self.correction_decay is not None
        return bool(self.predictor or slows_or_corrects or self.spike_compensation)


class Delays:
    """The delays of a schedule's gradients, in steps."""

    def __init__(self, analysis: Analysis) -> None:
        schedule, versions = analysis.schedule, analysis.versions
        self._late = versions.staleness_steps
        self.drift = versions.drift  # (stage, microbatch) -> steps between its forward and its backward
        window = schedule.shape.batches[-1]
        stages = range(schedule.shape.num_backward_stages)
        # by stage, the mean delay over the last step, as in every step of a full pipeline
        self.tau = [sum(self._late[stage, mb] for mb in window) / len(window) for stage in stages]
        self._first = {mb: batch.start for batch in schedule.shape.batches for mb in batch}

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


def check_compensation(schedule: Schedule, settings: Compensation, *, has_tied: bool) -> None:
    """Refuse (ValueError) a compensation that does not fit the schedule."""
    if not settings.is_needed:
        return
    wanted = Policy.PREDICT if settings.predictor else Policy.LATEST
    if schedule.policy is not wanted:
        other = settings.predictor or ("pipelined_backprop" if settings.spike_compensation else "pipemare")
        raise ValueError(
            f"compensation of late gradients takes a schedule of policy {wanted.value}, {schedule.name} has "
            f"{schedule.policy.value}; use schedule={other}"
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


def spike_coefficients(momentum: float, delay: float) -> tuple[float, float]:
    """a and b, the factors on velocity and gradient, of gradients that are `delay` steps late on average."""
    a = momentum**delay
    return a, (1 - a) / (1 - momentum)


class SpikeCompensatedSGD(torch.optim.SGD):
    """Gradient descent with momentum; `delays`: for each group of weights, the steps that its gradients are late.

    The state of a weight is its velocity v (`momentum_buffer`) and a v + b g of its last step (`direction`), along
    which weights are predicted.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        delays: Sequence[float],
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, lr=1.0, momentum=momentum, weight_decay=weight_decay)
        for group, delay in zip(self.param_groups, delays, strict=True):
            group["delay"] = delay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None  # nobody asks for a loss
        for group in self.param_groups:
            a, b = spike_coefficients(group["momentum"], group["delay"])
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group, a, b)

    def _move(self, weight: torch.Tensor, group: dict[str, Any], a: float, b: float) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        else:
            state["momentum_buffer"] = gradient.detach().clone()
        state["direction"] = a * state["momentum_buffer"] + b * gradient
        weight.add_(state["direction"], alpha=-group["lr"])
