"""Training: the state of a run, and the handlers of a schedule's actions.

The host keeps weights by version, gradients, masters, optimizer state and kept inputs. A device holds only the tensors
of its running action, so any device may run any stage. Where replicas share a stage, each keeps its own shard or copy
of it and gets the rest by collectives (`rpbench.engine.state.ownership`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from rpbench.cost.table import CostTable
from rpbench.engine.compute.forward_backward import Passes
from rpbench.engine.compute.stage import GRAINS, Grain, Shells, Stages
from rpbench.engine.executor import Gate, Handler
from rpbench.engine.host_order import ReportedLock
from rpbench.engine.layout import layout_of
from rpbench.engine.program import Program, gather_steps, make_program
from rpbench.engine.shards.cut import cut, joined, joined_head_state
from rpbench.engine.shards.reduced_gradients import ReducedWindow
from rpbench.engine.shards.replica_weights import ReplicaWeights
from rpbench.engine.shards.tensor_parallel import Team, TeamGradients
from rpbench.engine.state.accumulation import Reduction, gradient_groups, reductions_of
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.device_memory import DeviceMemory, StageBytes
from rpbench.engine.state.device_weights import Copy, DeviceWeights, copy_in_memory
from rpbench.engine.state.gradients import Gradients, Window, carried_windows
from rpbench.engine.state.loss_scale import LossScaler
from rpbench.engine.state.ownership import sharing_of
from rpbench.engine.state.saved_activations import SavedActivations
from rpbench.engine.state.updates.compensation import Compensation, Delays, check_compensation, slowdown
from rpbench.engine.state.updates.optimizer import HostOptimizer, OptimizerSettings, step_groups
from rpbench.engine.state.updates.selective_optimizer import SelectiveOptimizer, SplitWindow
from rpbench.engine.state.weights import Weights, at_home, begin, masters_of
from rpbench.engine.state.weights_read import Adjustments, Reads
from rpbench.engine.training_checks import check_kept, check_momentum, check_selective, check_shape, check_stored
from rpbench.engine.transfers import Traffic, Transfers
from rpbench.engine.workload import Workload
from rpbench.ir.action import COMPUTE, Action, Kind
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.checks.residency import inputs_stay, moves_activations
from rpbench.ir.policy import STEPS_BEHIND, Policy, is_trial, share_moved
from rpbench.ir.schedule import Schedule
from rpbench.ir.schedule import Weights as WeightsAre
from rpbench.ir.waits.moves import has_transfers
from rpbench.passes.recomputation import EXECUTED, Recompute

Reductions = Mapping[tuple[int, int], Sequence[Reduction]]


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    recompute_grain: Grain = "stage"  # how much a backward recomputes at a time: its whole stage, or one layer
    recompute: Recompute = "all"
    keep_gradients: bool = False  # keep every step's gradients, to compare them with a reference
    compensation: Compensation = field(default_factory=Compensation)
    keep_state: bool = False  # keep the versions before the last that a checkpoint needs
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.recompute_grain not in GRAINS:
            raise ValueError(f"recompute_grain={self.recompute_grain!r}: one of {', '.join(GRAINS)}")
        if self.recompute not in EXECUTED:
            raise ValueError(f"recompute={self.recompute!r}: one of {', '.join(EXECUTED)}")


class Training:
    """The training of a workload by a schedule.

    ValueError if the model does not have the partition's layers, or cannot run the parts the schedule cuts sequences
    into.
    """

    def __init__(
        self,
        workload: Workload,  # its modules are read, never written
        # with its partition, or its analysis; with STEP actions if weights are to change
        schedule: Schedule | Analysis,
        settings: Settings | None = None,
        start: State | None = None,  # the state to resume from; None: the modules' own weights
        copy: Copy = copy_in_memory,
        *,
        pin_memory: bool = False,  # keep the host's weights in pinned memory, which needs an accelerator
        # device -> its accelerator, where weights, gradients and optimizer state of its stages stay there
        place_of: Callable[[int], torch.device] | None = None,
    ) -> None:
        given = analysed(schedule)
        partition, keeps_every = given.schedule.partition, given.schedule.shape.keeps_every
        check_shape(workload, given.schedule)
        assert partition is not None  # or it has been refused
        self.uncut, self.settings = workload, settings or Settings()
        self.workload, self.start = cut(workload, given.schedule, start)
        moves = given.schedule.weights is WeightsAre.BOUND and moves_activations(given.schedule)
        self.layout = layout_of(partition, self.workload.num_head_shards, keeps_every, keeps_embedded=moves)
        self._check(given.schedule)
        self._rewriting, validated = ReportedLock(), Kind.VALIDATE in given.schedule.kinds
        self.step_groups = step_groups(self.workload, self.layout, self.settings.optimizer, validated=validated)
        self.analysis = Analysis(gather_steps(given.schedule)) if self.step_groups else given
        self.schedule = self.analysis.schedule
        self._place_of = None if place_of is None else at_home(place_of, self.layout.devices(self.analysis.index))
        self.reads = Reads(self.analysis, len(self.start.stale) if self.start else 0)
        self.groups = gradient_groups(self.analysis)
        self.sharing = sharing_of(self.analysis, self.layout, self.workload)  # stage -> how its replicas share it
        homes = self.analysis.moves.handovers.homes if has_transfers(self.schedule) else {}
        self._bytes = StageBytes(self.schedule, self.workload, self.layout, self.sharing, homes)
        self.traffic, limit = Traffic(copy), self.settings.device_memory_bytes
        self.memory = None if limit is None else DeviceMemory(limit, self._bytes.staying())
        self._hold = self.memory.change if self.memory else lambda device, what, num_bytes: None
        whole = self.settings.recompute == "none" and moves_activations(self.schedule)
        self._saved = SavedActivations(self.memory) if whole else None
        moved = _moved(self.schedule)
        selective = self.schedule.late_rest is not None  # then a LOAD:P brings late columns of weights that stay there
        self.weights = self._weights(set() if selective else moved["P"], pin_memory)
        reduced = {
            (stage, version): ReducedWindow(sums, self.sharing[stage], self._hold)
            for (stage, version), sums in reductions_of(self.analysis).items()
        }
        self.gradients = self._gradients(moved["G"], reduced)
        self.scaler = self._scaler()
        self._delays = Delays(self.analysis) if self.settings.compensation.is_needed else None
        self.optimizer = self._optimizer()
        self._adjustments = self._adjust()
        splits = Kind.I in self.schedule.plain_kinds  # some backward comes in halves
        self.team = self._team(splits) if isinstance(self.gradients, TeamGradients) else None
        self.passes = self.team.passes[0] if self.team else self._own_passes(splits)
        if isinstance(self.weights, DeviceWeights) and not self.layout.fused:
            self.passes.recompute_head = self.weights.leaves_between(self.layout.top)
        self.transfers = Transfers(
            self.analysis, self.weights, self.gradients, self.passes, self.traffic, reduced, self._saved
        )

    def _own_passes(self, splits: bool) -> Passes:
        num_parts, shells = self.schedule.shape.num_segments, Shells(self.workload.modules)
        return self._make_passes(Stages(self.workload, self.weights, shells, num_parts, splits), self.gradients)

    def _check(self, schedule: Schedule) -> None:
        compensation = self.settings.compensation
        check_kept(schedule, self.settings.recompute, compensation)
        check_compensation(schedule, compensation, has_tied=bool(self.workload.tied))
        check_momentum(compensation, self.settings.optimizer)
        check_stored(schedule, self.layout, self.settings.recompute_grain)
        check_selective(self.workload, schedule)

    def _weights(self, loaded: set[int], pin: bool) -> Weights:
        """The host's weights; with copies on devices where stages are loaded, or shards where replicas share them."""
        counts = self.reads.count(self.layout)
        if self.settings.keep_state:
            modules = range(len(self.workload.modules))
            counts.update((module, version) for module in modules for version in self._last_stale())
        begun = None if self.start is None else begin(self.workload, self.start, self.reads.num_stale)
        on_devices = self.workload, counts, begun, self.reads, self.layout, self.analysis, self.traffic
        if self.sharing:
            return ReplicaWeights(*on_devices, pin=pin, sharing=self.sharing, hold=self._hold, place_of=self._place_of)
        if loaded:
            return DeviceWeights(*on_devices, pin=pin, hold=self._hold)
        return Weights(self.workload, counts, begun, self._place_of)

    def _gradients(self, stored: set[int], reduced: Mapping[tuple[int, int], ReducedWindow]) -> Gradients:
        keep = self.settings.keep_gradients
        if self.schedule.shape.tensor_parallel:
            return TeamGradients(self.groups, self.schedule.shape.num_ranks, keep=keep)
        windows = {**reduced, **carried_windows(self.analysis)}
        if self.schedule.late_rest is not None:
            split = partial(self._split, reductions_of(self.analysis))
            return Gradients(self.groups, keep=keep, reduced=windows, split=split)
        return Gradients(self.groups, keep=keep, on_devices=stored, reduced=windows)

    def _split(self, sums: Reductions, stage: int, version: int, made: Window) -> SplitWindow:
        """A gradient that devices and host share."""
        assert self.schedule.late_rest is not None
        found = self.sharing.get(stage)
        return SplitWindow(
            made,
            found.owned if found is not None and found.scatters else {},
            {each: device for one in sums.get((stage, version), ()) for device, own in one.items() for each in own},
            lambda: self._selective.chosen(stage, version),
            goes_home=bool(share_moved(self.schedule.late_rest, version)),
        )

    @property
    def _selective(self) -> SelectiveOptimizer:
        assert isinstance(self.optimizer, SelectiveOptimizer)
        return self.optimizer

    def _optimizer(self) -> HostOptimizer:
        make: Callable[..., HostOptimizer] = HostOptimizer
        rule = self.schedule.late_rest
        if rule is not None:
            make = partial(SelectiveOptimizer, rule=rule, num_steps=self.schedule.shape.num_steps)
        return make(
            self.workload,
            self.layout,
            masters_of(self.workload, self.start, self._place_of),
            self.gradients,
            self.settings.optimizer,
            self._pace,
            self.scaler,
            lambda version: self.reads.fixed((version - 1) * self.workload.num_microbatches) or 0,  # scales need one
            None if self.start is None else self.start.moments,
            self.sharing,
            self._delays.tau if self._delays and self.settings.compensation.spike_compensation else None,
            self.schedule.policy,
            self.analysis.index.rollbacks.keys(),
            self._place_of,
        )

    def _team(self, splits: bool) -> Team:
        assert isinstance(self.gradients, TeamGradients)
        along, given = self.schedule.shape.sequence_parallel, (self.layout, self.weights, self.gradients)
        return Team(self.workload, *given, self._make_passes, splits=splits, along_sequence=along)

    def _make_passes(self, stages: Stages, gradients: Gradients) -> Passes:
        streamed = self.schedule.weights is WeightsAre.STREAMED
        kept_there = None if streamed and not inputs_stay(self.schedule) else self.memory
        return Passes(
            stages,
            self.layout,
            self.reads,
            gradients,
            self.settings.recompute_grain,
            self._adjustments,
            self.scaler,
            kept_there,
            self.settings.recompute,
            self._saved,
        )

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        found = dict(self.team.handlers) | {Kind.STEP: self._step} if self.team else self._handlers()
        if self.memory is not None:
            found |= {kind: self._bytes.counted(found[kind], self.memory) for kind in COMPUTE & found.keys()}
        return found

    def _handlers(self) -> dict[Kind, Handler]:
        compute: dict[Kind, Handler] = {
            Kind.F: self.passes.forward,
            Kind.R: self.passes.recompute,
            Kind.B: self.passes.backward,
            Kind.I: self.passes.backward_for_input,
            Kind.W: self.passes.backward_for_weights,
            Kind.FB: self.passes.fused,
            Kind.HF: self.passes.share_forward,
            Kind.HB: self.passes.share_backward,
        }
        if isinstance(self.weights, DeviceWeights):
            compute = {kind: self.weights.on_device(handler) for kind, handler in compute.items()}
        steps: dict[Kind, Handler] = {
            Kind.STEP: self._step,
            Kind.VALIDATE: self._validate,
            Kind.ROLLBACK: self._roll_back,
            Kind.WAIT: lambda action, number, gate: None,  # an edge of the program has waited
        }
        if self.schedule.late_rest is not None:
            steps |= {Kind.STEP_REST: self._step_rest, Kind.LOAD: self._bring_rest}
        return compute | dict(self.transfers.handlers) | steps

    def program(self, costs: CostTable, *, real_time: bool = False) -> Program:
        """The program to execute; in real time, recomputations also wait for their kept inputs."""
        if real_time:
            costs = replace(costs, fused_ahead=False)  # a fused forward needs its input
        needed = self._recomputed_from() if real_time else None
        program = make_program(self.analysis, costs, step_groups=self.step_groups, recomputed_from=needed)
        return replace(program, stop=self.team.meeting.stop) if self.team else program

    def mean_loss(self, step: int) -> float:
        """The loss of an optimizer step, counted from 0: the mean over its microbatches."""
        window = range(step * self.workload.num_microbatches, (step + 1) * self.workload.num_microbatches)
        return math.fsum(self.passes.losses[microbatch] for microbatch in window)

    def state(self) -> State:
        """The state to resume from; needs `keep_state`. ValueError without steps, or with versions read by place."""
        newest = self.schedule.shape.num_steps
        stale = {
            newest - version: {
                (module, name): leaf.detach()
                for module in range(len(self.workload.modules))
                for name, leaf in self.weights.leaves(module, version).items()
            }
            for version in self._last_stale()
        }
        scales = self.scaler.scales if self.scaler else {}
        state = State(
            self.workload.first_step + newest,
            self.optimizer.masters,
            self.optimizer.moments(),
            stale,
            {version - newest: scales[version] for version in (newest, *self._last_stale()) if version in scales},
        )
        if self.workload.num_head_shards:
            return joined_head_state(state, self.workload)
        return state.changed(joined) if self.team else state

    def _last_stale(self) -> range:
        """The versions before the last one that a resumed run would read."""
        newest, behind = self.schedule.shape.num_steps, STEPS_BEHIND.get(self.schedule.policy)
        ends_in_a_trial = is_trial(self.schedule.policy, newest)
        in_two_halves = self.schedule.late_rest is not None  # whose moments go on apart
        if behind is None or not self.reads.has_steps or ends_in_a_trial or in_two_halves:
            raise ValueError(
                f"policy {self.schedule.policy.value} over {newest} steps leaves no state to go on from; use STEP "
                "actions, and a schedule that flushes or is one step stale, or whose last step is no trial"
            )
        return range(newest - behind, newest)

    def _adjust(self) -> Adjustments | None:
        if self._delays is None:
            return None
        settings, window = self.settings.compensation, self.workload.num_microbatches
        return Adjustments(settings, self._delays, self.weights, self.optimizer, self.layout.backward, window)

    def _pace(self, stage: int, version: int) -> float:
        """The factor on a stage's learning rate at the step to `version`."""
        return 1.0 if self._delays is None else slowdown(self._delays.tau[stage], version, self.settings.compensation)

    def _step(self, action: Action, number: int, gate: Gate) -> None:
        assert action.version is not None
        modules = [*self.layout.backward[action.stage], *self.layout.shard(action.stage)]
        before = self._adjustments.before_step(action.stage) if self._adjustments else {}
        self.optimizer.step(action.stage, action.version)
        if self._adjustments:
            self._adjustments.after_step(action.stage, before)
        self.weights.publish(modules, action.version, partial(self.optimizer.values, modules))
        if is_trial(self.schedule.policy, action.version):
            self.optimizer.end_trial(action.stage)

    def _step_rest(self, action: Action, number: int, gate: Gate) -> None:
        assert action.version is not None
        self._selective.step_rest(action.stage, action.version)

    def _bring_rest(self, action: Action, number: int, gate: Gate) -> None:
        """Write the host's late columns into a version that no action has read yet."""
        assert action.version is not None
        device, modules = self.analysis.index.device(number), self.layout.backward[action.stage]
        self._selective.bring(action.stage, action.version, device, lambda made: self.traffic(made, device, "h2d"))
        with self._rewriting:  # several devices bring their parts of one stage
            self.weights.rewrite(modules, action.version, partial(self.optimizer.values, modules))

    def _validate(self, action: Action, number: int, gate: Gate) -> None:
        assert action.version is not None
        self.optimizer.validate(action.version)

    def _roll_back(self, action: Action, number: int, gate: Gate) -> None:
        """Validate a step; if it was wrong, write its weights again, on devices that have loaded them too."""
        assert action.version is not None
        if self.optimizer.settle(action.stage, action.version):
            modules = [*self.layout.backward[action.stage], *self.layout.shard(action.stage)]
            self.weights.rewrite(modules, action.version, partial(self.optimizer.values, modules))

    def _scaler(self) -> LossScaler | None:
        rule = self.settings.optimizer.loss_scaling
        if rule is not None and self.schedule.policy is Policy.TRIAL:
            raise ValueError(
                "policy trial takes the mean of gradients of two rounds, whose losses would have different scales; use "
                "dtype=bfloat16, or a schedule that flushes"
            )
        if rule is not None and self.reads.fixed(0) is None:
            raise ValueError(
                f"policy {self.schedule.policy.value} lets microbatches of one step read different versions, so that "
                "their losses would have different scales; use dtype=bfloat16, or a schedule that flushes"
            )
        return None if rule is None else LossScaler(rule, self.start.scales if self.start else None)

    def _recomputed_from(self) -> dict[int, int]:
        """Backward stage -> the forward stage that keeps the input of its recomputation."""
        found = {}
        for stage in range(len(self.layout.backward)):
            again = self.passes.recomputed(stage)
            for forward, others in enumerate(self.layout.forward):
                if again and again[-1].start in others:
                    found[stage] = forward
        return found


def _moved(schedule: Schedule) -> dict[str, set[int]]:
    """P or G -> the stages whose weights or gradients are loaded or stored."""
    moves = [action for _, _, row in schedule.items() for action in row if action.kind in (Kind.LOAD, Kind.STORE)]
    return {what: {action.stage for action in moves if action.object == what} for what in "PG"}
