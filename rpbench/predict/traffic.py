"""Traffic and work of the tasks of a streamed pipeline: device seconds, link bytes, host and interpreter work."""

from collections.abc import Sequence
from typing import NamedTuple

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.table import CostTable
from rpbench.cost.transfers import StageBytes
from rpbench.ir.action import Kind
from rpbench.mesh.layers.layer_times import times_of
from rpbench.predict.case import Case, expert_s, loop_s
from rpbench.predict.streaming import Jobs, Lanes, Slot, lanes_of
from rpbench.sim.shared_links import COPY, HOST, LOOP, NOTHING, Capacity, run
from rpbench.workload.counts import BYTES_PER_VALUE

INF = float("inf")


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
    copy, host, group = (basis.get(f"{name}_bytes_per_s", INF) for name in ("copy", "host", "root_complex"))
    own, amount, servers = (list(column) for column in zip(*needs, strict=True))
    begin, end = run(lanes.tasks, own, amount, servers, Capacity(copy, host, group, basis["loop_share"]))
    return Run(lanes, begin, end, own)


def devices_per_complex(basis: Basis) -> int:
    """Devices on one root complex; 0 if its rate is unknown and so no limit."""
    shared = "root_complex_bytes_per_s" in basis.values
    return int(basis.get("devices_per_root_complex", 0)) if shared else 0


class Needs:
    """The needs of the tasks of a plan's lanes."""

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
