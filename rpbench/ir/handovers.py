"""Handovers: weights and gradients that go from device to device instead of from and to the host.

    sLOAD:P>q    the device takes a copy of stage s from rank q: what q has loaded of it for an earlier microbatch of
                 the same direction, or, where q has loaded none, what q keeps: then q is the home of the stage
    sSTORE:G>q   the device adds its gradient of stage s to the sum that has come to it, and sends the sum to rank q

    LOAD:P>q     after q's LOAD:P of that copy, whose FREE:P waits for it
    STORE:G>q    after the STORE:G of the microbatch before; the last one of a step goes to the home of the stage

A rank that names itself copies what it keeps; nothing goes over a link. The home of a stage has its master weights
and its optimizer state, and so its STEP.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.visits import Transfer, Visit


class Handovers:
    """What goes from device to device in a schedule.

    Args:
        loads: LOAD:P of all devices.
        stores: STORE:G of all devices.

    Attributes:
        edges: (producer, consumer) by number.
        origins: number of a LOAD:P>q -> the transfer whose copy it takes; None: what rank q keeps.
        homes: stage -> the rank that keeps it.
        carried: (stage, step) -> the STORE:G>q that carry its sum, in order.

    Raises:
        ScheduleError: for a copy that is not there, or a sum that does not get to where it goes on.
    """

    def __init__(self, index: Index, loads: Iterable[Transfer], stores: Iterable[Transfer]) -> None:
        self._index = index
        self.edges: list[tuple[int, int]] = []
        self.origins: dict[int, Transfer | None] = {}
        self.homes: dict[int, int] = {}
        self.carried: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        on_rank: dict[tuple[int, int, bool, int], list[Transfer]] = defaultdict(list)
        for load in loads:
            if self.peer(load.pieces[0]) is not None:
                visit = load.visits[0]
                on_rank[visit.device, visit.stage, visit.backward, visit.step].append(load)
        for found in on_rank.values():
            found.sort(key=self._microbatch)
        for found in on_rank.values():
            for load in found:
                self._find_origin(load, on_rank)
        for store in stores:
            if self.peer(store.pieces[0]) is not None:
                self.carried[store.visits[0].stage, store.visits[0].step].append(store)
        for (stage, _), carriers in self.carried.items():
            self._chain(stage, carriers)

    @property
    def are_there(self) -> bool:
        """Whether anything goes from device to device."""
        return bool(self.origins or self.carried)

    def peer(self, number: int) -> int | None:
        """The rank that an action names, if it names one."""
        peer = self._index.actions[number].peer
        return peer if isinstance(peer, int) else None

    def is_local(self, number: int) -> bool:
        """Whether what an action moves stays on its rank."""
        return self.peer(number) == self._index.device(number)

    def _microbatch(self, transfer: Transfer) -> int:
        return _first_microbatch(self._index, transfer.visits[0])

    def _find_origin(self, load: Transfer, on_rank: Mapping[tuple[int, int, bool, int], Sequence[Transfer]]) -> None:
        number, visit, origin = load.pieces[0], load.visits[0], None
        rank, wanted = self.peer(number), self._microbatch(load)
        assert rank is not None
        if rank != visit.device:
            there = on_rank.get((rank, visit.stage, visit.backward, visit.step), ())
            origin = max(
                (other for other in there if self._microbatch(other) < wanted), key=self._microbatch, default=None
            )
        self.origins[number] = origin
        if origin is not None:
            self.edges += [(origin.pieces[-1], number), (number, origin.end)]
            return
        home = self._home(visit.stage, rank)
        if rank != home:
            rule = (
                f"{self._index.actions[number]} takes what rank {rank} does not have: stage {visit.stage} is at home "
            )
            way_out = f"take it from rank {home}, or from a rank that has loaded it for an earlier microbatch"
            raise broken(self._index.schedule, f"{rule}on rank {home}", [number], way_out=way_out)

    def _home(self, stage: int, rank: int) -> int:
        """Where a stage is stepped; without steps, the first rank that is taken to have it."""
        step = self._index.steps.get((stage, 1))
        return self.homes.setdefault(stage, rank if step is None else self._index.device(step))

    def _chain(self, stage: int, carriers: list[Transfer]) -> None:
        carriers.sort(key=self._microbatch)
        for before, after in pairwise(carriers):
            number, rank = before.pieces[0], after.visits[0].device
            if self.peer(number) != rank:
                following = self._index.actions[after.pieces[0]]
                rule = f"{self._index.actions[number]} is followed by {following} on rank {rank}"
                raise broken(self._index.schedule, rule, [number, after.pieces[0]], way_out=f"send it to rank {rank}")
            self.edges.append((number, after.pieces[0]))
        last = carriers[-1].pieces[0]
        home = self.homes.get(stage)
        if home is not None and self.peer(last) != home:
            rule = f"{self._index.actions[last]} is the sum of a step: it goes to rank {home}, which steps the stage"
            raise broken(self._index.schedule, rule, [last])


def _first_microbatch(index: Index, visit: Visit) -> int:
    parts = parts_of(index.actions[visit.first])
    return next(part.microbatch or 0 for part in parts if part.stage == visit.stage and part.kind is not Kind.STEP)
