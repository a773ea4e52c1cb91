"""A simulated run with failures: its step, its policy, and the record of what was lost and how it went on."""

from collections import Counter
from dataclasses import replace
from typing import Any

from rpbench.config.choices import ConfigError, Failures
from rpbench.config.request import Request
from rpbench.failures.bamboo import Bamboo
from rpbench.failures.detours import is_absorbed
from rpbench.failures.failures import Failure, drawn, listed
from rpbench.failures.gemini import Gemini
from rpbench.failures.morphing import NoForm, Varuna
from rpbench.failures.placement import recoverable_probability
from rpbench.failures.recycle import Recycle
from rpbench.failures.walk import Event, History, Policy, walk
from rpbench.run.modes.failures import jobs
from rpbench.run.modes.failures.jobs import Step
from rpbench.run.modes.failures.policies import policy_of
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.run.scheduled import assembled_of, scheduled


def prepare(request: Request) -> Work:
    """Check a request and give its work.

    Raises:
        ValueError: if the request is wrong.
    """
    asked = request.mode
    assert isinstance(asked, Failures)
    if request.num_steps != 1:
        raise ConfigError(
            f"num_steps={request.num_steps} with mode=failures: one step is simulated and walked through; leave it "
            "out, and set mode.horizon_steps or mode.horizon_s"
        )
    step = jobs.step_of(assembled_of(request), asked, asked.pipelines)
    policy = policy_of(request, asked, step)
    try:
        free_s = policy.form.job.step_s if isinstance(policy, Varuna) else step.job.step_s
        horizon_s = _horizon_s(asked, free_s)
        failures = _failures(request, asked, step.job.num_ranks, horizon_s)
    except NoForm as error:
        reason = str(error)
        return Work({"policy": asked.policy}, lambda: _infeasible(reason))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"mode.failures: {error}") from None
    work = scheduled(
        request,
        step.assembled,
        lambda: _outcome(step, policy, failures, free_s, horizon_s),
        lambda error: isinstance(error, MemoryError),
    )
    return replace(work, opening={**work.opening, "policy": asked.policy})


def _horizon_s(asked: Failures, free_s: float) -> float:
    horizon_s = asked.horizon_steps * free_s if asked.horizon_s is None else asked.horizon_s
    if not horizon_s > 0:
        raise ConfigError(f"mode.horizon_s={horizon_s}: seconds above 0, or null for mode.horizon_steps steps")
    return horizon_s


def _failures(request: Request, asked: Failures, num_ranks: int, horizon_s: float) -> tuple[Failure, ...]:
    if asked.failures and asked.mean_between_s is not None:
        raise ConfigError("mode.failures and mode.mean_between_s: list failures or draw them; give one of the two")
    if asked.mean_between_s is not None:
        return drawn(asked.mean_between_s, num_ranks, horizon_s, request.seed)
    if not asked.failures:
        raise ConfigError(
            "mode.failures=[]: nobody dies; name ranks and seconds, as in mode.failures=[[1,30.5]], or set "
            "mode.mean_between_s"
        )
    return listed(_pairs(asked.failures), num_ranks, horizon_s)


def _pairs(given: list[Any]) -> list[list[float]]:
    for each in given:
        if not isinstance(each, list) or not all(isinstance(value, int | float) for value in each):
            raise ConfigError(f"mode.failures={given}: a list of pairs of numbers, as in [[1,30.5]]")
    return given


def _infeasible(reason: str) -> Outcome:
    return Outcome({"status": "infeasible", "reason": reason, "evidence": None})


def _outcome(step: Step, policy: Policy, failures: tuple[Failure, ...], free_s: float, horizon_s: float) -> Outcome:
    facts = _facts(step, policy)
    if isinstance(policy, Bamboo) and not jobs.fits(step.assembled, jobs.held(step.assembled), policy.shadow_bytes):
        reason = f"shadows of up to {max(policy.shadow_bytes):,} bytes do not fit beside what each device has"
        return Outcome({**facts, "status": "infeasible", "reason": reason, "evidence": step.assembled.evidence})
    try:
        history = walk(policy, failures, horizon_s)
        return Outcome({"evidence": step.assembled.evidence, **facts, **_story(step, history, free_s)})
    except NoForm as error:
        return _infeasible(str(error))


def _story(step: Step, history: History, free_s: float) -> Fields:
    """What happened, and the pace over the horizon."""
    fetched: Counter[str] = Counter()
    for event in history.events:
        fetched.update(event.recovery.fetched_bytes)
    tokens, width = step.assembled.tokens_per_step, step.job.num_pipelines
    goodput = history.steps_per_s
    return {
        "num_ranks": step.job.num_ranks,
        "horizon_s": history.horizon_s,
        "failure_free_step_s": free_s,
        "step_s_after": history.last.step_s(0),
        "num_steps_done": history.num_steps,
        "goodput_steps_per_s": goodput,
        "goodput": goodput * free_s,
        "goodput_tokens_per_s": None if tokens is None else goodput * tokens * width,
        "num_failures": len(history.events),
        "lost_steps": sum(event.recovery.lost_steps for event in history.events),
        "lost_microbatches": sum(event.recovery.lost_microbatches for event in history.events),
        "fetched_bytes": dict(fetched),
        "recover_s": sum(event.waited_s + event.recovery.recover_s for event in history.events),
        "failures": [_told(event) for event in history.events],
    }


def _told(event: Event) -> Fields:
    """One failure, with its terms."""
    found = event.recovery
    form = found.then.form if isinstance(found.then, Varuna) else None
    return {
        "at_s": event.at_s,
        "ranks": sorted(event.lost),
        "num_steps_before": event.num_steps,
        "source": found.source,
        "lost_steps": found.lost_steps,
        "lost_microbatches": found.lost_microbatches,
        "fetched_bytes": dict(found.fetched_bytes),
        "num_joined": event.num_joined,
        "waited_s": event.waited_s,
        "detect_s": found.detect_s,
        "restart_s": found.restart_s,
        "fetch_s": found.fetch_s,
        "recompute_s": found.recompute_s,
        "recover_s": found.recover_s,
        "step_s_after": found.then.step_s(0),
        **(
            {}
            if form is None
            else {"stages": form.stages, "width": form.width, "microbatch_sequences": form.microbatch}
        ),
    }


def _facts(step: Step, policy: Policy) -> Fields:
    """What belongs to a policy alone."""
    job = step.job
    if isinstance(policy, Gemini):
        copying = policy.copying
        likely = {str(k): float(recoverable_probability(job.num_ranks, policy.copies, k)) for k in _numbers(policy)}
        return {
            "recoverable_probability": likely,
            "copied_bytes_per_step": policy.sent_bytes,
            "copies_host_bytes": list(policy.host_bytes),
            "net_idle_s": copying.idle_s,
            "net_needed_s": copying.needed_s,
            "copies_added_s": copying.added_s,
            "copies_done_s": copying.done_s,
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


def _numbers(policy: Gemini) -> range:
    """Failures at once, from none to one more than there are copies."""
    return range(min(policy.copies + 1, policy.job.num_ranks) + 1)
