"""Optimizer: AdamW, gradient descent with momentum, RMSprop or Adafactor, a stage at a time; and its direction.

A stage's step needs that stage's gradients alone, with two exceptions: clipping by the norm of all gradients, and
parameters that several stages share, whose gradients are added in model order. The first step to a version does both;
`step_groups` says which gradients it waits for.

Each replica of a shared stage steps its own part (`rpbench.engine.state.ownership`): the elements of a shard, with
moments for no others, or a whole copy. One STEP stands for all replicas. The norm, and the sum of a shared parameter's
gradients, are taken of whole gradients in the order of plain training; a system on several machines would add up one
number of each. Neither counts as moved bytes.

A trial (`rpbench.ir.policy`) is a step like any other; after its weights are published, `end_trial` restores masters
and moments. The step after it takes the mean of both gradients.

A speculative step (`rpbench.ir.checks.check`) looks at its own gradient alone. `validate` then looks at all gradients,
and `settle` ends the step: after an overflow or too large a norm it restores masters, moments and count from a copy,
and in the second case steps again. So every bit is that of steps that wait.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from rpbench.engine.host_order import ReportedLock
from rpbench.engine.layout import Layout
from rpbench.engine.peers import at, finish, here
from rpbench.engine.program import StepGroups
from rpbench.engine.state.checkpoint import Moments
from rpbench.engine.state.gradients import Gradients, Place, Tensors, mean_of
from rpbench.engine.state.loss_scale import LossScaler, LossScaling
from rpbench.engine.state.ownership import Part, Sharing, join, make_parts, moments_of, resume
from rpbench.engine.state.updates.compensation import SpikeCompensatedSGD
from rpbench.engine.state.weights import PlaceOf
from rpbench.engine.workload import Workload
from rpbench.ir.policy import Policy, is_trial, update_of, versions_averaged


def direction(optimizer: torch.optim.Optimizer, weight: torch.Tensor, *, with_decay: bool) -> torch.Tensor | None:
    """The decrease of a weight by a step of learning rate 1 with gradients unchanged; None before the first step.

    AdamW: the bias-corrected mean gradient over the root of the mean square, with weight decay on request. SGD: the
    momentum, None without one; with spike compensation the direction of the last step.

    Source: PipeOptim (arXiv 2312.00839), section 3; XPipe (arXiv 1911.04610), section 3.2, for Adam.
    """
    state, group = optimizer.state.get(weight, {}), optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD):
        return state.get("direction", state.get("momentum_buffer"))
    if not state:
        return None
    assert isinstance(optimizer, torch.optim.AdamW), "checked when the run is asked for"
    (beta1, beta2), step = group["betas"], float(state["step"])
    mean = state["exp_avg"] / (1 - beta1**step)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt()
    found = mean / (root + group["eps"])
    return found + group["weight_decay"] * weight.detach() if with_decay else found


class KeptState:
    """A copy of a part's masters, moments and count, to restore them.

    A copy restores every bit. Undoing the arithmetic of a step (an inverse Adam) needs no copy and restores nearly the
    same values; `tests/engine/test_speculation.py` has the difference.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._masters = {place: master.clone() for place, master in part.masters.items()}
        self._state = {
            place: {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in part.optimizer.state[master].items()
            }
            for place, master in part.masters.items()
            if master in part.optimizer.state
        }

    def give_back(self) -> None:
        """Restore the copy; masters that had no optimizer state have none again."""
        optimizer = self._part.optimizer
        for place, master in self._part.masters.items():
            with torch.no_grad():
                master.copy_(self._masters[place])
            optimizer.state.pop(master, None)
            if place in self._state:
                optimizer.state[master] = self._state[place]


_MOMENTS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "rmsprop": ("step", "square_avg"), "adafactor": ("step",)}
OPTIMIZERS = (*_MOMENTS, "sgd")


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer with a linear warm-up.

    AdamW: Loshchilov and Hutter, ICLR'19. RMSprop: Tieleman and Hinton, lecture 6.5, 2012. Adafactor: Shazeer and
    Stern, ICML'18; its steps need a whole matrix, of whose squares it keeps the means of rows and columns.
    """

    learning_rate: float = 1e-3  # after the warm-up
    weight_decay: float = 0.01
    num_warmup_steps: int = 0  # step v of the first ones takes v / (num_warmup_steps + 1) of the learning rate
    clip_norm: float | None = None  # gradients are scaled down to this Euclidean norm over all parameters; None: never
    loss_scaling: LossScaling | None = None  # for gradients in float16; None: losses are as they are
    name: str = "adamw"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.name!r}: one of {', '.join(OPTIMIZERS)}")
        if not 0 <= self.momentum < 1 or (self.momentum and self.name != "sgd"):
            raise ValueError(f"momentum={self.momentum}: from 0 to below 1, and of optimizer=sgd alone")
        if not self.learning_rate >= 0:
            raise ValueError(f"learning_rate={self.learning_rate}: a learning rate is not negative; try 1e-3")
        if self.num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps={self.num_warmup_steps}: a number of steps, 0 for no warm-up")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: a norm is above 0; leave it out not to clip")

    def rate(self, version: int) -> float:
        """The learning rate of the step that makes `version`, which counts from 1."""
        return self.learning_rate * min(1.0, version / (self.num_warmup_steps + 1))

    @property
    def moments(self) -> tuple[str, ...]:
        """The optimizer state of every parameter that has been updated; Adafactor has more, by its shape."""
        return ("momentum_buffer",) * (self.momentum > 0) if self.name == "sgd" else _MOMENTS[self.name]

    def state_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a parameter's master and moments in 32 bits."""
        num = prod(shape)
        if self.name == "adafactor":
            return 4 * (num + (num if len(shape) < 2 else num // shape[-1] + num // shape[-2]))
        return 4 * num * (1 + len(set(self.moments) - {"step"}))

    def make(
        self, parameters: Iterable[torch.Tensor] | list[dict[str, Any]], delays: Sequence[float] | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer of some masters, or groups of them, whose learning rate is set at every step; it compensates
        spikes where `delays` has the steps that the gradients of every group are late.
        """
        if delays is not None:
            return SpikeCompensatedSGD(parameters, delays, self.momentum, self.weight_decay)
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=1.0, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.name in ("rmsprop", "adafactor"):
            made = torch.optim.RMSprop if self.name == "rmsprop" else torch.optim.Adafactor
            return made(parameters, lr=1.0, weight_decay=self.weight_decay)
        return torch.optim.AdamW(parameters, lr=1.0, weight_decay=self.weight_decay, fused=True)


def step_groups(
    workload: Workload, layout: Layout, settings: OptimizerSettings, *, validated: bool = False
) -> StepGroups:
    """Backward stages whose steps need one another's gradients; if `validated`, VALIDATE looks at all."""
    looks = settings.clip_norm is not None or settings.loss_scaling is not None
    if looks and not validated:
        return [range(len(layout.backward))] if len(layout.backward) > 1 else []
    # One step does what all of them share, so that it waits for the gradients of every stage that shares anything.
    group = sorted({layout.stage_of(module) for places in workload.tied.values() for module, _ in places})
    return [group] if len(group) > 1 else []


def laid_out_as(master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with its master's strides: torch's fused AdamW pairs values by where they lie in memory."""
    return gradient if gradient.stride() == master.stride() else torch.empty_like(master).copy_(gradient)


class Outcome(NamedTuple):
    """The known outcome of a step: whether it `lasts` whatever other gradients are, and the factor on its gradients."""

    lasts: bool
    skipped: bool = False
    clipping: torch.Tensor | None = None


Pace = Callable[[int, int], float]  # (stage, version) -> factor on the learning rate of the step to that version


class HostOptimizer:
    """Masters and their optimizer state, one optimizer a stage and owner."""

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        masters: Tensors,
        gradients: Gradients,
        settings: OptimizerSettings,
        pace: Pace = lambda stage, version: 1.0,
        # has the scales of gradients; the step to a version has that of version `read_by(version)`
        scaler: LossScaler | None = None,
        read_by: Callable[[int], int] = lambda version: version - 1,
        moments: Mapping[Place, Mapping[str, torch.Tensor]] | None = None,
        sharing: Mapping[int, Sharing] | None = None,
        # by stage, the steps that gradients are late, where steps compensate spikes
        spike_delays: Sequence[float] | None = None,
        policy: Policy = Policy.FLUSH,  # says which steps are trials
        goes_ahead: Collection[tuple[int, int]] = (),  # (stage, version) that are stepped before they are validated
        # where owners keep their masters; the whole masters of shards then have no values
        place_of: PlaceOf | None = None,
    ) -> None:
        self._masters, self._pace, self._place_of = masters, pace, place_of
        self._scaler, self._read_by = scaler, read_by
        self._workload, self._layout = workload, layout
        self._gradients, self._settings = gradients, settings
        self._tied = tuple(workload.tied)
        self._places: dict[int, list[Place]] = {stage: [] for stage in range(len(layout.backward))}
        for owner in (owner for owner in masters if owner not in workload.tied):
            self._places[layout.stage_of(owner[0])].append(owner)
        self._sharing_of, self._spike_delays = sharing or {}, spike_delays
        self._parts = {stage: self._cut(stage, places) for stage, places in self._places.items() if places}
        tied: dict[int, list[Place]] = {}
        for owner in self._tied:
            tied.setdefault(layout.stage_of(owner[0]), []).append(owner)
        self._shared_parts = [part for stage in sorted(tied) for part in self._cut(stage, tied[stage])]
        for part in self._all_parts() if place_of else ():
            self._masters |= {place: self._masters[place].to("meta") for place, _, _ in part.pieces or ()}
        self._shared_version = 0
        self._first_step = workload.first_step
        resume(self._all_parts(), moments or {})
        tied_modules = (module for owner in self._tied for module, _ in workload.tied[owner])
        self._tied_stages = {layout.stage_of(module) for module in tied_modules}
        self._looks = settings.clip_norm is not None or scaler is not None  # a step depends on all gradients
        self._looked_at = 0  # the version of the last step whose gradients are known
        self._skipped: set[int] = set()
        self._clipping: dict[int, torch.Tensor] = {}
        self.gradient_norms: dict[int, torch.Tensor] = {}  # version -> norm before clipping; empty without clipping
        self._policy, self._goes_ahead = policy, goes_ahead
        self._kept: dict[int, KeptState] = {}  # by identity of the part: its state before a step that may not last
        self._to_publish: set[int] = set()  # stages that have not published a trial's shared parameters yet
        self._lock = ReportedLock()

    def step(self, stage: int, version: int) -> None:
        """Update the masters of a stage from the gradients of the step to `version`."""
        goes_ahead = (stage, version) in self._goes_ahead
        if stage in self._tied_stages or (self._looks and not goes_ahead):
            with self._lock:
                if not goes_ahead:
                    self._look(version)
                self._step_tied(version)
        outcome = self._outcome(version)
        for part in self._parts.get(stage, ()):
            with at(part.place):
                self._take(part, self._mean(stage, version, part.owner), version, outcome, self._pace(stage, version))
        if not goes_ahead and not is_trial(self._policy, version):  # whose gradient the next step takes as well
            self._drop(stage, version)

    def validate(self, version: int) -> None:
        """Check all gradients of the step to `version`, and end the step of shared parameters."""
        with self._lock:
            self._look(version)
            tied = {} if self._leaves_alone(version) else self._tied_gradients(version)
            for part in self._shared_parts:
                self._settle(part, part.own(tied), version)

    def settle(self, stage: int, version: int) -> bool:
        """End a speculative step; True if it was wrong, so that its weights have changed."""
        wrong = not self._leaves_alone(version)
        for part in self._parts.get(stage, ()):
            self._settle(part, self._mean(stage, version, part.owner) if wrong else {}, version)
        self._drop(stage, version)
        return wrong

    def end_trial(self, stage: int) -> None:
        """Restore masters, moments and count from before a trial; shared ones once all have published."""
        self._give_back(self._parts.get(stage, ()))
        if stage in self._tied_stages:
            with self._lock:
                self._to_publish.discard(stage)
                if not self._to_publish:
                    self._give_back(self._shared_parts)

    def values(self, modules: Collection[int], replica: int | None = None) -> Tensors:
        """Masters of some modules by place; with `replica`, its own: flat pieces where shards are on accelerators."""
        masters = dict(self._masters)
        for part in self._all_parts() if replica is not None else ():
            if part.owner == replica and (part.pieces is None or self._place_of):
                masters |= part.masters
        return {place: masters[owner] for place, owner in self._workload.owner_of.items() if place[0] in modules}

    @property
    def masters(self) -> Tensors:
        """The whole masters; joined on the host where owners keep shards on their own accelerators."""
        shards = [
            {place: master.cpu() for place, master in part.masters.items()}
            for part in self._all_parts()
            if part.pieces is not None and self._place_of
        ]
        apart = {place: self._masters[place].shape for shard in shards for place in shard}
        return self._masters | join(shards, apart)

    @property
    def seen(self) -> Tensors:
        """The masters of the weights that the newest version has."""
        return self.masters

    def moments(self) -> Moments:
        """The optimizer's state of every master that has been updated."""
        return moments_of(self._all_parts(), self._masters)

    def _give_back(self, parts: Iterable[Part]) -> None:
        for part in parts:
            kept = self._kept.pop(id(part), None)
            if kept is not None:
                with at(part.place):
                    kept.give_back()

    def _mean(self, stage: int, version: int, owner: int | None = None) -> Tensors:
        """The gradient that a stage is stepped with, or an owner's part of it."""
        found = [
            self._gradients.total(stage, used) if owner is None else self._gradients.shard(stage, used, owner)
            for used in versions_averaged(self._policy, version)
        ]
        return found[0] if len(found) == 1 else mean_of(found)

    def _all_parts(self) -> Iterator[Part]:
        for parts in self._parts.values():
            yield from parts
        yield from self._shared_parts

    def _cut(self, stage: int, places: list[Place]) -> list[Part]:
        masters, sharing = {place: self._masters[place] for place in places}, self._sharing_of.get(stage)
        if self._settings.name == "adafactor" and sharing is not None and sharing.scatters:
            raise ValueError(
                "optimizer=adafactor steps whole matrices, and replicas share them here; use optimizer=adamw"
            )
        recut = any(place in self._tied for place in places)

        def make(own: list[torch.Tensor]) -> torch.optim.Optimizer:
            return self._settings.make(own, None if self._spike_delays is None else [self._spike_delays[stage]])

        return make_parts(masters, sharing, make, recut=recut, place_of=self._place_of)

    def ahead(self, stage: int, version: int, horizon: int, *, with_decay: bool) -> Tensors:
        """A stage's masters after `horizon` more steps like the one to `version`; as they are before the first."""
        if stage not in self._parts:
            return {}
        (part,) = self._parts[stage]  # weights of replicas are never predicted
        optimizer, scale = part.optimizer, horizon * self._settings.rate(self._first_step + max(1, version))
        return {
            place: master if found is None else master - scale * found
            for place, master in ((place, self.masters[place]) for place in self._places[stage])
            for found in [direction(optimizer, master, with_decay=with_decay)]
        }

    def _step_tied(self, version: int) -> None:
        """Step the parameters that several stages share, once a version."""
        if self._shared_version >= version:
            return
        self._shared_version = version
        tied, outcome = self._tied_gradients(version), self._outcome(version)
        self._to_publish = set(self._tied_stages)
        for part in self._shared_parts:
            with at(part.place):
                self._take(part, part.own(tied), version, outcome)
                finish(part.place)

    def _take(self, part: Part, gradients: Tensors, version: int, outcome: Outcome, pace: float = 1.0) -> None:
        """Step a part; keep a copy of a trial or speculative step, to restore it."""
        if outcome.skipped:
            return
        if not outcome.lasts or is_trial(self._policy, version):
            self._kept[id(part)] = KeptState(part)
        self._apply(part, self._plain_of(gradients, part.masters, version, outcome), version, pace)

    def _settle(self, part: Part, gradients: Tensors, version: int) -> None:
        kept = self._kept.pop(id(part), None)
        if kept is None or self._leaves_alone(version):
            return
        kept.give_back()
        outcome = self._outcome(version)
        if not outcome.skipped:
            self._apply(part, self._plain_of(gradients, part.masters, version, outcome), version)

    def _drop(self, stage: int, version: int) -> None:
        for used in versions_averaged(self._policy, version):
            self._gradients.drop(stage, used)

    def _look(self, version: int) -> None:
        """Find the outcome of the step to a version, unless it is known. All of its gradients must be there."""
        if self._looked_at >= version or not self._looks:
            return
        gradients = (gradient for stage in self._places for gradient in self._mean(stage, version).values())
        if self._scaler is not None and not self._scaler.advance(version, self._read_by(version), gradients):
            self._skipped = {version}
        elif self._settings.clip_norm is not None:
            norm = self.gradient_norms[version] = self._norm(version)
            self._clipping = {version: (self._settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)}
        self._looked_at = version

    def _norm(self, version: int) -> torch.Tensor:
        """The norm of all gradients, on the host; each gradient's own norm is taken on its device."""
        gradients, norms = self._in_model_order(version), dict[Place, torch.Tensor]()
        for place in dict.fromkeys(gradient.device for gradient in gradients.values()):
            own = [owner for owner, gradient in gradients.items() if gradient.device == place]
            with at(place):
                found = [torch.linalg.vector_norm(self._plain(owner, gradients[owner], version)) for owner in own]
                norms |= zip(own, torch.stack(found).cpu(), strict=True)
        return torch.linalg.vector_norm(torch.stack([norms[owner] for owner in gradients]))

    def _outcome(self, version: int) -> Outcome:
        if not self._looks:
            return Outcome(lasts=True)
        if self._looked_at < version:
            return Outcome(lasts=False)
        return Outcome(True, version in self._skipped, self._clipping.get(version))

    def _leaves_alone(self, version: int) -> bool:
        """Whether looking at the gradients changes nothing: the step is neither skipped nor clipped."""
        _, skipped, clipping = self._outcome(version)
        return not skipped and (clipping is None or bool(clipping >= 1))

    def _plain(self, owner: Place, gradient: torch.Tensor, version: int) -> torch.Tensor:
        """A gradient in its master's type, without the scale of its loss."""
        gradient = here(gradient).to(self._masters[owner].dtype)
        return gradient if self._scaler is None else gradient / self._scaler.of(self._read_by(version))

    def _tied_gradients(self, version: int) -> Tensors:
        sums: Tensors = {}
        for owner in self._tied:
            for module, name in self._workload.tied[owner]:
                gradient = self._mean(self._layout.stage_of(module), version).get((module, name))
                if gradient is None:
                    continue
                with at(self._masters[owner].device):
                    gradient = here(gradient).to(self._masters[owner].dtype)
                    sums[owner] = sums[owner] + gradient if owner in sums else gradient
        return sums

    def _in_model_order(self, version: int) -> Tensors:
        tied, means = self._tied_gradients(version), {stage: self._mean(stage, version) for stage in self._places}
        sources = {owner: tied if owner in tied else means[self._layout.stage_of(owner[0])] for owner in self._masters}
        return {owner: source[owner] for owner, source in sources.items() if owner in source}

    def _plain_of(self, gradients: Tensors, places: Iterable[Place], version: int, outcome: Outcome) -> Tensors:
        """The gradients of some places in their masters' types, without the scale of the loss, clipped."""
        found = {place: self._plain(place, gradients[place], version) for place in places if place in gradients}
        if outcome.clipping is None:
            return found
        return {place: gradient * outcome.clipping for place, gradient in found.items()}

    def _apply(self, part: Part, gradients: Tensors, version: int, pace: float = 1.0) -> None:
        """Step the masters of a part with gradients as they are."""
        for place, master in part.masters.items():
            gradient = gradients.get(place)
            master.grad = None if gradient is None else laid_out_as(master, gradient)
        for group in part.optimizer.param_groups:
            group["lr"] = self._settings.rate(update_of(self._policy, self._first_step + version)) * pace
        part.optimizer.step()
        for master in part.masters.values():
            master.grad = None
