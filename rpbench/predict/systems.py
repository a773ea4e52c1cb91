"""The systems of the published tables: step time, memory, and sensitivity of the throughput to each constant.

In streamed pipelines most constants act through the devices' seconds in forwards, those in backwards, or the bytes of
the optimizer. So the step is simulated once for each of these kinds, and its change with a constant is counted. By the
chain rule

    slope of a constant = sum over kinds of (slope of a kind) x (change of the kind with the constant)

The rates of links and host and the times of the interpreter are varied directly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from types import MappingProxyType

from rpbench.cost.hardware.basis import Basis
from rpbench.predict import footprint, megatron, roundpipe, sharded
from rpbench.predict.case import Case, Terms
from rpbench.predict.footprint import Footprint
from rpbench.predict.megatron import bound_cut
from rpbench.predict.streaming import Jobs, Lanes, lanes_of
from rpbench.predict.traffic import Need, Needs, Run, timed_with
from rpbench.registry import unknown_name
from rpbench.sim.shared_links import HOST

# Factor by which a constant is varied.
STEP = 1.05
_VARIED = ("copy_bytes_per_s", "host_bytes_per_s", "expert_pass_s", "loop_share")
_KINDS = (("F", "R"), ("B", "FB"), ("refresh", "convert", "adam"))


def streamed_slopes(case: Case, jobs: Jobs, seconds: Callable[[Run], float]) -> Mapping[str, float]:
    """Relative change of the throughput per relative change of each uncertain constant, by name.

    Args:
        seconds: gives the seconds of a step from a run of the jobs.
    """
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
    """How one system is predicted.

    Args:
        step: seconds of a step by cause.
        memory: bytes of a throughput run.
        memory_of_length: bytes of a case of another length; the second case is the throughput run.
        schedule: the registered schedule whose order it runs, if any.
        slopes: as `streamed_slopes`, where that is faster than timing a step again for each constant.
        refuses: why it cannot train a case at all; empty if it can.
    """

    step: Callable[[Case, Basis], Terms]
    memory: Callable[[Case, Basis], Footprint]
    memory_of_length: Callable[[Case, Case], Footprint]
    schedule: str | None = None
    slopes: Callable[[Case], Mapping[str, float]] | None = None
    refuses: Callable[[Case], str] = lambda case: ""


def _layer_grain(case: Case, run: Case) -> Footprint:
    return footprint.streamed(replace(case, grain="layer"), run.basis)


def _of_the_run(memory: Callable[[Case, Basis], Footprint]) -> Callable[[Case, Case], Footprint]:
    return lambda case, run: memory(case, run.basis)


def _pipeline_of_the_run(case: Case, run: Case) -> Footprint:
    return footprint.pipeline(case, run.basis, bound_cut(run).forward)


def _pipeline_memory(case: Case, basis: Basis) -> Footprint:
    return footprint.pipeline(case, basis, bound_cut(case).forward)


def _mobius_memory(case: Case, basis: Basis) -> Footprint:
    """Bytes with one sequence a microbatch, for its settings are not public."""
    return footprint.zero_infinity(replace(case, settings=replace(case.settings, microbatch_sequences=1.0)), basis)


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


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "zero-2": System(sharded.zero2_step, footprint.zero2, _of_the_run(footprint.zero2)),
        "zero-infinity": System(
            sharded.zero_infinity_step, footprint.zero_infinity, _of_the_run(footprint.zero_infinity)
        ),
        "fsdp": System(sharded.fsdp_step, footprint.fsdp, _of_the_run(footprint.fsdp)),
        "megatron-pp": System(
            megatron.pipeline_step, _pipeline_memory, _pipeline_of_the_run, "1f1b", refuses=_enough_layers
        ),
        "megatron-tp": System(
            megatron.tensor_step,
            footprint.tensor_parallel,
            _of_the_run(footprint.tensor_parallel),
            refuses=_divided_heads,
        ),
        # Its longest sequences are published as equal to those of ZeRO-Infinity, in every model.
        "mobius": System(
            roundpipe.mobius_step,
            _mobius_memory,
            _of_the_run(_mobius_memory),
            "looped_bfs",
            _slopes_of(roundpipe.mobius_jobs),
        ),
        "roundpipe": System(roundpipe.asynchronous_step, footprint.streamed, _layer_grain, "roundpipe", _async_slopes),
        "roundpipe-sync": System(
            roundpipe.synchronous_step,
            footprint.streamed,
            _layer_grain,
            "roundpipe",
            _slopes_of(roundpipe.synchronous_jobs),
        ),
    }
)


def system(name: str) -> System:
    """The system of that name.

    Raises:
        ValueError: naming the nearest known one.
    """
    if name not in SYSTEMS:
        raise ValueError(unknown_name("system", name, list(SYSTEMS)))
    return SYSTEMS[name]
