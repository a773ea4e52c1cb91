"""Shares: an event simulation of tasks that share links, a host's memory and an interpreter, made for speed.

A task begins when all that it waits for has ended - the order of a lane is one more thing to wait for - and its port,
if it needs one, is free; it ends when its own seconds have passed and its amount has been served. A port takes one
task at a time, urgent ones first. What serves amounts:

    copies    bytes over a link; at most the pace of a link each, what the copies of a root complex share, and a fair
              share of the host's memory
    host      bytes the host's threads read and write for one task: what copies leave of the memory, and at least the
              share of one of them
    loop      seconds of one interpreter, which takes turns among all that wait for it

Transfers of one kind all have the same rate at any moment, and so share a clock of bytes: the task that ends first is
the one whose turn on that clock is first, and no rate need be stored for each. `rpbench.sim.links` has no such limit
and times schedules as data; both give the same times where both apply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rpbench.sim import share_loop

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOTHING, HOST, LOOP, COPY = 0, 1, 2, 3  # what serves the amount; COPY + g: over the links of group g


@dataclass
class Tasks:
    """Tasks with what they wait for; their times and amounts stand apart, by slot, so that they can be varied.

    Attributes:
        slot: what the times of a task are looked up by.
        waits: how many tasks it waits for.
        followers: the tasks that wait for it.
        port: what it occupies; -1 for nothing.
        urgent: whether it goes before others that wait for the same port.
    """

    slot: list[int] = field(default_factory=list)
    port: list[int] = field(default_factory=list)
    urgent: list[bool] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)

    def add(self, slot: int, *after: int, port: int = -1, urgent: bool = False) -> int:
        """A task that waits for others (negative numbers for none); its number."""
        number = len(self.slot)
        self.slot.append(slot)
        self.port.append(port)
        self.urgent.append(urgent)
        self.followers.append([])
        count = 0
        for other in after:
            if other >= 0:
                self.followers[other].append(number)
                count += 1
        self.waits.append(count)
        return number

    def link(self, before: int, after: int) -> None:
        """Let one task wait for another as well."""
        self.followers[before].append(after)
        self.waits[after] += 1


@dataclass(frozen=True)
class Capacity:
    """What is shared.

    Args:
        copy_bytes_per_s: pace of one copy alone.
        host_bytes_per_s: of the host's memory, all copies and the host's own threads together.
        group_bytes_per_s: of all copies of one group: one way through one root complex.
        loop_share: of a core that the interpreter has while the host's threads fill them all.

    Raises:
        ValueError: for a share that is not one.
    """

    copy_bytes_per_s: float = inf
    host_bytes_per_s: float = inf
    group_bytes_per_s: float = inf
    loop_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.loop_share <= 1:
            raise ValueError(f"loop_share={self.loop_share}: a share of a core, above 0 and at most 1")

    @property
    def paces(self) -> tuple[float, float, float, float]:
        """As `rpbench.sim.share_loop` takes them."""
        return self.copy_bytes_per_s, self.host_bytes_per_s, self.group_bytes_per_s, self.loop_share


def run(
    tasks: Tasks, own_s: Sequence[float], amount: Sequence[float], served_by: Sequence[int], capacity: Capacity
) -> tuple[list[float], list[float]]:
    """When each task begins and ends, in seconds.

    Args:
        own_s, amount, served_by: by slot: seconds of a task, what must be served besides, and by what.
    """
    from rpbench.sim import share_loop  # numba is imported when first needed

    num_servers = max(COPY, *served_by) + 1
    first, followers = _in_a_row(tasks.followers)
    graph = share_loop.Graph(np.array(tasks.slot), np.array(tasks.port), np.array(tasks.urgent), first, followers)
    servers, needs = np.array(served_by), np.array([own_s, amount], float)
    heaps = share_loop.Heaps(*_heaps(graph, needs, servers, num_servers))
    num, num_ports = len(tasks.slot), len(heaps.size) - num_servers
    ready = np.flatnonzero(np.array(tasks.waits) == 0)
    way = share_loop.Way(
        waits=np.array(tasks.waits),
        begin=np.zeros(num),
        end=np.zeros(num),
        open_parts=np.ones(num, np.int64),
        taken=np.zeros(num_ports, np.bool_),
        clock=np.zeros(num_servers),
        rate=np.zeros(num_servers),
        stack=np.concatenate((ready, np.zeros(num + 1 - len(ready), np.int64))),
        num_ready=np.array([len(ready)]),
        num_ended=np.zeros(1, np.int64),
        now=np.zeros(1),
    )
    share_loop.run_events(graph, needs, servers, np.array(capacity.paces), heaps, way)
    return way.begin.tolist(), way.end.tolist()


def _in_a_row(followers: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Where each task's followers begin, and all followers one behind the other."""
    return np.cumsum([0, *map(len, followers)]), np.fromiter(chain.from_iterable(followers), np.int64)


def _heaps(graph: "share_loop.Graph", needs: Floats, servers: Integers, num_servers: int) -> tuple[Any, ...]:
    """Empty heaps of own times, of each server and of each port, as large as they can become."""
    timed, served = needs[:, graph.slot] > 0
    sizes = np.bincount(servers[graph.slot][served], minlength=num_servers)
    sizes[NOTHING] = timed.sum()
    sizes = np.concatenate((sizes, np.bincount(graph.port[graph.port >= 0], minlength=1)))
    base = np.cumsum(sizes) - sizes
    return np.zeros(sizes.sum()), np.zeros(sizes.sum(), np.int64), base, np.zeros(len(sizes), np.int64)
