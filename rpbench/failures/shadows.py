"""Bamboo: each rank also keeps the state of the next stage and runs its forwards, so that it can replace it.

With 3 ranks and 3 microbatches of 1F1B; `1f0` is the redundant forward of stage 1 for microbatch 0 on rank 0:

    rank 0   0F0 0F1 0F2 1f0 0B0 1f1 0B1 1f2 0B2
    rank 1   1F0 1F1 2f0 1B0 1F2 2f1 1B1 2f2 1B2
    rank 2   0f0 2F0 2B0 0f1 2F1 2B1 0f2 2F2 2B2

A redundant forward runs directly before the backward of the same microbatch, while the rank waits for the gradient. The
last rank waits for activations instead, and its shadow is stage 0: there it runs before the forward.

Redundant forwards run in every step (eager), redundant backwards only once a neighbour is lost. Then the rank before it
runs both stages, merged in the order in which actions began before, with its own stage first at equal times. The
forwards of the lost rank have run as redundant ones; its backwards run again, because its accumulated gradient is gone,
and the gradients that it had received are sent again. Training continues within the step. Shadows whose holder or owner
is gone run no more. If a lost stage has no shadow any more - two neighbours were lost, or one beside a rank that runs
two stages - all go back to the persistent store, on new ranks.

Two stages on one rank save hops, but a step never takes less than without failures. The order of merged rows and the
place of the last rank's redundant forward are ours. Activations of redundant forwards wait in host memory: they take no
device memory, and their copies no time.

Source: after the released code of Thorpe et al., "Bamboo: Making Preemptible Instances Resilient for Affordable
Training of Large DNNs", NSDI'23, whose rules are described, not ported.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from rpbench.failures.walk import Checkpoint, Progress, Recovery, seconds


class What(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    SHADOW = "f"


class Act(NamedTuple):
    what: What
    stage: int
    microbatch: int


Rows = Sequence[Sequence[Act]]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage's forward and backward, and of a hop."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float = 0.0

    def of(self, act: Act) -> float:
        return (self.backward if act.what is What.BACKWARD else self.forward)[act.stage]


@dataclass(frozen=True)
class Timed:
    """When each act of each rank begins and ends."""

    start: dict[tuple[int, Act], float]
    end: dict[tuple[int, Act], float]

    @property
    def makespan(self) -> float:
        return max(self.end.values(), default=0.0)

    def done(self, moment: float) -> dict[int, set[Act]]:
        """Rank -> the acts that have ended at a moment."""
        found: dict[int, set[Act]] = {}
        for (rank, act), end in self.end.items():
            if end <= moment:
                found.setdefault(rank, set()).add(act)
        return found


@dataclass(frozen=True, kw_only=True)
class Bamboo(Checkpoint):
    """Redundant forwards, and neighbours that replace lost ranks; `rows` are of one pipeline, one stage a rank.

    Raises ValueError for a single rank, which has no neighbour.
    """

    rows: Rows
    times: StageTimes
    boundary_bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.job.num_stages < 2:
            raise ValueError(
                f"{self.job.num_stages} rank a pipeline: a neighbour keeps the state of a lost rank; "
                "set num_devices to 2 or more, or take mode.policy=checkpoint"
            )

    @property
    def shadow_bytes(self) -> tuple[int, ...]:
        """Weights and optimizer state of the next stage, on each rank of a pipeline."""
        stages = range(self.job.num_stages)
        return tuple(self.job.state_bytes[shadow_of(rank, self.job.num_stages)] for rank in stages)

    @cached_property
    def redundancy_s(self) -> float:
        """Seconds that redundant forwards add to a step without failures; 0 if all of them fit into waits."""
        return time_rows(with_shadows(self.rows), self.times).makespan - self._plain.makespan

    @cached_property
    def pace_s(self) -> float:  # type: ignore[override]  # cached, because it is simulated
        """Seconds of a step of the slowest pipeline, on the ranks that are left."""
        pipelines = range(self.job.num_pipelines)
        slowest = max(time_rows(self._rows_of(pipeline), self.times).makespan for pipeline in pipelines)
        return max(slowest, self.job.step_s)

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """Recovery by the neighbours if every lost stage has a shadow, else from the store."""
        job = self.job
        if not self._has_shadows(lost):
            return self.from_store(progress, replace(self, lost=frozenset()))
        then = replace(self, lost=self.lost | lost)
        again, rests = [], []
        for pipeline in range(job.num_pipelines):
            done = time_rows(self._rows_of(pipeline), self.times).done(progress.into_s)
            gone = sorted(rank for found, rank in map(job.place, lost) if found == pipeline)
            again += [[act for act in done.get(rank, ()) if act.what is What.BACKWARD] for rank in gone]
            rests.append(then._rest_of(pipeline, gone, done))
        fetched = self.boundary_bytes * sum(act.stage < job.num_stages - 1 for acts in again for act in acts)
        return Recovery(
            source="shadow",
            then=then,
            lost_microbatches=sum(map(len, again)),
            fetched_bytes={"remote": fetched} if fetched else {},
            detect_s=job.detect_s,
            fetch_s=seconds(fetched, job.net_bytes_per_s),
            recompute_s=max(sum(map(self.times.of, acts)) for acts in again),
            rest_s=self.written_s(progress.num_steps) + max(*rests, job.step_s - progress.into_s),
        )

    @cached_property
    def _plain(self) -> Timed:
        return time_rows(self.rows, self.times)

    def _rows_of(self, pipeline: int) -> Rows:
        lost = sorted(rank for found, rank in map(self.job.place, self.lost) if found == pipeline)
        return merged(self.rows, lost, self._plain)

    def _has_shadows(self, lost: Collection[int]) -> bool:
        """Whether each lost rank ran one stage alone, and the rank with its shadow lives."""
        gone = self.lost | set(lost)
        for pipeline, rank in map(self.job.place, lost):
            first, p = pipeline * self.job.num_stages, self.job.num_stages
            if first + (rank - 1) % p in gone or first + (rank + 1) % p in self.lost:
                return False
        return True

    def _rest_of(self, pipeline: int, gone: Collection[int], done: Mapping[int, Collection[Act]]) -> float:
        """Seconds left of a step on the living ranks, which have run `done`."""
        there = {rank: set(acts) for rank, acts in done.items() if rank not in gone}
        for rank in gone:
            own = there.setdefault((rank - 1) % self.job.num_stages, set())
            own |= {act._replace(what=What.FORWARD) for act in own if act[:2] == (What.SHADOW, rank)}
        return time_rows(self._rows_of(pipeline), self.times, there).makespan


# --- rows ---------------------------------------------------------------------------------------------------


def shadow_of(rank: int, num_ranks: int) -> int:
    """The stage whose state a rank keeps beside its own."""
    return (rank + 1) % num_ranks


def with_shadows(rows: Rows, lost: Collection[int] = ()) -> tuple[tuple[Act, ...], ...]:
    """Rows of one stage a rank, with the redundant forwards of shadows whose owner and holder both live."""
    found = []
    for rank, row in enumerate(rows):
        shadow, acts = shadow_of(rank, len(rows)), list[Act]()
        before = What.FORWARD if rank == len(rows) - 1 else What.BACKWARD
        for act in row:
            if act.what is before and not {rank, shadow} & set(lost):
                acts.append(Act(What.SHADOW, shadow, act.microbatch))
            acts.append(act)
        found.append(tuple(acts))
    return tuple(found)


def merged(rows: Rows, lost: Collection[int], timed: Timed) -> tuple[tuple[Act, ...], ...]:
    """Rows without lost ranks, no two of which are neighbours, in the order of `timed`, which has no shadows."""
    found = list(with_shadows(rows, lost))
    for rank in lost:
        keeper = (rank - 1) % len(rows)
        both = [(timed.start[keeper, act], 0, act) for act in rows[keeper]]
        both += [(timed.start[rank, act], 1, act) for act in rows[rank]]
        found[keeper], found[rank] = tuple(act for _, _, act in sorted(both, key=lambda each: each[:2])), ()
    return tuple(found)


def time_rows(rows: Rows, times: StageTimes, done: Mapping[int, Collection[Act]] | None = None) -> Timed:
    """Run rows in order, each act as soon as its rank is free and its input there; `done` acts take no time."""
    rank_of = {act: rank for rank, row in enumerate(rows) for act in row}
    last, timed = len(times.forward) - 1, Timed({}, {})
    following, free = [0] * len(rows), [0.0] * len(rows)

    def arrives(act: Act, rank: int) -> float | None:
        """When the input of an act arrives at its rank; None while unknown."""
        if act.what is What.BACKWARD:
            source = Act(What.FORWARD if act.stage == last else act.what, min(act.stage + 1, last), act.microbatch)
        elif act.stage == 0:
            return 0.0
        else:
            source = Act(What.FORWARD, act.stage - 1, act.microbatch)
        ended = timed.end.get((rank_of[source], source))
        return None if ended is None else ended + (times.hop if rank_of[source] != rank else 0.0)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            for act in row[following[rank] :]:
                is_done = act in (done or {}).get(rank, ())
                there = 0.0 if is_done else arrives(act, rank)
                if there is None:
                    break
                timed.start[rank, act] = 0.0 if is_done else max(free[rank], there)
                timed.end[rank, act] = 0.0 if is_done else timed.start[rank, act] + times.of(act)
                free[rank] = max(free[rank], timed.end[rank, act])
                following[rank], moved = following[rank] + 1, True
    assert following == [len(row) for row in rows], "rows that wait for each other"
    return timed
