"""GEMINI: after every step each rank's state goes to the host memory of c ranks, in the idle time of the network.

    net of a rank   | boundary |  copy of step i  | boundary | copy | boundary |        step i + 1

The copies of the state after step i travel while step i + 1 runs. Until they have arrived, those of step i - 1 are the
newest. What does not fit into the time in which the network of a whole group is idle makes the step longer. A process
that dies finds its copy in its own host's memory; a machine that dies is replaced, and the new one fetches the copy
from another holder; where all holders died, all ranks go back to the persistent store.

The members of a group send to one another at the same time, each c - 1 times its state. That a group has idle time only
when all of its members have is ours, and on the careful side; so is that sending and receiving count as one link.
The copy from a device to its own host's memory, which costs the network nothing, is not charged; copies that a dead
host held for others are taken to be with its successor when training goes on.

Source: after the description of Wang et al., SOSP'23; not from its code.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rpbench.failures.checkpoint import Checkpoint, from_store
from rpbench.failures.job import Job, seconds
from rpbench.failures.network import Spans, time_when_placed
from rpbench.failures.placement import Group, check_copies, groups, is_recoverable
from rpbench.failures.walk import Progress, Recovery

KINDS = ("machine", "process")


class Copying(NamedTuple):
    """The copies of one step.

    Args:
        idle_s: in which the network of the group that fits worst is idle during a step.
        needed_s: that its copies take.
        added_s: what a step becomes longer.
        done_s: into the next step, when the last copy has arrived.
    """

    idle_s: float
    needed_s: float
    added_s: float
    done_s: float


@dataclass(frozen=True)
class Gemini:
    """Copies in host memory, of every step.

    Args:
        copies: c, holders of each state, its own rank counted.
        busy: for each rank of a pipeline, when its network is busy during a step.
        store_every: steps from one checkpoint in the persistent store to the next.
        kind: what dies: a `machine` with its host memory, or a `process`.
        safe_steps: whose state the last recovery began from, so that all holders have it.

    Raises:
        ValueError: for copies that cannot be placed, or an unknown kind.
    """

    job: Job
    copies: int
    busy: tuple[Spans, ...]
    store_every: int
    kind: str = "machine"
    safe_steps: int = 0

    def __post_init__(self) -> None:
        check_copies(self.job.num_ranks, self.copies)
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: what dies is one of {', '.join(KINDS)}")
        Checkpoint(self.job, self.store_every)

    @cached_property
    def copying(self) -> Copying:
        """How the copies of a step fit into the next one, of the group that fits worst."""
        found = [self._of_group(group) for group in groups(self.job.num_ranks, self.copies)]
        return max(found, key=lambda each: (each.added_s, each.done_s))

    @property
    def sent_bytes(self) -> int:
        """What all ranks send in a step."""
        return (self.copies - 1) * self.job.all_state_bytes

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Host memory for copies, of each rank: what is complete, and what arrives meanwhile."""
        found = [0] * self.job.num_ranks
        for group in groups(self.job.num_ranks, self.copies):
            for place in range(len(group)):
                states = [group[place - behind] for behind in range(self.copies)]
                found[group[place]] = 2 * self.job.bytes_of(states)
        return tuple(found)

    def step_s(self, number: int) -> float:
        """A step, with what copies add and the checkpoint in the store where one follows it."""
        stored = Checkpoint(self.job, self.store_every).step_s(number)
        return stored + self.copying.added_s

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """All: who dies is replaced."""
        return ranks

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """From copies, if of every state there is one."""
        if self.kind == "machine" and not is_recoverable(lost, self.job.num_ranks, self.copies):
            found = from_store(self.job, self.store_every, progress, self)
            return replace(found, then=replace(self, safe_steps=progress.num_steps - found.lost_steps))
        job, done = self.job, progress.num_steps
        lost_steps = int(done > self.safe_steps and progress.into_s < self.copying.done_s)
        into_s = min(progress.into_s, job.step_s + self.copying.added_s)
        remote = job.bytes_of(lost) if self.kind == "machine" else 0
        local_s = max(seconds(size, job.host_bytes_per_s) for size in job.state_bytes)
        remote_s = max(seconds(job.bytes_of([rank]), job.net_bytes_per_s) for rank in lost) if remote else 0.0
        fetched = {"local": job.all_state_bytes - remote} | ({"remote": remote} if remote else {})
        return Recovery(
            "remote" if self.kind == "machine" else "local",
            replace(self, safe_steps=done - lost_steps),
            lost_steps,
            job.again(lost_steps, into_s),
            fetched,
            job.detect_s,
            job.restart_s,
            max(local_s, remote_s + (local_s if remote else 0.0)),
            lost_steps * (job.step_s + self.copying.added_s) + into_s,
        )

    def _of_group(self, group: Group) -> Copying:
        size = max(self.job.bytes_of([rank]) for rank in group)
        needed = seconds((self.copies - 1) * size, self.job.net_bytes_per_s)
        busy = [span for rank in group for span in self.busy[rank % self.job.num_stages]]
        placed = time_when_placed(busy, self.job.step_s, needed)
        return Copying(placed.idle_s, needed, max(0.0, needed - placed.idle_s), placed.done_s)
