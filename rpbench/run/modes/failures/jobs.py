"""Simulated failures: the job that a policy sees, the policies by name, and the record of a run."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from rpbench.config.choices import Failures
from rpbench.config.errors import ConfigError, config_errors
from rpbench.config.request import Request
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.replicas import shares_or_offloads
from rpbench.cost.transfers import StageBytes
from rpbench.failures.copies import Gemini, busy_spans, recoverable_probability
from rpbench.failures.detours import Recycle, SplitTimes, is_absorbed
from rpbench.failures.morphing import Form, NoForm, Varuna, best_form
from rpbench.failures.shadows import Act, Bamboo, StageTimes, What
from rpbench.failures.walk import Checkpoint, Event, Failure, History, Job, drawn, listed, walk
from rpbench.ir.action import BACKWARD, COMPUTE, Kind, parts_of
from rpbench.ir.policy import Policy as Updates
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.timeline import Timeline
from rpbench.run.assemble import Assembled
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.run.scheduled import assembled_of, scheduled
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight


class Step(NamedTuple):
    """One simulated step of a pipeline, and its job."""

    assembled: Assembled
    timeline: Timeline
    job: Job


def step_of(assembled: Assembled, asked: Failures, num_pipelines: int) -> Step:
    """A step of an assembled run on some pipelines; ConfigError for an impossible time or bandwidth."""
    timeline, cluster = simulate_graph(assembled.graph, assembled.costs), assembled.cluster
    shape = assembled.schedule.shape
    begun_s: dict[int, float] = {}  # microbatch -> start of its first action
    for span in timeline.spans():
        for part in parts_of(span.action):
            if part.kind in COMPUTE and part.microbatch is not None:
                start = float(span.start) / timeline.units_per_second
                begun_s[part.microbatch] = min(start, begun_s.get(part.microbatch, start))
    try:
        job = Job(
            shape.num_ranks,
            num_pipelines,
            shape.num_microbatches,
            float(timeline.makespan) / timeline.units_per_second,
            tuple(begun_s[microbatch] for microbatch in sorted(begun_s)),
            _state_bytes(assembled),
            asked.detect_s,
            asked.restart_s,
            asked.store_bytes_per_s,
            asked.net_bytes_per_s or cluster.link_bytes_per_s("net"),
            cluster.link_bytes_per_s("h2d"),
        )
    except ValueError as error:
        raise ConfigError(f"mode.{error}") from None
    return Step(assembled, timeline, job)


def _state_bytes(assembled: Assembled) -> tuple[int, ...]:
    """Weights and optimizer state of each rank, equal parts if ranks or the host share them; 0 without a shape."""
    schedule, sizes = assembled.schedule, assembled.sizes
    ranks = range(schedule.shape.num_ranks)
    if sizes is None or schedule.partition is None:
        return (0,) * len(ranks)
    stages = StageBytes(schedule.partition, sizes)
    each = [stages.stage(number, backward=True) for number in range(schedule.shape.num_backward_stages)]
    weights = [stage.weights + stage.optimizer for stage in each]
    if _has_state_elsewhere(schedule):
        return tuple(sum(weights) // len(ranks) + (rank < sum(weights) % len(ranks)) for rank in ranks)
    return tuple(sum(weights[stage] for stage in _stages_on(schedule, rank)) for rank in ranks)


def _has_state_elsewhere(schedule: Schedule) -> bool:
    """Whether ranks share their state, or the host has it."""
    return schedule.weights is Weights.STREAMED or shares_or_offloads(schedule)


def _stages_on(schedule: Schedule, rank: int) -> set[int]:
    parts = (part for action in schedule.compute(rank) for part in parts_of(action))
    return {part.stage for part in parts if part.kind in BACKWARD}


def _has_one_stage_a_rank(schedule: Schedule) -> bool:
    return all(_stages_on(schedule, rank) == {rank} for rank in range(schedule.shape.num_ranks))


def _times(assembled: Assembled, kind: Kind) -> tuple[float, ...]:
    """Seconds of a kind on each stage; a whole backward or its first half includes recomputation."""
    costs, stages = assembled.costs, range(assembled.schedule.shape.num_stages)
    works = [costs.on(stage, costs.of(kind, stage)) for stage in stages]
    return tuple(float(work.pre + work.main) / costs.units_per_second for work in works)


def _hop_s(assembled: Assembled) -> float:
    return float(assembled.costs.hop) / assembled.costs.units_per_second


def fits(assembled: Assembled, in_flight: Sequence[int] | None = None, more: Sequence[int] = ()) -> bool:
    """Whether each rank has memory for `in_flight` microbatches, by default the schedule's, and `more` bytes."""
    limit, sizes = assembled.cluster.usable_memory_bytes, assembled.sizes
    if limit is None or sizes is None:
        return True
    held = peak_in_flight(assembled.graph) if in_flight is None else in_flight
    classes = classes_of(assembled.schedule, sizes, held, assembled.keeps)
    pairs = zip(classes, more or (0,) * len(classes), strict=True)
    return all(sum(each.values()) + extra <= limit for each, extra in pairs)


# --- policies by name ---------------------------------------------------------------------------------------


def policy_of(request: Request, asked: Failures, step: Step) -> Checkpoint:
    """The chosen policy; ConfigError for a schedule that it cannot serve, NoForm if no form fits."""
    schedule = step.assembled.schedule
    if schedule.policy is not Updates.FLUSH:
        raise ConfigError(
            f"mode=failures with schedule={schedule.name}: what is lost is counted in steps, and its steps overlap; "
            "take a schedule that is flushed, such as 1f1b"
        )
    with config_errors(f"mode.policy={asked.policy}: ", NoForm):
        return _POLICIES[asked.policy](request, asked, step)


def _gemini(request: Request, asked: Failures, step: Step) -> Gemini:
    schedule, costs = step.assembled.schedule, step.assembled.costs
    if _has_state_elsewhere(schedule):
        raise ConfigError(
            f"mode.policy=gemini with schedule={schedule.name}: copies are of what a rank has alone, and here the host "
            "or all ranks together have it; take a schedule whose stages stay, such as 1f1b, or mode.policy=checkpoint"
        )
    busy = busy_spans(step.assembled.graph, step.timeline, float(costs.hop))
    return Gemini(step.job, asked.checkpoint_every, copies=asked.copies, busy=busy, kind=asked.dies)


def _bamboo(request: Request, asked: Failures, step: Step) -> Bamboo:
    assembled, schedule = step.assembled, step.assembled.schedule
    if not _has_one_stage_a_rank(schedule) or not schedule.plain_kinds <= {Kind.F, Kind.B, Kind.STEP}:
        raise ConfigError(
            f"mode.policy=bamboo with schedule={schedule.name}: a rank stands in for the next stage, so that each has "
            "one stage, whose backwards are whole; take schedule=1f1b or gpipe, or mode.policy=checkpoint"
        )
    what = {Kind.F: What.FORWARD, Kind.B: What.BACKWARD}
    return Bamboo(
        step.job,
        asked.checkpoint_every,
        rows=[
            [Act(what[act.kind], act.stage, act.microbatch or 0) for act in schedule.compute(rank) if act.kind in what]
            for rank in range(schedule.shape.num_ranks)
        ],
        times=StageTimes(_times(assembled, Kind.F), _times(assembled, Kind.B), _hop_s(assembled)),
        boundary_bytes=assembled.sizes.boundary if assembled.sizes else 0,
    )


def _recycle(request: Request, asked: Failures, step: Step) -> Recycle:
    if request.entry.name != "1f1b" or request.schedule.file is not None:
        raise ConfigError(
            f"mode.policy=recycle with schedule={request.schedule.chosen}: its detours have an order of their own, "
            "which stands beside 1F1B without failures; take schedule=1f1b"
        )
    forward, input_grad, weight_grad = (_times(step.assembled, kind) for kind in (Kind.F, Kind.I, Kind.W))
    times = SplitTimes(forward, input_grad, weight_grad, _hop_s(step.assembled))
    return Recycle(
        step.job, asked.checkpoint_every, times=times, fits=lambda in_flight: fits(step.assembled, in_flight)
    )


def _varuna(request: Request, asked: Failures, step: Step) -> Varuna:
    schedule, sequences = step.assembled.schedule, request.workload.microbatch_sequences
    if not _has_one_stage_a_rank(schedule) or request.schedule.file is not None:
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
    sizes: tuple[int, ...] = (sequences,)
    if request.cost.name == "analytic" and request.model:
        sizes = tuple(1 << exponent for exponent in range(batch.bit_length()))

    def simulate(stages: int, width: int, microbatch: int, num_microbatches: int) -> Job | None:
        """The job of a form; None if a pipeline does not fit into the cluster or its memory."""
        if request.cluster.num_devices is not None and stages > request.cluster.num_devices:
            return None
        workload = replace(request.workload, microbatch_sequences=microbatch)
        sized = replace(request, num_devices=stages, num_microbatches=num_microbatches, num_steps=1, workload=workload)
        assembled = assembled_of(sized)
        return step_of(assembled, asked, width).job if fits(assembled) else None

    @cache
    def find(num_devices: int) -> Form:
        if num_devices < 1:
            raise NoForm("0 devices: all have died; look at a shorter mode.horizon_s, or take more pipelines")
        return best_form(num_devices, layers, batch, sizes, simulate)

    return Varuna.begin(find, step.job.num_ranks, asked.checkpoint_every)


_POLICIES: dict[str, Callable[[Request, Failures, Step], Checkpoint]] = {
    "checkpoint": lambda request, asked, step: Checkpoint(step.job, asked.checkpoint_every),
    "gemini": _gemini,
    "bamboo": _bamboo,
    "recycle": _recycle,
    "varuna": _varuna,
}


def prepare(request: Request) -> Work:
    asked = request.mode_as(Failures)
    if request.num_steps != 1:
        raise ConfigError(
            f"num_steps={request.num_steps} with mode=failures: one step is simulated and walked through; leave it "
            "out, and set mode.horizon_steps or mode.horizon_s"
        )
    step = step_of(assembled_of(request), asked, asked.pipelines)
    try:
        policy = policy_of(request, asked, step)
    except NoForm as error:
        infeasible = _infeasible(str(error))
        return Work({"policy": asked.policy}, lambda: infeasible)
    horizon_s = asked.horizon_steps * policy.job.step_s if asked.horizon_s is None else asked.horizon_s
    with config_errors("mode.failures: "):
        failures = _failures(request, asked, step.job.num_ranks, horizon_s)
    work = scheduled(request, step.assembled, lambda: _outcome(step, policy, failures, horizon_s))
    return replace(work, opening={**work.opening, "policy": asked.policy})


def _failures(request: Request, asked: Failures, num_ranks: int, horizon_s: float) -> tuple[Failure, ...]:
    given, mean_s = asked.failures, asked.mean_between_s
    if not horizon_s > 0:
        raise ConfigError(f"mode.horizon_s={horizon_s}: seconds above 0, or null for mode.horizon_steps steps")
    if given and mean_s is not None:
        raise ConfigError("mode.failures and mode.mean_between_s: list failures or draw them; give one of the two")
    if mean_s is not None:
        return drawn(mean_s, num_ranks, horizon_s, request.seed)
    if not given:
        raise ConfigError(
            "mode.failures=[]: nobody dies; name ranks and seconds, as in mode.failures=[[1,30.5]], or set "
            "mode.mean_between_s"
        )
    if not all(isinstance(each, list) and all(isinstance(value, int | float) for value in each) for each in given):
        raise ConfigError(f"mode.failures={given}: a list of pairs of numbers, as in [[1,30.5]]")
    return listed(given, num_ranks, horizon_s)


def _infeasible(reason: str) -> Outcome:
    return Outcome({"status": "infeasible", "reason": reason, "evidence": None})


def _outcome(step: Step, policy: Checkpoint, failures: tuple[Failure, ...], horizon_s: float) -> Outcome:
    fields = {**_facts(policy), "evidence": step.assembled.evidence}
    if isinstance(policy, Bamboo) and not fits(step.assembled, more=policy.shadow_bytes):
        reason = f"shadows of up to {max(policy.shadow_bytes):,} bytes do not fit beside what each device has"
        return Outcome({**fields, "status": "infeasible", "reason": reason})
    try:
        return Outcome({**fields, **_story(step, walk(policy, failures, horizon_s), policy.job.step_s)})
    except NoForm as error:
        return _infeasible(str(error))


def _story(step: Step, history: History, free_s: float) -> Fields:
    costs, goodput = [event.recovery for event in history.events], history.steps_per_s
    fetched: Counter[str] = Counter()
    for each in costs:
        fetched.update(each.fetched_bytes)
    tokens = step.assembled.tokens_per_step
    return {
        "num_ranks": step.job.num_ranks,
        "horizon_s": history.horizon_s,
        "failure_free_step_s": free_s,
        "step_s_after": history.last.step_s(0),
        "num_steps_done": history.num_steps,
        "goodput_steps_per_s": goodput,
        "goodput": goodput * free_s,
        "goodput_tokens_per_s": None if tokens is None else goodput * tokens * step.job.num_pipelines,
        "num_failures": len(costs),
        "lost_steps": sum(each.lost_steps for each in costs),
        "lost_microbatches": sum(each.lost_microbatches for each in costs),
        "fetched_bytes": dict(fetched),
        "recover_s": sum(event.waited_s + event.recovery.recover_s for event in history.events),
        "failures": [_failure_fields(event) for event in history.events],
    }


def _failure_fields(event: Event) -> Fields:
    names = ("source", "lost_steps", "lost_microbatches", "detect_s", "restart_s", "fetch_s", "recompute_s")
    found = event.recovery
    return {
        "at_s": event.at_s,
        "ranks": sorted(event.lost),
        "num_steps_before": event.num_steps,
        "num_joined": event.num_joined,
        "waited_s": event.waited_s,
        **{name: getattr(found, name) for name in (*names, "recover_s")},
        "fetched_bytes": dict(found.fetched_bytes),
        "step_s_after": found.then.step_s(0),
        **(_facts(found.then) if isinstance(found.then, Varuna) else {}),
    }


def _facts(policy: Checkpoint) -> Fields:
    job = policy.job
    if isinstance(policy, Gemini):
        numbers = range(min(policy.copies + 1, job.num_ranks) + 1)  # to one more than there are copies
        likely = {str(k): float(recoverable_probability(job.num_ranks, policy.copies, k)) for k in numbers}
        return {
            "recoverable_probability": likely,
            "copied_bytes_per_step": policy.sent_bytes,
            "copies_host_bytes": list(policy.host_bytes),
            "net_idle_s": policy.copying.idle_s,
            "net_needed_s": policy.copying.needed_s,
            "copies_added_s": policy.copying.added_s,
            "copies_done_s": policy.copying.done_s,
        }
    if isinstance(policy, Bamboo):
        return {"shadow_bytes": list(policy.shadow_bytes), "redundancy_added_s": policy.redundancy_s}
    if isinstance(policy, Recycle):
        one = replace(policy, lost=frozenset({0}))
        return {
            "absorbs_by_formula": is_absorbed(job.num_stages, job.num_microbatches, job.num_pipelines),
            "slowdown_of_one": one.slowdown,
            "in_flight_of_one": list(one.pace.in_flight),
        }
    if isinstance(policy, Varuna):
        form = policy.form
        return {"stages": form.stages, "width": form.width, "microbatch_sequences": form.microbatch}
    return {}
