"""The lanes of a streamed pipeline: jobs in order, and everything that moves for them, as timed tasks.

A job is one stage run for all microbatches of a call, on one device. Its weights are loaded while the job before it on
that device runs, in pieces that give way to activations, and its gradient is stored after it. Where layers read the
tokens of their experts from the device, nothing is issued ahead: the library launches a job once the one before it on
that device has been issued, so the weights of the next stage come after the last experts of this one.

All activations between jobs go through the host, and so do the inputs that a backward recomputes from. The transfers
are those that `rpbench.passes.offload.stream` writes into a schedule. The times agree within a few per cent (weights
there keep their place in the lane), and within 13 at a fifth of the links' rate; a test names the worst case. This form
times whole steps of large models in fractions of a second. The host's lane is the released library's optimizer:

    asynchronous   refresh (weights of the update before), convert the gradients as they arrive, Adam; the next step
                   waits for the refresh of each stage, and the refresh for the last upload of this step
    synchronous    convert, Adam, refresh; the step ends there

Source: arXiv 2604.27085; transfers and optimizer as in its released library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.table import CostTable
from rpbench.cost.transfers import StageBytes
from rpbench.ir.action import Kind
from rpbench.ir.partition import Partition
from rpbench.mesh.layers.layer_times import times_of
from rpbench.predict.case import Case, expert_s, loop_s
from rpbench.sim.shared_links import COPY, HOST, LOOP, NOTHING, Capacity, Tasks, run
from rpbench.workload.counts import BYTES_PER_VALUE

What = Literal["F", "R", "B", "FB", "boundary", "weights", "gradients", "refresh", "convert", "adam"]


class Slot(NamedTuple):
    """The work of a task: its kind, stage and variant."""

    what: What
    stage: int = 0  # forward stages for F, weights of a forward and refresh; backward stages otherwise
    short: bool = False  # whether it is for the last microbatch of a call, which may be shorter
    routed: bool = False  # whether it is the experts' part of F or R
    backward: bool = False  # whether weights are for a backward job
    again: bool = False  # whether gradients of an earlier call come with them
    pieces: int = 1  # number of pieces the weights come in
    group: int = 0  # number of the shared link: one direction of one root complex


@dataclass(frozen=True)
class Jobs:
    """The jobs of a run, from which its lanes follow."""

    plan: Partition  # stages; with `plan.fused` the top backward stage runs forward and backward in one visit
    num_devices: int
    microbatches: int
    calls: int  # of one step; every call runs all stages for `microbatches` microbatches
    steps: int
    asynchronous: bool
    routed: bool = False  # layers have experts, which a forward knows only when its attention has ended
    bound: bool = False  # stage s stays on device s modulo `num_devices`; else jobs rotate over all calls
    devices_per_complex: int = 0  # devices on one root complex; 0 where complexes are no limit

    def group(self, device: int, *, down: bool) -> int:
        """Number of the root complex direction that a device's copies go through; 0 where complexes are no limit."""
        return 2 * (device // self.devices_per_complex) + down if self.devices_per_complex else 0

    @property
    def visits(self) -> int:
        """Visits of stages to devices in one step."""
        return self.calls * (len(self.plan.forward) + len(self.plan.backward))


@dataclass
class _Visit:
    device: int
    step: int
    call: int
    stage: int
    backward: bool
    weights: list[int] = field(default_factory=list)  # tasks that load them
    computed: list[int] = field(default_factory=list)  # last task of each microbatch
    handed: list[int] = field(default_factory=list)  # tasks that the next job waits for
    stored: int = -1
    routed: int = -1  # the experts of its last microbatch
    coming: "_Visit | None" = None  # the next on its device


class Lanes:
    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.tasks = jobs, Tasks()
        self._numbers: dict[Slot, int] = {}
        self.up, self.down, self.compute = ([-1] * jobs.num_devices for _ in range(3))
        self.computing: list[list[int]] = [[] for _ in range(jobs.steps)]  # by step; the last task ends the step
        self.kept: dict[tuple[int, int, int], int] = {}  # call, stage, microbatch -> the task that stored it
        self.host = -1
        plan = jobs.plan  # backward stage -> the forward stage that saves its input; the first stage has the tokens
        recomputed = range(1, len(plan.backward) - plan.fused)
        self.keepers = {stage: plan.keeping_stages[stage] for stage in recomputed if plan.backward[stage]}
        visits = self._visits()
        coming: list[_Visit | None] = [None] * jobs.num_devices
        for visit in reversed(visits):
            visit.coming, coming[visit.device] = coming[visit.device], visit
        last: list[_Visit | None] = [None] * jobs.num_devices
        for before, visit in zip([None, *visits], visits, strict=False):
            self._run(visit, before if before and before.call == visit.call else None, last[visit.device])
            last[visit.device] = visit
        by_step = [[each for each in visits if each.step == step] for step in range(jobs.steps)]
        self.host_ends = self._host_tasks(by_step)  # the last task of the host's lane in each step
        self.slots = tuple(self._numbers)  # the slot of each number in `tasks.slot`

    def _visits(self) -> list[_Visit]:
        jobs, plan = self.jobs, self.jobs.plan
        order = [(stage, False) for stage in range(len(plan.forward))]
        order += [(stage, True) for stage in reversed(range(len(plan.backward)))]
        found: list[_Visit] = []
        for call in range(jobs.steps * jobs.calls):
            for stage, backward in order:
                device = (stage if jobs.bound else len(found)) % jobs.num_devices
                found.append(_Visit(device, call // jobs.calls, call, stage, backward))
        return found

    def _add(self, slot: Slot, *after: int, port: int = -1, urgent: bool = False) -> int:
        return self.tasks.add(self._numbers.setdefault(slot, len(self._numbers)), *after, port=port, urgent=urgent)

    def _lane(self, lane: list[int], device: int, slot: Slot, *after: int) -> int:
        urgent = lane is self.up
        if self.jobs.devices_per_complex and lane is not self.compute:
            slot = slot._replace(group=self.jobs.group(device, down=not urgent))
        lane[device] = self._add(slot, lane[device], *after, port=device if urgent else -1, urgent=urgent)
        return lane[device]

    def _weights(self, visit: _Visit, pieces: int, *after: int) -> None:
        """Add the load of a visit's weights, or of one of several pieces."""
        again = visit.backward and visit.call % self.jobs.calls > 0
        group = self.jobs.group(visit.device, down=False)
        slot = Slot("weights", visit.stage, backward=visit.backward, again=again, pieces=pieces, group=group)
        last = visit.weights[-1] if visit.weights else -1
        visit.weights.append(self._add(slot, last, *after, port=visit.device))

    def _run(self, visit: _Visit, before: _Visit | None, last: _Visit | None) -> None:
        """Add a visit: `before` hands it its input, `last` ran on this device before."""
        num, coming = self.jobs.microbatches, visit.coming
        if not visit.weights:
            self._weights(visit, 1)
        for mb in range(num):
            self._microbatch(visit, before, mb)
            if coming is not None and not self.jobs.routed:
                # the buffer is that of the visit before this one
                freed = last.computed[-1] if last is not None and mb == 0 else -1
                self._weights(coming, num, freed)
        if coming is not None and self.jobs.routed:
            self._weights(coming, 1, visit.routed)
        if visit.backward:
            visit.stored = self._lane(self.down, visit.device, Slot("gradients", visit.stage), visit.computed[-1])

    def _microbatch(self, visit: _Visit, before: _Visit | None, mb: int) -> None:
        jobs, device, stage = self.jobs, visit.device, visit.stage
        short, plan = mb == jobs.microbatches - 1, jobs.plan
        boundary = Slot("boundary", short=short)
        top = stage == len(plan.backward) - 1
        kept = handed = -1
        recomputes = visit.backward and not (plan.fused and top)
        if recomputes and stage in self.keepers:
            buffer = visit.computed[mb - 2] if mb >= 2 else -1
            kept = self._lane(self.up, device, boundary, self.kept[visit.call, stage, mb], buffer)
        if before is not None:
            handed = before.handed[mb]
            if before.device != device:
                handed = self._lane(self.up, device, boundary, handed)
        weights = visit.weights[-1]
        if recomputes:
            visit.routed = self._forward(visit, "R", short, kept, weights)
            done = self._compute(visit, Slot("B", stage, short), handed)
        elif visit.backward:
            done = visit.routed = self._compute(visit, Slot("FB", stage, short), weights, handed)
        else:
            done = visit.routed = self._forward(visit, "F", short, weights, handed)
        visit.computed.append(done)
        self._hand_on(visit, done, mb, boundary)

    def _forward(self, visit: _Visit, what: What, short: bool, *after: int) -> int:
        done = self._compute(visit, Slot(what, visit.stage, short), *after)
        return self._compute(visit, Slot(what, visit.stage, short, routed=True)) if self.jobs.routed else done

    def _compute(self, visit: _Visit, slot: Slot, *after: int) -> int:
        done = self._lane(self.compute, visit.device, slot, *after)
        self.computing[visit.step].append(done)
        return done

    def _hand_on(self, visit: _Visit, done: int, mb: int, boundary: Slot) -> None:
        """Hand a microbatch's output to the next job, and store the inputs kept for backward stages."""
        jobs, device = self.jobs, visit.device
        is_last = visit.backward and visit.stage == 0
        turns = not visit.backward and visit.stage == len(jobs.plan.forward) - 1  # to its backward, on its device
        crosses = jobs.num_devices > 1 and not is_last and not (jobs.bound and turns)
        visit.handed.append(self._lane(self.down, device, boundary, done) if crosses else done)
        if visit.backward:
            return
        for stage, keeper in self.keepers.items():
            if keeper == visit.stage:
                self.kept[visit.call, stage, mb] = self._lane(self.down, device, boundary, done)

    # --- the host --------------------------------------------------------------------------------------------

    def _host_tasks(self, by_step: Sequence[Sequence[_Visit]]) -> list[int]:
        ends = []
        parts = (self._refresh, self._update) if self.jobs.asynchronous else (self._update, self._refresh)
        for visits, following in zip(by_step, [*by_step[1:], []], strict=True):
            for part in parts:
                part(visits, following)
            ends.append(self.host)
        return ends

    def _refresh(self, visits: Sequence[_Visit], following: Sequence[_Visit]) -> None:
        first_call = [visit for visit in following if visit.call == following[0].call]
        uploaded = [visit.weights[-1] for visit in visits]
        forward = {visit.stage: visit for visit in first_call if not visit.backward}
        for stage in range(len(self.jobs.plan.forward)):
            self.host = self._add(Slot("refresh", stage), self.host, *uploaded)
            uploaded = []
            if stage in forward:
                self.tasks.link(self.host, forward[stage].weights[0])
        if self.jobs.plan.fused:
            top = len(self.jobs.plan.backward) - 1
            self.host = self._add(Slot("refresh", top, backward=True), self.host)
        for visit in first_call:
            if visit.backward:
                self.tasks.link(self.host, visit.weights[0])

    def _update(self, visits: Sequence[_Visit], following: Sequence[_Visit]) -> None:
        first_call = {visit.stage: visit for visit in following if visit.call == following[0].call and visit.backward}
        for visit in visits:
            if visit.backward and visit.call == visits[-1].call:
                self.host = self._add(Slot("convert", visit.stage), self.host, visit.stored)
                if visit.stage in first_call:
                    self.tasks.link(self.host, first_call[visit.stage].weights[0])
        self.host = self._add(Slot("adam"), self.host)


lanes_of = lru_cache(maxsize=32)(Lanes)  # timed again with other costs


# --- needs of tasks: device seconds, link bytes, host and interpreter work; and their times -----------------------


class Need(NamedTuple):
    """The need of a task: seconds of its device, and an amount served by a shared link, host or interpreter."""

    own_s: float = 0.0
    amount: float = 0.0
    served_by: int = NOTHING


class Run(NamedTuple):
    """Begin and end of every task of some lanes, and the devices' own seconds by slot."""

    lanes: Lanes
    begin: list[float]
    end: list[float]
    own_s: list[float]

    def computed_s(self, step: int) -> float:
        """End of the last computation of a step."""
        return self.end[self.lanes.computing[step][-1]]

    def finished_s(self, step: int) -> float:
        """End of the host's part of a step."""
        return self.end[self.lanes.host_ends[step]]

    def busy_s(self, steps: range) -> tuple[float, float]:
        """Mean seconds of a step that a device computes, and that it waits for the interpreter within a layer."""
        slots = self.lanes.tasks.slot
        tasks = [task for step in steps for task in self.lanes.computing[step]]
        shares = len(steps) * self.lanes.jobs.num_devices
        computing = sum(self.own_s[slots[task]] for task in tasks)
        occupied = sum(self.end[task] - self.begin[task] for task in tasks)
        return computing / shares, max(0.0, occupied - computing) / shares


def timed(jobs: Jobs, case: Case, basis: Basis) -> Run:
    """The lanes of a case's jobs, timed by the event simulation."""
    lanes = lanes_of(jobs)
    return timed_with(lanes, Needs(jobs, case, basis).of_all(lanes), basis)


def timed_with(lanes: Lanes, needs: Sequence[Need], basis: Basis) -> Run:
    """The lanes, timed with given needs of every slot."""
    copy, host, group = (basis.get(f"{name}_bytes_per_s", inf) for name in ("copy", "host", "root_complex"))
    own, amount, servers = (list(column) for column in zip(*needs, strict=True))
    begin, end = run(lanes.tasks, own, amount, servers, Capacity(copy, host, group, basis["loop_share"]))
    return Run(lanes, begin, end, own)


def devices_per_complex(basis: Basis) -> int:
    """Devices on one root complex; 0 if its rate is unknown and so no limit."""
    shared = "root_complex_bytes_per_s" in basis.values
    return int(basis.get("devices_per_root_complex", 0)) if shared else 0


class Needs:
    def __init__(self, jobs: Jobs, case: Case, basis: Basis) -> None:
        plan = jobs.plan
        self.case, self.basis, self.plan = case, basis, plan
        chunks, seq = case.settings.chunks, case.model.seq_len
        self.tables = {
            short: times_of(case.setting(size * seq, basis)).table(plan, recompute_ahead=True)
            for short, size in ((False, chunks.size), (True, chunks.last))
        }
        self.tokens = {False: chunks.size * seq, True: chunks.last * seq}
        model = case.model
        self.stages = StageBytes(plan, model_bytes(model, 1))
        self.expert_s = {
            short: expert_s(model, tokens, basis) if jobs.routed else 0.0 for short, tokens in self.tokens.items()
        }
        self.loop_s = loop_s(model, basis) if jobs.routed else 0.0

    def of_all(self, lanes: Lanes) -> list[Need]:
        return [self.of(slot) for slot in lanes.slots]

    def of(self, slot: Slot) -> Need:
        if slot.what in ("F", "R", "B", "FB"):
            return self._computed(slot)
        if slot.what in ("refresh", "convert", "adam"):
            return Need(amount=self._host_bytes(slot), served_by=HOST)
        if slot.what == "gradients":
            return Need(amount=self.stages.stage(slot.stage, backward=True).gradients, served_by=COPY + slot.group)
        if slot.what == "weights":
            stage = self.stages.stage(slot.stage, backward=slot.backward)
            moved = stage.weights + stage.gradients * slot.again
            return Need(amount=moved / slot.pieces, served_by=COPY + slot.group)
        return Need(amount=self.case.model.boundary_bytes(self.tokens[slot.short]), served_by=COPY + slot.group)

    def _computed(self, slot: Slot) -> Need:
        table: CostTable = self.tables[slot.short]
        kind = {"F": Kind.F, "FB": Kind.FB}.get(slot.what, Kind.B)
        work = table.work[kind][slot.stage]
        own = {"R": work.pre, "B": work.main}.get(slot.what, work.pre + work.main)
        layers = (self.plan.forward if slot.what == "F" else self.plan.backward)[slot.stage]
        if slot.what == "B" or not self.loop_s:
            return Need(own)
        if slot.what == "FB":
            return Need(own, self.loop_s * layers, LOOP)
        experts = layers * self.expert_s[slot.short]
        return Need(experts, self.loop_s * layers, LOOP) if slot.routed else Need(own - experts)

    def _host_bytes(self, slot: Slot) -> float:
        """Bytes through the host's memory: Adam, and a conversion of every value before and after it."""
        adam = self.basis["adam_bytes"]
        if slot.what == "adam":
            return adam * self.case.model.trainable_parameters
        each = (self.basis["optimizer_bytes"] - adam) / 2
        stage = self.stages.stage(slot.stage, backward=slot.what == "convert" or slot.backward)
        return each * stage.gradients / BYTES_PER_VALUE
