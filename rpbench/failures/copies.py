"""GEMINI: after every step each rank's state is copied to the host memory of c ranks, while the network is idle.

    net of a rank   | boundary |  copy of step i  | boundary | copy | boundary |        step i + 1

The copies of the state after step i travel during step i + 1; until they have arrived, those of step i - 1 are the
newest. Copies that do not fit into the time in which the network of a whole group is idle make the step longer. A
process that dies finds its copy in its own host's memory. A machine that dies is replaced, and the new one fetches the
copy from another holder; if all holders died, all ranks go back to the persistent store.

Ranks form groups of c; each rank holds the states of all ranks of its group. If c does not divide N, the last group
takes the remaining ranks and is a ring: the copies of a rank are with itself and the c - 1 ranks behind it. With N = 5
and c = 2:

    group 0      0 1        each has both states
    ring         2 3 4      2's state with 2 and 3, 3's with 3 and 4, 4's with 4 and 2

A state is lost if all c of its holders fail. With k = c failures, each set of c equally likely, nothing is lost with
P = 1 - (N / c) / C(N, c) where c divides N; for c = 2 that is 1 - 1 / (N - 1).

The members of a group send to one another at the same time, each c - 1 times its state. Two assumptions are ours and
conservative: a group is idle only when all its members are, and sending and receiving share one link. The copy from a
device to its own host's memory is free, and a replaced host has again the copies that the dead one held for others.

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
    """The copies of one step, for the group that needs most time."""

    idle_s: float  # in which the network is idle during a step
    needed_s: float
    added_s: float  # by which a step becomes longer
    done_s: float  # from the start of the next step until the last copy has arrived


@dataclass(frozen=True, kw_only=True)
class Gemini(Checkpoint):
    """Copies in host memory of every step; ValueError for copies that cannot be placed, or an unknown kind."""

    copies: int  # c: holders of each state, its own rank counted
    busy: tuple[Spans, ...]  # for each rank of a pipeline, when its network is busy during a step
    kind: str = "machine"  # what dies: a machine with its host memory, or a process
    safe_steps: int = 0  # steps of the state that the last recovery began from, which all holders have

    def __post_init__(self) -> None:
        super().__post_init__()
        groups(self.job.num_ranks, self.copies)
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: what dies is one of {', '.join(KINDS)}")

    @cached_property
    def copying(self) -> Copying:
        """The copies of a step beside the next one, for the group that needs most time."""
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
        """Host memory of each rank for complete copies and for those that arrive meanwhile."""
        found = [0] * self.job.num_ranks
        for owner in range(self.job.num_ranks):
            for holder in holders(owner, self.job.num_ranks, self.copies):
                found[holder] += 2 * self.job.bytes_of([owner])
        return tuple(found)

    @property
    def pace_s(self) -> float:
        return self.job.step_s + self.copying.added_s

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """Recovery from copies, if there is one of every state, else from the store."""
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
    """The groups that hold one another's states, the last the largest; ValueError for an impossible `num_copies`."""
    if not 1 <= num_copies <= num_ranks:
        raise ValueError(
            f"copies={num_copies}: each copy is in the memory of another rank, its own counted, and there are "
            f"{num_ranks}; take 1 to {num_ranks}"
        )
    starts = [number * num_copies for number in range(num_ranks // num_copies)]
    return tuple(map(tuple, map(range, starts, [*starts[1:], num_ranks])))


def holders(rank: int, num_ranks: int, num_copies: int) -> Group:
    """The ranks that hold the state of `rank`, itself first."""
    group = next(each for each in groups(num_ranks, num_copies) if rank in each)
    place = group.index(rank)
    return tuple(group[(place + behind) % len(group)] for behind in range(num_copies))


def is_recoverable(lost: Collection[int], num_ranks: int, num_copies: int) -> bool:
    """Whether a living rank has a copy of every lost state."""
    return all(set(holders(rank, num_ranks, num_copies)) - set(lost) for rank in lost)


def recoverable_probability(num_ranks: int, num_copies: int, num_failures: int) -> Fraction:
    """The probability that no state is lost when `num_failures` ranks fail at once, all sets equally likely.

    Raises ValueError for more failures than ranks, or an impossible number of copies.
    """
    if not 0 <= num_failures <= num_ranks:
        raise ValueError(f"num_failures={num_failures}: of {num_ranks} ranks; take 0 to {num_ranks}")
    sound = np.array([1], dtype=object)  # number of failures -> how many sets of them leave a copy of everything
    for group in groups(num_ranks, num_copies):
        own = [_sound_sets(len(group), num_copies, failed) for failed in range(len(group) + 1)]
        sound = np.convolve(sound, np.array(own, dtype=object))  # exact, for these are Python's whole numbers
    return Fraction(sound[num_failures], comb(num_ranks, num_failures))


def _sound_sets(size: int, run: int, failed: int) -> int:
    """The number of sets of `failed` members of a ring without `run` of them in a row.

    The living members cut the ring into as many runs of failed ones, each shorter than `run` (inclusion and exclusion
    over longer ones); every set is counted once for each living member that may be the first.
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
    """For each device, the spans of a step in which it sends or receives a boundary tensor; each takes a hop."""
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
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def placed(busy: Iterable[Span], step_s: float, needed_s: float) -> tuple[float, float]:
    """Idle seconds of a step, and when the last of `needed_s` of traffic is sent if it takes the first idle seconds.

    Traffic that is left over follows the step.
    """
    idle, done, left, now = 0.0, 0.0, needed_s, 0.0
    for start, stop in (*_joined(busy), (step_s, step_s)):
        gap = max(0.0, min(start, step_s) - now)
        idle += gap
        if left > 0 and gap > 0:
            taken = min(gap, left)
            left, done = left - taken, now + taken
        now = max(now, stop)
    return idle, step_s + left if left > 0 else done
