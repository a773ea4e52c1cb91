"""Processes that are killed: training with one process a rank, compared with undisturbed training and simulation."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from rpbench.config.choices import Failures
from rpbench.config.errors import ConfigError, config_errors
from rpbench.config.request import Request
from rpbench.cost.table import CostTable
from rpbench.engine.backends.threads import one_thread
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.recovery.plan import Death, Plan
from rpbench.engine.recovery.watch import Return, train
from rpbench.engine.reference import largest_difference
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.training import Settings, Training
from rpbench.failures.copies import Gemini, holders
from rpbench.failures.walk import Checkpoint, Progress
from rpbench.ir.schedule import Schedule, to_text
from rpbench.passes.lower import add_steps
from rpbench.run.assemble import Assembled
from rpbench.run.modes.failures.jobs import step_of
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.run.scheduled import assembled_of, scheduled
from rpbench.run.training.tensors import optimizer_settings


def prepare(request: Request) -> Work:
    asked, assembled = request.mode_as(Failures), assembled_of(replace(request, num_steps=1))
    plan = _plan(request, asked, assembled)
    whole = assembled_of(request)
    work = scheduled(request, assembled, lambda: Outcome(_carried_out(plan, asked, assembled, whole)))
    opening = {**work.opening, "policy": asked.policy}
    return replace(work, opening=opening, is_out_of_memory=lambda error: False)


def _plan(request: Request, asked: Failures, assembled: Assembled) -> Plan:
    if asked.policy not in ("checkpoint", "gemini") or asked.pipelines != 1 or asked.dies != "machine":
        raise ConfigError(
            f"mode.run=processes with mode.policy={asked.policy} mode.pipelines={asked.pipelines} "
            f"mode.dies={asked.dies}: processes of one pipeline die with their memory, and come back by gemini or "
            "checkpoint; others are simulated"
        )
    if request.workload.name != "synthetic" or request.dtype not in ("float32", "float64"):
        raise ConfigError(
            f"mode.run=processes with workload={request.workload.name} dtype={request.dtype}: processes train on "
            "workload=synthetic in float32 or float64"
        )
    ranks = assembled.schedule.shape.num_ranks
    settings = optimizer_settings(request.optimizer)
    in_memory = asked.policy == "gemini"
    with config_errors("mode.run=processes: "):
        plan = Plan(
            to_text(add_steps(assembled.schedule)),
            asdict(request.given_model),
            request.num_steps,
            tuple(holders(rank, ranks, asked.copies) if in_memory else (rank,) for rank in range(ranks)),
            _deaths(asked.failures),
            "memory" if in_memory else "store",
            0 if in_memory else asked.checkpoint_every,
            "" if in_memory else "unset",
            request.workload.microbatch_sequences,
            request.seed,
            request.dtype,
            asdict(settings),
            asked.stall_s,
        )
        plan.workload(), plan.settings()
    return plan


def _deaths(given: Sequence[Any]) -> tuple[Death, ...]:
    if not given:
        raise ConfigError("mode.failures=[]: nobody dies; name a rank and a step, as in mode.failures=[[1,3]]")
    for each in given:
        if not isinstance(each, list) or len(each) not in (2, 3) or not all(type(value) is int for value in each):
            raise ConfigError(
                f"mode.failures={list(given)}: with mode.run=processes each is a rank, a step and, if not 0, an "
                "action of its row, whole numbers as in [[1,3,2]]"
            )
    steps = [each[1] for each in given]
    for step in steps:
        if steps.count(step) > 1:
            raise ConfigError(
                f"mode.failures={list(given)}: two deaths in step {step}, which are one failure or two by chance; name "
                "different steps"
            )
    return tuple(Death(*each) for each in sorted(given, key=itemgetter(1)))


def _carried_out(plan: Plan, asked: Failures, assembled: Assembled, whole: Assembled) -> Fields:
    with tempfile.TemporaryDirectory(prefix="rpbench-failures-") as folder:
        found = train(replace(plan, folder=folder) if plan.folder else plan)
    with one_thread():
        difference = largest_difference(found.masters, undisturbed(plan, whole.schedule, whole.costs))
    simulated = _simulated(plan, asked, assembled)
    window = plan.order.shape.num_microbatches
    fields = {
        "evidence": "measured",
        "num_ranks": plan.num_ranks,
        "num_failures": len(found.returns),
        "weight_max_abs_diff": difference,
        "num_actions": found.num_actions,
        "num_actions_needed": plan.num_steps * sum(len(plan.order.compute(rank)) for rank in range(plan.num_ranks)),
        "lost_steps": sum(each.lost_steps for each in found.returns),
        "lost_steps_simulated": [steps for steps, _ in simulated],
        "lost_microbatches_simulated": [microbatches for _, microbatches in simulated],
        "lost_microbatches": [each.lost_steps * window + each.num_microbatches for each in found.returns],
        "fetched_bytes": {asked.policy: sum(each.fetched_bytes for each in found.returns)},
        "failures": [
            {
                "ranks": list(each.ranks),
                "step": each.step,
                "source": each.source,
                "lost_steps": each.lost_steps,
                "lost_actions": list(each.num_actions),
                "lost_microbatches": each.num_microbatches,
                "fetched_bytes": each.fetched_bytes,
                "stop_s": each.stop_s,
            }
            for each in found.returns
        ],
    }
    reason = _why_failed(plan, difference, found.returns, simulated)
    return fields | ({"status": "failed", "reason": reason} if reason else {})


def _why_failed(plan: Plan, difference: float, found: Sequence[Return], simulated: Sequence[tuple[int, int]]) -> str:
    """Why the weights, or the repeated work, are not as they must be; empty where they are.

    The progress of other ranks at a death depends on their clocks: microbatches are compared for the first stage only.
    """
    if difference:
        return f"weights differ by up to {difference:g} from those of training without failures, expected 0"
    if len(found) != len(simulated):
        return f"{len(found)} failures, {len(simulated)} were to come"
    for each, (steps, microbatches) in zip(found, simulated, strict=True):
        whole = each.lost_steps * plan.order.shape.num_microbatches
        again = each.lost_steps, whole + each.num_microbatches
        is_first = each.ranks == plan.rank_of[:1]
        if again[0] != steps or (is_first and again[1] != microbatches):
            return (
                f"rank {each.ranks[0]} in step {each.step}: steps and microbatches done again {again}, simulated "
                f"{(steps, microbatches)}"
            )
    return ""


def undisturbed(plan: Plan, schedule: Schedule, costs: CostTable) -> Tensors:
    """The weights of the same training in one process, without failures."""
    if schedule.shape.num_steps == 1:
        schedule = add_steps(schedule)
    training = Training(plan.workload(), schedule, Settings(plan.settings()))
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training.optimizer.masters


def _simulated(plan: Plan, asked: Failures, assembled: Assembled) -> list[tuple[int, int]]:
    """For each death, the steps and microbatches that are repeated by the policy.

    As with the processes, the network takes no time, so copies are complete when a step counts.
    """
    step = step_of(assembled, asked, 1)
    job, timeline = replace(step.job, net_bytes_per_s=None), step.timeline
    policy = Checkpoint(job, asked.checkpoint_every)
    if plan.source == "memory":
        policy = Gemini(job, asked.checkpoint_every, copies=asked.copies, busy=((),) * job.num_stages)
    found = []
    for death in plan.deaths:
        spans = [span for span in timeline.spans() if (span.device, span.lane) == (death.rank, "compute")]
        # A rank dies before an action: when it starts, or at the end of the step after all actions of its row.
        moment = float(spans[death.action].start if death.action < len(spans) else timeline.makespan)
        progress = Progress(death.step, moment / timeline.units_per_second)
        recovery = policy.recover(frozenset({death.rank}), progress)
        found.append((recovery.lost_steps, recovery.lost_microbatches))
    return found
