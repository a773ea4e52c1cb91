"""A simulated run with failures: its step, its policy, and the record of what was lost and how it went on."""

from collections import Counter
from dataclasses import replace

from rpbench.config.choices import ConfigError, Failures
from rpbench.config.request import Request
from rpbench.failures.copies import Gemini, recoverable_probability
from rpbench.failures.detours import Recycle, is_absorbed
from rpbench.failures.failures import Failure, drawn, listed
from rpbench.failures.morphing import NoForm, Varuna
from rpbench.failures.shadows import Bamboo
from rpbench.failures.walk import Checkpoint, Event, History, walk
from rpbench.run.modes.failures.jobs import Step, fits, policy_of, step_of
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
    step = step_of(assembled_of(request), asked, asked.pipelines)
    try:
        policy = policy_of(request, asked, step)
        horizon_s = asked.horizon_steps * policy.job.step_s if asked.horizon_s is None else asked.horizon_s
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
        lambda: _outcome(step, policy, failures, horizon_s),
        lambda error: isinstance(error, MemoryError),
    )
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
    """What happened, and the pace over the horizon."""
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
        "failures": [_told(event) for event in history.events],
    }


def _told(event: Event) -> Fields:
    """One failure, with its terms."""
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
    """What belongs to a policy alone."""
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
