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
from heapq import heappop, heappush
from math import inf

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

    def rates(self, copying: Sequence[int], hosted: int) -> tuple[list[float], float]:
        """Bytes per second of a copy of each group, and of the host's threads.

        Args:
            copying: copies under way in each group.
            hosted: tasks of the host's threads, which take turns.
        """
        left, users = self.host_bytes_per_s, sum(copying) + (hosted > 0)
        found = [inf] * len(copying)
        caps = sorted(
            (min(self.copy_bytes_per_s, self.group_bytes_per_s / num), group)
            for group, num in enumerate(copying)
            if num
        )
        for cap, group in caps:
            rate = min(cap, left / users)
            found[group] = rate
            if left != inf:
                left -= rate * copying[group]
                users -= copying[group]
        return found, left


def run(
    tasks: Tasks, own_s: Sequence[float], amount: Sequence[float], served_by: Sequence[int], capacity: Capacity
) -> tuple[list[float], list[float]]:
    """When each task begins and ends, in seconds.

    Args:
        own_s, amount, served_by: by slot: seconds of a task, what must be served besides, and by what.
    """
    way = _Way(tasks, own_s, amount, served_by, capacity)
    ready, ended = [task for task, count in enumerate(tasks.waits) if not count], list[int]()
    while True:
        while ready or ended:
            if ended:
                way.finish(ended.pop(), ready)
            else:
                way.start(ready.pop(), ended)
        task = way.advance()
        if task is None:
            return way.begin, way.end
        way.open_parts[task] -= 1
        if not way.open_parts[task]:
            ended.append(task)


class _Way:
    """Tasks on their way: what has begun and ended, what is queued at whom, and the moment."""

    def __init__(
        self,
        tasks: Tasks,
        own_s: Sequence[float],
        amount: Sequence[float],
        served_by: Sequence[int],
        capacity: Capacity,
    ) -> None:
        self.tasks, self.own_s, self.amount, self.served_by, self.capacity = tasks, own_s, amount, served_by, capacity
        self.waits, number = list(tasks.waits), len(tasks.slot)
        self.begin, self.end = [0.0] * number, [0.0] * number
        self.open_parts = [1] * number  # own time and amount that have not ended
        self.at_port: list[list[tuple[bool, int]]] = [[] for _ in range(max(tasks.port, default=-1) + 1)]
        self.taken = [False] * len(self.at_port)
        self.timers: list[tuple[float, int]] = []
        self.queues: list[list[tuple[float, int]]] = [[] for _ in range(max(COPY, *served_by) + 1)]
        self.clock = [0.0] * len(self.queues)  # units a task of this kind has been served since the start
        self.rate, self.busy, self.changed = [0.0] * len(self.queues), list[int](), True
        self.known: dict[tuple[int, ...], list[float]] = {}
        self.now = 0.0

    def finish(self, task: int, ready: list[int]) -> None:
        """A task has ended: its port is free, and who waited only for it is ready."""
        tasks, waits = self.tasks, self.waits
        self.end[task], port = self.now, tasks.port[task]
        if port >= 0:
            self.taken[port] = False
            if self.at_port[port]:
                ready.append(heappop(self.at_port[port])[1])
        for other in tasks.followers[task]:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)

    def start(self, task: int, ended: list[int]) -> None:
        """A task begins, unless its port is taken; one that takes nothing has ended."""
        tasks = self.tasks
        slot, port = tasks.slot[task], tasks.port[task]
        if port >= 0:
            if self.taken[port]:
                heappush(self.at_port[port], (not tasks.urgent[task], task))
                return
            self.taken[port] = True
        self.begin[task] = self.now
        seconds, units, server = self.own_s[slot], self.amount[slot], self.served_by[slot]
        if units > 0:
            heappush(self.queues[server], (self.clock[server] + units, task))
            self.changed = True
        if seconds > 0:
            heappush(self.timers, (self.now + seconds, task))
            if units > 0:
                self.open_parts[task] = 2
        elif units <= 0:
            ended.append(task)

    def advance(self) -> int | None:
        """Go on to the next moment at which a task's own time or amount ends; the task, or None if none is left."""
        if self.changed:
            self._share_out()
        queues, clock, rate, timers, now = self.queues, self.clock, self.rate, self.timers, self.now
        moment, source = (timers[0][0], NOTHING) if timers else (inf, NOTHING)
        for server in self.busy:
            at = now + (queues[server][0][0] - clock[server]) / rate[server]
            if at < moment:
                moment, source = at, server
        if moment == inf:
            return None
        passed = moment - now
        if passed > 0:
            for server in self.busy:
                clock[server] += rate[server] * passed
            self.now = moment
        if source == NOTHING:
            return heappop(timers)[1]
        clock[source], task = heappop(queues[source])
        self.changed = True
        return task

    def _share_out(self) -> None:
        """Rates for as many tasks as are in each queue now."""
        counts = tuple(map(len, self.queues))
        if counts not in self.known:
            self.known[counts] = _rates(counts, self.capacity)
        self.rate, self.changed = self.known[counts], False
        self.busy = [server for server in range(HOST, len(self.queues)) if counts[server]]


def _rates(counts: Sequence[int], capacity: Capacity) -> list[float]:
    """Units per second of a task in each queue, by how many there are in each."""
    loop = capacity.loop_share if counts[HOST] else 1.0
    copies, host = capacity.rates(counts[COPY:], counts[HOST])
    return [0.0, host / max(1, counts[HOST]), loop / max(1, counts[LOOP]), *copies]
