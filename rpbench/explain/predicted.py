"""Predicted sides: seconds by cause of a system of the published tables, and of a run under a mesh.

Evidence: predicted. Terms of a system (`rpbench.predict`) with several causes are separated by timing the run again
without one of them:

    recomputation  counted separately, by the same costs
    partition      slowest stage less the mean, of a pipeline whose stages stay on their devices
    transfers      the run less the run with copies that take no time
    late updates   an asynchronous step less a synchronous one

A run under a mesh follows the closed forms of `rpbench.mesh`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.hardware.machine import machine
from rpbench.explain.side import COMPUTATION, DECLARED, Side, Work
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import Seconds, eager_kernels
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.mesh.layout import Mesh
from rpbench.mesh.software import software
from rpbench.mesh.step import stages_of_step, step_terms
from rpbench.predict import megatron, roundpipe
from rpbench.predict.case import FUSED, Case, Terms
from rpbench.predict.megatron import bound_cut
from rpbench.predict.systems import system
from rpbench.registry import unknown_name
from rpbench.sim.longest_path import simulate_graph
from rpbench.untrusted import whole
from rpbench.workload.architecture import Architecture

FREE = 1e9  # factor on the bandwidth of a link that takes no time
# Settings of a run under a mesh that can be typed.
MESH = ("data", "pipeline", "tensor", "context", "expert")
COUNTS = ("seq_len", "sequences", "num_microbatches", "chunks")
WORDS = ("schedule", "recompute", "precision")


def side_of_case(case: Case, tokens_per_s: float | None, label: str, *, evidence: str = "published") -> Side:
    """A published throughput of a system; `tokens_per_s` are those of all devices, None for the prediction itself."""
    each = case.num_devices / case.tokens_per_step
    causes = {name: each * cause_s for name, cause_s in case_causes(case).items()}
    return Side(
        label,
        case.num_devices / tokens_per_s if tokens_per_s else sum(causes.values()),
        evidence if tokens_per_s else "predicted",
        causes,
        "predicted",
        work=work_of(case.model, case.microbatch_tokens, case.basis, case.software),
        settings={
            "system": case.system,
            "model": case.model.name,
            "cluster": case.basis.cluster_name,
            "num_devices": case.num_devices,
            "seq_len": case.model.seq_len,
            "global_sequences": case.settings.global_sequences,
            "num_calls": case.settings.num_calls,
            "num_microbatches": case.settings.num_microbatches,
            "microbatch_sequences": case.settings.microbatch_sequences,
        },
        notes=(case.settings.source,),
    )


def case_causes(case: Case) -> dict[str, float]:
    """Seconds of a step by cause, with the predicted step as their sum; ValueError for an unknown system."""
    finer = _FINER.get(case.system)
    causes = _by_cause(system(case.system).step(case, case.basis)) if finer is None else finer(case)
    again = min(_recomputed_s(case), causes[COMPUTATION])
    causes[COMPUTATION] -= again
    return causes | {"recomputation": again}


def _by_cause(terms: Terms) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, term_s in terms.items():
        cause = DECLARED["cause_of_term"][name]
        found[cause] = found.get(cause, 0.0) + term_s
    return found


def _recomputed_s(case: Case) -> float:
    """Seconds of a step in which a device recomputes forwards: all but those of RoundPipe's fused stage."""
    model, settings = case.model, case.settings
    if case.system == "megatron-tp":
        setting = replace(case.setting(case.microbatch_tokens), mesh=Mesh(tensor=case.num_devices))
        forward, *_ = eager_kernels(setting).layer()
        return settings.num_calls * model.num_layers * forward
    streamed = case.system.startswith(("roundpipe", "mobius"))
    tokens = case.chunk_tokens if streamed else case.microbatch_tokens
    times = times_of(case.setting(tokens))
    layers = model.num_layers
    if case.system.startswith("roundpipe"):
        layers -= roundpipe.planned(case).backward[-1]
    whole = layers * times.recompute[0]
    if streamed:
        sequences = settings.global_sequences / settings.chunks.size
        return whole * sequences / case.num_devices
    return settings.num_calls * whole / (case.num_devices if case.system == "megatron-pp" else 1)


# --- systems whose terms hold several causes ------------------------------------------------------------------


def _pipeline(case: Case) -> dict[str, float]:
    """1F1B: the slowest stage's work, the bubble of the order, and boundary tensors."""
    terms = _by_cause({name: s for name, s in megatron.pipeline_step(case, case.basis).items() if name != "pipeline"})
    cut, times, calls = bound_cut(case), megatron.pipeline_times(case, case.basis), case.settings.num_calls
    graph = megatron.graph_of(case.num_devices, calls)
    spans = [float(max(simulate_graph(graph, each.table(cut)).end)) for each in (times, replace(times, hop=0.0))]
    layer = times.forward[0] + times.recompute[0] + times.backward[0]
    stages = [calls * layer * count for count in cut.forward]
    stages[-1] += calls * (times.head_forward + times.head_backward)
    mean = sum(stages) / len(stages)
    return terms | {
        COMPUTATION: mean,
        "partition": max(stages) - mean,
        "bubble": spans[1] - max(stages),
        "transfers": spans[0] - spans[1],
    }


def _asynchronous(case: Case) -> dict[str, float]:
    """RoundPipe: the synchronous step, and the seconds that late updates save."""
    found = _with_free_copies(case, roundpipe.synchronous_step)
    saved = sum(roundpipe.asynchronous_step(case, case.basis).values()) - sum(found.values())
    return found | {"late updates": saved}


def _with_free_copies(case: Case, step: Callable[[Case, Basis], Terms]) -> dict[str, float]:
    """The bubble split into waits for copies and idle time of the order."""
    basis = case.basis
    free = basis.scaled("copy_bytes_per_s", FREE)
    if "root_complex_bytes_per_s" in basis.values:
        free = free.scaled("root_complex_bytes_per_s", FREE)
    found, without = _by_cause(step(case, basis)), _by_cause(step(case, free))
    waiting = max(0.0, found["bubble"] - without["bubble"])
    return found | {"bubble": found["bubble"] - waiting, "transfers": waiting}


_FINER: Mapping[str, Callable[[Case], dict[str, float]]] = {
    "megatron-pp": _pipeline,
    "roundpipe": _asynchronous,
    "roundpipe-sync": lambda case: _with_free_copies(case, roundpipe.synchronous_step),
    "mobius": lambda case: _with_free_copies(case, roundpipe.mobius_step),
}


# --- the work of a token ---------------------------------------------------------------------------------------


def work_of(model: Architecture, num_tokens: float, basis: Basis, framework: str) -> Work:
    """FLOPs of a token, and the gain of products summed in fp16 over sums in fp32, in microbatches of `num_tokens`."""
    flops = 3 * model.forward_flops(model.seq_len, "causal") / model.seq_len
    wide = basis["wide_matmul_flops_per_s"]
    if framework == FUSED:
        return Work(flops, wide)
    efficiencies = basis["wide_matmul_efficiency"] / basis["matmul_efficiency"]
    slower = basis.scaled("matmul_flops_per_s", wide / basis["matmul_flops_per_s"])
    slower = slower.scaled("matmul_efficiency", efficiencies)
    paces = [_forward_backward_s(model, num_tokens, each) for each in (slower, basis)]
    return Work(flops, wide, paces[0] / paces[1])


def _forward_backward_s(model: Architecture, num_tokens: float, basis: Basis) -> float:
    times = times_of(setting_of(model, num_tokens, basis))
    return sum(times.forward) + sum(times.backward) + times.head_forward + times.head_backward


# --- a run under a mesh ---


def side_of_job(job: Job, step_s: float | None, label: str, *, slower: float = 1.0, **more: Any) -> Side:
    """A number of a run under a mesh: `step_s` seconds a step, None for the prediction itself.

    `slower` is a factor on all seconds, for a slow session; `more` are further fields of the side.
    """
    each = job.machine.size / job.tokens
    causes = {name: each * seconds for name, seconds in job_causes(job).items()}
    causes["overheads"] += (slower - 1.0) * sum(causes.values())
    return Side(
        label,
        each * step_s if step_s else sum(causes.values()),
        "published" if step_s else "predicted",
        causes,
        "predicted",
        work=Work(job.architecture.flops_per_token(job.seq_len), job.machine.device.flops_16, dtype_gain(job)),
        settings=settings_of(job),
        **more,
    )


def job_causes(job: Job) -> dict[str, float]:
    """Seconds of a step by cause, means over devices, with the predicted step as their sum."""
    terms, stages = step_terms(job), stages_of_step(job)
    p, m = job.mesh.pipeline, job.num_microbatches
    each = job.software.constants["microbatch_s"]
    ranks = [sum(stages.both(stage) for stage in job.stages_of(rank)) for rank in range(p)]
    inner = _inner(job)
    gathers = job.mesh.sharing.what == "parameters" and job.mesh.shard_group > 1 and p == 1
    known = inner.recompute + inner.host
    device = inner.forward + inner.input_grad + inner.weight_grad
    kernels = device if gathers else sum(ranks) - known - inner.forward_exposed - inner.backward_exposed
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
    """Seconds of all layers and the head for one microbatch; `host` is the time in which the device waits for it."""
    found = [(job.kinds[kind], count) for layers in job.stage_layers for kind, count in layers] + [(job.head, 1)]
    sums = [sum(count * getattr(seconds, name) for seconds, count in found) for name in Seconds._fields]
    whole = Seconds(*sums)
    return whole._replace(host=sum(count * seconds.waits for seconds, count in found))


def dtype_gain(job: Job) -> float:
    """Seconds of computation in 16 bits over those in the precision of a run under a mesh."""
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
        **{name: getattr(job.mesh, name) for name in MESH},
        **{name: getattr(job, name) for name in ("seq_len", "sequences", "num_microbatches", "schedule", "chunks")},
        "recompute": job.recompute,
        "precision": job.precision,
        "cut": "-".join(map(str, job.cut)),
    }


def with_settings(job: Job, typed: Mapping[str, str]) -> Job:
    """The same run with typed settings, on as many devices as its mesh needs; ValueError for a wrong key or value."""
    mesh_sizes: dict[str, Any] = {key: whole(key, value) for key, value in typed.items() if key in MESH}
    counts = {key: whole(key, value) for key, value in typed.items() if key in COUNTS}
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
