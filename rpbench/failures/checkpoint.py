"""Checkpoint: every k steps the state is written to a persistent store, and after a failure all ranks read it back.

What is lost is the steps since the last checkpoint, and what had run of the next one: the baseline that every other
policy is compared with, and falls back to. Training stands still while it writes. Ranks that died are replaced.
"""

from dataclasses import dataclass

from rpbench.failures.job import Job, seconds
from rpbench.failures.walk import Policy, Progress, Recovery


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints of a job every `every` steps, the first after that many; the start of the run is one as well.

    Raises:
        ValueError: for a number of steps below 1.
    """

    job: Job
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoint_every={self.every}: steps from one checkpoint to the next, at least 1")

    @property
    def write_s(self) -> float:
        """Seconds in which one pipeline writes; the others have the same state."""
        return seconds(sum(self.job.state_bytes), self.job.store_bytes_per_s)

    def step_s(self, number: int) -> float:
        """A step, with the checkpoint where one follows it."""
        return self.job.step_s + (self.write_s if (number + 1) % self.every == 0 else 0.0)

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """All: who dies is replaced."""
        return ranks

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """Back to the last checkpoint, whoever was lost."""
        return from_store(self.job, self.every, progress, self)


def from_store(job: Job, every: int, progress: Progress, then: Policy, fetched_bytes: int | None = None) -> Recovery:
    """Every rank reads the last checkpoint.

    Args:
        fetched_bytes: what all read; None: the state of all ranks.
    """
    lost_steps = progress.num_steps % every
    fetched = job.all_state_bytes if fetched_bytes is None else fetched_bytes
    into_s = min(progress.into_s, job.step_s)  # what is beyond is writing
    return Recovery(
        "store",
        then,
        lost_steps,
        job.again(lost_steps, into_s),
        {"store": fetched},
        job.detect_s,
        job.restart_s,
        seconds(fetched, job.store_bytes_per_s),
        sum(map(then.step_s, range(progress.num_steps - lost_steps, progress.num_steps))) + into_s,
    )
