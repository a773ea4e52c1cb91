"""Selective optimizer: important columns are stepped at once, the rest late and for several steps together.

The device's half of the optimizer has moments of the important elements alone, packed. The host's half has moments of
all elements; those of important ones stay unchanged. Both halves share the masters, and each changes its own elements
only. Of the rest, devices see the values last sent to them, in the type of the weights. A step's gradient is split in
the same way: the device steps its part, the rest goes to the host.

An element is stepped at its position in a copy of its matrix: torch's fused AdamW rounds by position, so every element
has the bits of plain training on the same gradients.

Columns are those of the last dimension; a parameter of one dimension is important as a whole. Of equal columns the
first is taken.

Source: ZenFlow in DeepSpeed (runtime/zenflow), after a description of that code. The rounding of a fraction of the
columns (down, at least one) is ours.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from typing import Any

import torch

from rpbench.engine.host_order import ReportedLock
from rpbench.engine.state.checkpoint import Moments
from rpbench.engine.state.gradients import Move, Place, Tensors, Window
from rpbench.engine.state.ownership import Part, Pieces, take
from rpbench.engine.state.updates.optimizer import HostOptimizer, Outcome
from rpbench.ir.policy import LateRest, boundaries


def num_important(num_columns: int, topk: Fraction) -> int:
    return max(1, int(topk * num_columns)) if topk else 0


def important(gradient: torch.Tensor | None, like: torch.Tensor, topk: Fraction) -> torch.Tensor:
    """True where an element is important, in the parameter's shape: in the `topk` columns by its gradient; 0: nowhere.

    Without a gradient no microbatch used the parameter, and all columns are equal.
    """
    if like.dim() < 2 or not topk:
        return torch.full(like.shape, bool(topk), device=like.device)
    columns = like.shape[-1]
    sizes = torch.zeros(columns) if gradient is None else gradient.to(like.dtype).abs().reshape(-1, columns).sum(0)
    chosen = torch.argsort(sizes, descending=True, stable=True)[: num_important(columns, topk)]
    mask = torch.zeros(columns, dtype=torch.bool, device=like.device)
    mask[chosen] = True
    return mask.expand(like.shape).contiguous()


def none_of(tensors: Tensors) -> Tensors:
    return {place: torch.zeros(tensor.shape, dtype=torch.bool) for place, tensor in tensors.items()}


class SplitWindow(Window):
    """A gradient of which devices step the important elements and the host gets the rest."""

    def __init__(
        self,
        made: Window,  # the gradient on its devices
        owners: Mapping[int, Pieces],  # device -> the elements it owns; empty where one device has all
        device_of: Mapping[int, int],  # microbatch -> the device that runs it
        # makes the masks of the elements that devices step; called when the gradient is complete
        chosen: Callable[[], Tensors],
        *,
        goes_home: bool,  # whether the rest goes to the host
    ) -> None:
        self._made, self._owners, self._device_of, self._chosen = made, owners, device_of, chosen
        self._lock, self._waits_for = ReportedLock(), {"step"} | ({"store"} if goes_home else set())
        # owner -> its elements on the host that are not chosen, flat; owner None has all
        self.rest: dict[int | None, Tensors] = {}

    @property
    def is_complete(self) -> bool:
        return self._made.is_complete

    @property
    def total(self) -> Tensors:
        return self._made.total

    def shard(self, device: int) -> Tensors:
        return self._made.shard(device)

    def add(self, microbatch: int, gradients: Tensors) -> None:
        self._made.add(microbatch, gradients)

    def store(self, microbatches: Iterable[int], copy: Move) -> None:
        """Copy a device's part of the rest to the host."""
        if not self.is_complete:
            raise RuntimeError("a gradient is stored before it is complete: what is chosen follows from all of it")
        owner = self._device_of[next(iter(microbatches))] if self._owners else None
        made = self.total if owner is None else self.shard(owner)
        masks = self._chosen() if owner is None else take(self._chosen(), self._owners[owner])
        left = {place: value.reshape(-1)[~masks[place].reshape(-1)] for place, value in made.items()}
        self.rest[owner] = {place: copy(values) for place, values in left.items() if values.numel()}
        if self.is_stored:
            self._end("store")

    @property
    def is_stored(self) -> bool:
        """Whether the host has every owner's part of the rest."""
        return len(self.rest) == max(1, len(self._owners))

    def drop(self) -> None:
        """Free the total, once the rest is on the host."""
        self._end("step")

    def _end(self, what: str) -> None:
        with self._lock:
            self._waits_for.discard(what)
            if not self._waits_for:
                self._made.drop()


class SelectiveOptimizer(HostOptimizer):
    """The optimizer of a schedule with a late rest; `given` and `options` are those of `HostOptimizer`."""

    def __init__(self, *given: Any, rule: LateRest, num_steps: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._rule = rule
        self._end_of = {version: end for end in boundaries(rule, num_steps) for version in end.window}
        self._seen = {place: master.clone() for place, master in self.masters.items()}
        self._masks: dict[int, Tensors] = {}  # stage -> what is important of it
        self._chosen_by: dict[int, int] = {}  # stage -> the version whose gradient has chosen that
        self._on_devices: dict[int, Moments] = {}  # by identity of the part: moments, packed
        self._outcomes: dict[tuple[int, int], Outcome] = {}  # (stage, version) that the host has not added up yet
        self._sums: dict[tuple[int, int], dict[int | None, Tensors]] = {}  # (stage, boundary) -> owner -> rest
        # stage -> the last boundary and, by owner, the weights that the host has made there
        self._made: dict[int, tuple[int, dict[int | None, Tensors]]] = {}

    # --- what is important ---

    def chosen(self, stage: int, version: int) -> Tensors:
        """The masks of important elements in a stage's step to a version, by place; its gradient must be complete."""
        with self._lock:
            if version <= self._rule.num_warmup_steps:
                return none_of(self._of_stage(stage))
            if self._rule.chooses(version) and self._chosen_by.get(stage) != version:
                self._choose(stage, version)
            return self._masks[stage]

    def _choose(self, stage: int, version: int) -> None:
        """Choose columns; after the first choice, masters restart from the weights and device moments from 0."""
        if stage in self._masks:
            for place, master in self._of_stage(stage).items():
                master.copy_(self._rounded(place, self._seen[place]))
            for part in self._parts.get(stage, ()):
                self._on_devices.pop(id(part), None)
        made, topk = self._gradients.total(stage, version), 1 - self._rule.rest
        self._masks[stage] = {
            place: important(made.get(place), master, topk) for place, master in self._of_stage(stage).items()
        }
        self._chosen_by[stage] = version

    def _of_stage(self, stage: int) -> Tensors:
        return {place: self.masters[place] for place in self._places[stage]}

    def _rounded(self, place: Place, values: torch.Tensor) -> torch.Tensor:
        """Values in the type of the weights."""
        return values.to(self._workload.parameter(place).dtype)

    # --- the device's half ---

    def step(self, stage: int, version: int) -> None:
        if version <= self._rule.num_warmup_steps:
            super().step(stage, version)
            self._keep_made(stage, version)
            return
        with self._lock:
            self._look(version)
        outcome, masks = self._outcome(version), self.chosen(stage, version)
        for part in self._parts.get(stage, ()) if not outcome.skipped else ():
            made = self._mean(stage, version, part.owner)
            state = self._on_devices.setdefault(id(part), {})
            self._step_elements(part, self._plain_of(made, made, version, outcome), part.own(masks), state, version)
        for place, mask in masks.items():
            self._seen[place][mask] = self.masters[place][mask]
        with self._lock:
            self._outcomes[stage, version] = outcome
            self._add_up(stage, version - 1)
        self._drop(stage, version)

    # --- the host's half ---

    def step_rest(self, stage: int, version: int) -> None:
        """Step the unimportant elements with the gradients of the window that ends with a version."""
        with self._lock:
            self._add_up(stage, version)
            sums = self._sums.pop((stage, version), {})
        for part in self._parts.get(stage, ()):
            masks = {place: ~mask for place, mask in part.own(self._masks[stage]).items()}
            own = sums.get(part.owner, {})
            gradients = {place: _spread(own[place], masks[place]) for place in part.masters if place in own}
            kept = {place: part.optimizer.state[part.masters[place]] for place in gradients}
            state = {place: _packed(values, masks[place]) for place, values in kept.items() if values}
            self._step_elements(part, gradients, masks, state, version)
            for place, values in state.items():
                kept[place].update(_unpacked(values, masks[place], kept[place]))
        self._keep_made(stage, version)

    def _add_up(self, stage: int, last: int) -> None:
        """Add the stored gradients of the steps up to `last` to the host's sums, in order."""
        for version in sorted(v for other, v in self._outcomes if other == stage and v <= last):
            end = self._end_of.get(version)
            window = self._gradients.window(stage, version)
            assert isinstance(window, SplitWindow)
            if end is not None and not window.is_stored:
                return
            outcome = self._outcomes.pop((stage, version))
            if end is None or outcome.skipped:
                continue
            sums = self._sums.setdefault((stage, end.version), {})
            for owner, rest in window.rest.items():
                total = sums.setdefault(owner, {})
                for place, values in self._plain_of(rest, rest, version, outcome).items():
                    total[place] = total[place] + values if place in total else values
            window.rest = {}

    def _keep_made(self, stage: int, version: int) -> None:
        """Keep a copy of the host's weights of a stage, for devices to load at a later boundary."""
        made = {
            part.owner: {place: self._rounded(place, master).clone() for place, master in part.masters.items()}
            for part in self._parts.get(stage, ())
        }
        self._made[stage] = version, made

    def bring(self, stage: int, version: int, device: int, copy: Move) -> None:
        """Copy the host's weights of a device's elements into what devices see of a version."""
        origin, found = self._made[stage]
        assert origin == self._end_of[version].brings  # or an edge of the program is missing
        warm = version <= self._rule.num_warmup_steps
        masks = none_of(self._of_stage(stage)) if warm else self._masks[stage]
        for part in self._parts.get(stage, ()):
            if part.owner not in (None, device):
                continue
            seen, own = part.own(self._seen), part.own(masks)
            for place, made in found[part.owner].items():
                came, rest = copy(made), ~own[place]
                seen[place][rest] = came[rest].to(seen[place].dtype)

    # --- both halves ---

    @property
    def seen(self) -> Tensors:
        return self._seen

    def values(self, modules: Collection[int], replica: int | None = None) -> Tensors:
        """The weights that devices see: important columns of the masters, the others as last sent."""
        return {place: self._seen[place] for place in self._workload.owner_of if place[0] in modules}

    def _step_elements(self, part: Part, gradients: Tensors, masks: Tensors, state: Moments, version: int) -> None:
        """Step the elements of masks; `state`, their packed moments, changes in place."""
        masters = {place: part.masters[place] for place in gradients if bool(masks[place].any())}
        if not masters:
            return
        copies = {place: master.clone() for place, master in masters.items()}
        optimizer = self._settings.make(list(copies.values()))
        for place, own in copies.items():
            if place in state:
                optimizer.state[own] = _unpacked(state[place], masks[place], {})
        self._apply(Part(part.owner, copies, optimizer), gradients, version)
        for place, own in copies.items():
            masters[place][masks[place]] = own[masks[place]]
            state[place] = _packed(optimizer.state[own], masks[place])


def _spread(values: torch.Tensor, mask: torch.Tensor, around: torch.Tensor | None = None) -> torch.Tensor:
    """Packed values at their positions; elsewhere those of `around`, or 0."""
    found = torch.zeros(mask.shape, dtype=values.dtype, device=values.device) if around is None else around.clone()
    found[mask] = values
    return found


def _packed(state: Mapping[str, Any], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optimizer state of some elements; state without dimensions is copied."""
    return {name: value[mask] if value.dim() else value.clone() for name, value in state.items() if value is not None}


def _unpacked(
    state: Mapping[str, torch.Tensor], mask: torch.Tensor, around: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Packed optimizer state at its positions; elsewhere the values of `around`, or 0."""
    return {
        name: _spread(value, mask, around.get(name)) if value.dim() else value.clone() for name, value in state.items()
    }
