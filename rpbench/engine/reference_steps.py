"""Sums and steps of the reference: gradients in the order of groups, plain updates, trials that leave no trace."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from rpbench.engine.late_rest_reference import LateRestReference
from rpbench.engine.state.gradient_sums.accumulation import Groups
from rpbench.engine.state.gradient_sums.gradients import Tensors
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload


class OrderedSum:
    """Adds gradients in the order of the groups, whatever order they come in, and every replica's groups first."""

    def __init__(self, groups: Groups, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.groups = [list(group) for group in groups]
        self.waiting: dict[int, list[Tensors]] = {}
        self.sums: list[Tensors] = [{} for _ in groups]

    def offer(self, microbatch: int, gradients: Tensors) -> None:
        """Add what a microbatch has, as soon as its turn in every group has come."""
        self.waiting.setdefault(microbatch, []).append(gradients)
        for group, total in zip(self.groups, self.sums, strict=True):
            while group and self.waiting.get(group[0]):
                _add(total, self.waiting[group.pop(0)].pop(0))

    def result(self) -> Tensors:
        """The sum over all groups.

        Raises:
            RuntimeError: if the groups lack a microbatch of the step, or name one that is not in it: what is added up
                in their order is then no gradient of the step.
        """
        missing = [microbatch for group in self.groups for microbatch in group]
        left = [microbatch for microbatch, gradients in self.waiting.items() if gradients]
        if missing or left:
            raise RuntimeError(f"a step's gradient is added up without microbatches {left}, and waits for {missing}")
        total: Tensors = {}
        per_replica = len(self.sums) // self.num_replicas
        for replica in range(self.num_replicas):
            own: Tensors = {}
            for part in self.sums[replica * per_replica : (replica + 1) * per_replica]:
                _add(own, part)
            _add(total, own)
        return total


def _add(total: Tensors, more: Tensors) -> None:
    for place, gradient in more.items():
        total[place] = total[place] + gradient if place in total else gradient


def update(
    workload: Workload,
    masters: Tensors,
    gradients: Tensors,
    settings: OptimizerSettings,
    optimizer: torch.optim.Optimizer,
    scale: float | None,
) -> None:
    """One step with the gradients of all places; masters that several share get the sum.

    Args:
        scale: of the loss; None: 1.
    """
    for master in masters.values():
        master.grad = None
    for place, owner in workload.owner_of.items():
        if place in gradients:
            master, gradient = masters[owner], gradients[place].to(masters[owner].dtype)
            if scale is not None:
                gradient = gradient / scale
            if master.grad is None:
                master.grad = torch.empty_like(master).copy_(gradient)  # with its strides: fused AdamW goes by memory
            else:
                master.grad = master.grad + gradient
    if settings.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(masters.values(), settings.clip_norm)
    optimizer.step()


def try_step(
    workload: Workload,
    masters: Tensors,
    gradients: Tensors,
    settings: OptimizerSettings,
    optimizer: torch.optim.Optimizer,
    note: Callable[[Tensors, torch.optim.Optimizer], None],
) -> None:
    """Note what a step would make, and leave everything as it is."""
    before = deepcopy((masters, optimizer.state_dict()))
    update(workload, masters, gradients, settings, optimizer, None)
    note(masters, optimizer)
    optimizer.load_state_dict(before[1])
    for place, master in masters.items():
        master.copy_(before[0][place])


def halved(masters: Tensors, workload: Workload, first: Tensors, second: Tensors) -> Tensors:
    """Half of the sum of two gradients, in the type of the masters; 0 for one that is not there."""
    found: Tensors = {}
    for place in {**first, **second}:
        like = masters[workload.owner_of[place]]
        pair = [g[place].to(like.dtype) if place in g else torch.zeros_like(like) for g in (first, second)]
        found[place] = (pair[0] + pair[1]) / 2
    return found


@dataclass(frozen=True)
class Steps:
    """What follows the gradients of a step.

    Args:
        rates: of each group of the optimizer, by step.
        note: keeps the masters as the newest version.
        halves: what steps instead where some columns are stepped late.
        trials: whether every other step is a trial.
    """

    workload: Workload
    masters: Tensors
    settings: OptimizerSettings
    optimizer: torch.optim.Optimizer
    rates: Sequence[Callable[[int], float]]
    note: Callable[[Tensors, torch.optim.Optimizer], None]
    halves: LateRestReference | None
    trials: bool

    def take(self, step: int, made: Sequence[Tensors], scale: float | None, *, finite: bool) -> None:
        """Step, and note the version; gradients that are not finite change nothing.

        Args:
            made: the gradients of all steps up to this one.
        """
        if self.halves:
            self.halves.step(step, made[-1], scale, finite=finite)
            self.note(self.halves.seen, self.optimizer)
        elif finite and self.trials and step % 2 == 0:
            self._set_rates(step)
            try_step(self.workload, self.masters, made[-1], self.settings, self.optimizer, self.note)
        else:
            if finite:
                self._set_rates(step)
                gradients = halved(self.masters, self.workload, *made[-2:]) if self.trials else made[-1]
                update(self.workload, self.masters, gradients, self.settings, self.optimizer, scale)
            self.note(self.masters, self.optimizer)

    def _set_rates(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate(step)
