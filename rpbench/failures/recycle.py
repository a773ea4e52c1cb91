"""ReCycle: the other pipelines take the work of a lost rank into their bubbles; nobody is replaced or restarted.

Each pipeline has all stages, so the weights of a lost rank are with its peers. Only the step that was running is lost,
for gradients of the lost rank are gone. From then on microbatches make detours (`rpbench.failures.detours`). Equal
stages absorb one lost rank as long as m <= (p - 1)(d - 1) and the peers have memory for what they hold in addition.
Where every pipeline has lost a stage, all go back to the persistent store, on new ranks.

Without failures a step takes what the 1F1B schedule takes. Under failures it is never said to take less: that the
detours' own order, whose steps are not flushed, would be faster even then is not counted.

Source: after the abstract of Gandhi et al., "ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation",
SOSP'24 (arXiv 2405.14009). Order, limits in flight and the treatment of several failures are ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rpbench.failures import detours
from rpbench.failures.checkpoint import Checkpoint, from_store
from rpbench.failures.detours import Pace, SplitTimes
from rpbench.failures.job import Job
from rpbench.failures.walk import Progress, Recovery
from rpbench.ordering.list_order import ROUNDING

Fits = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Recycle:
    """Detours over the other pipelines.

    Args:
        times: of the stages.
        fits: whether ranks of each stage may hold so many microbatches.
        store_every: steps from one checkpoint in the persistent store to the next.
        lost: ranks, over all pipelines, that are gone.

    Raises:
        ValueError: if there is no other pipeline.
    """

    job: Job
    times: SplitTimes
    fits: Fits
    store_every: int
    lost: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.job.num_pipelines < 2:
            raise ValueError(
                f"{self.job.num_pipelines} pipeline: work of a lost rank goes to another pipeline; "
                "set mode.pipelines to 2 or more, or take mode.policy=checkpoint"
            )

    @cached_property
    def pace(self) -> Pace:
        """The fastest pace that fits into the memory, over several limits in flight; the tightest where none fits."""
        job, p = self.job, self.job.num_stages
        peers = self._peers(self.lost)
        found: list[Pace] = []
        for more in (0, (p + 1) // 2, p, 2 * p):
            most = [p - stage + more for stage in range(p)]
            each = detours.pace(peers, job.num_pipelines, job.num_microbatches, self.times, most)
            if not found or self.fits(each.in_flight):
                found.append(each)
        return min(found, key=lambda each: each.step_s)

    @property
    def slowdown(self) -> float:
        """Seconds of a step over those without failures: 1 where the failures are absorbed."""
        found = self.pace.step_s / self.job.step_s if self.lost else 1.0
        return found if found > 1.0 + ROUNDING else 1.0

    def step_s(self, number: int) -> float:
        """A step on the ranks that are left, with the checkpoint in the store where one follows it."""
        stored = Checkpoint(self.job, self.store_every).step_s(number)
        return stored + (self.slowdown - 1.0) * self.job.step_s

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """Those that are not gone."""
        return ranks - self.lost

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """The step that was running begins anew, on the ranks that are left."""
        gone = self.lost | lost
        if not all(self._peers(gone)):
            return from_store(self.job, self.store_every, progress, replace(self, lost=frozenset()))
        job, then = self.job, replace(self, lost=gone)
        into_s = min(progress.into_s, job.step_s * self.slowdown)
        return Recovery("replica", then, 0, job.begun(into_s), {}, job.detect_s, 0.0, 0.0, into_s)

    def _peers(self, lost: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        places = {self.job.place(rank) for rank in lost}
        return detours.living(places, self.job.num_stages, self.job.num_pipelines)
