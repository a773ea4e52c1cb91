"""Nodes: an engine on every host, each with the whole schedule and microbatches of its own (RoundPipe over hosts).

Weights that are streamed have no rank of torch's runtime. But a node's host holds all of them, so nodes are data
parallel: gradients of a stage are scattered over the nodes as soon as the stage is to be stepped, each node's host
steps its shard with optimizer state for nothing else, and the new weights are gathered. All of that is one STEP to the
engine, so it overlaps with the next step's work wherever the schedule's STEP does.

Every stage has a group of its own, because steps of several stages run at a time and in no common order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from rpbench.engine.state.gradient_sums.gradients import Tensors
from rpbench.engine.state.ownership import Pieces, cut_evenly, take
from rpbench.engine.training import Training
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.models.data import Batch, Data


@dataclass(frozen=True)
class NodeData:
    """A node's part of every step: of its N * m microbatches those from `node` * m on."""

    data: Data
    node: int
    num_microbatches: int

    def microbatch(self, step: int, microbatch: int) -> Batch:
        """Microbatch `microbatch` of this node."""
        return self.data.microbatch(step, self.node * self.num_microbatches + microbatch)


def check_nodes(schedule: Schedule) -> None:
    """Refuse what nodes cannot share.

    Raises:
        ScheduleError: with the reason and a way out.
    """
    name = schedule.name or "this schedule"
    if schedule.policy not in (Policy.FLUSH, Policy.DELAYED):
        raise ScheduleError(
            f"schedule={name}: policy {schedule.policy.value} is asynchronous: which version a microbatch reads would "
            "depend on the other nodes' pace; it stays on one host, with backend=cpu or cuda"
        )
    if {Kind.REDUCE_GRAD, Kind.UNSHARD} & schedule.kinds or schedule.shape.tensor_parallel:
        raise ScheduleError(
            f"schedule={name} shares stages among its own devices already; take a schedule with one copy of each stage"
        )
    if Kind.STEP not in schedule.kinds:
        raise ScheduleError(f"schedule={name} has no STEP, and gradients meet there: add_steps() puts them in")


def node_workload(workload: Workload, node: int, num_microbatches: int) -> Workload:
    """What one node trains."""
    return replace(
        workload,
        data=NodeData(workload.data, node, num_microbatches),
        num_microbatches=num_microbatches,
    )


@dataclass
class Sent:
    """Bytes this node has sent to others, by what they were."""

    gradients: int = 0
    weights: int = 0
    by_stage: dict[int, int] = field(default_factory=dict)


class NodeOptimizer:
    """The engine's optimizer with every stage's masters in shards over the nodes.

    It takes the place of a training's optimizer (`share`).

    Attributes:
        sent: bytes that went to other nodes.
        totals: the gradients of every step whose shard was here, if they are kept: (stage, version) -> by place.

    Raises:
        ValueError: for what needs all gradients at once: clipping, loss scaling, tied weights.
    """

    def __init__(self, training: Training, groups: Sequence[Any], node: int, num_nodes: int) -> None:
        settings = training.settings.optimizer
        if settings.clip_norm is not None or settings.loss_scaling is not None or training.workload.tied:
            raise ValueError(
                "clip_norm, loss scaling and tied weights need gradients of several stages at once, and nodes have "
                "shards of them; leave them out, or use one host"
            )
        self._training, self._groups, self._node, self._num_nodes = training, groups, node, num_nodes
        self._settings = settings
        self.masters = training.optimizer.masters
        self._cuts: dict[int, list[Pieces]] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._own: dict[int, Tensors] = {}
        for stage in range(len(training.layout.backward)):
            sizes = {p: m.numel() for p, m in self.masters.items() if training.layout.stage_of(p[0]) == stage}
            self._cuts[stage] = cut_evenly(sizes, num_nodes)
            self._own[stage] = take(self.masters, self._cuts[stage][node])
            if self._own[stage]:
                self._optimizers[stage] = settings.make(list(self._own[stage].values()))
        self.sent = Sent()
        self.totals: dict[tuple[int, int], Tensors] = {}

    def step(self, stage: int, version: int) -> None:
        """Scatter the gradients of a stage, step this node's shard, gather the masters."""
        total = self._training.gradients.total(stage, version)
        shard = self._scatter(stage, total)
        if self._training.settings.keep_gradients:
            self.totals[stage, version] = {place: value.clone() for place, value in shard.items()}
        if stage in self._optimizers:
            for place, master in self._own[stage].items():
                master.grad = shard[place]
            for group in self._optimizers[stage].param_groups:
                group["lr"] = self._settings.rate(self._training.workload.first_step + version)
            self._optimizers[stage].step()
            for master in self._own[stage].values():
                master.grad = None
        self._gather(stage)
        self._training.gradients.drop(stage, version)

    def values(self, *arguments: Any, **options: Any) -> Tensors:
        """The masters of some modules, by their own places."""
        return self._inner.values(*arguments, **options)

    def share(self) -> None:
        """Take the place of the training's own optimizer."""
        self._inner = self._training.optimizer
        self._training.optimizer = self  # type: ignore[assignment]  # what a training asks of it

    def _scatter(self, stage: int, total: Mapping[Any, torch.Tensor]) -> Tensors:
        """The mean over the nodes of this node's shard; they are added up in the order of the nodes."""
        cuts = self._cuts[stage]
        like = {place: self.masters[place] for pieces in cuts for place, _, _ in pieces}
        whole = {place: total.get(place, torch.zeros_like(m)).to(m.dtype) for place, m in like.items()}
        sizes = [sum(stop - start for _, start, stop in pieces) for pieces in cuts]
        flat = [piece.contiguous() for pieces in cuts for piece in take(whole, pieces).values()]
        own = sizes[self._node]
        received = self._exchange(stage, flat, sizes, [own] * self._num_nodes)
        self._count(stage, "gradients", sum(sizes) - own)
        parts = received.view(self._num_nodes, own)
        mean = parts[0].clone()
        for part in parts[1:]:
            mean += part
        return self._apart(mean / self._num_nodes, cuts[self._node])

    def _gather(self, stage: int) -> None:
        """Every node's shard of the masters, written where they belong."""
        cuts = self._cuts[stage]
        sizes = [sum(stop - start for _, start, stop in pieces) for pieces in cuts]
        own = [piece.contiguous() for piece in self._own[stage].values()]
        received = self._exchange(stage, own * self._num_nodes, [sizes[self._node]] * self._num_nodes, sizes)
        self._count(stage, "weights", sizes[self._node] * (self._num_nodes - 1))
        for node, part in enumerate(received.split(sizes)):
            if node != self._node:
                targets = take(self.masters, cuts[node])
                for place, value in self._apart(part, cuts[node]).items():
                    targets[place].copy_(value)

    def _exchange(self, stage: int, flat: list[torch.Tensor], sends: list[int], receives: list[int]) -> torch.Tensor:
        """What all nodes send to this one, one after another."""
        dtype = next(iter(self.masters.values())).dtype
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
        incoming = torch.empty(sum(receives), dtype=outgoing.dtype)
        dist.all_to_all_single(incoming, outgoing, receives, sends, group=self._groups[stage])
        return incoming

    def _count(self, stage: int, what: str, num_elements: int) -> None:
        size = next(iter(self.masters.values())).itemsize
        setattr(self.sent, what, getattr(self.sent, what) + num_elements * size)
        self.sent.by_stage[stage] = self.sent.by_stage.get(stage, 0) + num_elements * size

    @staticmethod
    def _apart(flat: torch.Tensor, pieces: Pieces) -> Tensors:
        sizes = [stop - start for _, start, stop in pieces]
        return {place: part for (place, _, _), part in zip(pieces, flat.split(sizes), strict=True)}


def bytes_per_step(num_trained: int, num_nodes: int, itemsize: int) -> int:
    """Bytes that all nodes together send in a step: each gradient and each new weight to all nodes but one.

    A ring of n nodes sends as many: n times (n - 1) / n of everything, twice.
    """
    return 2 * (num_nodes - 1) * num_trained * itemsize
