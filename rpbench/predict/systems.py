"""The systems of the published tables: step time, memory, and sensitivity of the throughput to each constant.

In streamed pipelines most constants act through the devices' seconds in forwards or in backwards, or the optimizer's
bytes. So a step is simulated once for each of these kinds, and the change of the kind with a constant is counted. By
the chain rule

    slope of a constant = sum over kinds of (slope of a kind) x (change of the kind with the constant)

The rates of links and host and the times of the interpreter are varied directly.

Data-parallel systems with sharded state have closed forms here. Every device trains its own microbatches; a step is
`num_calls` micro-steps. Psi is the number of parameters.

    ZeRO-2         reduces the gradients of every micro-step on all devices (bucketed; 2 sends of Psi), gathers the
                   updated weights once a step; behind the computation
    ZeRO-Infinity  gathers the weights of every micro-step twice and scatters its gradients (3 Psi); fetches its
                   share of the weights from the host twice and adds its gradients there in fp32; Adam on the host;
                   all behind the computation
    both           pass over every gradient of a micro-step on its way into a bucket and out
    FSDP           gathers the weights of every micro-step twice (2 Psi), beside the computation; scatters gradients
                   once a step

Whether a system hides its transfers and how often it sends gradients is our reading of the published throughputs,
for no profile is public: the settings allow more than one.

Source: Rajbhandari et al., "ZeRO", SC'20, section 7; "ZeRO-Infinity", SC'21, sections 5 and 6; Zhao et al.,
"PyTorch FSDP", VLDB'23, section 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from types import MappingProxyType

from rpbench.cost.hardware.basis import Basis
from rpbench.mesh.layers.collectives import gather_s, reduce_s
from rpbench.mesh.layers.layer_times import times_of
from rpbench.predict import footprint, megatron, roundpipe
from rpbench.predict.case import Case, Terms, ring, waiting_s
from rpbench.predict.footprint import Footprint
from rpbench.predict.megatron import bound_cut
from rpbench.predict.streaming import Jobs, Lanes, Need, Needs, Run, lanes_of, timed_with
from rpbench.registry import check_known
from rpbench.sim.shared_links import HOST
from rpbench.workload.counts import BYTES_PER_VALUE

# Factor by which a constant is varied.
STEP = 1.05
_VARIED = ("copy_bytes_per_s", "host_bytes_per_s", "expert_pass_s", "loop_share")
_KINDS = (("F", "R"), ("B", "FB"), ("refresh", "convert", "adam"))


def streamed_slopes(case: Case, jobs: Jobs, seconds: Callable[[Run], float]) -> Mapping[str, float]:
    """Relative change of the throughput per relative change of each uncertain constant; `seconds` are of a step."""
    basis, lanes = case.basis, lanes_of(jobs)
    basis.read.clear()
    needs = Needs(jobs, case, basis).of_all(lanes)
    plain = seconds(timed_with(lanes, needs, basis))

    def slope(varied: Sequence[Need], other: Basis) -> float:
        return log(plain / seconds(timed_with(lanes, varied, other))) / log(STEP)

    by_kind = {kinds: slope(_longer(lanes, needs, kinds), basis) for kinds in _KINDS}
    before = _sizes(lanes, needs)
    found = {}
    for name in basis.uncertain():
        other = case.varied(name, STEP)
        varied = Needs(jobs, case, other).of_all(lanes)
        if name in _VARIED:
            found[name] = slope(varied, other)
            continue
        after = _sizes(lanes, varied)
        found[name] = sum(
            by_kind[kinds] * log(after[kinds] / before[kinds]) / log(STEP) for kinds in _KINDS if before[kinds]
        )
    return found


def _longer(lanes: Lanes, needs: Sequence[Need], kinds: Sequence[str]) -> list[Need]:
    """The needs with those of some kinds longer by `STEP`."""
    return [
        need._replace(own_s=need.own_s * STEP, amount=need.amount * (STEP if need.served_by == HOST else 1))
        if slot.what in kinds
        else need
        for slot, need in zip(lanes.slots, needs, strict=True)
    ]


def _sizes(lanes: Lanes, needs: Sequence[Need]) -> dict[tuple[str, ...], float]:
    """Seconds of devices, or bytes of the host, by kind, summed over slots."""
    return {
        kinds: sum(
            need.amount if need.served_by == HOST else need.own_s
            for slot, need in zip(lanes.slots, needs, strict=True)
            if slot.what in kinds
        )
        for kinds in _KINDS
    }


@dataclass(frozen=True)
class System:
    step: Callable[[Case, Basis], Terms]  # seconds of a step by cause
    memory: Callable[[Case], Footprint]  # bytes on the fullest device and on the host
    # as `streamed_slopes`, where that is faster than timing a step again for each constant
    slopes: Callable[[Case], Mapping[str, float]] | None = None
    refuses: Callable[[Case], str] = lambda case: ""  # why it cannot train a case at all; empty if it can


def _pipeline_memory(case: Case) -> Footprint:
    return footprint.pipeline(case, bound_cut(case).forward)


def _mobius_memory(case: Case) -> Footprint:
    """Bytes with one sequence a microbatch, for its settings are not public."""
    return footprint.zero_infinity(replace(case, settings=replace(case.settings, microbatch_sequences=1.0)))


def _slopes_of(jobs_of: Callable[[Case], Jobs]) -> Callable[[Case], Mapping[str, float]]:
    return lambda case: streamed_slopes(case, jobs_of(case), lambda run: run.finished_s(0))


def _async_slopes(case: Case) -> Mapping[str, float]:
    """Slopes from fewer steps, without a step after them: only changes with a constant matter."""
    jobs = roundpipe.asynchronous_jobs(case, roundpipe.TIMED_VISITS // 3)
    first, last = roundpipe.timed_steps(jobs)
    jobs = replace(jobs, steps=last + 1)
    return streamed_slopes(case, jobs, lambda run: run.computed_s(last) - run.computed_s(first))


def _divided_heads(case: Case) -> str:
    model, devices = case.model, case.num_devices
    if model.key_value_heads % devices:
        return f"{model.key_value_heads} key heads cannot be divided among {devices} devices"
    return ""


def _enough_layers(case: Case) -> str:
    if case.model.num_layers < case.num_devices:
        return f"{case.model.num_layers} layers make no {case.num_devices} stages"
    return ""


# --- data-parallel systems with sharded state -----------------------------------------------------------------------


def zero2_step(case: Case, basis: Basis) -> Terms:
    calls, devices = case.settings.num_calls, case.num_devices
    gradients = BYTES_PER_VALUE * case.model.trainable_parameters
    return {
        "computation": calls * compute_s(case, basis),
        "expert loop": calls * waiting_s(case.model, basis),
        "gradients": calls * reduce_s(gradients, ring(devices, basis)),
        "gradient copies": calls * _gradient_copies_s(case, basis),
        "weights": gather_s(gradients, ring(devices, basis)),
        "optimizer": _device_optimizer_s(case, basis),
    }


def fsdp_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of FSDP: gathers count as far as they exceed the computation beside them."""
    calls, devices = case.settings.num_calls, case.num_devices
    gathers = calls * 2 * gather_s(BYTES_PER_VALUE * case.model.total_parameters, ring(devices, basis))
    computation = calls * (compute_s(case, basis) + waiting_s(case.model, basis))
    return {
        "computation": computation,
        "weights": max(0.0, gathers - computation),
        "gradients": gather_s(BYTES_PER_VALUE * case.model.trainable_parameters, ring(devices, basis)),
        "optimizer": _device_optimizer_s(case, basis),
    }


def zero_infinity_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of ZeRO-Infinity with weights and optimizer on the host."""
    calls, devices = case.settings.num_calls, case.num_devices
    weights = BYTES_PER_VALUE * case.model.total_parameters
    trained = case.model.trainable_parameters
    gradients = BYTES_PER_VALUE * trained
    each = (2 * weights + gradients) / devices  # copied by all at the same time, over links and the host's memory
    copies_s = max(each / basis["copy_bytes_per_s"], each * devices / basis["host_bytes_per_s"])
    return {
        "computation": calls * compute_s(case, basis),
        "expert loop": calls * waiting_s(case.model, basis),
        "weights": calls * 2 * gather_s(weights, ring(devices, basis)),
        "gradients": calls * gather_s(gradients, ring(devices, basis)),
        "gradient copies": calls * _gradient_copies_s(case, basis),
        "copies": calls * copies_s,
        "adding gradients": calls * basis["host_accumulate_bytes"] * trained / basis["host_bytes_per_s"],
        "optimizer": basis["adam_bytes"] * trained / basis["host_bytes_per_s"],
    }


def compute_s(case: Case, basis: Basis) -> float:
    """Seconds of one micro-step on one device: every layer recomputed, eager passes over all logits in fp32."""
    times = times_of(case.setting(case.microbatch_tokens, basis))
    layers = sum(times.forward) + sum(times.recompute) + sum(times.backward)
    loss = basis["eager_loss_bytes"] * case.microbatch_tokens * case.model.vocab / basis.memory_rate
    return layers + times.head_forward + times.head_backward + loss


def _gradient_copies_s(case: Case, basis: Basis) -> float:
    """Seconds a device takes to copy all gradients of a micro-step into DeepSpeed's buckets and out again."""
    return basis["deepspeed_gradient_bytes"] * case.model.trainable_parameters / basis.memory_rate


def _device_optimizer_s(case: Case, basis: Basis) -> float:
    """Seconds Adam takes over a device's share of the state."""
    return basis["adam_bytes"] * case.model.trainable_parameters / case.num_devices / basis.memory_rate


# --- all of them ------------------------------------------------------------------------------------------------

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "zero-2": System(zero2_step, footprint.zero2),
        "zero-infinity": System(zero_infinity_step, footprint.zero_infinity),
        "fsdp": System(fsdp_step, footprint.fsdp),
        "megatron-pp": System(megatron.pipeline_step, _pipeline_memory, refuses=_enough_layers),
        "megatron-tp": System(megatron.tensor_step, footprint.tensor_parallel, refuses=_divided_heads),
        # Its longest sequences are published as equal to those of ZeRO-Infinity, in every model.
        "mobius": System(roundpipe.mobius_step, _mobius_memory, _slopes_of(roundpipe.mobius_jobs)),
        "roundpipe": System(roundpipe.asynchronous_step, footprint.streamed, _async_slopes),
        "roundpipe-sync": System(
            roundpipe.synchronous_step, footprint.streamed, _slopes_of(roundpipe.synchronous_jobs)
        ),
    }
)


def system(name: str) -> System:
    """The system of that name; ValueError naming the nearest known one."""
    check_known("system", name, SYSTEMS)
    return SYSTEMS[name]
