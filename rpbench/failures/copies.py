"""GEMINI: after every step each rank's state goes to the host memory of c ranks, in the idle time of the network.

    net of a rank   | boundary |  copy of step i  | boundary | copy | boundary |        step i + 1

The copies of the state after step i travel while step i + 1 runs. Until they have arrived, those of step i - 1 are the
newest. What does not fit into the time in which the network of a whole group is idle makes the step longer. A process
that dies finds its copy in its own host's memory; a machine that dies is replaced, and the new one fetches the copy
from another holder; where all holders died, all ranks go back to the persistent store.

Ranks stand in groups of c; each holds the states of all ranks of its group, its own included. Where c does not divide N
the last group takes what is left over and is a ring: a rank's copies are with itself and the c - 1 behind it. With
N = 5 and c = 2:

    group 0      0 1        each has both states
    ring         2 3 4      2's state with 2 and 3, 3's with 3 and 4, 4's with 4 and 2

A state is lost if all c of its holders fail. With k = c failures, each set of c equally likely, nothing is lost with
P = 1 - (N / c) / C(N, c) where c divides N; for c = 2 that is 1 - 1 / (N - 1).

The members of a group send to one another at the same time, each c - 1 times its state. That a group has idle time only
when all of its members have is ours, and on the careful side; so is that sending and receiving count as one link.
The copy from a device to its own host's memory, which costs the network nothing, is not charged; copies that a dead
host held for others are taken to be with its successor when training goes on.

Source: after the description of Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP'23, mixed placement; not from its code. The sum over all sets of failures is ours.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import comb
from typing import NamedTuple

import numpy as np

from rpbench.failures.walk import Checkpoint, Progress, Recovery, seconds
from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph

KINDS = ("machine", "process")

Group = tuple[int, ...]
Span = tuple[float, float]
Spans = tuple[Span, ...]


class Copying(NamedTuple):
    """The copies of one step.

    Args:
        idle_s: in which the network of the group that fits worst is idle during a step.
        added_s: what a step becomes longer.
        done_s: into the next step, when the last copy has arrived.
    """

    idle_s: float
    needed_s: float
    added_s: float
    done_s: float


@dataclass(frozen=True, kw_only=True)
class Gemini(Checkpoint):
    """Copies in host memory, of every step.

    Args:
        copies: c, holders of each state, its own rank counted.
        busy: for each rank of a pipeline, when its network is busy during a step.
        kind: what dies: a `machine` with its host memory, or a `process`.
        safe_steps: whose state the last recovery began from, so that all holders have it.

    Raises:
        ValueError: for copies that cannot be placed, or an unknown kind.
    """

    copies: int
    busy: tuple[Spans, ...]
    kind: str = "machine"
    safe_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        groups(self.job.num_ranks, self.copies)
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: what dies is one of {', '.join(KINDS)}")

    @cached_property
    def copying(self) -> Copying:
        """How the copies of a step fit into the next one, of the group that fits worst."""
        found = []
        for group in groups(self.job.num_ranks, self.copies):
            size = max(self.job.bytes_of([rank]) for rank in group)
            needed = seconds((self.copies - 1) * size, self.job.net_bytes_per_s)
            busy = [span for rank in group for span in self.busy[rank % self.job.num_stages]]
            idle, done = placed(busy, self.job.step_s, needed)
            found.append(Copying(idle, needed, max(0.0, needed - idle), done))
        return max(found, key=lambda each: (each.added_s, each.done_s))

    @property
    def sent_bytes(self) -> int:
        return (self.copies - 1) * self.job.all_state_bytes

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Host memory for copies, of each rank: what is complete, and what arrives meanwhile."""
        found = [0] * self.job.num_ranks
        for owner in range(self.job.num_ranks):
            for holder in holders(owner, self.job.num_ranks, self.copies):
                found[holder] += 2 * self.job.bytes_of([owner])
        return tuple(found)

    @property
    def pace_s(self) -> float:
        """A step, with what copies add."""
        return self.job.step_s + self.copying.added_s

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """From copies, if of every state there is one."""
        job, done, is_machine = self.job, progress.num_steps, self.kind == "machine"
        if is_machine and not is_recoverable(lost, job.num_ranks, self.copies):
            found = self.from_store(progress, self)
            return replace(found, then=replace(self, safe_steps=done - found.lost_steps))
        lost_steps = int(done > self.safe_steps and progress.into_s < self.copying.done_s)
        into_s = min(progress.into_s, self.pace_s)
        remote = job.bytes_of(lost) if is_machine else 0
        local_s = max(seconds(size, job.host_bytes_per_s) for size in job.state_bytes)
        remote_s = max(seconds(job.bytes_of([rank]), job.net_bytes_per_s) for rank in lost) if remote else 0.0
        return Recovery(
            source="remote" if is_machine else "local",
            then=replace(self, safe_steps=done - lost_steps),
            lost_steps=lost_steps,
            lost_microbatches=job.again(lost_steps, into_s),
            fetched_bytes={"local": job.all_state_bytes - remote} | ({"remote": remote} if remote else {}),
            detect_s=job.detect_s,
            restart_s=job.restart_s,
            fetch_s=remote_s + local_s,
            recompute_s=lost_steps * self.pace_s + into_s,
        )


# --- placement of copies -----------------------------------------------------------------------------------------


def groups(num_ranks: int, num_copies: int) -> tuple[Group, ...]:
    """The groups that hold one another's states, the last the largest; ValueError for copies that fit in none."""
    if not 1 <= num_copies <= num_ranks:
        raise ValueError(
            f"copies={num_copies}: each copy is in the memory of another rank, its own counted, and there are "
            f"{num_ranks}; take 1 to {num_ranks}"
        )
    starts = [number * num_copies for number in range(num_ranks // num_copies)]
    return tuple(map(tuple, map(range, starts, [*starts[1:], num_ranks])))


def holders(rank: int, num_ranks: int, num_copies: int) -> Group:
    """The ranks that hold the state of one, itself first."""
    group = next(each for each in groups(num_ranks, num_copies) if rank in each)
    place = group.index(rank)
    return tuple(group[(place + behind) % len(group)] for behind in range(num_copies))


def is_recoverable(lost: Collection[int], num_ranks: int, num_copies: int) -> bool:
    """Whether a copy of every lost rank's state is with a rank that lives."""
    return all(set(holders(rank, num_ranks, num_copies)) - set(lost) for rank in lost)


def recoverable_probability(num_ranks: int, num_copies: int, num_failures: int) -> Fraction:
    """How likely no state is lost when `num_failures` ranks fail at once, all sets of them equally likely; raises
    ValueError if more fail than there are, or the copies cannot be placed.
    """
    if not 0 <= num_failures <= num_ranks:
        raise ValueError(f"num_failures={num_failures}: of {num_ranks} ranks; take 0 to {num_ranks}")
    sound = [1]  # by number of failures, the sets of them that leave a copy of everything
    for group in groups(num_ranks, num_copies):
        own = [_sound_sets(len(group), num_copies, failed) for failed in range(len(group) + 1)]
        joined = [0] * (len(sound) + len(own) - 1)
        for before, sets in enumerate(sound):
            for failed, more in enumerate(own):
                joined[before + failed] += sets * more
        sound = joined
    return Fraction(sound[num_failures], comb(num_ranks, num_failures))


def _sound_sets(size: int, run: int, failed: int) -> int:
    """The sets of so many members of a ring without `run` of them in a row.

    The members that live cut the ring into as many runs, each below `run` (inclusion and exclusion over those that are
    not); every set is counted once for each member that may stand first of those that live.
    """
    alive = size - failed
    if not alive:
        return 0
    signed = (
        (-1) ** long * comb(alive, long) * comb(size - 1 - long * run, alive - 1)
        for long in range(failed // run + 1)
        if size - 1 >= long * run
    )
    return size * sum(signed) // alive


# --- the network --------------------------------------------------------------------------------------------


def busy_spans(graph: Graph, timeline: Timeline, hop: float) -> tuple[Spans, ...]:
    """For each device, the seconds of a step in which a boundary tensor comes or goes; it takes a hop."""
    found: list[list[Span]] = [[] for _ in range(graph.schedule.shape.num_ranks)]
    if hop:
        end, unit = np.asarray(timeline.end, float), timeline.units_per_second
        consumers = np.repeat(np.arange(graph.num_actions), np.diff(graph.pred_start))
        for edge in np.flatnonzero(graph.crosses & graph.moves):
            producer, consumer = graph.order[graph.pred[edge]], graph.order[consumers[edge]]
            for number in (producer, consumer):
                span = float(end[producer]) / unit, float(end[producer] + hop) / unit
                found[int(graph.columns.device[number])].append(span)
    return tuple(map(_joined, found))


def _joined(spans: Iterable[Span]) -> Spans:
    """The same time in spans that do not touch, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def placed(busy: Iterable[Span], step_s: float, needed_s: float) -> tuple[float, float]:
    """Traffic in the first idle seconds of a step, and behind it what is left over: how long the step is idle, and when
    the last of the traffic has been sent."""
    idle, done, left, now = 0.0, 0.0, needed_s, 0.0
    for start, stop in (*_joined(busy), (step_s, step_s)):
        gap = max(0.0, min(start, step_s) - now)
        idle += gap
        if left > 0 and gap > 0:
            taken = min(gap, left)
            left, done = left - taken, now + taken
        now = max(now, stop)
    return idle, step_s + left if left > 0 else done
