"""Steps of the reference: gradients summed in the order of groups, plain updates, trials, and late gradients.

The papers' rules for late gradients are implemented here independently of the engine's
(`rpbench.engine.state.updates.compensation`), so that verification shows a wrong constant in either place. Only the
user's choices (K, D, synchronous steps, predictor) are shared. How late a gradient is follows from the versions that
the lanes read.

    T1   alpha_k = alpha tau^-p_k       p_k = 1 - min(k / K, 1)       k from the first step that is not flushed
    T2   delta <- gamma delta + (1 - gamma) (w_new - w_old)           gamma = D^(1 / tau)
         backward on w - (tau_forward - tau_backward) delta

T1 of the paper makes a stage that is less than a step late faster; no stage is here, nor in the engine.

Where important columns are stepped at once and the rest late, two whole optimizers, the device's and the host's, step
all elements; after each step the elements of the other one are restored. Nothing is packed, cut or sent. The steps at
which columns are stepped are computed here again, not taken from the schedule.

Sources: Yang et al., "PipeMare", MLSys'21 (arXiv 1910.05124), section 3; the horizons of Guan et al., PipeOptim (arXiv
2312.00839) and XPipe (arXiv 1911.04610), and of Chen et al., SpecTrain (arXiv 1809.02839).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch

from rpbench.engine.state.accumulation import Groups
from rpbench.engine.state.checkpoint import Moments
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload
from rpbench.ir.policy import LateRest


class Lateness:
    """How many steps late the gradients of a module are: the step they belong to less the version forward read."""

    def __init__(self, read: Callable[[int, int], int], num_microbatches: int, num_steps: int) -> None:
        self._read, self._window = read, num_microbatches
        self._last = range((num_steps - 1) * num_microbatches, num_steps * num_microbatches)
        self.tau = cache(self._tau)

    def steps(self, module: int, microbatch: int) -> int:
        """How many steps late the gradient of a microbatch is."""
        return microbatch // self._window - self._read(module, microbatch)

    def of_step(self, module: int, microbatch: int) -> int:
        """The same of the first microbatch of its step."""
        return self.steps(module, microbatch - microbatch % self._window)

    def _tau(self, module: int) -> float:
        """The mean over the last step, by when the pipeline is full."""
        return sum(self.steps(module, microbatch) for microbatch in self._last) / len(self._last)


def rate_factor(tau: float, step: int, num_steps_to_full: int, num_sync_steps: int) -> float:
    """T1: the factor on the learning rate at a step, from 0.

    K is `num_steps_to_full` (0: no rescheduling); k counts from the end of `num_sync_steps`.
    """
    k = step - num_sync_steps
    if num_steps_to_full == 0 or k < 0 or tau <= 1:
        return 1.0
    p = 1.0 - min(k / num_steps_to_full, 1.0)
    return float(tau**-p)


def mean_move(mean: torch.Tensor, old: torch.Tensor, new: torch.Tensor, tau: float, decay: float) -> torch.Tensor:
    """T2: delta with the newest move; the newest move alone for a stage that is not late."""
    gamma = decay ** (1.0 / tau) if tau > 0 else 0.0
    return gamma * mean + (1 - gamma) * (new - old)


def corrected(weight: torch.Tensor, steps_apart: int, mean: torch.Tensor) -> torch.Tensor:
    """T2: an estimate of the weight `steps_apart` steps ago."""
    return weight - steps_apart * mean


def horizons(predictor: str, stage: int, late: int) -> tuple[int, int]:
    """Steps that forward and backward look ahead, if the gradient of the step's first microbatch is `late` steps late.

    All microbatches of a step look ahead to the step that adds that gradient. SpecTrain looks floor(k / 2) steps
    further on stage k, both ways: to when the microbatch is back at the first stage.
    """
    if not predictor:
        return 0, 0
    further = stage // 2 if predictor == "spectrain" else 0
    return late + further, further


def give_gradients(
    workload: Workload, masters: Tensors, gradients: Tensors, scale: float | None, clip_norm: float | None
) -> None:
    """Give every master its gradient, divided by the loss scale and clipped; those that several share get the sum."""
    for master in masters.values():
        master.grad = None
    for place, owner in workload.owner_of.items():
        if place in gradients:
            master, gradient = masters[owner], gradients[place].to(masters[owner].dtype)
            if scale is not None:
                gradient = gradient / scale
            if master.grad is None:  # with the master's strides: fused AdamW goes by memory
                master.grad = torch.empty_like(master).copy_(gradient)
            else:
                master.grad = master.grad + gradient
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(masters.values(), clip_norm)


class LateRestReference:
    """The masters, and the weights that devices see (`seen`), step by step."""

    def __init__(
        self,
        workload: Workload,
        masters: Tensors,
        settings: OptimizerSettings,
        rule: LateRest,
        num_steps: int,
        rate: Callable[[int], float],
    ) -> None:
        self.masters, self.settings, self.rule, self.num_steps, self.rate = masters, settings, rule, num_steps, rate
        self.workload, self.seen = workload, _copy(masters)
        self.types = {place: workload.parameter(place).dtype for place in masters}
        self.host = settings.make(list(masters.values()))
        self.device, self.on_device = self.host, masters  # until columns are chosen
        self.masks: Tensors = {}
        self.sums: Tensors = {}
        self.made: Tensors | None = None  # by the host, and not taken in yet

    def step(self, step: int, raw: Tensors, scale: float | None, *, finite: bool = True) -> None:
        """One step, from 0, with unprocessed gradients; one that is not finite changes nothing."""
        gradients = self._plain(raw, scale) if finite else {}
        if step < self.rule.num_warmup_steps:
            self._apply(self.host, self.masters, gradients, step)
            self.seen = self._rounded()
            return
        behind = step - self.rule.num_warmup_steps
        again = self.rule.select_interval and self.rule.topk < 1 and behind % self.rule.select_interval == 0
        if behind == 0 or again:
            self._choose(raw, first=behind == 0)
        self._apply(self.device, self.on_device, gradients, step)
        for place, mask in self.masks.items():
            for whole in (self.masters, self.seen):
                whole[place] = whole[place].copy_(torch.where(mask, self.on_device[place], whole[place]))
        _add(self.sums, gradients)
        ends = step + 1 == self.num_steps
        if (behind + 1) % self.rule.update_interval == 0 or ends:
            chooses = self.rule.select_interval and (behind + 1) % self.rule.select_interval == 0
            self._boundary(step, waits=ends or bool(chooses and self.rule.topk < 1) or not self.rule.overlap)

    def _boundary(self, step: int, *, waits: bool) -> None:
        """The end of a window: devices take the host's former result, or wait for the new one."""
        before = self.made
        self._step_host(step)
        self.made = self._rounded()
        taken = self.made if waits else before
        if waits:
            self.made = None
        if taken is not None:
            for place, mask in self.masks.items():
                self.seen[place] = torch.where(mask, self.seen[place], taken[place])

    def _choose(self, raw: Tensors, *, first: bool) -> None:
        if not first:
            for place, master in self.masters.items():
                master.copy_(self.seen[place].to(self.types[place]))
        self.on_device = _copy(self.masters)
        self.device = self.settings.make(list(self.on_device.values()))
        self.masks = {place: self._important(raw.get(place), master) for place, master in self.masters.items()}

    def _important(self, gradient: torch.Tensor | None, master: torch.Tensor) -> torch.Tensor:
        topk = self.rule.topk
        if master.dim() == 1 or topk in (0, 1):
            return torch.full_like(master, topk > 0, dtype=torch.bool)
        columns = master.shape[-1]
        number = max(1, int(topk * columns + 1e-9))
        if gradient is None:
            sizes = torch.zeros(columns)
        else:
            sizes = gradient.to(master.dtype).abs().reshape(-1, columns).sum(0)
        order = sorted(range(columns), key=lambda column: (-float(sizes[column]), column))
        mask = torch.zeros_like(master, dtype=torch.bool)
        mask[..., order[:number]] = True
        return mask

    def _step_host(self, step: int) -> None:
        """Step the rest; important elements and their moments on the host stay."""
        before, known = _copy(self.masters), _known(self.host, self.masters)
        rest = {place: total for place, total in self.sums.items() if not bool(self.masks[place].all())}
        self._apply(self.host, self.masters, rest, step)
        self.sums = {}
        for place, mask in self.masks.items():
            self.masters[place].copy_(torch.where(mask, before[place], self.masters[place]))
            for name, value in self.host.state.get(self.masters[place], {}).items():
                if value is not None and value.dim():
                    old = known.get(place, {}).get(name)
                    value.copy_(torch.where(mask, torch.zeros_like(value) if old is None else old, value))

    def _apply(self, optimizer: torch.optim.Optimizer, weights: Tensors, gradients: Tensors, step: int) -> None:
        for place, weight in weights.items():
            weight.grad = gradients.get(place)
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        optimizer.step()

    def _plain(self, raw: Tensors, scale: float | None) -> Tensors:
        """Gradients in the masters' types, without the scale of the loss, clipped by their norm."""
        give_gradients(self.workload, self.masters, raw, scale, self.settings.clip_norm)
        return {place: master.grad for place, master in self.masters.items() if master.grad is not None}

    def _rounded(self) -> Tensors:
        """The masters as they come to devices: rounded to the type of the weights."""
        return {
            place: master.to(self.types[place]).to(master.dtype, copy=True) for place, master in self.masters.items()
        }


def _copy(tensors: Tensors) -> Tensors:
    return {place: tensor.clone() for place, tensor in tensors.items()}


def _known(optimizer: torch.optim.Optimizer, masters: Tensors) -> Moments:
    return {
        place: {name: value.clone() for name, value in optimizer.state[master].items() if value is not None}
        for place, master in masters.items()
        if master in optimizer.state
    }


class OrderedSum:
    """Adds gradients in the order of the groups, whatever order they come in; each replica's groups first."""

    def __init__(self, groups: Groups, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.groups = [list(group) for group in groups]
        self.waiting: dict[int, list[Tensors]] = {}
        self.sums: list[Tensors] = [{} for _ in groups]

    def offer(self, microbatch: int, gradients: Tensors) -> None:
        """Add the gradients of a microbatch to its group when its turn comes."""
        self.waiting.setdefault(microbatch, []).append(gradients)
        for group, total in zip(self.groups, self.sums, strict=True):
            while group and self.waiting.get(group[0]):
                _add(total, self.waiting[group.pop(0)].pop(0))

    def result(self) -> Tensors:
        """The sum over all groups; RuntimeError if they lack a microbatch of the step, or name another."""
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


@dataclass(frozen=True)
class Steps:
    """The weight updates of a run, step by step."""

    workload: Workload
    masters: Tensors
    settings: OptimizerSettings
    optimizer: torch.optim.Optimizer
    rates: Sequence[Callable[[int], float]]  # for each group of the optimizer, step -> learning rate
    note: Callable[[Tensors, torch.optim.Optimizer], None]  # keeps the masters as the newest version
    halves: LateRestReference | None  # steps instead where some columns are stepped late
    trials: bool  # whether every other step is a trial

    def take(self, step: int, made: Sequence[Tensors], scale: float | None, *, finite: bool) -> None:
        """Step with the last of the gradients `made` so far, if they are finite, and note the new version."""
        if self.halves:
            self.halves.step(step, made[-1], scale, finite=finite)
            self.note(self.halves.seen, self.optimizer)
        elif finite and self.trials and step % 2 == 0:
            before = deepcopy((self.masters, self.optimizer.state_dict()))
            self._update(step, made[-1], None)
            self.note(self.masters, self.optimizer)
            self.optimizer.load_state_dict(before[1])
            for place, master in self.masters.items():
                master.copy_(before[0][place])
        else:
            if finite:
                self._update(step, self._mean(*made[-2:]) if self.trials else made[-1], scale)
            self.note(self.masters, self.optimizer)

    def _update(self, step: int, gradients: Tensors, scale: float | None) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate(step)
        give_gradients(self.workload, self.masters, gradients, scale, self.settings.clip_norm)
        self.optimizer.step()

    def _mean(self, first: Tensors, second: Tensors) -> Tensors:
        """The mean of two gradients, in the type of the masters; 0 for one that is not there."""
        found: Tensors = {}
        for place in {**first, **second}:
            like = self.masters[self.workload.owner_of[place]]
            pair = [g[place].to(like.dtype) if place in g else torch.zeros_like(like) for g in (first, second)]
            found[place] = (pair[0] + pair[1]) / 2
        return found
