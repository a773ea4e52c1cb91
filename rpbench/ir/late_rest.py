"""Late rest: what STEP_REST, STORE:G and LOAD:P wait for where devices step some columns and the host the others.

    STORE:G        after every REDUCE_GRAD of its step, because all devices choose the same columns
    STEP_REST@v    after the STORE:G of its window, STEP@v, and the LOAD:P of what the host had made before
    LOAD:P@v       after STEP@v and what it brings; before what reads version v, and before the UNSHARD of it

A STEP waits for no STORE:G: what a device steps is there. The order at a boundary is that of the release: the device
has stepped, takes in what the host has made, and hands it the next window. The rule itself: `rpbench.ir.rest_rule`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rpbench.ir.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.policy import Policy
from rpbench.ir.rest_rule import Boundary, boundaries
from rpbench.ir.schedule import ScheduleError
from rpbench.ir.visits import Transfer, Visit


def host_step(index: Index, stage: int, version: int) -> int:
    """The number of what the host does at a boundary: STEP_REST, or STEP in the warm-up."""
    return index.rests.get((stage, version), index.steps.get((stage, version), -1))


class RestEdges:
    """What stands in a schedule of a late rest waits for; arguments are transfers as `rpbench.ir.moves` matches them.

    Args:
        loads: (device, stage) -> numbers of its LOAD:P.
        visits: (device, stage) -> its visits.
        stores, reduces, gathers: STORE:G, REDUCE_GRAD and UNSHARD.
    """

    def __init__(
        self,
        index: Index,
        loads: Mapping[tuple[int, int], Sequence[int]],
        visits: Mapping[tuple[int, int], Sequence[Visit]],
        stores: Sequence[Transfer],
        reduces: Sequence[Transfer],
        gathers: Sequence[Transfer],
    ) -> None:
        rule = index.schedule.late_rest
        assert rule is not None
        self._index, self._visits = index, visits
        self._loads = loads
        self._ends = boundaries(rule, index.shape.num_steps)
        self._stores, self._reduces, self._gathers = stores, reduces, gathers

    def edges(self) -> Iterator[tuple[int, int]]:
        """(producer, consumer) by number."""
        yield from self._of_gradients()
        yield from self._of_host()
        yield from self._of_loads()

    def _of_gradients(self) -> Iterator[tuple[int, int]]:
        end_of = {version: end.version for end in self._ends for version in end.window}
        reduced: dict[tuple[int, int], list[int]] = defaultdict(list)
        for transfer in self._reduces:
            visit = transfer.visits[-1]
            reduced[visit.stage, visit.step + 1].append(transfer.pieces[0])
        for transfer in self._stores:
            stage, version = transfer.visits[-1].stage, transfer.visits[-1].step + 1
            yield from ((number, transfer.pieces[0]) for number in reduced[stage, version])
            if version not in end_of:
                rule = f"{self._index.actions[transfer.pieces[0]]} is of no use: devices step all of it at once"
                raise broken(self._index.schedule, rule, [transfer.pieces[0]], way_out="take it out")
            yield transfer.pieces[0], host_step(self._index, stage, end_of[version])

    def _of_host(self) -> Iterator[tuple[int, int]]:
        for stage, version in self._index.rests:
            yield self._index.steps[stage, version], self._index.rests[stage, version]

    def _of_loads(self) -> Iterator[tuple[int, int]]:
        brings = {end.version: end.brings for end in self._ends}
        gathers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for transfer in self._gathers:
            visit = transfer.visits[0]
            gathers[visit.stage, visit.step].append(transfer.pieces[0])
        for (device, stage), numbers in self._loads.items():
            for number in numbers:
                version = self._index.actions[number].version or 0
                origin = brings.get(version)
                if origin is None:
                    rule = f"{self._index.actions[number]} brings nothing: no step of the host is taken in there"
                    raise broken(self._index.schedule, rule, [number], way_out="take it out")
                yield host_step(self._index, stage, origin), number
                yield self._index.steps[stage, version], number
                if origin != version:
                    yield number, self._index.rests[stage, version]
                readers = gathers[stage, version] or [
                    visit.first for visit in self._visits[device, stage] if visit.step == version
                ]
                yield from ((number, reader) for reader in readers)


def check_late_rest(index: Index) -> None:
    """A rule stands with policy selective alone; each window has its STEP_REST, or none has: nothing is moved yet.

    Raises:
        ScheduleError: naming the first action that breaks a rule.
    """
    schedule, rule = index.schedule, index.schedule.late_rest
    if (rule is None) != (schedule.policy is not Policy.SELECTIVE):
        raise ScheduleError(
            f"policy {schedule.policy.value} with late_rest={rule}: policy selective has a late rest, and no other; "
            "take both or neither"
        )
    if rule is None:
        for number in index.rests.values():
            raise broken(schedule, f"{index.actions[number]}: nothing is late here", [number], way_out="take it out")
        return
    if index.steps:
        _check_host(index, boundaries(rule, schedule.shape.num_steps), rule.num_warmup_steps)


def _check_host(index: Index, ends: Sequence[Boundary], num_warmup_steps: int) -> None:
    schedule, due = index.schedule, {end.version for end in ends if end.version > num_warmup_steps}
    for (_, version), number in index.rests.items():
        if index.lanes[index.lane_of[number]].name != "host":
            raise broken(schedule, f"{index.actions[number]} stands on another lane than host", [number])
        if version not in due:
            rule = f"{index.actions[number]} stands where no window of the host ends: those end at {sorted(due)}"
            raise broken(schedule, rule, [number], way_out="take it out")
    for stage in range(schedule.shape.num_backward_stages) if index.rests else ():
        for version in sorted(due):
            if (stage, version) not in index.rests:
                rule = f"{stage}STEP_REST@{version} is missing: what the host has added up is never applied"
                raise broken(schedule, rule, [index.steps[stage, version]], way_out="add it on lane host")
