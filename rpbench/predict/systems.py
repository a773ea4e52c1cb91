"""The systems of the published tables: how long a step of each takes, and what it needs of the memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rpbench.cost.hardware.basis import Basis
from rpbench.predict import footprint, megatron, sharded
from rpbench.predict.case import Case, Terms
from rpbench.predict.cuts import bound_cut
from rpbench.predict.footprint import Footprint
from rpbench.predict.sensitivities import streamed_slopes
from rpbench.predict.streamed import mobius, roundpipe
from rpbench.registry import unknown_name


@dataclass(frozen=True)
class System:
    """How one system is predicted.

    Args:
        step: seconds of a step by cause.
        memory: bytes of a throughput run.
        memory_of_length: bytes of a case of another length; the second case is that of the throughput run.
        schedule: the registered schedule whose order it runs, if it runs one.
        slopes: relative change of its throughput for that of each constant, where there is a shorter way to it than
            timing a step again for each.
        refuses: why it cannot train a case at all, or an empty string.
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
    """Of one sequence a microbatch, for its settings are not public."""
    return footprint.zero_infinity(replace(case, settings=replace(case.settings, microbatch_sequences=1.0)), basis)


def _mobius_slopes(case: Case) -> Mapping[str, float]:
    return streamed_slopes(case, mobius.jobs_of(case), lambda run: run.finished_s(0))


def _sync_slopes(case: Case) -> Mapping[str, float]:
    return streamed_slopes(case, roundpipe.synchronous_jobs(case), lambda run: run.finished_s(0))


def _async_slopes(case: Case) -> Mapping[str, float]:
    """Over fewer steps, and none behind them: what does not change with a constant may be left out."""
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
        "mobius": System(mobius.step, _mobius_memory, _of_the_run(_mobius_memory), "looped_bfs", _mobius_slopes),
        "roundpipe": System(roundpipe.asynchronous_step, footprint.streamed, _layer_grain, "roundpipe", _async_slopes),
        "roundpipe-sync": System(
            roundpipe.synchronous_step, footprint.streamed, _layer_grain, "roundpipe", _sync_slopes
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
