"""Tasks that share links, a host's memory and an interpreter, timed by the event loop of fair shares.

A task begins when all that it waits for has ended - the order of a lane is one more thing to wait for - and its port,
if it needs one, is free; it ends when its own seconds have passed and its amount has been served. What serves amounts:

    copies    bytes over a link; at most the pace of a link each, what the copies of a root complex share, and a fair
              share of the host's memory
    host      bytes the host's threads read and write for one task: what copies leave of the memory, and at least the
              share of one of them
    loop      seconds of one interpreter, which takes turns among all that wait for it
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf

import numpy as np
import numpy.typing as npt

from rpbench.sim.fair_shares import Edges, Servers, Works, timed

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

    def servers(self, num: int) -> Servers:
        """So many servers: `NOTHING`, `HOST`, `LOOP`, and `COPY` of each group."""
        groups = num - COPY
        return Servers(
            np.array([inf, inf, inf, *[self.copy_bytes_per_s] * groups]),
            np.array([-1, 0, -1, *[0] * groups]),
            np.array([-1, -1, *range(1, 2 + groups)]),
            np.arange(num) == HOST,
            np.zeros(num),
        )

    def links(self, num: int, *, beside_host: bool) -> npt.NDArray[np.float64]:
        """Units a second of what so many servers share: the memory, the interpreter, and the links of groups."""
        loop = self.loop_share if beside_host else 1.0
        return np.array([self.host_bytes_per_s, loop, *[self.group_bytes_per_s] * (num - COPY)])


def run(
    tasks: Tasks, own_s: Sequence[float], amount: Sequence[float], served_by: Sequence[int], capacity: Capacity
) -> tuple[list[float], list[float]]:
    """When each task begins and ends, in seconds.

    Args:
        own_s, amount, served_by: by slot: seconds of a task, what must be served besides, and by what.
    """
    num, num_servers, slot = len(tasks.slot), max(COPY, *served_by) + 1, np.array(tasks.slot)
    none, first = np.zeros(num), np.cumsum([0, *map(len, tasks.followers)])
    followers = np.fromiter(chain.from_iterable(tasks.followers), np.int64)
    empty = followers[:0]
    edges = Edges(np.full(num, -1), np.zeros(num + 1, np.int64), empty, first, followers, none[:0], empty)
    needs, servers = np.array([own_s, amount], float)[:, slot], np.array(served_by)[slot]
    works = Works(none, needs[0], needs[1], servers, np.array(tasks.port), 1 - np.array(tasks.urgent, np.int64))
    links = capacity.links(num_servers, beside_host=False), capacity.links(num_servers, beside_host=True)
    found = timed(edges, works, capacity.servers(num_servers), links, np.array(tasks.waits))
    return found.begun.tolist(), found.end.tolist()
