"""Node run: a request for several nodes, each of them one process with an engine that drives its devices."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist

from rpbench.cost.table import CostTable, LayerTimes
from rpbench.engine.backends.cpu import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.reference import (
    Reads,
    largest_difference,
    largest_relative_difference,
    reads_of,
    train_reference,
)
from rpbench.engine.state.gradient_sums.accumulation import Groups
from rpbench.engine.state.gradient_sums.gradients import Tensors
from rpbench.engine.state.ownership import join
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.schedule import Schedule, from_text
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.torch_runtime.processes.board import Phase, Place
from rpbench.torch_runtime.processes.nodes import NodeOptimizer, bytes_per_step, check_nodes, node_workload
from rpbench.torch_runtime.request import DTYPES
from rpbench.workload.architecture import Architecture

BACKENDS = ("virtual", "cpu")
_groups: dict[int, list[Any]] = {}


@dataclass(frozen=True)
class NodeRequest:
    """A schedule for the devices of one node, run by several nodes on microbatches of their own.

    Args:
        schedule: in our text form, with its partition and STEPs.
        model: the fields of an `Architecture`.
        num_nodes: processes, one a node.
        backend: of each node's engine: a virtual clock, or threads.
        optimizer: the fields of `OptimizerSettings`.
        verify: compare with plain training on all nodes' microbatches, on node 0.
    """

    schedule: str
    model: dict[str, Any]
    num_nodes: int = 2
    microbatch_sequences: int = 1
    seed: int = 0
    dtype: str = "float32"
    backend: str = "virtual"
    optimizer: dict[str, Any] = field(default_factory=dict)
    verify: bool = False
    device: str = "cpu"  # of what nodes exchange: host memory, so gloo

    @cached_property
    def parsed(self) -> Schedule:
        """The schedule.

        Raises:
            ScheduleError: if the text is none.
        """
        return from_text(self.schedule)

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.num_nodes

    @property
    def digest(self) -> str:
        """A hash of all that nodes must have alike."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: value, rule and way out.
        """
        check_nodes(self.parsed)
        if self.parsed.partition is None:
            raise ValueError("the schedule has no partition: give it one by with_partition(), or name a model")
        self.parsed.partition.check_layers(Architecture(**self.model).num_layers)
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend}: nodes run their engine as {' or '.join(BACKENDS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: one of {', '.join(DTYPES)}")
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}: at least 1")

    def workload(self) -> Workload:
        """All nodes' microbatches."""
        model = Architecture(**self.model)
        return Workload(
            list(build_model(model, seed=self.seed, dtype=DTYPES[self.dtype])),
            SyntheticTokens(model.vocab, model.seq_len, self.microbatch_sequences, self.seed),
            self.parsed.shape.num_microbatches * self.num_nodes,
            self.seed,
            draws_random=model.dropout > 0,
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"nodes": asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "NodeRequest":
        """The request `to_json` wrote."""
        return cls(**json.loads(text)["nodes"])


def run_node(request: NodeRequest, place: Place) -> dict[str, Any] | None:
    """This node's part of a request; the answer on node 0, None on the others.

    Raises:
        ValueError: if there are not as many processes as nodes, or they have different requests.
    """
    node = _meet(request)
    schedule, workload = request.parsed, request.workload()
    settings = Settings(OptimizerSettings(**request.optimizer), keep_gradients=request.verify)
    training = Training(node_workload(workload, node, schedule.shape.num_microbatches), schedule, settings)
    groups = _stage_groups(len(training.layout.backward))
    optimizer = NodeOptimizer(training, groups, node, request.num_nodes)
    optimizer.share()
    place.write(Phase.COMPUTING, -1, 0)
    timeline = _execute(request, training, _costs(schedule))
    place.write(Phase.DONE)
    losses = [training.mean_loss(step) for step in range(schedule.shape.num_steps)]
    trained = sum(master.numel() for master in optimizer.masters.values())
    itemsize = next(iter(optimizer.masters.values())).itemsize
    own = {
        "sent_gradient_bytes": optimizer.sent.gradients,
        "sent_weight_bytes": optimizer.sent.weights,
        "losses": losses,
        "makespan_s": float(timeline.makespan) if request.backend == "cpu" else None,
        "shards": optimizer.totals,
        "masters": optimizer.masters if request.verify else {},
    }
    gathered: list[Any] | None = [None] * request.num_nodes if node == 0 else None
    dist.gather_object(own, gathered)
    if gathered is None:
        return None
    answer = {
        "nodes": [{key: value for key, value in each.items() if key not in ("shards", "masters")} for each in gathered],
        "losses": [sum(step) / request.num_nodes for step in zip(*(each["losses"] for each in gathered), strict=True)],
        "sent_bytes": sum(each["sent_gradient_bytes"] + each["sent_weight_bytes"] for each in gathered),
        "expected_bytes": schedule.shape.num_steps * bytes_per_step(trained, request.num_nodes, itemsize),
    }
    return answer | (_verified(request, workload, training, gathered) if request.verify else {})


def _meet(request: NodeRequest) -> int:
    world = dist.get_world_size()
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, request.digest)
    if len(set(digests)) > 1 or world != request.num_nodes:
        raise ValueError(
            f"{world} processes with {len(set(digests))} different requests for {request.num_nodes} nodes: start one "
            "process a node, all with the same command and the same version"
        )
    return dist.get_rank()


def _stage_groups(num_stages: int) -> list[Any]:
    """A group of all nodes for every stage; steps of stages go on at a time."""
    world = dist.get_world_size()
    found = _groups.setdefault(world, [])
    while len(found) < num_stages:
        found.append(dist.new_group(list(range(world)), backend="gloo"))
    return found


def _costs(schedule: Schedule) -> CostTable:
    """Equal layers: they only order what a virtual clock does."""
    assert schedule.partition is not None
    layers = [1.0] * schedule.partition.num_layers
    return LayerTimes(layers, layers, layers, 1.0, 1.0, layers, layers, 1.0, 1.0).table(schedule.partition)


def _execute(request: NodeRequest, training: Training, costs: CostTable) -> Any:
    if request.backend == "virtual":
        return execute(training.program(costs), training.handlers, VirtualBackend(costs))
    with CpuBackend() as backend:
        return execute(training.program(costs, real_time=True), training.handlers, backend)


def _verified(request: NodeRequest, workload: Workload, training: Training, gathered: list[Any]) -> dict[str, Any]:
    """All nodes' gradients and weights against one plain loop over all of their microbatches."""
    schedule, size = request.parsed, request.parsed.shape.num_microbatches
    local = reads_of(schedule, training.layout, training.settings.recompute_grain)

    def read(versions: Any) -> Any:
        return lambda module, microbatch: versions(module, microbatch // (size * request.num_nodes) * size)

    reference = train_reference(
        workload,
        training.layout,
        _all_groups(training.groups, size, request.num_nodes),
        training.settings.optimizer,
        num_steps=schedule.shape.num_steps,
        reads=Reads(read(local.forward), read(local.backward), local.grain),
        num_replicas=request.num_nodes,
    )
    found: list[Tensors] = [{} for _ in reference.gradients]
    shapes = {place: master.shape for place, master in training.optimizer.masters.items()}
    for stage, version in gathered[0]["shards"]:
        found[version - 1] |= join([each["shards"][stage, version] for each in gathered], shapes)
    apart = [largest_difference(each["masters"], gathered[0]["masters"]) for each in gathered[1:]]
    return {
        "grad_max_abs_diff": max(map(largest_difference, found, reference.gradients)),
        "grad_max_rel_diff": max(map(largest_relative_difference, found, reference.gradients)),
        "weight_max_abs_diff": largest_difference(gathered[0]["masters"], reference.masters),
        "copies_max_abs_diff": max(apart, default=0.0),
        "reference_losses": reference.losses,
    }


def _all_groups(own: Any, size: int, num_nodes: int) -> dict[tuple[int, int], Groups]:
    """The order of one node's sums, node after node, with all nodes' numbers of microbatches."""
    return {
        (stage, version): tuple(
            tuple((number // size * num_nodes + node) * size + number % size for number in group)
            for node in range(num_nodes)
            for group in groups
        )
        for (stage, version), groups in own.items()
    }
