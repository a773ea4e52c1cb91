"""The lanes of a streamed pipeline: jobs in order, and everything that moves for them, as tasks of `sim.shares`.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from rpbench.ir.partition import Partition
from rpbench.sim.shared_links import Tasks

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
    """A job on its device."""

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
    """The tasks of a run.

    Attributes:
        slots: the slot of each number in `tasks.slot`.
        computing: the compute tasks of each step; the last one ends the step.
        host_ends: the last task of the host's lane in each step.
    """

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.tasks = jobs, Tasks()
        self._numbers: dict[Slot, int] = {}
        self.up, self.down, self.compute = ([-1] * jobs.num_devices for _ in range(3))
        self.computing: list[list[int]] = [[] for _ in range(jobs.steps)]
        self.kept: dict[tuple[int, int, int], int] = {}  # call, stage, microbatch -> the task that stored it
        self.host = -1
        self.keepers = _keepers(jobs.plan)
        visits = self._visits()
        coming: list[_Visit | None] = [None] * jobs.num_devices
        for visit in reversed(visits):
            visit.coming, coming[visit.device] = coming[visit.device], visit
        last: list[_Visit | None] = [None] * jobs.num_devices
        for before, visit in zip([None, *visits], visits, strict=False):
            self._run(visit, before if before and before.call == visit.call else None, last[visit.device])
            last[visit.device] = visit
        self.host_ends = self._host_tasks(
            [[each for each in visits if each.step == step] for step in range(jobs.steps)]
        )
        self.slots = tuple(self._numbers)

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


def _keepers(plan: Partition) -> Mapping[int, int]:
    """Backward stage -> the forward stage that saves its input for recomputation; the first stage has the tokens."""
    found = {}
    forward = plan.forward_ranges()
    for stage, layers in enumerate(plan.backward_ranges()):
        fused = plan.fused and stage == len(plan.backward) - 1
        if stage and not fused and len(layers):
            found[stage] = next(number for number, other in enumerate(forward) if layers.start in other)
    return found
