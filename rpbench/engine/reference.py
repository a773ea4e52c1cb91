"""Reference: the same training as one plain loop, to compare the engine's gradients and weights with.

One process, one graph per microbatch through the whole model, no stages, no recomputation, one optimizer over all
parameters. A sharded head runs in the same shards: sums of exponentials in parts have other last bits. Results depend
on two things of the schedule: the order in which gradients are added up, and the weight version that every microbatch
reads. Where backward reads other weights than forward, each piece that the engine recomputes has a graph of its own,
from the input that forward kept.

Where every other step is a trial (ACCO), g~ and g being the means over the two halves of an update:

    theta~ = Opt(theta, g~), and theta, its moments and its count as before      theta = Opt(theta, (g~ + g) / 2)

Where important columns are stepped at once and the rest late: `rpbench.engine.reference_steps`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.func import functional_call

from rpbench.engine.compute.randomness import drawing
from rpbench.engine.compute.stage import Grain, pieces, present
from rpbench.engine.layout import Layout
from rpbench.engine.reference_steps import (
    Lateness,
    LateRestReference,
    OrderedSum,
    Steps,
    corrected,
    horizons,
    mean_move,
    rate_factor,
)
from rpbench.engine.state.accumulation import Groups
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.state.loss_scale import Scale
from rpbench.engine.state.updates.compensation import Compensation
from rpbench.engine.state.updates.optimizer import OptimizerSettings, direction
from rpbench.engine.state.weights import masters_of
from rpbench.engine.workload import Workload
from rpbench.ir.checks.versions import lane_reads
from rpbench.ir.policy import LateRest
from rpbench.ir.schedule import Schedule
from rpbench.models.attention import KeysValues
from rpbench.models.shards import loss_over_shards
from rpbench.models.vocab_shards import Rows

ReadVersion = Callable[[int, int], int]  # (module, microbatch) -> version
WeightsOf = Callable[[int, int], Tensors]  # (module, microbatch) -> its weights, by place


class Reads(NamedTuple):
    """The weight versions that modules read for a microbatch, in forward and in backward."""

    forward: ReadVersion
    backward: ReadVersion
    grain: Grain = "stage"  # how much is recomputed at a time, where the two differ


def reads_of(schedule: Schedule, layout: Layout, grain: Grain = "stage") -> Reads:
    """The versions by each lane of a schedule alone; ScheduleError if one depends on the pace of other lanes."""
    found = lane_reads(schedule)
    stage_of = {module: stage for stage, modules in enumerate(layout.forward) for module in modules}

    def backward(module: int, microbatch: int) -> int:
        return found.backward[layout.stage_of(module), microbatch]

    def forward(module: int, microbatch: int) -> int:
        stage = stage_of.get(module)  # a fused stage has no forward of its own
        return backward(module, microbatch) if stage is None else found.forward[stage, microbatch]

    return Reads(forward, backward, grain)


@dataclass
class Trajectory:
    """The course of a training run."""

    losses: list[float] = field(default_factory=list)  # mean loss of every optimizer step
    # per step, the sum over its microbatches by place; not clipped, not summed over tied parameters
    gradients: list[Tensors] = field(default_factory=list)
    masters: Tensors = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)  # version -> loss scale, which `gradients` still have
    begun_with: list[Tensors] = field(default_factory=list)  # the masters before every step, with `keep_weights`


def train_reference(
    workload: Workload,
    layout: Layout,
    # (backward stage, version) -> microbatches in the order their gradients are added up
    groups: Mapping[tuple[int, int], Groups],
    settings: OptimizerSettings,
    *,
    num_steps: int = 1,
    num_parts: int = 1,  # segments that sequences are cut into; still one graph for all segments of a microbatch
    updates: bool = True,  # whether weights change after a step
    reads: Reads | None = None,  # the versions that modules read for a microbatch; None: the newest
    # how late gradients are compensated; how late they are follows from `reads`
    compensation: Compensation | None = None,
    start: State | None = None,  # the state to resume from; it has the versions below 0
    num_replicas: int = 1,  # replicas, each of which first adds up an equal part of the groups
    trials: bool = False,  # every other step, from the first on, is a trial; a step is then half of an update
    # the rule by which devices step some columns and the host the others; not with `start`
    late_rest: LateRest | None = None,
    keep_weights: bool = False,  # keep the masters before every step
) -> Trajectory:
    """Train for some steps."""
    masters = masters_of(workload, start)
    settled = compensation or Compensation()
    late = Lateness(reads.forward, workload.num_microbatches, num_steps) if reads and settled.is_needed else None
    optimizer, rates = _optimizer(layout, masters, settings, settled, late, workload.first_step, trials=trials)
    past = _Past(workload, layout, settings, settled, late)
    halves = late_rest and LateRestReference(workload, masters, settings, late_rest, num_steps, rates[0])
    if start is not None:  # the versions and the optimizer's state of a run before
        past.working = {-age: tensors for age, tensors in start.stale.items()}
        for owner, state in start.moments.items():
            optimizer.state[masters[owner]] = {name: value.clone() for name, value in state.items()}
    past.note(masters, optimizer)
    steps = Steps(workload, masters, settings, optimizer, rates, past.note, halves or None, trials)
    rule = settings.loss_scaling
    scales = {} if rule is None else {0: Scale(rule.initial)} | (start.scales if start else {})
    found = Trajectory(masters=masters)
    for step in range(num_steps):
        past.reads = reads or _newest(step if updates else 0)
        if keep_weights:
            found.begun_with.append({place: master.clone() for place, master in masters.items()})
        read = past.reads.backward(workload.chain[-1], step * workload.num_microbatches)
        scale = scales[read].value if rule else None
        losses, gradients = _gradients(past, groups, step, num_parts, scale, num_replicas)
        found.losses.append(losses)
        found.gradients.append(gradients)
        if updates:
            finite = rule is None or all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            if rule is not None:
                scales[step + 1] = rule.follow(scales[read], finite=finite)
            steps.take(step, found.gradients, scale, finite=finite)
    found.scales = {version: scale.value for version, scale in scales.items()}
    return found


def _newest(version: int) -> Reads:
    """Every module reads one version, in forward and in backward."""
    return Reads(lambda module, microbatch: version, lambda module, microbatch: version)


def _optimizer(
    layout: Layout,
    masters: Tensors,
    settings: OptimizerSettings,
    compensation: Compensation,
    late: Lateness | None,
    first_step: int,
    *,
    trials: bool = False,
) -> tuple[torch.optim.Optimizer, list[Callable[[int], float]]]:
    """One optimizer over all masters, with a learning rate for each stage."""
    stages = sorted({layout.stage_of(module) for module, _ in masters})
    groups = [[master for place, master in masters.items() if layout.stage_of(place[0]) == stage] for stage in stages]
    module_of = {layout.stage_of(module): module for module, _ in masters}
    taus = [late.tau(module_of[stage]) if late else 0.0 for stage in stages]
    spikes = taus if late and compensation.spike_compensation else None
    optimizer = settings.make([{"params": group} for group in groups], spikes)

    def rate(tau: float, step: int) -> float:
        update = (first_step + step) // (2 if trials else 1) + 1
        factor = rate_factor(tau, step, compensation.rescheduling_steps, compensation.num_sync_steps)
        return settings.rate(update) * factor

    return optimizer, [partial(rate, tau) for tau in taus]


@dataclass
class _Past:
    """All weight versions so far, and the weights of a microbatch made from them."""

    workload: Workload
    layout: Layout
    settings: OptimizerSettings
    compensation: Compensation
    late: Lateness | None
    working: dict[int, Tensors] = field(default_factory=dict)
    newest: int = -1
    masters: list[Tensors] = field(default_factory=list)
    directions: list[dict[Place, torch.Tensor | None]] = field(default_factory=list)
    moves: list[Tensors] = field(default_factory=list)
    reads: Reads = field(init=False)

    def note(self, masters: Tensors, optimizer: torch.optim.Optimizer) -> None:
        self.newest += 1
        self.working[self.newest] = {
            place: masters[owner].to(self.workload.parameter(place).dtype, copy=True)
            for place, owner in self.workload.owner_of.items()
        }
        if self.late is None:
            return
        self.masters.append({place: master.clone() for place, master in masters.items()})
        decays = self.compensation.predictor == "pipeoptim"
        found = {place: direction(optimizer, master, with_decay=decays) for place, master in masters.items()}
        # A momentum is written by the next step, so what it is now has to be copied.
        self.directions.append({place: None if way is None else way.clone() for place, way in found.items()})
        if self.compensation.correction_decay is not None:
            first = not self.moves
            self.moves.append({p: torch.zeros_like(w) if first else self._move(p) for p, w in masters.items()})

    def forward(self, module: int, microbatch: int) -> Tensors:
        version, horizon = self.reads.forward(module, microbatch), self._horizon(module, microbatch, 0)
        return self._ahead(module, version, horizon) if horizon else self.working[version]

    def backward(self, module: int, microbatch: int) -> Tensors:
        version, horizon = self.reads.backward(module, microbatch), self._horizon(module, microbatch, 1)
        if horizon:
            return self._ahead(module, version, horizon)
        drift = version - self.reads.forward(module, microbatch)
        if not self.moves or not drift:
            return self.working[version]
        masters, moves = self.masters[version], self.moves[version]
        own = (place for place in masters if place[0] == module)
        return self._cast({place: corrected(masters[place], drift, moves[place]) for place in own})

    def same_both_ways(self, microbatch: int) -> bool:
        modules = range(len(self.workload.modules))
        return not any(self._horizon(each, microbatch, way) for each in modules for way in (0, 1)) and not any(
            self.reads.forward(each, microbatch) != self.reads.backward(each, microbatch) for each in modules
        )

    def _move(self, place: Place) -> torch.Tensor:
        """The running mean of a weight's moves, with the newest."""
        assert self.late is not None
        assert self.compensation.correction_decay is not None
        old, new = (masters[place] for masters in self.masters[-2:])
        return mean_move(self.moves[-1][place], old, new, self.late.tau(place[0]), self.compensation.correction_decay)

    def _horizon(self, module: int, microbatch: int, way: int) -> int:
        if self.late is None:
            return 0
        steps = self.late.of_step(module, microbatch)
        return horizons(self.compensation.predictor, self.layout.stage_of(module), steps)[way]

    def _ahead(self, module: int, version: int, horizon: int) -> Tensors:
        scale, masters = horizon * self.settings.rate(max(1, version)), self.masters[version]
        moved = {}
        for place in (place for place in masters if place[0] == module):
            found = self.directions[version][place]
            moved[place] = masters[place] if found is None else masters[place] - scale * found
        return self._cast(moved)

    def _cast(self, masters: Tensors) -> Tensors:
        return {place: master.to(self.workload.parameter(place).dtype) for place, master in masters.items()}


def _gradients(
    past: _Past,
    groups: Mapping[tuple[int, int], Groups],
    step: int,
    num_parts: int,
    scale: float | None,
    num_replicas: int,
) -> tuple[float, Tensors]:
    """Loss and gradients of a step, added up stage by stage in the order of the groups."""
    layout, num = past.layout, past.workload.num_microbatches
    sums = [OrderedSum(groups[stage, step + 1], num_replicas) for stage in range(len(layout.backward))]
    loss = 0.0
    for microbatch in range(step * num, (step + 1) * num):
        run = _Microbatch(past, microbatch, num_parts, scale)
        whole = past.same_both_ways(microbatch)
        share, by_segment = run.in_one_graph() if whole else run.by_pieces(layout)
        loss += share
        for gradients in reversed(by_segment):  # the last segment's backward comes first
            for stage, modules in enumerate(layout.backward):
                shared = layout.shard(stage)  # whose backward comes before that of the stage
                for visited in (shared, modules) if shared else (modules,):
                    found = {place: g for place, g in gradients.items() if place[0] in visited}
                    sums[stage].offer(microbatch, found)
    return loss, {place: gradient for total in sums for place, gradient in total.result().items()}


class _Microbatch:
    """Forward and backward of one microbatch."""

    def __init__(self, past: _Past, microbatch: int, num_parts: int, scale: float | None) -> None:
        self.workload, self.past, self.scale = past.workload, past, scale
        self.microbatch, self.num_parts = microbatch, num_parts
        self.last = self.workload.chain[-1]  # the head, or its norm where it is cut
        self.seen: list[list[KeysValues]] = [[] for _ in self.workload.modules]  # what earlier segments left behind

    def in_one_graph(self) -> tuple[float, list[Tensors]]:
        """Loss, as its part of the step's mean, and the weight gradients of each segment."""
        losses, leaves = [], []
        for part in range(self.num_parts):
            tokens = self.workload.segment(self.microbatch, part, self.num_parts)[0]
            loss, used = self._run(range(self.last + 1), tokens, self.past.forward, part)
            losses.append(loss)
            leaves.append(used)
        wanted = [(part, place) for part, used in enumerate(leaves) for place in used]
        grads = None if self.scale is None else [torch.full_like(loss, self.scale) for loss in losses]
        inputs = [leaves[part][place] for part, place in wanted]
        found = torch.autograd.grad(losses, inputs, grads, allow_unused=True)
        gradients: list[Tensors] = [{} for _ in leaves]
        for (part, place), value in zip(wanted, found, strict=True):
            if value is not None:
                gradients[part][place] = value
        return sum(float(loss.detach()) for loss in losses), gradients

    def by_pieces(self, layout: Layout) -> tuple[float, list[Tensors]]:
        """The same, with a forward that keeps inputs and a graph for each piece on its backward's weights."""
        assert self.num_parts == 1, "segments with weights that drift have no reference: see `check_reference`"
        assert not self.workload.num_head_shards, "nor has a head in shards"
        kept: dict[int, torch.Tensor] = {}
        x = self.workload.batch(self.microbatch).tokens
        with torch.no_grad():
            for module in range(self.last):
                kept[module] = x
                x, _ = self._run(range(module, module + 1), x, self.past.forward)
        loss, grad, gradients = self._differentiate(range(self.last, self.last + 1), x, self.past.forward, None)
        for stage in reversed(layout.backward):
            for piece in reversed(pieces(range(stage.start, min(stage.stop, self.last)), self.past.reads.grain)):
                _, grad, found = self._differentiate(piece, kept[piece.start], self.past.backward, grad)
                gradients |= found
        return float(loss.detach()), [gradients]

    def _differentiate(
        self, modules: range, x: torch.Tensor, weights_of: WeightsOf, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        """Output, gradient of the input and gradients of the weights of some modules."""
        start = x.detach().requires_grad_(x.is_floating_point())
        end, leaves = self._run(modules, start, weights_of)
        wanted = [*leaves.values(), *([start] if start.requires_grad else [])]
        if not wanted or not end.requires_grad:
            return end, None, {}
        found = torch.autograd.grad(end, wanted, grad, allow_unused=True)
        return end, found[-1] if start.requires_grad else None, present(leaves, found)

    def _run(
        self, modules: range, x: torch.Tensor, weights_of: WeightsOf, part: int = 0
    ) -> tuple[torch.Tensor, Tensors]:
        """The output of some modules and the weights used; after the head, the loss as its share."""
        workload, leaves = self.workload, Tensors()
        for number in modules:
            own = self._tensors(number, weights_of)
            leaves |= _trained(number, own)
            with drawing(workload, number, self.microbatch, part):
                inputs = self._inputs(number, x, part)
                output: Any = functional_call(workload.modules[number], own, inputs, tie_weights=False)
            if isinstance(output, tuple):
                output, made = output
                self.seen[number] = [*self.seen[number], made]
            x = output
        if self.last not in modules:
            return x, leaves
        if workload.num_head_shards:
            x, used = self._run_shards(x, weights_of)
            leaves |= used
        return workload.share(x, self.microbatch, part, self.num_parts), leaves

    def _run_shards(self, x: torch.Tensor, weights_of: WeightsOf) -> tuple[torch.Tensor, Tensors]:
        """The mean loss over all shares of the head, and the weights used."""
        shares, leaves = [], Tensors()
        for number in self.workload.shards:
            own, module = self._tensors(number, weights_of), self.workload.modules[number]
            assert isinstance(module, Rows)
            shares.append(module.shard(own["weight"]))
            leaves |= _trained(number, own)
        labels = self.workload.batch(self.microbatch).labels
        return loss_over_shards(shares, x.flatten(0, 1), labels.flatten()), leaves

    def _tensors(self, number: int, weights_of: WeightsOf) -> dict[str, torch.Tensor]:
        """A module's tensors by name; those that are trained are leaves."""
        weights = weights_of(number, self.microbatch)
        return {
            name: weights[number, name].detach().requires_grad_() if parameter.requires_grad else parameter.detach()
            for name, parameter in self.workload.modules[number].named_parameters(remove_duplicate=False)
        }

    def _inputs(self, number: int, x: torch.Tensor, part: int) -> tuple[Any, ...]:
        if number == self.workload.head:
            return x, self.workload.segment(self.microbatch, part, self.num_parts)[1]
        packed = self.workload.packed(number, self.microbatch)
        if packed:
            return x, None, packed
        return (x, self.seen[number]) if self.num_parts > 1 and number else (x,)


def _trained(module: int, own: dict[str, torch.Tensor]) -> Tensors:
    return {(module, name): tensor for name, tensor in own.items() if tensor.requires_grad}


def largest_difference(one: Tensors, other: Tensors) -> float:
    """The largest absolute difference; infinite if a tensor is missing in one. Equal infinities and NaNs are alike."""
    if one.keys() != other.keys():
        return float("inf")
    return max((_difference(one[place], other[place]) for place in one if one[place].numel()), default=0.0)


def largest_relative_difference(one: Tensors, other: Tensors) -> float:
    """The largest difference of two sets of tensors, as a fraction of the largest value of the tensor in `other`.

    Infinite if a tensor is missing in one, or differs from one that is all 0.
    """
    if one.keys() != other.keys():
        return float("inf")
    pairs = ((_difference(one[place], other[place]), float(other[place].abs().max())) for place in one)
    return max((far / scale if scale else far and float("inf") for far, scale in pairs), default=0.0)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf).max())
