"""Plans: every mesh, schedule, microbatch, recomputation and sharding that divides, as arrays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from rpbench.cost.arrays import Ints
from rpbench.cost.hardware.machine import Machine
from rpbench.ir.partition import divisors, split_evenly
from rpbench.mesh.layers.layer_seconds import LAYERWISE, Recompute
from rpbench.mesh.layout import SHARDED, Mesh, Sharded, Sharing
from rpbench.workload.architecture import Architecture

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "gpipe")
SPLIT = frozenset({"zb_h1", "zb_h2"})  # orders that split backward
Alone = Sharded | Literal["tensor"]
EVEN = -1
MOST_SEQUENCES = 32  # of a microbatch


class Inner(NamedTuple):
    """The choices that the seconds of a layer depend on."""

    tensor: int
    context: int
    expert: int
    sequences: int
    recompute: Recompute


@dataclass(frozen=True)
class Space:
    """The choices of a search."""

    # max_tensor, max_context: largest groups
    max_tensor: int = 8
    max_context: int = 1
    cuts_experts: bool = True  # whether devices may hold some of the experts each
    sequences: tuple[int, ...] = ()  # of a microbatch; empty: `microbatch_sizes`
    # recomputes, schedules, shared: see `Job` and `Sharing`
    recomputes: tuple[Recompute, ...] = ("fitting",)  # it is as fast as none where all fits, and as small as full
    schedules: tuple[str, ...] = SCHEDULES
    shared: tuple[Sharded, ...] = SHARDED
    # where there is no pipeline: what replicas may share, and whether one replica may be cut into tensor shards alone
    without_pipeline: tuple[Alone, ...] = (*SHARDED, "tensor")
    max_chunks: int = 8  # on a device
    alone: bool = True  # whether plans that are one pipeline, or replicas of all layers, and nothing else take part
    # of a model, tensor, expert, expert_tensor, and devices that share parameters: why a framework takes no such cut
    refuses: Callable[..., str] | None = None


@dataclass(frozen=True)
class Plans:
    """Columns, one entry for each plan."""

    inners: tuple[Inner, ...]
    schedules: tuple[str, ...]
    # inner, schedule, shared: indices into `inners`, `schedules` and `SHARDED`
    inner: Ints
    pipeline: Ints
    data: Ints
    chunks: Ints
    microbatches: Ints
    schedule: Ints
    shared: Ints
    last: Ints  # layers of the last stage, which has the head, with the other stages cut evenly; `EVEN`: all are

    @property
    def count(self) -> int:
        return len(self.inner)

    def mesh(self, number: int) -> Mesh:
        inner = self.inners[int(self.inner[number])]
        return Mesh(
            int(self.data[number]),
            int(self.pipeline[number]),
            inner.tensor,
            inner.context,
            inner.expert,
            sequence_parallel=inner.tensor > 1,
            sharing=Sharing(SHARDED[int(self.shared[number])]),
        )

    def cut(self, number: int, layers: int) -> tuple[int, ...]:
        stages, last = int(self.pipeline[number] * self.chunks[number]), int(self.last[number])
        return split_evenly(layers, stages) if last == EVEN else (*split_evenly(layers - last, stages - 1), last)


def microbatch_sizes(global_batch: int) -> tuple[int, ...]:
    """The sizes of microbatches that divide a batch; others divide no replica's part of it."""
    return tuple(size for size in divisors(global_batch) if size <= MOST_SEQUENCES)


def enumerate_plans(own: Architecture, machine: Machine, seq_len: int, global_batch: int, space: Space) -> Plans:
    """All plans of a model on a machine whose sizes divide; if there is none, ValueError naming what to change."""
    devices, layers = machine.size, len(own.layers)
    if own.training_mode == "qlora":  # as a `Job` demands
        space = replace(space, max_tensor=1)
    if space.refuses is not None:
        space = replace(space, refuses=partial(space.refuses, own))
    inners: list[Inner] = []
    rows: list[Ints] = []
    space = replace(space, sequences=space.sequences or microbatch_sizes(global_batch))
    for inner in _inners(own, machine, seq_len, space):
        group = inner.tensor * inner.context
        if devices % group:
            continue
        plain = inner._replace(recompute="full" if inner.recompute in LAYERWISE else "none")
        found = _outer(devices // group, layers, global_batch, plain, space)
        if len(found):
            rows.append(np.column_stack([np.full(len(found), len(inners), np.int64), found]))
            inners.append(inner)
    if not rows:
        sizes = f"no mesh of {devices} devices divides a global batch of {global_batch} and {layers} layers"
        if global_batch % devices:
            raise ValueError(f"{sizes}; take a batch that is a multiple of the devices")
        widest = max(_tensors(own, machine, seq_len, space))
        raise ValueError(
            f"{sizes}, with these methods and tensor groups of at most {widest}; take a larger batch or further methods"
        )
    columns = np.concatenate(rows).T
    even = np.full(columns.shape[1], EVEN)
    return Plans(tuple(inners), _orders(space), *map(np.ascontiguousarray, (*columns, even)))


def _tensors(own: Architecture, machine: Machine, seq_len: int, space: Space) -> list[int]:
    """Sizes of tensor groups, which stay on fast links."""
    return [
        t
        for t in _powers(min(space.max_tensor, machine.domain_devices))
        if seq_len % t == own.heads % t == 0 and max(t, own.key_value_heads) % min(t, own.key_value_heads) == 0
    ]


def _inners(own: Architecture, machine: Machine, seq_len: int, space: Space) -> list[Inner]:
    tensors = _tensors(own, machine, seq_len, space)
    contexts = [c for c in _powers(space.max_context) if seq_len % c == 0]
    total = own.experts.total if own.experts and space.cuts_experts else 1
    experts = [e for e in _powers(total) if total % e == 0]
    return [Inner(*each) for each in product(tensors, contexts, experts, space.sequences, space.recomputes)]


@lru_cache(maxsize=1024)
def _outer(ranks: int, layers: int, global_batch: int, inner: Inner, space: Space) -> Ints:
    """(pipeline, data, chunks, microbatches, schedule, shared) of every plan with these inner choices, (plans, 6)."""
    found: list[tuple[int, ...]] = []
    for pipeline in range(1, min(ranks, layers) + 1):
        data, rest = divmod(ranks, pipeline)
        microbatches, left = divmod(global_batch, data * inner.sequences)
        if rest or left or not microbatches or data * inner.context * inner.tensor % inner.expert:
            continue
        for (number, name), shared in product(enumerate(_orders(space)), range(len(SHARDED))):
            is_cut = data == 1 and inner.tensor > 1
            if not _is_asked(space, name, SHARDED[shared], pipeline, is_cut=is_cut):
                continue
            if 1 in (data, pipeline) and inner[:3] == (1, 1, 1) and not space.alone and SHARDED[shared] != "optimizer":
                continue  # contenders cover these plans, except with ZeRO-1
            sharing = inner.context * inner.tensor * (1 if SHARDED[shared] == "none" else data)
            if space.refuses is not None and space.refuses(inner.tensor, inner.expert, 1, sharing):
                continue
            if _sensible(SHARDED[shared], data * inner.context, pipeline):
                found += [
                    (pipeline, data, chunks, microbatches, number, shared)
                    for chunks in _chunks(name, pipeline, layers, microbatches, inner, space)
                ]
    return np.array(found, np.int64).reshape(-1, 6)


def _orders(space: Space) -> tuple[str, ...]:
    """The orders of a space's plans; one rank alone has that of 1F1B."""
    return (*space.schedules, *(["1f1b"] if space.without_pipeline and "1f1b" not in space.schedules else []))


def _is_asked(space: Space, name: str, shared: Sharded, pipeline: int, *, is_cut: bool) -> bool:
    alone = ("tensor" if is_cut else shared) in space.without_pipeline
    return shared in space.shared and (name in space.schedules if pipeline > 1 else alone)


def _sensible(shared: Sharded, replicas: int, pipeline: int) -> bool:
    """Whether a sharding makes sense: among replicas only, of gradients and parameters only without a pipeline."""
    if replicas == 1:
        return shared == "none"
    return pipeline == 1 or shared in ("none", "optimizer")


def _chunks(name: str, pipeline: int, layers: int, microbatches: int, inner: Inner, space: Space) -> list[int]:
    if pipeline == 1:
        return [1] if name == "1f1b" else []
    if name == "interleaved_1f1b":
        most = min(space.max_chunks, layers // pipeline)
        return list(range(2, most + 1)) if microbatches % pipeline == 0 else []
    if name in SPLIT and microbatches < 2 * pipeline:
        return []
    return [1]


def _powers(most: int) -> list[int]:
    return [2**k for k in range(max(1, most).bit_length())]
