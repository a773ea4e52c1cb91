"""Walk: a run through its failures, step by step, under a policy that decides the cost of each.

    steps ....x  detect  restart  fetch  again  steps ...
              ^ ranks die; their work of this step, and steps that are in no copy, are repeated

A failure during a recovery joins it: the ranks of both are lost, and the recovery begins anew. Only steps that have
ended count. The seconds of a step contain the work of the policy that makes recovery possible.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

ROUNDING = 1e-6  # of a step: sums of seconds differ by less
MOST = 10_000  # failures of a run, on average; more take minutes and add no insight


@dataclass(frozen=True, order=True)
class Failure:
    """Ranks that die at one moment, in seconds since the start; rank r of pipeline k is k * p + r."""

    at_s: float
    ranks: frozenset[int]


def listed(pairs: Iterable[Sequence[float]], num_ranks: int, horizon_s: float) -> tuple[Failure, ...]:
    """Failures from (rank, second) pairs in order of time, those of one moment joined.

    Raises ValueError for an unknown rank, a moment outside the run, or what is no pair.
    """
    found: dict[float, set[int]] = {}
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"failure {list(pair)}: a rank and the second at which it dies, as in [1, 30.5]")
        rank, at_s = pair
        if not 0 <= rank < num_ranks or rank != int(rank):
            raise ValueError(f"failure of rank {rank:g}: the run has ranks 0 to {num_ranks - 1}; name one of them")
        if not 0 <= at_s < horizon_s:
            raise ValueError(
                f"failure at {at_s:g} s: the run goes from 0 to {horizon_s:g} s; take one in between, or a longer "
                "mode.horizon_s"
            )
        found.setdefault(float(at_s), set()).add(int(rank))
    return tuple(Failure(at_s, frozenset(ranks)) for at_s, ranks in sorted(found.items()))


def drawn(mean_s: float, num_ranks: int, horizon_s: float, seed: int) -> tuple[Failure, ...]:
    """Failures of ranks whose lives are exponentially distributed with a mean; the same for a seed.

    Raises ValueError for an impossible mean, or one that makes more failures than are simulated.
    """
    if not (isfinite(mean_s) and mean_s > 0):
        raise ValueError(f"mean_between_s={mean_s}: seconds that a rank lives on average, a finite number above 0")
    lived = num_ranks * horizon_s
    if lived > MOST * mean_s:
        raise ValueError(
            f"mean_between_s={mean_s:g}: {num_ranks} ranks would die {lived / mean_s:.3g} times in {horizon_s:g} s, "
            f"and {MOST:,} are simulated at most; take {lived / MOST:.3g} or more, or a shorter mode.horizon_s"
        )
    draws, found, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + draws.expovariate(num_ranks / mean_s)) < horizon_s:
        found.append(Failure(at_s, frozenset({draws.randrange(num_ranks)})))
    return tuple(found)


@dataclass(frozen=True)
class Job:
    """A schedule on pipelines that share the microbatches of a step; ValueError for an impossible time or bandwidth.

    A bandwidth that is None has no limit.
    """

    num_stages: int  # p: ranks of a pipeline, each with stages of its own
    num_pipelines: int  # d
    num_microbatches: int  # m: of a step, in each pipeline
    step_s: float  # of a step without failures and without a policy
    begun_s: tuple[float, ...]  # start of the first forward of each microbatch
    state_bytes: tuple[int, ...]  # weights and optimizer state of each rank of a pipeline; zeros without a shape
    detect_s: float = 0.0  # until a failure is known
    restart_s: float = 0.0  # until processes run again, on new machines if ranks are replaced
    store_bytes_per_s: float | None = None  # of the persistent store, for all ranks together
    net_bytes_per_s: float | None = None  # between the hosts of two ranks, one way
    host_bytes_per_s: float | None = None  # between a device and the memory of its host

    def __post_init__(self) -> None:
        for name in ("detect_s", "restart_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: seconds, 0 or more")
        for name in ("store_bytes_per_s", "net_bytes_per_s", "host_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: bytes a second above 0, or null for no limit")

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_pipelines

    @property
    def all_state_bytes(self) -> int:
        return self.num_pipelines * sum(self.state_bytes)

    def place(self, rank: int) -> tuple[int, int]:
        """Pipeline of a rank, and its number there."""
        return divmod(rank, self.num_stages)

    def bytes_of(self, ranks: Iterable[int]) -> int:
        return sum(self.state_bytes[rank % self.num_stages] for rank in ranks)

    def again(self, lost_steps: int, into_s: float) -> int:
        """Microbatches to repeat: those of lost steps, and those of the running step that have begun."""
        begun = sum(into_s - start > ROUNDING * self.step_s for start in self.begun_s)
        return self.num_pipelines * (lost_steps * self.num_microbatches + begun)


def seconds(num_bytes: float, bytes_per_s: float | None) -> float:
    """Seconds that bytes take; 0 without a limit."""
    return num_bytes / bytes_per_s if bytes_per_s else 0.0


@dataclass(frozen=True)
class Progress:
    """The progress of training when ranks die: steps that have ended, and seconds into the next one."""

    num_steps: int
    into_s: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The cost of a failure."""

    # of the state: `store`, `remote` (memory of other hosts), `local` (of the same hosts), `replica` (other pipelines)
    # or `shadow` (the neighbour)
    source: str
    then: "Checkpoint"  # the policy from now on
    lost_steps: int = 0  # whole steps to repeat
    lost_microbatches: int  # to repeat, of these steps and of the running one
    fetched_bytes: Mapping[str, int]  # by source
    detect_s: float
    restart_s: float = 0.0
    fetch_s: float = 0.0
    recompute_s: float  # until training is where it was
    rest_s: float | None = None  # seconds left of the running step, if it continues; None if it begins anew

    @property
    def stop_s(self) -> float:
        """Seconds in which no rank trains."""
        return self.detect_s + self.restart_s + self.fetch_s

    @property
    def recover_s(self) -> float:
        """From the failure until training is where it was."""
        return self.stop_s + self.recompute_s


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint every `every` steps: the base of all policies, and their fallback. ValueError for less than 1 step.

    Training stops while the state is written to a persistent store. After a failure all ranks read it back and repeat
    the steps since then; dead ranks are replaced. The start of the run is a checkpoint as well.
    """

    job: Job
    every: int
    lost: frozenset[int] = frozenset()  # ranks of all pipelines that are gone and not replaced

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoint_every={self.every}: steps from one checkpoint to the next, at least 1")

    @property
    def pace_s(self) -> float:
        """Seconds of a step, with the work of the policy in every step."""
        return self.job.step_s

    def written_s(self, number: int) -> float:
        """Seconds of writing after step `number`: one pipeline writes, as the others have the same state."""
        writes = (number + 1) % self.every == 0
        return seconds(sum(self.job.state_bytes), self.job.store_bytes_per_s) if writes else 0.0

    def step_s(self, number: int) -> float:
        """Seconds of step `number`, counted from 0, with the checkpoint behind it if there is one."""
        return self.pace_s + self.written_s(number)

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """Those of the ranks that are not lost yet."""
        return ranks - self.lost

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        return self.from_store(progress, self)

    def from_store(self, progress: Progress, then: "Checkpoint") -> Recovery:
        """Recovery in which every rank of the next policy reads the last checkpoint."""
        job, lost_steps = self.job, progress.num_steps % self.every
        fetched, into_s = then.job.all_state_bytes, min(progress.into_s, job.step_s)  # the rest is writing
        again = range(progress.num_steps - lost_steps, progress.num_steps)
        return Recovery(
            source="store",
            then=then,
            lost_steps=lost_steps,
            lost_microbatches=job.again(lost_steps, into_s),
            fetched_bytes={"store": fetched},
            detect_s=job.detect_s,
            restart_s=job.restart_s,
            fetch_s=seconds(fetched, job.store_bytes_per_s),
            recompute_s=sum(map(then.step_s, again)) + into_s,
        )


@dataclass(frozen=True)
class Event:
    """A failure and its recovery."""

    at_s: float
    lost: frozenset[int]
    recovery: Recovery
    num_steps: int  # that had ended
    num_joined: int  # further failures during the recovery
    waited_s: float  # from the first failure to the last


@dataclass(frozen=True)
class History:
    """A run up to its horizon."""

    horizon_s: float
    num_steps: int
    events: tuple[Event, ...]
    last: Checkpoint

    @property
    def steps_per_s(self) -> float:
        return self.num_steps / self.horizon_s


@dataclass
class _Run:
    policy: Checkpoint
    now: float = 0.0
    num_steps: int = 0
    rest_s: float | None = None  # of a step that continues after a failure
    events: list[Event] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return self.policy.step_s(self.num_steps) if self.rest_s is None else self.rest_s

    def train_until(self, moment: float) -> None:
        while self.now + self.step_s <= moment + ROUNDING * self.policy.job.step_s:
            self.now += self.step_s
            self.num_steps, self.rest_s = self.num_steps + 1, None

    def progress(self, moment: float) -> Progress:
        whole = self.policy.step_s(self.num_steps)
        return Progress(self.num_steps, min(whole, max(0.0, whole - (self.now + self.step_s - moment))))


def walk(policy: Checkpoint, failures: Sequence[Failure], horizon_s: float) -> History:
    """A run through failures, given in order of time, up to its horizon."""
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
