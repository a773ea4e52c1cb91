"""The side of a run under a mesh: its seconds by cause, from the closed forms of `rpbench.mesh`. Evidence: predicted."""

from dataclasses import replace
from typing import Any

from rpbench.explain.side import COMPUTATION, Rate, Side, Work
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Seconds
from rpbench.mesh.step import stages_of_step, step_terms


def side_of_job(
    job: Job, step_s: float | None, label: str, *, evidence: str = "published", slower: float = 1.0, **more: Any
) -> Side:
    """A number of a run under a mesh.

    Args:
        step_s: seconds of a step, as the number says; None for the prediction itself.
        slower: a factor on all seconds of the run's session.
        more: further fields of the side.
    """
    each = job.machine.num_devices / job.tokens
    causes = {name: each * seconds for name, seconds in job_causes(job).items()}
    causes["overheads"] += (slower - 1.0) * sum(causes.values())
    return Side(
        label,
        each * step_s if step_s else sum(causes.values()),
        evidence if step_s else "predicted",
        causes,
        "predicted",
        work=Work(job.architecture.flops_per_token(job.seq_len), job.machine.gpu.flops_16, _dtype_gain(job)),
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
    """Seconds of all layers and the head for one microbatch; `host` counts both ways."""
    found = [(job.kinds[kind], count) for layers in job.stage_layers for kind, count in layers] + [(job.head, 1)]
    sums = [sum(count * getattr(seconds, name) for seconds, count in found) for name in Seconds._fields]
    whole = Seconds(*sums)
    return whole._replace(host=2 * whole.host)


def _kernels_s(inner: Seconds) -> float:
    return inner.forward + inner.input_grad + inner.weight_grad


def _dtype_gain(job: Job) -> float:
    if job.precision == "bf16":
        return 1.0
    return job_causes(replace(job, precision="bf16"))[COMPUTATION] / job_causes(job)[COMPUTATION]


def settings_of(job: Job) -> dict[str, Any]:
    """What is known of a run, for people and for `with_settings`."""
    return {
        "model": job.architecture.name,
        "machine": job.machine.name,
        "software": job.software.name,
        "num_devices": job.machine.num_devices,
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


CONVENTIONS = {
    "causal": "products and causal attention, as this project counts",
    "6n": "6 N of all N parameters",
    "palm": "6 N + 12 L a d s: the whole square of attention (PaLM, arXiv 2204.02311, appendix B)",
    "megatron": "72 L h^2 (1 + s / 6h + V / 12Lh) (Megatron-LM, SC'21, without recomputation)",
    "megatron_recompute": "96 L h^2 (1 + s / 6h + V / 16Lh): full recomputation counts (Megatron-LM, SC'21)",
}


def counted_flops(job: Job, convention: str) -> float:
    """FLOPs of a token as a published rate counts them.

    Args:
        convention: one of `CONVENTIONS`.
    """
    own, s = job.architecture, job.seq_len
    layers, h = own.num_layers, own.hidden
    if convention == "causal":
        return own.flops_per_token(s)
    if convention in ("6n", "palm"):
        squares = 12.0 * layers * own.heads * own.head_dim * s if convention == "palm" else 0.0
        return 6.0 * own.total_parameters + squares
    passes, head = (96.0, 16.0) if convention == "megatron_recompute" else (72.0, 12.0)
    return passes * layers * h * h * (1 + s / (6 * h) + own.vocab / (head * layers * h))


def rated(job: Job, side: Side, convention: str, peak: float | None) -> Side:
    """The side with the rate that its source prints."""
    return replace(side, rate=Rate(counted_flops(job, convention), peak))
