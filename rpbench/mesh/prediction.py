"""Prediction: seconds and bytes of a training run under a mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rpbench.cost.hardware.machine import Machine, machine
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Mesh
from rpbench.mesh.memory import Bytes, Verdict, fullest, verdict
from rpbench.mesh.plan_search.smallest_change import Change, smallest_change
from rpbench.mesh.software import Software, software
from rpbench.mesh.step import Terms, step_terms
from rpbench.workload.architecture import Architecture


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a job.

    Args:
        terms: seconds of a step by cause.
        fullest_rank, memory: the pipeline rank with most bytes, and its bytes by class.
        verdict: whether it fits.
    """

    job: Job
    terms: Terms
    fullest_rank: int
    memory: Bytes
    verdict: Verdict

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens a second of one device."""
        return self.job.tokens / self.step_time_s / self.job.machine.size

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of tensors on the fullest device."""
        return sum(self.memory.values())

    @property
    def model_flops_utilization(self) -> float:
        """FLOPs of products and causal attention, over the device's 16-bit peak."""
        done = self.job.architecture.flops_per_token(self.job.seq_len) * self.tokens_per_s_per_device
        return done / self.job.machine.device.flops_16

    @property
    def smallest_change(self) -> Change | None:
        """The least change that makes it fit; None where it is predicted to fit."""
        return smallest_change(self.job)

    def record(self) -> dict[str, Any]:
        """Flat fields for a record."""
        change = self.smallest_change
        return {
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s_per_device * self.job.machine.size,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "model_flops_utilization": self.model_flops_utilization,
            "peak_memory_bytes": self.peak_memory_bytes,
            "status": {"oom": "oom"}.get(self.verdict.answer, "ok"),
            "reason": self.verdict.reason,
            "verdict": self.verdict.answer,
            "smallest_change": change.plain() if change else None,
            "terms_s": dict(self.terms),
            "memory_bytes": dict(self.memory),
        }


def predict_job(job: Job) -> Prediction:
    """The prediction of a job by closed forms."""
    rank, classes = fullest(job)
    return Prediction(job, step_terms(job), rank, classes, verdict(job))


def predict(
    model: Architecture,
    cluster: Machine | str,
    mesh: Mesh,
    *,
    seq_len: int,
    global_batch: int,
    sequences: int = 1,
    framework: Software | str = "megatron_core",
    **options: Any,
) -> Prediction:
    """Seconds and bytes of a model's training under a mesh.

    Args:
        cluster: a machine, or the name of one in `conf/cluster/`, which gets as many nodes as the mesh needs.
        global_batch: sequences of a step.
        sequences: of a microbatch.
        framework: traits and constants, or their name in `conf/software/`.
        options: schedule, chunks, recompute, precision, cut; see `Job`.

    Raises:
        ValueError: for sizes that do not divide or names that are not known, with those that do and are.
    """
    found = machine(cluster).with_devices(mesh.num_devices) if isinstance(cluster, str) else cluster
    known = software(framework) if isinstance(framework, str) else framework
    microbatches = num_microbatches(global_batch, mesh, sequences)
    return predict_job(Job(model, found, mesh, known, seq_len, sequences, microbatches, **options))


def num_microbatches(global_batch: int, mesh: Mesh, sequences: int) -> int:
    """Microbatches of a step.

    Raises:
        ValueError: if the batch cannot be dealt evenly.
    """
    each = mesh.data * sequences
    found, rest = divmod(global_batch, each)
    if rest or not found:
        nearest = max(1, round(global_batch / each)) * each
        raise ValueError(
            f"global_batch={global_batch}: {mesh.data} data shards of microbatches of {sequences} sequences take "
            f"multiples of {each}; the nearest is {nearest}"
        )
    return found


def with_constants(job: Job, values: Mapping[str, float]) -> Job:
    """The same job with some of its framework's constants replaced."""
    return replace(job, software=job.software.with_constants(values))
