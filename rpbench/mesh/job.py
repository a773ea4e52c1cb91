"""Job: one training run under a mesh, checked; and the seconds of its stages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, get_args

from rpbench.ir.partition import Partition, split_evenly
from rpbench.ir.schedule import check_slices
from rpbench.mesh.layers.layer_seconds import RECOMPUTES, Precision, Seconds, Setting
from rpbench.mesh.layers.layer_times import hop_s
from rpbench.registry import check_known, entry
from rpbench.workload.counts import Layer


@dataclass(frozen=True)
class Job(Setting):
    """A training run: the setting of its layers, and its schedule; ValueError for sizes that do not fit each other."""

    sequences: int = 1
    num_microbatches: int = 1  # of a step, for each pipeline
    schedule: str = "1f1b"
    chunks: int = 1  # stages on each pipeline rank
    cut: tuple[int, ...] = ()  # layers of each stage, in model order; empty for an even cut
    kept: tuple[int, ...] = ()  # with recompute=fitting: layers that are not recomputed (`rpbench.mesh.memory.fitted`)

    def __post_init__(self) -> None:
        for name in ("seq_len", "sequences", "num_microbatches", "chunks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number of at least 1")
        for name, known in (("recompute", RECOMPUTES), ("precision", get_args(Precision))):
            check_known(name, getattr(self, name), known)
        own, mesh = self.architecture, self.mesh
        entry(self.schedule)
        mesh.check_devices(self.machine.size)
        mesh.check_model(own.heads, own.key_value_heads, own.experts.total if own.experts else 1, len(own.layers))
        if self.seq_len % mesh.context:
            raise ValueError(f"mesh.context={mesh.context} does not divide seq_len={self.seq_len}")
        if mesh.sequence_parallel:
            check_slices(self.seq_len, mesh.tensor, "mesh.sequence_parallel")
        if own.training_mode == "qlora" and mesh.tensor > 1:
            raise ValueError(
                f"mesh.tensor={mesh.tensor} with training_mode=qlora: blocks of 4 bits are not cut; take "
                "mesh.tensor=1, with mesh.shard=parameters, which gathers them"
            )
        self._check_cut()

    def _check_cut(self) -> None:
        layers, stages = len(self.architecture.layers), self.num_stages
        if self.cut and (len(self.cut) != stages or sum(self.cut) != layers or min(self.cut) < 0):
            raise ValueError(f"cut={list(self.cut)}: {stages} numbers that add up to {layers} layers")
        if not self.cut:
            if stages > layers:
                raise ValueError(
                    f"pipeline {self.mesh.pipeline} x chunks {self.chunks} = {stages} stages of {layers} layers: "
                    f"take at most {layers // self.mesh.pipeline} chunks"
                )
            object.__setattr__(self, "cut", tuple(split_evenly(layers, stages)))

    @cached_property
    def layers_s(self) -> tuple[Seconds, ...]:
        """Seconds of every layer for one microbatch; those that keep their activations are not recomputed."""
        found = [self.kinds[kind] for kind in self.architecture.layers]
        for layer in self.kept if self.recompute == "fitting" else ():
            found[layer] = found[layer]._replace(recompute=0.0)
        return tuple(found)

    def kept_by_stage(self, cut: Partition) -> tuple[int, ...]:
        """Layers of each backward stage of a cut that are not recomputed, where the memory decides."""
        kept = {*self.kept} if self.recompute == "fitting" else set()
        return tuple(sum(layer in kept for layer in own) for own in cut.backward_ranges())

    @property
    def num_stages(self) -> int:
        return self.mesh.pipeline * self.chunks

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.sequences * self.num_microbatches * self.mesh.data

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all devices."""
        return self.global_batch * self.seq_len

    @cached_property
    def stage_layers(self) -> tuple[tuple[tuple[Layer, int], ...], ...]:
        """(kind, number of layers) of each stage."""
        return tuple(map(kinds_of, stages_of(self.architecture.layers, self.cut)))

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank; ranks take them in turn."""
        return list(range(rank, self.num_stages, self.mesh.pipeline))

    @cached_property
    def hop_s(self) -> float:
        """Seconds of a boundary tensor from one stage to the next."""
        return hop_s(self)


def stages_of(layers: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """The layers of each stage of a cut, or what there is of every layer."""
    return [layers[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def kinds_of(layers: Sequence[Layer]) -> tuple[tuple[Layer, int], ...]:
    return tuple(Counter(layers).items())


class StageSeconds(NamedTuple):
    """Seconds of every stage for one microbatch; the backward is without recomputation."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]

    def both(self, stage: int) -> float:
        return self.forward[stage] + self.recompute[stage] + self.backward[stage]


def stage_seconds(job: Job) -> StageSeconds:
    """Seconds of the stages of a job whose devices keep their parameters (no FSDP)."""

    def summed(name: str, head: float = 0.0) -> list[float]:
        found = [sum(n * getattr(job.kinds[kind], name) for kind, n in layers) for layers in job.stage_layers]
        return [*found[:-1], found[-1] + head]

    forward = summed("forward_all", job.head.forward_all)
    # the embedding: tokens looked up, positions and dropout
    forward[0] += 8.0 * job.microbatch_tokens * job.architecture.hidden / job.memory_rate / job.spread
    backward = summed("backward_all", job.head.backward_all)
    each_s = [layer.recompute for layer in job.layers_s]
    again = [
        sum(each * number for (_, each), number in Counter(own).items())
        for own in stages_of([*zip(job.architecture.layers, each_s, strict=True)], job.cut)
    ]
    return StageSeconds(tuple(forward), tuple(backward), tuple(again))
