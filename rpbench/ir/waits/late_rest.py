"""Late rest: the edges of STEP_REST, STORE:G and LOAD:P where devices step some columns and the host the others.

    STORE:G        after every REDUCE_GRAD of its step, because all devices choose the same columns
    STEP_REST@v    after the STORE:G of its window, STEP@v, the host's step at the boundary before, and its LOAD:P
    LOAD:P@v       after STEP@v and the host's step it brings; before the readers of version v, and before its UNSHARD

A STEP waits for no STORE:G: the columns that a device steps stay on it. The order at a boundary is that of DeepSpeed:
the device has stepped, takes in the host's result, and hands the next window to the host. The rule itself is in
`rpbench.ir.policy`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.policy import Boundary, boundaries, check_selective, versions_stored
from rpbench.ir.schedule import ScheduleError
from rpbench.ir.waits.saved_inputs import What
from rpbench.ir.waits.visits import Transfer, Visit

Moved = dict[tuple[What, int, int], list[int]]  # what, device and stage -> its actions


def host_step(index: Index, stage: int, version: int) -> int:
    """The number of the host's step at a boundary: STEP_REST, or STEP in the warm-up."""
    return index.rests.get((stage, version), index.steps.get((stage, version), -1))


def rest_edges(
    index: Index,
    loads: Mapping[tuple[int, int], Sequence[int]],  # (device, stage) -> numbers of its LOAD:P
    visits: Mapping[tuple[int, int], Sequence[Visit]],  # (device, stage) -> its visits
    stores: Sequence[Transfer],  # STORE:G, then REDUCE_GRAD and UNSHARD
    reduces: Sequence[Transfer],
    gathers: Sequence[Transfer],
) -> Iterator[tuple[int, int]]:
    """The edges of a late rest, (producer, consumer) by number; transfers are matched by `rpbench.ir.waits.moves`."""
    assert index.schedule.late_rest is not None
    ends = boundaries(index.schedule.late_rest, index.shape.num_steps)
    end_of = {version: end.version for end in ends for version in end.window}
    reduced = _by_stage(reduces, -1, offset=1)
    for transfer in stores:
        stage, version = transfer.visits[-1].stage, transfer.visits[-1].step + 1
        yield from ((number, transfer.pieces[0]) for number in reduced[stage, version])
        yield transfer.pieces[0], host_step(index, stage, end_of[version])
    for (stage, version), number in index.rests.items():
        yield index.steps[stage, version], number
    for stage in range(index.shape.num_backward_stages):
        done = [host_step(index, stage, end.version) for end in ends]
        yield from ((before, after) for before, after in pairwise(done) if min(before, after) >= 0)
    brings = {end.version: end.brings for end in ends}
    gathered = _by_stage(gathers, 0)
    for (device, stage), numbers in loads.items():
        for number in numbers:
            version = index.actions[number].version or 0
            origin = brings.get(version)
            if origin is None:
                rule = f"{index.actions[number]} brings nothing: no step of the host is taken in there"
                raise broken(index.schedule, rule, [number], way_out="take it out")
            yield host_step(index, stage, origin), number
            yield index.steps[stage, version], number
            if origin != version:
                yield number, index.rests[stage, version]
            of_version = (visit.first for visit in visits[device, stage] if visit.step == version)
            yield from ((number, reader) for reader in gathered[stage, version] or of_version)


def _by_stage(transfers: Iterable[Transfer], place: int, *, offset: int = 0) -> dict[tuple[int, int], list[int]]:
    """(stage, step + offset) of the visit at a place of each transfer -> the numbers of the transfers."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for transfer in transfers:
        visit = transfer.visits[place]
        found[visit.stage, visit.step + offset].append(transfer.pieces[0])
    return found


def check_late_rest(index: Index) -> None:
    """Check that a late rest has policy selective, and that a schedule has all moves of the late rest, or none."""
    schedule, rule = index.schedule, index.schedule.late_rest
    try:
        check_selective(schedule.policy, rule)
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    if rule is None:
        for number in index.rests.values():
            raise broken(schedule, f"{index.actions[number]}: there is no late rest", [number], way_out="take it out")
        return
    moved = _moved(index)
    if not index.steps:
        for number in index.rests.values():
            raise broken(schedule, f"{index.actions[number]} steps the late columns, and no STEP the others", [number])
        for (what, *_), (number, *_) in moved.items():
            if what == (Kind.LOAD, "P"):
                rule_broken = f"{index.actions[number]} brings columns that the host has stepped, and there is no STEP"
                raise broken(schedule, rule_broken, [number], way_out="take it out")
        return
    ends = boundaries(rule, schedule.shape.num_steps)
    _check_host(index, ends, rule.num_warmup_steps, is_due=bool(moved or index.rests))
    if moved or index.rests:
        brings = [end.version for end in ends if end.brings is not None]
        _check_moved(index, moved, (Kind.LOAD, "P"), Kind.F, brings)
        _check_moved(index, moved, (Kind.STORE, "G"), Kind.B, versions_stored(rule, schedule.shape.num_steps))
        _check_sums(index, moved)


def _check_host(index: Index, ends: Sequence[Boundary], num_warmup_steps: int, *, is_due: bool) -> None:
    schedule, due = index.schedule, {end.version for end in ends if end.version > num_warmup_steps}
    for (_, version), number in index.rests.items():
        if index.lanes[index.lane_of[number]].name != "host":
            raise broken(schedule, f"{index.actions[number]} stands on another lane than host", [number])
        if version not in due:
            rule = f"{index.actions[number]} stands where no window of the host ends: those end at {sorted(due)}"
            raise broken(schedule, rule, [number], way_out="take it out")
    for stage in range(schedule.shape.num_backward_stages) if is_due else ():
        for version in sorted(due):
            if (stage, version) not in index.rests:
                rule = f"{stage}STEP_REST@{version} is missing: what the host has added up is never applied"
                raise broken(schedule, rule, [index.steps[stage, version]], way_out="add it on lane host")


def _moved(index: Index) -> Moved:
    """The LOAD:P and STORE:G, by object, device and stage."""
    found: Moved = defaultdict(list)
    for lane in index.lanes:
        for number in range(lane.start, lane.stop):
            action = index.actions[number]
            if (action.kind, action.object) in ((Kind.LOAD, "P"), (Kind.STORE, "G")):
                found[(action.kind, action.object), lane.device, action.stage].append(number)
    return found


def _check_moved(index: Index, moved: Moved, what: What, user: Kind, versions: Sequence[int]) -> None:
    """Check that every device that runs a stage, by F or by B or W (`user`), moves a part of it once a version."""
    first: dict[tuple[int, int], int] = {}  # (device, stage) -> an action that runs it
    for number, action in enumerate(index.actions):
        for part in parts_of(action):
            if part.kind in (user, Kind.W if user is Kind.B else user):
                first.setdefault((index.device(number), part.stage), number)
    for place, number in sorted(first.items()):
        own, wanted = moved[(what, *place)], list(versions)
        found = sorted(index.actions[each].version or 0 for each in own) if what[0] is Kind.LOAD else wanted
        if len(own) != len(wanted) or found != wanted:
            if own and not wanted:
                rule = f"{index.actions[own[0]]} is of no use: devices step all of it at once"
                raise broken(index.schedule, rule, own[:1], way_out="take it out")
            if what[0] is Kind.LOAD:
                told = f"brings stage {place[1]} for versions {found}, and the host has something at {wanted}"
            else:
                told = f"stores the gradient of stage {place[1]} {len(own)} times, and the host has a part of {wanted}"
            way_out = f"one {what[0].name}:{what[1]} for each of them"
            raise broken(index.schedule, f"rank {place[0]} {told}", own[:1] or [number], way_out=way_out)


def _check_sums(index: Index, moved: Moved) -> None:
    """Check that several devices which store the gradient of a stage reduce it: the sum decides which columns go."""
    storing: dict[int, dict[int, int]] = defaultdict(dict)  # stage -> device -> a STORE:G
    for (what, device, stage), numbers in moved.items():
        if what == (Kind.STORE, "G") and numbers:
            storing[stage][device] = numbers[0]
    reducing = {
        (index.device(number), action.stage)
        for number, action in enumerate(index.actions)
        if action.kind is Kind.REDUCE_GRAD
    }
    for stage, devices in storing.items():
        for device, number in devices.items():
            if len(devices) > 1 and (device, stage) not in reducing:
                rule = f"{index.actions[number]} is of what rank {device} has, and columns are chosen by the sum of all"
                raise broken(index.schedule, rule, [number], way_out=f"add {stage}REDUCE_GRAD on lane net before it")
