"""Bamboo: each rank keeps the state of the next stage and runs its forward as well, so that it can stand in for it.

The redundant forwards are in every step (eager), as `rpbench.failures.shadow_rows` draws them; the redundant backward
comes only once a neighbour is lost. Then the rank before it runs both stages: forwards that the lost rank had run are
there as redundant ones, its backwards are run again, for the gradient it had added up is gone, and the gradients it had
received are sent again. Training goes on within the step. Where the loss hits a stage that has no shadow any more - two
neighbours, or one beside a rank that runs two stages - all go back to the persistent store, on new ranks.

Two stages on one rank save hops; a step is never said to take less for that than without failures. The order of merged
rows is ours, and so is the place of the last rank's redundant forward. Activations of redundant forwards wait in host
memory and count for nothing on the device; their copies take no time here.

Source: after the released code of Thorpe et al., "Bamboo: Making Preemptible Instances Resilient for Affordable
Training of Large DNNs", NSDI'23, whose rules are described, not ported.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from rpbench.failures.checkpoint import Checkpoint, from_store
from rpbench.failures.job import Job, seconds
from rpbench.failures.shadow_rows import Act, Rows, StageTimes, Timed, What, merged, shadow_of, time_rows, with_shadows
from rpbench.failures.walk import Progress, Recovery


@dataclass(frozen=True)
class Bamboo:
    """Redundant forwards, and neighbours that stand in.

    Args:
        rows: of one pipeline, one stage a rank, forwards and backwards.
        times: of its stages.
        boundary_bytes: of a boundary tensor.
        store_every: steps from one checkpoint in the persistent store to the next.
        lost: ranks, over all pipelines, that are gone.
    """

    job: Job
    rows: Rows
    times: StageTimes
    boundary_bytes: int
    store_every: int
    lost: frozenset[int] = field(default_factory=frozenset)

    @property
    def shadow_bytes(self) -> tuple[int, ...]:
        """Weights and optimizer state of the next stage, on each rank of a pipeline."""
        stages = range(self.job.num_stages)
        return tuple(self.job.state_bytes[shadow_of(rank, self.job.num_stages)] for rank in stages)

    @cached_property
    def redundancy_s(self) -> float:
        """What redundant forwards add to a step without failures: nothing where all of them fit into waits."""
        return time_rows(with_shadows(self.rows), self.times).makespan - self._plain.makespan

    @cached_property
    def slowest_s(self) -> float:
        """A step of the pipeline that takes longest."""
        return max(self._step_of(pipeline) for pipeline in range(self.job.num_pipelines))

    def step_s(self, number: int) -> float:
        """A step on the ranks that are left, with the checkpoint in the store where one follows it."""
        return self._stored_s(number) + max(self.slowest_s, self.job.step_s)

    def living(self, ranks: frozenset[int]) -> frozenset[int]:
        """Those that are not gone."""
        return ranks - self.lost

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """The neighbours stand in, if every lost stage has a shadow."""
        whole = replace(self, lost=frozenset())
        if not self._has_shadows(lost):
            return from_store(self.job, self.store_every, progress, whole)
        then, job = replace(self, lost=self.lost | lost), self.job
        again = [self._again(rank, progress.into_s) for rank in sorted(lost)]
        pipelines = range(job.num_pipelines)
        rests = [then._rest_of(pipeline, lost, self._done(pipeline, progress.into_s)) for pipeline in pipelines]
        num_again = sum(map(len, again))
        fetched = self.boundary_bytes * sum(act.stage < job.num_stages - 1 for acts in again for act in acts)
        return Recovery(
            "shadow",
            then,
            0,
            num_again,
            {"remote": fetched} if fetched else {},
            job.detect_s,
            0.0,
            seconds(fetched, job.net_bytes_per_s),
            max(sum(map(self.times.of, acts)) for acts in again),
            self._stored_s(progress.num_steps) + max(*rests, job.step_s - progress.into_s),
        )

    def _stored_s(self, number: int) -> float:
        """The checkpoint in the store, where one follows a step."""
        return Checkpoint(self.job, self.store_every).step_s(number) - self.job.step_s

    # --- one pipeline ---

    @cached_property
    def _plain(self) -> Timed:
        return time_rows(self.rows, self.times)

    def _lost_of(self, pipeline: int) -> tuple[int, ...]:
        return tuple(sorted(rank for found, rank in map(self.job.place, self.lost) if found == pipeline))

    def _rows_of(self, pipeline: int) -> Rows:
        return merged(self.rows, self._lost_of(pipeline), self._plain)

    def _step_of(self, pipeline: int) -> float:
        return time_rows(self._rows_of(pipeline), self.times).makespan

    def _done(self, pipeline: int, into_s: float) -> dict[int, set[Act]]:
        return time_rows(self._rows_of(pipeline), self.times).done(into_s)

    def _has_shadows(self, lost: Collection[int]) -> bool:
        """Whether every stage that some ranks run is kept by a rank that lives, and runs one stage alone."""
        gone = self.lost | set(lost)
        for pipeline, rank in map(self.job.place, lost):
            first, p = pipeline * self.job.num_stages, self.job.num_stages
            if p < 2 or first + (rank - 1) % p in gone or first + (rank + 1) % p in self.lost:
                return False
        return True

    def _again(self, rank: int, into_s: float) -> list[Act]:
        """The backwards of a lost rank that had been run."""
        pipeline, own = self.job.place(rank)
        done = self._done(pipeline, into_s).get(own, set())
        return [act for act in done if act.what is What.BACKWARD]

    def _rest_of(self, pipeline: int, lost: Collection[int], done: dict[int, set[Act]]) -> float:
        """What is left of a step on the ranks that live, with what they had run before."""
        gone = {rank for found, rank in map(self.job.place, lost) if found == pipeline}
        there = {rank: set(acts) for rank, acts in done.items() if rank not in gone}
        for rank in gone:
            keeper = (rank - 1) % self.job.num_stages
            shadows = {act for act in there.get(keeper, set()) if act.what is What.SHADOW and act.stage == rank}
            there.setdefault(keeper, set()).update(act._replace(what=What.FORWARD) for act in shadows)
        return time_rows(self._rows_of(pipeline), self.times, there).makespan
