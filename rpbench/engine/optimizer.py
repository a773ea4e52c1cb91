"""Optimizer: AdamW on the host, a stage at a time.

A stage's step needs the gradients of that stage alone, with two exceptions: the norm of all gradients for clipping,
and parameters that several stages share, whose gradients are added in model order. Both are done once per version,
by whichever step comes first; `step_groups` tells a program what those steps wait for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

import torch

from rpbench.engine.gradients import Gradients, Place, Tensors
from rpbench.engine.layout import Layout
from rpbench.engine.loss_scale import LossScaler, LossScaling
from rpbench.engine.program import StepGroups
from rpbench.engine.workload import Workload


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter, ICLR'19) with a linear warm-up.

    Args:
        learning_rate: after the warm-up.
        num_warmup_steps: step v of the first ones takes v / (num_warmup_steps + 1) of the learning rate.
        clip_norm: gradients are scaled down to this Euclidean norm over all parameters; None: never.
        loss_scaling: for gradients in float16; None: losses are as they are.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    num_warmup_steps: int = 0
    clip_norm: float | None = None
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        if not self.learning_rate >= 0:
            raise ValueError(f"learning_rate={self.learning_rate}: a learning rate is not negative; try 1e-3")
        if self.num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps={self.num_warmup_steps}: a number of steps, 0 for no warm-up")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: a norm is above 0; leave it out not to clip")

    def rate(self, version: int) -> float:
        """The learning rate of the step that makes `version`, which counts from 1."""
        return self.learning_rate * min(1.0, version / (self.num_warmup_steps + 1))


def step_groups(workload: Workload, layout: Layout, settings: OptimizerSettings) -> StepGroups:
    """Backward stages whose steps need one another's gradients."""
    if settings.clip_norm is not None or settings.loss_scaling is not None:
        return [range(len(layout.backward))] if len(layout.backward) > 1 else []
    stages = (sorted({layout.stage_of(module) for module, _ in places}) for places in workload.tied.values())
    return [group for group in stages if len(group) > 1]


class HostOptimizer:
    """Masters and their AdamW state, one optimizer a stage."""

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        masters: Tensors,
        gradients: Gradients,
        settings: OptimizerSettings,
        scaler: LossScaler | None = None,
        read_by: Callable[[int], int] = lambda version: version - 1,
        moments: Mapping[Place, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """`scaler` has the scales of gradients; the step to a version has those of version `read_by(version)`."""
        self.masters = masters
        self._scaler, self._read_by = scaler, read_by
        self._workload, self._layout = workload, layout
        self._gradients, self._settings = gradients, settings
        self._tied = tuple(workload.tied)
        own = (owner for owner in masters if owner not in workload.tied)
        self._places: dict[int, list[Place]] = {stage: [] for stage in range(len(layout.backward))}
        for owner in own:
            self._places[layout.stage_of(owner[0])].append(owner)
        self._adamw = {stage: self._make(places) for stage, places in self._places.items() if places}
        self._shared_adamw = self._make(self._tied) if self._tied else None
        self._shared_version = 0
        self._first_step = workload.first_step
        for place, state in (moments or {}).items():
            self._of(place).state[masters[place]] = {name: value.clone() for name, value in state.items()}
        tied_modules = (module for owner in self._tied for module, _ in workload.tied[owner])
        self._sharing = {layout.stage_of(module) for module in tied_modules}  # stages whose steps share something
        if settings.clip_norm is not None or scaler is not None:
            self._sharing.update(self._places)
        self._clipping: dict[int, torch.Tensor] = {}
        self._skipped: set[int] = set()
        self._lock = Lock()

    def step(self, stage: int, version: int) -> None:
        """Update the masters of a stage from the gradients of the step to `version`."""
        if stage in self._sharing:
            with self._lock:
                self._step_shared(version)
        if stage in self._adamw and version not in self._skipped:
            gradients = self._gradients.total(stage, version)
            self._update(self._adamw[stage], self._places[stage], gradients, version)
        self._gradients.drop(stage, version)

    def values(self, modules: range) -> Tensors:
        """The masters of all trainable parameters of some modules, by their own places."""
        return {place: self.masters[owner] for place, owner in self._workload.owner_of.items() if place[0] in modules}

    def moments(self) -> dict[Place, dict[str, torch.Tensor]]:
        """AdamW's state of every master that has been updated."""
        states = {place: self._of(place).state.get(master) for place, master in self.masters.items()}
        return {place: dict(state) for place, state in states.items() if state}

    def _of(self, owner: Place) -> torch.optim.AdamW:
        shared = self._shared_adamw if owner in self._tied else None
        return shared or self._adamw[self._layout.stage_of(owner[0])]

    def _make(self, places: tuple[Place, ...] | list[Place]) -> torch.optim.AdamW:
        tensors = [self.masters[place] for place in places]
        return torch.optim.AdamW(tensors, lr=0.0, weight_decay=self._settings.weight_decay, fused=True)

    def _step_shared(self, version: int) -> None:
        """What steps to this version have in common, unless an earlier one has done it."""
        if self._shared_version >= version:
            return
        self._shared_version = version
        if self._scaler is not None and not self._scaler.advance(version, self._read_by(version), self._all(version)):
            self._skipped = {version}
            return
        tied = self._tied_gradients(version)
        if self._settings.clip_norm is not None:
            self._clipping = {version: self._clip_scale(version, tied, self._settings.clip_norm)}
        if self._shared_adamw is not None:
            self._update(self._shared_adamw, self._tied, tied, version)

    def _all(self, version: int) -> Iterator[torch.Tensor]:
        for stage in self._places:
            yield from self._gradients.total(stage, version).values()

    def _plain(self, owner: Place, gradient: torch.Tensor, version: int) -> torch.Tensor:
        """A gradient in its master's type, without the scale of its loss."""
        gradient = gradient.to(self.masters[owner].dtype)
        return gradient if self._scaler is None else gradient / self._scaler.of(self._read_by(version))

    def _tied_gradients(self, version: int) -> Tensors:
        sums: Tensors = {}
        for owner in self._tied:
            for module, name in self._workload.tied[owner]:
                gradient = self._gradients.total(self._layout.stage_of(module), version).get((module, name))
                if gradient is not None:
                    gradient = gradient.to(self.masters[owner].dtype)
                    sums[owner] = sums[owner] + gradient if owner in sums else gradient
        return sums

    def _clip_scale(self, version: int, tied: Tensors, clip_norm: float) -> torch.Tensor:
        """The factor that brings the norm of all gradients down to `clip_norm`, in model order."""
        found = []
        for owner in self.masters:
            source = tied if owner in tied else self._gradients.total(self._layout.stage_of(owner[0]), version)
            if owner in source:
                found.append(self._plain(owner, source[owner], version))
        norm = torch.nn.utils.get_total_norm(found)
        return (clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def _update(
        self,
        adamw: torch.optim.AdamW,
        places: tuple[Place, ...] | list[Place],
        gradients: Mapping[Place, torch.Tensor],
        version: int,
    ) -> None:
        for place in places:
            master, gradient = self.masters[place], gradients.get(place)
            if gradient is not None:
                gradient = self._plain(place, gradient, version)
                if version in self._clipping:
                    gradient = gradient * self._clipping[version]
            master.grad = gradient
        for group in adamw.param_groups:
            group["lr"] = self._settings.rate(self._first_step + version)
        adamw.step()
        for place in places:
            self.masters[place].grad = None
