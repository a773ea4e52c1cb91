"""Jobs: what a policy knows of a run, from what the run was assembled of and its simulated step."""

from collections.abc import Sequence
from typing import NamedTuple

from rpbench.config.choices import ConfigError, Failures
from rpbench.cost.memory import device_bytes
from rpbench.cost.replicas import shares_or_offloads
from rpbench.cost.table import Work
from rpbench.cost.transfers import StageBytes
from rpbench.failures.detours import SplitTimes
from rpbench.failures.job import Job
from rpbench.failures.shadow_rows import Act, Rows, StageTimes, What
from rpbench.ir.action import BACKWARD, COMPUTE, Kind, parts_of
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.timeline import Timeline
from rpbench.run.assemble import Assembled
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight


class Step(NamedTuple):
    """One simulated step of a pipeline, and what follows from it."""

    assembled: Assembled
    timeline: Timeline
    job: Job


def step_of(assembled: Assembled, asked: Failures, num_pipelines: int) -> Step:
    """A step of an assembled run, on so many pipelines.

    Raises:
        ConfigError: for a time or a pace that cannot be.
    """
    timeline, cluster, shape = simulate_graph(assembled.graph, assembled.costs), assembled.cluster, assembled.schedule
    try:
        job = Job(
            shape.shape.num_ranks,
            num_pipelines,
            shape.shape.num_microbatches,
            float(timeline.makespan) / timeline.units_per_second,
            begun_s(timeline),
            state_bytes(assembled),
            asked.detect_s,
            asked.restart_s,
            asked.store_bytes_per_s,
            asked.net_bytes_per_s or cluster.link_bytes_per_s("net"),
            cluster.link_bytes_per_s("h2d"),
        )
    except ValueError as error:
        raise ConfigError(f"mode.{error}") from None
    return Step(assembled, timeline, job)


def begun_s(timeline: Timeline) -> tuple[float, ...]:
    """For each microbatch of a step, when the first of it begins, in seconds."""
    found: dict[int, float] = {}
    for span in timeline.spans():
        for part in parts_of(span.action):
            if part.kind in COMPUTE and part.microbatch is not None:
                start = float(span.start) / timeline.units_per_second
                found[part.microbatch] = min(start, found.get(part.microbatch, start))
    return tuple(found[microbatch] for microbatch in sorted(found))


def state_bytes(assembled: Assembled) -> tuple[int, ...]:
    """Weights and optimizer state of each rank; zeros where the model has no shape.

    What ranks share, or the host has, is counted once, in equal parts of the ranks.
    """
    schedule, sizes = assembled.schedule, assembled.sizes
    ranks = range(schedule.shape.num_ranks)
    if sizes is None or schedule.partition is None:
        return (0,) * len(ranks)
    stages = StageBytes(schedule.partition, sizes)
    each = [stages.stage(number, backward=True) for number in range(schedule.shape.num_backward_stages)]
    weights = [stage.weights + stage.optimizer for stage in each]
    if has_state_elsewhere(schedule):
        return tuple(sum(weights) // len(ranks) + (rank < sum(weights) % len(ranks)) for rank in ranks)
    return tuple(sum(weights[stage] for stage in stages_on(schedule, rank)) for rank in ranks)


def has_state_elsewhere(schedule: Schedule) -> bool:
    """Whether ranks share their state, or the host has it."""
    return schedule.weights is Weights.STREAMED or shares_or_offloads(schedule)


def stages_on(schedule: Schedule, rank: int) -> list[int]:
    """The stages whose backwards a rank runs."""
    parts = (part for action in schedule.compute(rank) for part in parts_of(action))
    return sorted({part.stage for part in parts if part.kind in BACKWARD})


# --- schedules with one stage a rank ------------------------------------------------------------------------


def has_one_stage_a_rank(schedule: Schedule) -> bool:
    """Whether rank r has stage r and no other."""
    return all(stages_on(schedule, rank) == [rank] for rank in range(schedule.shape.num_ranks))


def rows_of(schedule: Schedule) -> Rows:
    """Forwards and backwards of each rank."""
    what = {Kind.F: What.FORWARD, Kind.B: What.BACKWARD}
    return tuple(
        tuple(Act(what[act.kind], act.stage, act.microbatch or 0) for act in schedule.compute(rank) if act.kind in what)
        for rank in range(schedule.shape.num_ranks)
    )


def stage_times(assembled: Assembled) -> StageTimes:
    """Seconds of whole forwards and backwards, recomputation included."""
    unit = assembled.costs.units_per_second
    return StageTimes(_seconds(assembled, Kind.F), _seconds(assembled, Kind.B), float(assembled.costs.hop) / unit)


def split_times(assembled: Assembled) -> SplitTimes:
    """Seconds of forwards and of the halves of backwards, recomputation in the first.

    Raises:
        ScheduleError: if the costs do not split backward.
    """
    unit = assembled.costs.units_per_second
    forward, input_grad, weight_grad = (_seconds(assembled, kind) for kind in (Kind.F, Kind.I, Kind.W))
    return SplitTimes(forward, input_grad, weight_grad, float(assembled.costs.hop) / unit)


def _seconds(assembled: Assembled, kind: Kind) -> tuple[float, ...]:
    costs, unit = assembled.costs, assembled.costs.units_per_second

    def on(stage: int) -> Work:
        return costs.on(stage, costs.of(kind, stage))

    works = map(on, range(assembled.schedule.shape.num_stages))
    return tuple(float(work.pre + work.main) / unit for work in works)


def fits(assembled: Assembled, in_flight: Sequence[int], more: Sequence[int] = ()) -> bool:
    """Whether ranks have room for so many microbatches, and for some more bytes each."""
    limit, sizes = assembled.cluster.usable_memory_bytes, assembled.sizes
    if limit is None or sizes is None:
        return True
    needed = device_bytes(assembled.schedule, sizes, in_flight, assembled.keeps)
    return all(each + extra <= limit for each, extra in zip(needed, more or (0,) * len(needed), strict=True))


def held(assembled: Assembled) -> list[int]:
    """Most stage inputs that each rank holds at once."""
    return peak_in_flight(assembled.graph)
