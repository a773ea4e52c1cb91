"""Gathering: the records of all ranks, brought to rank 0 on one clock, and compared there with plain training."""

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rpbench.engine.layout import layout_of
from rpbench.engine.reference import Trajectory, largest_difference, largest_relative_difference, train_reference
from rpbench.engine.state import checkpoint
from rpbench.engine.state.accumulation import Groups, gradient_groups
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.workload import Workload
from rpbench.ir.analysis import Analysis
from rpbench.ir.schedule import Schedule
from rpbench.models.layers import DecoderLayer
from rpbench.models.linear import Linear
from rpbench.torch_runtime.processes.member import Member
from rpbench.torch_runtime.shards import BY_INPUTS, replace_matrices

# Plain training with matrix products summed from the parts that tensor-parallel ranks compute. Sums of parts round
# otherwise than one long dot product; a difference from this reference is not rounding.


class SplitLinear(nn.Module):
    """x (..., inputs) -> (..., outputs) in equal parts, one a rank: slices, or summands if `by_inputs`."""

    def __init__(self, linear: Linear, num_parts: int, *, by_inputs: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.num_parts, self.by_inputs = num_parts, by_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view_as(x)  # the input's gradient is added up over the parts before it meets that of other maps
        weights = self._cut(self.weight, 1 if self.by_inputs else 0)
        if not self.by_inputs:
            biases = [None] * self.num_parts if self.bias is None else self._cut(self.bias, 0)
            return torch.cat([functional.linear(x, *own) for own in zip(weights, biases, strict=True)], dim=-1)
        first, *others = (functional.linear(*own) for own in zip(self._cut(x, -1), weights, strict=True))
        total = sum(others, start=first)
        return total if self.bias is None else total + self.bias

    def _cut(self, tensor: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        return [part.contiguous() for part in tensor.chunk(self.num_parts, dim)]


def with_split_sums(workload: Workload, num_parts: int) -> Workload:
    """The same training with every decoder layer's matrices multiplied in parts; its modules are changed."""
    for module in workload.modules:
        if isinstance(module, DecoderLayer):
            replace_matrices(module, lambda name, ours: SplitLinear(ours, num_parts, by_inputs=name in BY_INPUTS))
    return replace(workload)


ROUND_TRIPS = 20
Answer = dict[str, Any]


def gather(member: Member, more: Mapping[str, Any] = MappingProxyType({})) -> Answer | None:
    """The answer of a run on rank 0, with `more` of every rank; a collective."""
    offset_s, error_s = clock_offset(member.device)
    hop_s = measure_hop(member)
    own = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "offset_s": offset_s,
        "offset_error_s": error_s,
        "steps": [_on_common_clock(step, offset_s) for step in member.steps],
        "losses": member.losses,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(member.device) if member.device.type == "cuda" else None,
        **more,
    }
    ranks = _to_first(own)
    answer: Answer = {"ranks": ranks, "versions": versions(), "hop_s": hop_s} if ranks is not None else {}
    if member.request.verify:
        answer |= _verify(member)
    return answer if dist.get_rank() == 0 else None


def _on_common_clock(step: tuple[list[Any], float, float], offset_s: float) -> Answer:
    moments, began, ended = step

    def shift(at: float | None) -> float | None:
        return None if at is None else at + offset_s

    return {
        "began": shift(began),
        "ended": shift(ended),
        "moments": [(m.token, *map(shift, (m.start, m.end, m.begun, m.done))) for m in moments],
    }


def _to_first(own: Any) -> list[Any] | None:
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found)
    return found


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def clock_offset(device: torch.device) -> tuple[float, float]:
    """Seconds from this rank's clock to rank 0's, and the largest error.

    Processes of one host share a clock. For others the quickest of some round trips counts; its error is at most half
    of it.
    """
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    found = (0.0, 0.0)
    for other in range(1, len(hosts)):
        if hosts[other] != hosts[0]:
            measured = _round_trips(other, device)
            found = measured if dist.get_rank() == other else found
    return found


def _round_trips(other: int, device: torch.device) -> tuple[float, float]:
    """The offset of a rank, as that rank finds it."""
    best = (0.0, float("inf"))
    value = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(ROUND_TRIPS):
        if dist.get_rank() == 0:
            dist.recv(value, src=other)
            value[0] = time.perf_counter()
            dist.send(value, dst=other)
        elif dist.get_rank() == other:
            asked = time.perf_counter()
            dist.send(value, dst=0)
            dist.recv(value, src=0)
            answered = time.perf_counter()
            if (answered - asked) / 2 < best[1]:
                best = float(value[0]) - (asked + answered) / 2, (answered - asked) / 2
    return best


def measure_hop(member: Member) -> float:
    """Seconds of one boundary tensor between the first two pipeline ranks, on rank 0: half a round trip, median."""
    group, times = member.groups.pipeline, []
    value = torch.zeros_like(member.boundary)
    rank = member.rank
    for _ in range(ROUND_TRIPS if member.request.num_pipeline_ranks > 1 and rank < 2 else 0):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(value, group=group, group_dst=1 - sender)
            else:
                dist.recv(value, group=group, group_src=sender)
        if value.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 2)
    return median(times) if times else 0.0


# --- verification -------------------------------------------------------------------------------------------


def _verify(member: Member) -> Answer:
    """The run against one plain loop over the whole model, in rank 0's process."""
    own = {"gradients": member.gradients(), "weights": member.weights()}
    kept = own if member.groups.inner_rank == 0 else {"gradients": {}, "weights": {}}
    moved = {what: {place: t.cpu() for place, t in tensors.items()} for what, tensors in kept.items()}
    gathered = _to_first(moved)
    if gathered is None:
        return {}
    gradients, apart = _together([found["gradients"] for found in gathered])
    weights, weights_apart = _together([found["weights"] for found in gathered])
    return compare(member, gradients, weights) | {"copies_max_abs_diff": max(apart, weights_apart)}


def _together(by_rank: list[Tensors]) -> tuple[Tensors, float]:
    """All ranks' tensors, and the largest difference between copies of one."""
    found: Tensors = {}
    apart = 0.0
    for tensors in by_rank:
        both = tensors.keys() & found.keys()
        apart = max(apart, largest_difference({p: found[p] for p in both}, {p: tensors[p] for p in both}))
        found |= tensors
    return found, apart


def compare(member: Member, gradients: Tensors, weights: Tensors) -> Answer:
    """The largest differences of gradients and weights from plain training, absolute and relative.

    Tensor-parallel ranks are also compared with plain training that adds up the same parts of every matrix product.
    """
    request = member.request
    reference = _reference(member, request.workload())
    expected = reference.gradients[-1]
    split: Answer = {}
    if request.tensor_parallel > 1:
        same = _reference(member, with_split_sums(request.workload(), request.tensor_parallel))
        split = {
            "same_sums_grad_max_abs_diff": largest_difference(gradients, same.gradients[-1]),
            "same_sums_weight_max_abs_diff": largest_difference(weights, same.masters),
        }
    return split | {
        "grad_max_abs_diff": largest_difference(gradients, expected),
        "grad_max_rel_diff": largest_relative_difference(gradients, expected),
        "weight_max_abs_diff": largest_difference(weights, reference.masters),
        "reference_losses": reference.losses,
        "num_microbatches_verified": request.num_steps * request.num_microbatches,
    }


def _reference(member: Member, workload: Workload) -> Trajectory:
    request, table = member.request, member.lowered.table
    assert table.partition is not None
    return train_reference(
        workload,
        layout_of(table.partition),
        summation_order(table, request.num_steps, request.data_parallel),
        request.settings(),
        num_steps=request.num_steps,
        updates=request.optimizer is not None,
        num_replicas=request.data_parallel,
        start=checkpoint.state_in(Path(request.start), request.first_step) if request.start is not None else None,
    )


def summation_order(table: Schedule, num_steps: int, num_replicas: int) -> Mapping[tuple[int, int], Groups]:
    """(backward stage, version) -> microbatches in the order in which gradients are summed, replica after replica."""
    own, size = gradient_groups(Analysis(table)), table.shape.num_microbatches
    found: dict[tuple[int, int], Groups] = {}
    for step in range(num_steps):
        for (stage, _), groups in own.items():
            firsts = [(step * num_replicas + replica) * size for replica in range(num_replicas)]
            found[stage, step + 1] = tuple(
                tuple(first + microbatch for microbatch in group) for first in firsts for group in groups
            )
    return found
