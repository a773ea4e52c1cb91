"""Weight lanes: in which order a lane brings weights, lets activations in, and frees what is not needed any more."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cached_property

from rpbench.ir.action import Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.waits.edges import version_read
from rpbench.ir.waits.visits import Visit

ACTIVATION_BUFFERS = 2  # for what is loaded for recomputation, on every device

After = list[tuple[int, list[Action]]]  # (place of a visit on its device, what follows it)


class WeightLanes:
    """Lanes that bring weights and take them away again."""

    def __init__(self, index: Index, arrive: Kind, leave: Kind, what: str | None, prefetch: int) -> None:
        self._index, self.prefetch = index, prefetch
        self._arrive, self._leave, self._what = arrive, leave, what
        # Each once: there are as many of them as visits.
        self._arrivals: dict[tuple[int, int, int | None], Action] = {}
        self._departures: dict[int, Action] = {}

    def per_visit(
        self, visits: Sequence[Visit], uploads: Mapping[int, list[Action]], after: After | None = None
    ) -> list[Action]:
        """A lane that brings weights to every visit; `uploads` come in for an action."""
        due: dict[int, list[int]] = defaultdict(list)  # visit -> visits whose weights come while it runs
        for place in range(len(visits)):
            due[self._earliest(visits, place)].append(place)
        lane = _Lane(self, visits, deque(after or []))
        for place, visit in enumerate(visits):
            if place in due[place]:  # nothing can come ahead of it
                lane.follow(place - 1)
                lane.bring(place, 1)
            coming = [other for other in due[place] if other != place]
            groups = [uploads[number] for number in visit.numbers if number in uploads] if uploads else []
            lane.interleave(place, groups or [[]], coming)
            lane.follow(place - 1)
        lane.follow(len(visits) - 1)
        lane.free(len(visits) - 1)
        return lane.row

    def per_step(self, visits: Sequence[Visit], after: After) -> list[Action]:
        """A lane that brings weights once a step, and takes them away after their last visit in it."""
        follows, row = dict(after), list[Action]()
        for step in sorted({visit.step for visit in visits}):
            of_step = [(place, visit) for place, visit in enumerate(visits) if visit.step == step]
            first = {visit.stage: visit for _, visit in reversed(of_step)}
            last = {visit.stage: place for place, visit in of_step}
            row += [self.arrival(visit) for visit in sorted(first.values(), key=lambda visit: visit.first)]
            for place, visit in of_step:
                row += follows.get(place, [])
                row += [self.departure(visit)] * (last[visit.stage] == place)
        return row

    def arrival(self, visit: Visit, part: int = 0) -> Action:
        """Transfers that bring the weights of a visit."""
        version = self._versions[visit.step] if self._index.steps else None
        key = visit.stage, part, version
        if key not in self._arrivals:
            self._arrivals[key] = Action(self._arrive, visit.stage, None, part, version, self._what)
        return self._arrivals[key]

    def departure(self, visit: Visit) -> Action:
        """Transfers that take them away."""
        stage = visit.stage
        if stage not in self._departures:
            self._departures[stage] = Action(self._leave, stage, object=self._what)
        return self._departures[stage]

    def cut(self, visit: Visit, num_pieces: int) -> list[Action]:
        """Transfers that bring them, in pieces; a gather is one."""
        return [self.arrival(visit, part) for part in range(num_pieces if self._what else 1)]

    def _version(self, visit: Visit) -> int:
        return self._versions[visit.step]

    @cached_property
    def _versions(self) -> list[int]:
        """By step; policies that read what is newest have been refused."""
        shape, policy = self._index.shape, self._index.schedule.policy
        return [version_read(policy, shape, step * shape.num_microbatches) or 0 for step in range(shape.num_steps)]

    def _earliest(self, visits: Sequence[Visit], place: int) -> int:
        """The visit during which the weights of another may come: `prefetch` before it, but not before the work on
        this device that their version is made of."""
        earliest = max(0, place - self.prefetch)
        if self._index.steps:
            version = self._version(visits[place])
            while any(visit.step < version for visit in visits[earliest:place]):
                earliest += 1
        return earliest


class _Lane:
    """A lane h2d or net as it grows."""

    def __init__(self, weights: WeightLanes, visits: Sequence[Visit], after: "deque[tuple[int, list[Action]]]") -> None:
        self.row: list[Action] = []
        self._weights, self._visits, self._after = weights, visits, after
        self._num_freed = 0
        self._held: deque[tuple[int, Action]] = deque()  # (visit, activations that were loaded and not freed)

    def pieces(self, place: int, number: int) -> list[Action]:
        """The weights of a visit in pieces; a gather is in one, which comes with the first activation."""
        return self._weights.cut(self._visits[place], number)

    def bring(self, place: int, num_pieces: int) -> None:
        """Bring the weights of a visit, when there is a buffer for them."""
        self.free(place - 1 - self._weights.prefetch)
        self.row += self.pieces(place, num_pieces)

    def interleave(self, place: int, groups: Sequence[Sequence[Action]], coming: Sequence[int]) -> None:
        """Let activations come in, and in the gaps the weights of visits to come."""
        pieces = [piece for other in coming for piece in self.pieces(other, len(groups))]
        if len(groups) == 1 and not groups[0]:  # nothing but weights
            if coming:
                self.free(coming[-1] - 1 - self._weights.prefetch)
            self.row += pieces
            return
        for number, group in enumerate(groups):
            self.take(place, group)
            if number == 0 and coming:
                self.free(coming[-1] - 1 - self._weights.prefetch)
            share = len(coming) if number < len(groups) - 1 else len(pieces)
            self.row += pieces[:share]
            pieces = pieces[share:]

    def take(self, place: int, group: Sequence[Action]) -> None:
        """Let activations come in; what was loaded has two buffers."""
        for action in group:
            if action.kind is Kind.LOAD:
                if len(self._held) == ACTIVATION_BUFFERS:
                    self._free_held()
                self._held.append((place, action))
            self.row.append(action)

    def free(self, last: int) -> None:
        """Free the weights of all visits up to one, and the activations they held."""
        while self._num_freed <= last:
            while self._held and self._held[0][0] <= self._num_freed:
                self._free_held()
            self.row.append(self._weights.departure(self._visits[self._num_freed]))
            self._num_freed += 1

    def follow(self, last: int) -> None:
        """The actions that follow the visits up to one."""
        while self._after and self._after[0][0] <= last:
            self.row += self._after.popleft()[1]

    def _free_held(self) -> None:
        _, load = self._held.popleft()
        self.row.append(load._replace(kind=Kind.FREE))
