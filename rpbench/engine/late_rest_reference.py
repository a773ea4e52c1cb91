"""Late-rest reference: training whose important columns are stepped at once and the rest late, as one plain loop.

Two whole optimizers, one of the device and one of the host, each over all elements; after each step the elements that
are not its own are put back. Nothing is packed, cut or sent. When what is stepped is counted here once more, and not
taken from the schedule.
"""

from collections.abc import Callable

import torch

from rpbench.engine.state.gradient_sums.gradients import Place, Tensors
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload
from rpbench.ir.policy import LateRest

StateOf = dict[Place, dict[str, torch.Tensor]]


class LateRestReference:
    """Masters, and what devices see of them, through the steps of a run.

    Args:
        masters: changed in place; important elements too, where the host's own would be stale.
        rate: step, from 0 -> its learning rate.

    Attributes:
        seen: the weights that the next forward reads, in the masters' types.
    """

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
        self.seen = _copy(masters)
        self.types = {place: workload.parameter(place).dtype for place in masters}
        self.host = settings.make(list(masters.values()))
        self.device, self.on_device = self.host, masters  # until columns are chosen
        self.masks: Tensors = {}
        self.sums: Tensors = {}
        self.made: Tensors | None = None  # by the host, and not taken in yet

    def step(self, step: int, raw: Tensors, scale: float | None, *, finite: bool = True) -> None:
        """One step, from 0, with the gradients as they were made; one that is not finite changes nothing."""
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
        for place, gradient in gradients.items():
            self.sums[place] = self.sums[place] + gradient if place in self.sums else gradient
        ends = step + 1 == self.num_steps
        if (behind + 1) % self.rule.update_interval == 0 or ends:
            chooses = self.rule.select_interval and (behind + 1) % self.rule.select_interval == 0
            self._boundary(step, waits=ends or bool(chooses and self.rule.topk < 1) or not self.rule.overlap)

    def _boundary(self, step: int, *, waits: bool) -> None:
        """The end of a window: what the host has made before comes, or what it makes now."""
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
        """Step the rest; what is important, and what the host knows of it, stays."""
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
            found = gradients.get(place)
            weight.grad = None if found is None else torch.empty_like(weight).copy_(found)
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        optimizer.step()
        for weight in weights.values():
            weight.grad = None

    def _plain(self, raw: Tensors, scale: float | None) -> Tensors:
        """Gradients in the masters' types, without the scale of the loss, clipped by their norm."""
        found = {place: gradient.to(self.masters[place].dtype) for place, gradient in raw.items()}
        if scale is not None:
            found = {place: gradient / scale for place, gradient in found.items()}
        if self.settings.clip_norm is None:
            return found
        for place, gradient in found.items():
            self.masters[place].grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(self.masters.values(), self.settings.clip_norm)
        clipped = {place: self.masters[place].grad for place in found}
        for master in self.masters.values():
            master.grad = None
        return {place: gradient for place, gradient in clipped.items() if gradient is not None}

    def _rounded(self) -> Tensors:
        """The masters as they come to devices: rounded to the type of the weights."""
        return {
            place: master.to(self.types[place]).to(master.dtype, copy=True) for place, master in self.masters.items()
        }


def _copy(tensors: Tensors) -> Tensors:
    return {place: tensor.clone() for place, tensor in tensors.items()}


def _known(optimizer: torch.optim.Optimizer, masters: Tensors) -> StateOf:
    """A copy of what an optimizer knows of each master."""
    return {
        place: {name: value.clone() for name, value in optimizer.state[master].items() if value is not None}
        for place, master in masters.items()
        if master in optimizer.state
    }
