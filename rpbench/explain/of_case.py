"""The side of a system of the published tables: its seconds by cause, from `rpbench.predict`. Evidence: predicted.

What a system's own terms leave together is taken apart by timing the same run again with something free:

    recomputation  computed beside the rest, by the same costs
    partition      slowest stage less the mean, of a pipeline whose stages stay where they are
    transfers      the run as it is less the run with copies that take no time
    late updates   an asynchronous step less a synchronous one
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rpbench.cost.hardware.basis import Basis
from rpbench.explain.side import COMPUTATION, Side, Work
from rpbench.ir.schedule import Shape
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.mesh.layout import Mesh
from rpbench.predict import megatron, roundpipe
from rpbench.predict.case import FUSED, Case, Terms
from rpbench.predict.megatron import bound_cut
from rpbench.predict.systems import system
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.workload.architecture import Architecture

FREE = 1e9  # how much faster a link is that takes no time
# Terms of systems whose devices do the same, by cause.
TERMS: Mapping[str, str] = {
    "computation": COMPUTATION,
    "expert loop": "interpreter",
    "gradients": "collectives",
    "weights": "collectives",
    "reductions": "collectives",
    "tied embedding": "collectives",
    "gradient copies": "overheads",
    "copies": "transfers",
    "adding gradients": "optimizer",
    "optimizer": "optimizer",
    "idle": "bubble",
}


def side_of_case(case: Case, tokens_per_s: float | None, label: str, *, evidence: str = "published") -> Side:
    """A published throughput of a system, or the prediction itself.

    Args:
        tokens_per_s: of the whole machine, as the number says; None for the prediction.
    """
    each = case.num_devices / case.tokens_per_step
    causes = {name: each * cause_s for name, cause_s in case_causes(case).items()}
    return Side(
        label,
        case.num_devices / tokens_per_s if tokens_per_s else sum(causes.values()),
        evidence if tokens_per_s else "predicted",
        causes,
        "predicted",
        work=work_of(case.model, case.microbatch_tokens, case.basis, case.software),
        settings=_settings(case),
        notes=(case.settings.source,),
    )


def case_causes(case: Case) -> dict[str, float]:
    """Seconds of a step by cause; they add up to the predicted step.

    Raises:
        ValueError: for a system whose causes are not told apart here.
    """
    finer = _FINER.get(case.system)
    causes = _by_cause(system(case.system).step(case, case.basis)) if finer is None else finer(case)
    again = min(_recomputed_s(case), causes[COMPUTATION])
    causes[COMPUTATION] -= again
    return causes | {"recomputation": again}


def _by_cause(terms: Terms) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, term_s in terms.items():
        found[TERMS[name]] = found.get(TERMS[name], 0.0) + term_s
    return found


def _recomputed_s(case: Case) -> float:
    """Seconds of a step that a device computes forwards again: all of them, but of RoundPipe's fused stage."""
    model, settings = case.model, case.settings
    if case.system == "megatron-tp":
        setting = setting_of(model, case.microbatch_tokens, case.basis, FUSED)
        forward, *_ = eager_kernels(replace(setting, mesh=Mesh(tensor=case.num_devices))).layer()
        return settings.num_calls * model.num_layers * forward
    streamed = case.system.startswith(("roundpipe", "mobius"))
    tokens = case.chunk_tokens if streamed else case.microbatch_tokens
    times = times_of(setting_of(model, tokens, case.basis, case.software))
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
    """1F1B: the slowest stage's work, what the order adds to it, and boundary tensors."""
    terms = _by_cause({name: s for name, s in megatron.pipeline_step(case, case.basis).items() if name != "pipeline"})
    cut, times, calls = bound_cut(case), megatron.pipeline_times(case, case.basis), case.settings.num_calls
    graph = build_graph(entry("1f1b").build(Shape(case.num_devices, case.num_devices, calls)))
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


def _synchronous(case: Case) -> dict[str, float]:
    """RoundPipe with a barrier: what copies hold up apart from what the order leaves idle."""
    return _with_free_copies(case, roundpipe.synchronous_step)


def _asynchronous(case: Case) -> dict[str, float]:
    """RoundPipe: the synchronous step, and what late updates save of it."""
    found = _synchronous(case)
    saved = sum(roundpipe.asynchronous_step(case, case.basis).values()) - sum(found.values())
    return found | {"late updates": saved}


def _mobius(case: Case) -> dict[str, float]:
    return _with_free_copies(case, roundpipe.mobius_step)


def _with_free_copies(case: Case, step: Callable[[Case, Basis], Terms]) -> dict[str, float]:
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
    "roundpipe-sync": _synchronous,
    "mobius": _mobius,
}


# --- what is computed ------------------------------------------------------------------------------------------


def work_of(model: Architecture, num_tokens: float, basis: Basis, framework: str) -> Work:
    """FLOPs of a token, and what products summed in fp16 bring over sums in fp32.

    Args:
        num_tokens: of a microbatch.
    """
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


def _settings(case: Case) -> dict[str, Any]:
    return {
        "system": case.system,
        "model": case.model.name,
        "cluster": case.basis.cluster_name,
        "num_devices": case.num_devices,
        "seq_len": case.model.seq_len,
        "global_sequences": case.settings.global_sequences,
        "num_calls": case.settings.num_calls,
        "num_microbatches": case.settings.num_microbatches,
        "microbatch_sequences": case.settings.microbatch_sequences,
    }
