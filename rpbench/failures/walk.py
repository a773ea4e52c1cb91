"""Walk: a run through its failures, step by step, under a policy that says what each of them costs.

    steps ....x  detect  restart  fetch  again  steps ...
              ^ the ranks die; what they had run of this step, and steps that no copy has, is done again

A failure before training goes on joins the one that is being recovered: the ranks of both are lost, and recovery begins
anew at its moment. Only steps that have ended count. They count at the pace of the policy: what it does all the time so
that it can recover is in the seconds of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rpbench.failures.failures import Failure


@dataclass(frozen=True)
class Progress:
    """Where training is when ranks die.

    Args:
        num_steps: that have ended and count.
        into_s: seconds into the next one, at most what it takes.
    """

    num_steps: int
    into_s: float


@dataclass(frozen=True)
class Recovery:
    """What a failure costs.

    Args:
        source: where the state comes from: `store`, `remote` (memory of other hosts), `local` (of the same hosts),
            `replica` (other pipelines) or `shadow` (the neighbour).
        then: the policy from here on.
        lost_steps: whole steps that are done again.
        lost_microbatches: that had begun and are done again, of these steps and of the one that was running.
        fetched_bytes: by source.
        detect_s, restart_s, fetch_s: until training goes on.
        recompute_s: until it is where it was.
        rest_s: what is left of the step that was running, which goes on; None: it begins anew.
    """

    source: str
    then: "Policy"
    lost_steps: int
    lost_microbatches: int
    fetched_bytes: Mapping[str, int]
    detect_s: float
    restart_s: float
    fetch_s: float
    recompute_s: float
    rest_s: float | None = None

    @property
    def stop_s(self) -> float:
        """Seconds in which nobody trains."""
        return self.detect_s + self.restart_s + self.fetch_s

    @property
    def recover_s(self) -> float:
        """From the failure until training is where it was."""
        return self.stop_s + self.recompute_s


class Policy(Protocol):
    """How a system lives with failures."""

    def step_s(self, number: int) -> float:
        """Seconds of step `number`, counted from 0, with all that it does to be able to recover."""

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """Those of some ranks that this policy still runs on."""

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """What the loss of some ranks at once costs."""


@dataclass(frozen=True)
class Event:
    """A failure and its recovery."""

    at_s: float
    lost: frozenset[int]
    recovery: Recovery
    num_steps: int  # that had ended
    num_joined: int  # failures that came while it recovered
    waited_s: float  # from the first of them to the last


@dataclass(frozen=True)
class History:
    """A run up to its horizon."""

    horizon_s: float
    num_steps: int
    events: tuple[Event, ...]
    last: Policy

    @property
    def steps_per_s(self) -> float:
        """Steps that count, over the whole time."""
        return self.num_steps / self.horizon_s


@dataclass
class _Run:
    policy: Policy
    now: float = 0.0
    num_steps: int = 0
    rest_s: float | None = None  # of a step that goes on after a failure
    events: list[Event] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return self.policy.step_s(self.num_steps) if self.rest_s is None else self.rest_s

    def train_until(self, moment: float) -> None:
        """Every step that ends by a moment."""
        while self.now + self.step_s <= moment:
            self.now += self.step_s
            self.num_steps, self.rest_s = self.num_steps + 1, None

    def progress(self, moment: float) -> Progress:
        whole = self.policy.step_s(self.num_steps)
        return Progress(self.num_steps, min(whole, max(0.0, whole - (self.now + self.step_s - moment))))


def walk(policy: Policy, failures: Sequence[Failure], horizon_s: float) -> History:
    """A run through failures, which come in the order of time, up to its horizon."""
    run, coming = _Run(policy), list(failures)
    while coming:
        first = coming.pop(0)
        lost = run.policy.living(first.ranks)
        if not lost:
            continue
        run.train_until(first.at_s)
        progress = run.progress(first.at_s)
        recovery, last_s, num_joined = run.policy.recover(lost, progress), first.at_s, 0
        while coming and coming[0].at_s < last_s + recovery.stop_s:
            joined = coming.pop(0)
            if more := run.policy.living(joined.ranks):
                lost, last_s, num_joined = lost | more, joined.at_s, num_joined + 1
                recovery = run.policy.recover(lost, progress)
        run.events.append(Event(first.at_s, lost, recovery, run.num_steps, num_joined, last_s - first.at_s))
        run.now, run.policy, run.rest_s = last_s + recovery.stop_s, recovery.then, recovery.rest_s
        run.num_steps -= recovery.lost_steps
    run.train_until(horizon_s)
    return History(horizon_s, run.num_steps, tuple(run.events), run.policy)
