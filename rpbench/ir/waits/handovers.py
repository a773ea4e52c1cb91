"""Handovers: weights and gradients that go from device to device instead of from and to the host.

    sLOAD:P>q    the device takes a copy of stage s from rank q: the copy that q has loaded for an earlier microbatch of
                 the same direction, or for the step before if that has the version read. If q has loaded none, q is
                 the home of the stage and gives the weights it keeps
    sSTORE:G>q   the device adds its gradient of stage s to the sum it has received, and sends the sum to rank q

    LOAD:P>q     after q's LOAD:P of that copy, whose FREE:P waits for it
    STORE:G>q    after the STORE:G that sends it a sum; the last one of a step goes to the home of the stage

A rank that names itself copies the weights it keeps, and uses no link. The home of a stage has its master weights and
its optimizer state, and so its STEP. A home that loads no copy runs the stage on the weights it keeps. A rank that
takes copies from such a home is a relay: its k-th copy in a step serves the k-th visit of those that name it.

Gradients of a step go one of two ways:

    round      one sum goes through all microbatches in order; each sends it to the rank of the next      (WeiPipe)
    in groups  ranks send to the home, or to a rank that sends to the home for the same visit of its own  (TawPipe)
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.waits.edges import version_read
from rpbench.ir.waits.visits import Transfer, first_of


class GroupSum(NamedTuple):
    """A sum that goes home: the STORE:G>q of its parts, by microbatch, and the one among them that sends the sum."""

    parts: tuple[Transfer, ...]
    last: Transfer


class Handovers:
    """The weights and gradients of a schedule that go from device to device, by the LOAD:P and STORE:G of all devices.

    ScheduleError for a copy that is not there, or a sum that does not reach its next rank.
    """

    def __init__(self, index: Index, loads: Iterable[Transfer], stores: Iterable[Transfer]) -> None:
        self._index = index
        self.edges: list[tuple[int, int]] = []  # (producer, consumer) by number
        # number of a LOAD:P>q -> the transfer whose copy it takes; None: the weights that rank q keeps
        self.origins: dict[int, Transfer | None] = {}
        self.homes: dict[int, int] = {}  # stage -> the rank that keeps it
        # (stage, step) -> the STORE:G>q that send its sum from rank to rank, in order
        self.carried: dict[tuple[int, int], list[Transfer]] = {}
        # (stage, step) -> the sums that go home, in the order of their first microbatches
        self.grouped: dict[tuple[int, int], list[GroupSum]] = {}
        on_rank: dict[tuple[int, int, bool, int], list[Transfer]] = defaultdict(list)
        for load in loads:
            if self.peer(load.pieces[0]) is not None:
                visit = load.visits[0]
                on_rank[visit.device, visit.stage, visit.backward, visit.step].append(load)
        for found in on_rank.values():
            found.sort(key=self._microbatch)
        self._microbatches = {key: list(map(self._microbatch, found)) for key, found in on_rank.items()}
        for found in on_rank.values():
            for place, load in enumerate(found):
                self._find_origin(load, place, on_rank)
        sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for store in stores:
            if self.peer(store.pieces[0]) is not None:
                sent[store.visits[0].stage, store.visits[0].step].append(store)
        for (stage, step), found in sent.items():
            self._join_sums(stage, step, sorted(found, key=self._microbatch))

    def peer(self, number: int) -> int | None:
        """The rank that an action names, if it names one."""
        peer = self._index.actions[number].peer
        return peer if isinstance(peer, int) else None

    def is_local(self, number: int) -> bool:
        """Whether the object of an action stays on its rank."""
        return self.peer(number) == self._index.device(number)

    def _microbatch(self, transfer: Transfer) -> int:
        return first_of(self._index, transfer.visits[0]).microbatch or 0

    # --- weights ---

    def _find_origin(
        self, load: Transfer, place: int, on_rank: Mapping[tuple[int, int, bool, int], Sequence[Transfer]]
    ) -> None:
        """Find the copy that a load takes; `place` counts it among those of its device, stage, direction and step."""
        number, visit, origin = load.pieces[0], load.visits[0], None
        rank = self.peer(number)
        assert rank is not None
        if rank != visit.device:
            of_visit = visit.stage, visit.backward, visit.step
            there = on_rank.get((rank, *of_visit), ())
            relayed = there[place] if place < len(there) else None
            if relayed is not None and (self.peer(relayed.pieces[0]), *of_visit) not in on_rank:
                origin = relayed
            else:
                microbatches = self._microbatches.get((rank, *of_visit), [])
                num_earlier = bisect_left(microbatches, self._microbatch(load))
                if num_earlier:  # the first copy for the latest earlier microbatch
                    origin = there[microbatches.index(microbatches[num_earlier - 1])]
                else:
                    before = on_rank.get((rank, visit.stage, visit.backward, visit.step - 1), ())
                    origin = next((other for other in reversed(before) if self._reads_the_same(other, load)), None)
        self.origins[number] = origin
        if origin is not None:
            self.edges += [(origin.pieces[-1], number), (number, origin.end)]
            return
        home = self._home(visit.stage, rank)
        if rank != home:
            taken = f"{self._index.actions[number]} takes what rank {rank} does not have"
            way_out = f"take it from rank {home}, or from a rank that has loaded it for an earlier microbatch"
            rule = f"{taken}: stage {visit.stage} is at home on rank {home}"
            raise broken(self._index.schedule, rule, [number], way_out=way_out)

    def _reads_the_same(self, one: Transfer, other: Transfer) -> bool:
        """Whether two transfers of a stage bring the same version, and it is known before the schedule runs."""
        policy, shape = self._index.schedule.policy, self._index.shape
        read, wanted = (
            version_read(policy, shape, self._microbatch(load), load.visits[0].stage) for load in (one, other)
        )
        return read is not None and read == wanted

    def _home(self, stage: int, rank: int) -> int:
        """The rank that steps a stage; without steps, the first rank that gives its weights away."""
        step = self._index.steps.get((stage, 1))
        return self.homes.setdefault(stage, rank if step is None else self._index.device(step))

    # --- gradients ---

    def _join_sums(self, stage: int, step: int, stores: list[Transfer]) -> None:
        """Match each sum that is sent of a stage and step with the transfer that sends it on; stores by microbatch."""
        apart = next((pair for pair in pairwise(stores) if self._peer_of(pair[0]) != pair[1].visits[0].device), None)
        grouped = self._groups(stage, stores) if apart else None
        if grouped is not None:
            self.grouped[stage, step] = grouped
            for one in grouped:
                self.edges += [(part.pieces[0], one.last.pieces[0]) for part in one.parts if part is not one.last]
            return
        if apart:
            number, rank = apart[0].pieces[0], apart[1].visits[0].device
            following = self._index.actions[apart[1].pieces[0]]
            rule = f"{self._index.actions[number]} is followed by {following} on rank {rank}"
            raise broken(self._index.schedule, rule, [number, apart[1].pieces[0]], way_out=f"send it to rank {rank}")
        self.carried[stage, step] = stores
        self.edges += [(before.pieces[0], after.pieces[0]) for before, after in pairwise(stores)]
        last = stores[-1].pieces[0]
        home = self.homes.get(stage)
        if home is not None and self.peer(last) != home:
            rule = f"{self._index.actions[last]} is the sum of a step: it goes to rank {home}, which steps the stage"
            raise broken(self._index.schedule, rule, [last])

    def _groups(self, stage: int, stores: Sequence[Transfer]) -> list[GroupSum] | None:
        """The sums that ranks send home, with their parts; None if a gradient does not get home in one or two moves."""
        step = self._index.steps.get((stage, 1))
        if step is None:
            return None
        home = self.homes.setdefault(stage, self._index.device(step))
        of_device: dict[int, list[Transfer]] = defaultdict(list)
        for store in stores:
            of_device[store.visits[0].device].append(store)
        found: dict[int, list[Transfer]] = {}  # place of the one that sends the sum -> its parts
        places = {store.pieces[0]: place for place, store in enumerate(stores)}
        for store in stores:
            rank, last = self._peer_of(store), store
            if rank != home:
                there, visit = of_device[rank or 0], of_device[store.visits[0].device].index(store)
                if visit >= len(there) or self._peer_of(there[visit]) != home:
                    return None
                last = there[visit]
            found.setdefault(places[last.pieces[0]], []).append(store)
        return [GroupSum(tuple(parts), stores[place]) for place, parts in found.items()]

    def _peer_of(self, store: Transfer) -> int | None:
        return self.peer(store.pieces[0])
