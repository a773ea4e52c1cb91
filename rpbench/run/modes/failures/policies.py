"""Policies by name, for a request: which schedules each of them serves, and what it is made of."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from rpbench.config.choices import ConfigError, Failures
from rpbench.config.request import Request
from rpbench.failures.bamboo import Bamboo
from rpbench.failures.checkpoint import Checkpoint
from rpbench.failures.gemini import Gemini
from rpbench.failures.job import Job
from rpbench.failures.morphing import Form, NoForm, Varuna, best_form
from rpbench.failures.network import busy_spans
from rpbench.failures.recycle import Recycle
from rpbench.failures.walk import Policy
from rpbench.ir.action import Kind
from rpbench.ir.policy import Policy as Updates
from rpbench.run.modes.failures import jobs
from rpbench.run.modes.failures.jobs import Step
from rpbench.run.scheduled import assembled_of


def policy_of(request: Request, asked: Failures, step: Step) -> Policy:
    """The policy that a request asks for.

    Raises:
        ConfigError: if its schedule cannot be served, naming what can.
    """
    _check_flushed(step)
    try:
        return _POLICIES[asked.policy](request, asked, step)
    except (NoForm, ConfigError):
        raise
    except ValueError as error:
        raise ConfigError(f"mode.policy={asked.policy}: {error}") from None


def _checkpoint(request: Request, asked: Failures, step: Step) -> Policy:
    return Checkpoint(step.job, asked.checkpoint_every)


def _gemini(request: Request, asked: Failures, step: Step) -> Policy:
    schedule, costs = step.assembled.schedule, step.assembled.costs
    if jobs.has_state_elsewhere(schedule):
        raise ConfigError(
            f"mode.policy=gemini with schedule={schedule.name}: copies are of what a rank has alone, and here the host "
            "or all ranks together have it; take a schedule whose stages stay, such as 1f1b, or mode.policy=checkpoint"
        )
    busy = busy_spans(step.assembled.graph, step.timeline, float(costs.hop))
    return Gemini(step.job, asked.copies, busy, asked.checkpoint_every, asked.dies)


def _bamboo(request: Request, asked: Failures, step: Step) -> Policy:
    schedule = step.assembled.schedule
    if not jobs.has_one_stage_a_rank(schedule) or not schedule.plain_kinds <= {Kind.F, Kind.B, Kind.STEP}:
        raise ConfigError(
            f"mode.policy=bamboo with schedule={schedule.name}: a rank stands in for the next stage, so that each has "
            "one stage, whose backwards are whole; take schedule=1f1b or gpipe, or mode.policy=checkpoint"
        )
    sizes = step.assembled.sizes
    boundary = sizes.boundary if sizes else 0
    times = jobs.stage_times(step.assembled)
    return Bamboo(step.job, jobs.rows_of(schedule), times, boundary, asked.checkpoint_every)


def _recycle(request: Request, asked: Failures, step: Step) -> Policy:
    if request.entry.name != "1f1b" or request.schedule.file is not None:
        raise ConfigError(
            f"mode.policy=recycle with schedule={request.schedule.chosen}: its detours have an order of their own, "
            "which stands beside 1F1B without failures; take schedule=1f1b"
        )
    times = jobs.split_times(step.assembled)
    return Recycle(step.job, times, lambda in_flight: jobs.fits(step.assembled, in_flight), asked.checkpoint_every)


def _varuna(request: Request, asked: Failures, step: Step) -> Policy:
    schedule, sequences = step.assembled.schedule, request.workload.microbatch_sequences
    if not jobs.has_one_stage_a_rank(schedule) or request.schedule.file is not None:
        raise ConfigError(
            f"mode.policy=varuna with schedule={request.schedule.chosen}: the number of stages follows the number of "
            "devices, one each; take a generator with one stage a rank, such as schedule=varuna or 1f1b"
        )
    layers = request.model.num_layers if request.model else request.num_layers
    if layers is None:
        raise ConfigError(
            "mode.policy=varuna with model=abstract: numbers of stages divide the number of layers, which it does not "
            "say; add model.num_layers=12, or take a model with a shape"
        )
    batch = request.num_microbatches * sequences * asked.pipelines
    sizes = _powers(batch) if request.cost.name == "analytic" and request.model else (sequences,)

    @cache
    def find(num_devices: int) -> Form:
        if num_devices < 1:
            raise NoForm("0 devices: all have died; look at a shorter mode.horizon_s, or take more pipelines")
        return best_form(num_devices, layers, batch, sizes, _simulated(request, asked))

    return Varuna(find, step.job.num_ranks, asked.checkpoint_every)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most)


def _simulated(request: Request, asked: Failures) -> Callable[[int, int, int, int], Job | None]:
    """What a form comes to: its job, or None if a pipeline does not fit into the cluster or its memory."""

    def simulate(stages: int, width: int, sequences: int, num_microbatches: int) -> Job | None:
        if request.cluster.num_devices is not None and stages > request.cluster.num_devices:
            return None
        workload = replace(request.workload, microbatch_sequences=sequences)
        sized = replace(request, num_devices=stages, num_microbatches=num_microbatches, num_steps=1, workload=workload)
        assembled = assembled_of(sized)
        if not jobs.fits(assembled, jobs.held(assembled)):
            return None
        return jobs.step_of(assembled, asked, width).job

    return simulate


def _check_flushed(step: Step) -> None:
    schedule = step.assembled.schedule
    if schedule.policy is not Updates.FLUSH:
        raise ConfigError(
            f"mode=failures with schedule={schedule.name}: what is lost is counted in steps, and its steps overlap; "
            "take a schedule that is flushed, such as 1f1b"
        )


_POLICIES: dict[str, Callable[[Request, Failures, Step], Policy]] = {
    "checkpoint": _checkpoint,
    "gemini": _gemini,
    "bamboo": _bamboo,
    "recycle": _recycle,
    "varuna": _varuna,
}
