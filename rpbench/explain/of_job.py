"""The side of a run under a mesh: its seconds by cause, from the closed forms of `rpbench.mesh`; predicted."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rpbench.cost.hardware.machine import machine
from rpbench.explain.side import COMPUTATION, Side, Work
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import Seconds
from rpbench.mesh.software import software
from rpbench.mesh.step import stages_of_step, step_terms
from rpbench.registry import unknown_name

MESH = ("data", "pipeline", "tensor", "context", "expert")
COUNTS = ("seq_len", "sequences", "num_microbatches", "chunks")
WORDS = ("schedule", "recompute", "precision")


def side_of_job(
    job: Job, step_s: float | None, label: str, *, evidence: str = "published", slower: float = 1.0, **more: Any
) -> Side:
    """A number of a run under a mesh.

    Args:
        step_s: seconds of a step, as the number says; None for the prediction itself.
        slower: a factor on all seconds of the run's session.
        more: further fields of the side.
    """
    each = job.machine.size / job.tokens
    causes = {name: each * seconds for name, seconds in job_causes(job).items()}
    causes["overheads"] += (slower - 1.0) * sum(causes.values())
    return Side(
        label,
        each * step_s if step_s else sum(causes.values()),
        evidence if step_s else "predicted",
        causes,
        "predicted",
        work=Work(job.architecture.flops_per_token(job.seq_len), job.machine.device.flops_16, _dtype_gain(job)),
        settings=settings_of(job),
        **more,
    )


def job_causes(job: Job) -> dict[str, float]:
    """Seconds of a step by cause, as a mean over devices; they add up to the predicted step."""
    terms, stages = step_terms(job), stages_of_step(job)
    p, m = job.mesh.pipeline, job.num_microbatches
    each = job.software.constants["microbatch_s"]
    ranks = [sum(stages.both(stage) for stage in job.stages_of(rank)) for rank in range(p)]
    inner = _inner(job)
    gathers = job.mesh.sharing.what == "parameters" and job.mesh.shard_group > 1 and p == 1
    known = inner.recompute + inner.host
    kernels = _kernels_s(inner) if gathers else sum(ranks) - known - inner.forward_exposed - inner.backward_exposed
    return {
        COMPUTATION: m * kernels / p,
        "recomputation": m * inner.recompute / p,
        "partition": m * (max(ranks) - sum(ranks) / p),
        "bubble": terms.get("bubble", 0.0),
        "transfers": terms.get("hops", 0.0),
        "collectives": m * (sum(ranks) - known - kernels) / p + terms["data"] + terms["tied"],
        "optimizer": terms["optimizer"],
        "overheads": m * (inner.host / p + each) + terms["fixed"] + terms.get("jitter", 0.0),
    }


def _inner(job: Job) -> Seconds:
    """Seconds of all layers and the head for one microbatch; `host` is what it takes longer than the device."""
    found = [(job.kinds[kind], count) for layers in job.stage_layers for kind, count in layers] + [(job.head, 1)]
    sums = [sum(count * getattr(seconds, name) for seconds, count in found) for name in Seconds._fields]
    whole = Seconds(*sums)
    return whole._replace(host=sum(count * seconds.waits for seconds, count in found))


def _kernels_s(inner: Seconds) -> float:
    return inner.forward + inner.input_grad + inner.weight_grad


def _dtype_gain(job: Job) -> float:
    if job.precision == "bf16":
        return 1.0
    return job_causes(replace(job, precision="bf16"))[COMPUTATION] / job_causes(job)[COMPUTATION]


def settings_of(job: Job) -> dict[str, Any]:
    """Settings of a run, for people and for `with_settings`."""
    return {
        "model": job.architecture.name,
        "machine": job.machine.name,
        "software": job.software.name,
        "num_devices": job.machine.size,
        "data": job.mesh.data,
        "pipeline": job.mesh.pipeline,
        "tensor": job.mesh.tensor,
        "context": job.mesh.context,
        "expert": job.mesh.expert,
        "seq_len": job.seq_len,
        "sequences": job.sequences,
        "num_microbatches": job.num_microbatches,
        "schedule": job.schedule,
        "chunks": job.chunks,
        "recompute": job.recompute,
        "precision": job.precision,
        "cut": "-".join(map(str, job.cut)),
    }


def with_settings(job: Job, typed: Mapping[str, str]) -> Job:
    """The same run with some settings as typed in; a mesh of other sizes takes as many devices as it needs.

    Raises:
        ValueError: for an unknown key or a value that cannot be.
    """
    mesh_sizes: dict[str, Any] = {key: _count(key, value) for key, value in typed.items() if key in MESH}
    counts = {key: _count(key, value) for key, value in typed.items() if key in COUNTS}
    words: dict[str, Any] = {key: value for key, value in typed.items() if key in WORDS}
    for key in typed:
        if key not in (*MESH, *COUNTS, *WORDS, "machine", "software"):
            raise ValueError(unknown_name("key", key, [*MESH, *COUNTS, *WORDS, "machine", "software"]))
    mesh = replace(job.mesh, **mesh_sizes)
    place = machine(typed["machine"]) if "machine" in typed else job.machine
    framework = software(typed["software"]) if "software" in typed else job.software
    cut = () if {"pipeline", "chunks"} & set(typed) else job.cut
    changed: dict[str, Any] = {**counts, **words}
    return replace(job, mesh=mesh, machine=place.with_devices(mesh.num_devices), software=framework, cut=cut, **changed)


def _count(key: str, text: str) -> int:
    if not text.replace("_", "").isdecimal() or int(text) < 1:
        raise ValueError(f"{key}={text}: a whole number of at least 1")
    return int(text)
