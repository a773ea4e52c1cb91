"""Reference: the same training as one plain loop, to compare an engine's gradients and weights with.

One process, one graph per microbatch through the whole model, no stages, no recomputation, one AdamW over all
parameters. Two things are taken from the schedule, because they are part of what is computed: the order in which
gradients are added up, and the version of the weights that every microbatch reads.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functional_call

from rpbench.engine.accumulation import Groups
from rpbench.engine.checkpoint import State
from rpbench.engine.gradients import Place, Tensors
from rpbench.engine.layout import Layout
from rpbench.engine.loss_scale import Scale
from rpbench.engine.optimizer import OptimizerSettings
from rpbench.engine.randomness import seeded
from rpbench.engine.weights import masters_of
from rpbench.engine.workload import Workload
from rpbench.models.attention import KeysValues

ReadVersion = Callable[[int, int], int]  # (module, microbatch) -> version


@dataclass
class Trajectory:
    """What a training run went through.

    Args:
        losses: mean loss of every optimizer step.
        gradients: per step, the sum over its microbatches, by place; tied parameters still apart, nothing clipped.
        masters: the weights after the last step.
        scales: version -> what losses were multiplied by, where they were; gradients still are.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    masters: Tensors = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)


def train_reference(
    workload: Workload,
    layout: Layout,
    groups: Mapping[tuple[int, int], Groups],
    settings: OptimizerSettings,
    *,
    num_steps: int = 1,
    num_parts: int = 1,
    updates: bool = True,
    read_version: ReadVersion | None = None,
    start: State | None = None,
) -> Trajectory:
    """Train for some steps.

    Args:
        groups: (backward stage, version) -> microbatches in the order their gradients are added up.
        num_parts: segments that sequences are cut into; still one graph for all segments of a microbatch.
        updates: whether weights change after a step.
        read_version: the version a module has for a microbatch; None: the newest.
        start: what to go on from; it has the versions below 0.
    """
    masters = masters_of(workload, start)
    adamw = torch.optim.AdamW(masters.values(), lr=1.0, weight_decay=settings.weight_decay, fused=True)
    history = {0: _working(workload, masters)}
    if start is not None:
        history |= {-age: tensors for age, tensors in start.stale.items()}
        for owner, state in start.moments.items():
            adamw.state[masters[owner]] = {name: value.clone() for name, value in state.items()}
    rule = settings.loss_scaling
    scales = {} if rule is None else {0: Scale(rule.initial)} | (start.scales if start else {})
    found = Trajectory(masters=masters)
    for step in range(num_steps):

        def version(module: int, microbatch: int, newest: int = step if updates else 0) -> int:
            return newest if read_version is None else read_version(module, microbatch)

        read = version(len(workload.modules) - 1, step * workload.num_microbatches)
        scale = scales[read].value if rule else None
        losses, gradients = _gradients(workload, layout, groups, history, version, step, num_parts, scale)
        found.losses.append(losses)
        found.gradients.append(gradients)
        if updates:
            finite = rule is None or all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            if rule is not None:
                scales[step + 1] = rule.follow(scales[read], finite=finite)
            if finite:
                adamw.param_groups[0]["lr"] = settings.rate(workload.first_step + step + 1)
                _update(workload, masters, gradients, settings, adamw, scale)
            history[step + 1] = _working(workload, masters)
    found.scales = {version: scale.value for version, scale in scales.items()}
    return found


def _working(workload: Workload, masters: Tensors) -> Tensors:
    """The weights that forward reads: the masters in the model's own types, once for every place."""
    return {
        place: masters[owner].to(workload.parameter(place).dtype, copy=True)
        for place, owner in workload.owner_of.items()
    }


def _gradients(
    workload: Workload,
    layout: Layout,
    groups: Mapping[tuple[int, int], Groups],
    history: Mapping[int, Tensors],
    version: ReadVersion,
    step: int,
    num_parts: int,
    scale: float | None,
) -> tuple[float, Tensors]:
    """Loss and gradients of a step, added up stage by stage as soon as their turn comes."""
    window = range(step * workload.num_microbatches, (step + 1) * workload.num_microbatches)
    sums = [_OrderedSum(groups[stage, step + 1]) for stage in range(len(layout.backward))]
    loss = 0.0
    for microbatch in window:
        share, by_segment = _one_microbatch(workload, history, version, microbatch, num_parts, scale)
        loss += share
        for gradients in reversed(by_segment):  # the last segment's backward comes first
            for stage, modules in enumerate(layout.backward):
                sums[stage].offer(microbatch, {place: g for place, g in gradients.items() if place[0] in modules})
    return loss, {place: gradient for total in sums for place, gradient in total.result().items()}


def _one_microbatch(
    workload: Workload,
    history: Mapping[int, Tensors],
    version: ReadVersion,
    microbatch: int,
    num_parts: int,
    scale: float | None,
) -> tuple[float, list[Tensors]]:
    """The loss of a microbatch, and the gradients that the weights get from each of its segments."""
    seen: list[list[KeysValues]] = [[] for _ in workload.modules]
    losses: list[torch.Tensor] = []
    leaves: list[Tensors] = []
    for part in range(num_parts):
        leaves.append({})
        x, labels = workload.segment(microbatch, part, num_parts)
        for number, module in enumerate(workload.modules):
            weights = history[version(number, microbatch)]
            own = {
                name: weights[number, name].detach().requires_grad_() if parameter.requires_grad else parameter.detach()
                for name, parameter in module.named_parameters(remove_duplicate=False)
            }
            leaves[part] |= {(number, name): leaf for name, leaf in own.items() if leaf.requires_grad}
            inputs: tuple[Any, ...] = (x, labels) if number == len(workload.modules) - 1 else (x,)
            if num_parts > 1 and 0 < number < len(workload.modules) - 1:
                inputs = (x, seen[number])
            drawn = workload.seed, number, workload.absolute(microbatch), part
            with seeded(*drawn) if workload.draws_random else nullcontext():
                x = functional_call(module, own, inputs)
            if isinstance(x, tuple):
                x, made = x
                seen[number] = [*seen[number], made]
        losses.append(workload.share(x, microbatch, part, num_parts))
    wanted = [(part, place) for part, own in enumerate(leaves) for place in own]
    slopes = None if scale is None else [torch.full_like(loss, scale) for loss in losses]
    found = torch.autograd.grad(losses, [leaves[part][place] for part, place in wanted], slopes, allow_unused=True)
    gradients: list[Tensors] = [{} for _ in leaves]
    for (part, place), value in zip(wanted, found, strict=True):
        if value is not None:
            gradients[part][place] = value
    return sum(float(loss.detach()) for loss in losses), gradients


class _OrderedSum:
    """Adds gradients in the order of the groups, whatever order they come in."""

    def __init__(self, groups: Groups) -> None:
        self.groups = [list(group) for group in groups]
        self.waiting: dict[int, list[Tensors]] = {}
        self.sums: list[Tensors] = [{} for _ in groups]

    def offer(self, microbatch: int, gradients: Tensors) -> None:
        self.waiting.setdefault(microbatch, []).append(gradients)
        for group, total in zip(self.groups, self.sums, strict=True):
            while group and self.waiting.get(group[0]):
                _add(total, self.waiting[group.pop(0)].pop(0))

    def result(self) -> Tensors:
        total: Tensors = {}
        for part in self.sums:
            _add(total, part)
        return total


def _add(total: Tensors, more: Tensors) -> None:
    for place, gradient in more.items():
        total[place] = total[place] + gradient if place in total else gradient


def _update(
    workload: Workload,
    masters: Tensors,
    gradients: Tensors,
    settings: OptimizerSettings,
    adamw: torch.optim.AdamW,
    scale: float | None,
) -> None:
    for master in masters.values():
        master.grad = None
    for place, owner in workload.owner_of.items():
        if place in gradients:
            master, gradient = masters[owner], gradients[place].to(masters[owner].dtype)
            if scale is not None:
                gradient = gradient / scale
            master.grad = gradient.clone() if master.grad is None else master.grad + gradient
    if settings.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(masters.values(), settings.clip_norm)
    adamw.step()


def largest_difference(one: Mapping[Place, torch.Tensor], other: Mapping[Place, torch.Tensor]) -> float:
    """The largest absolute difference of two sets of tensors; infinite where one lacks what the other has.

    An overflow is the same as an overflow.
    """
    if one.keys() != other.keys():
        return float("inf")
    return max((_difference(one[place], other[place]) for place in one if one[place].numel()), default=0.0)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf).max())
