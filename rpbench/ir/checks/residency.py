"""Residency: how many stage activations each device holds while a schedule runs that moves some of them elsewhere.

The count comes from a replay in which every computation takes one slot and transfers take none, so that it depends on
the order alone. A device holds one more if a transfer is still under way when the next forward begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from rpbench.ir.action import Kind
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule, Weights

TAKE = frozenset({Kind.F, Kind.FB})  # kinds that take room for a stage activation as they begin
RELEASE = frozenset({Kind.B, Kind.W, Kind.FB})  # kinds that make room as they end


def moves_activations(schedule: Schedule) -> bool:
    """Whether activations of bound stages leave their device before their backward."""
    return (Kind.STORE, "A") in schedule.moves


def stays_on_devices(schedule: Schedule) -> bool:
    """Whether weights, gradients and optimizer state never leave the devices of their stages."""
    if schedule.weights is Weights.STREAMED or Kind.STEP_REST in schedule.kinds:
        return False
    on_host = (row for _, lane, row in schedule.items() if lane == "host")
    leaves = any(kind in (Kind.LOAD, Kind.STORE) and what in ("P", "G") for kind, what in schedule.moves)
    return not leaves and not any(action.kind is Kind.STEP for row in on_host for action in row)


def inputs_stay(schedule: Schedule) -> bool:
    """Whether weights are streamed and the few inputs that forwards keep stay on the device, not on the host."""
    return schedule.weights is Weights.STREAMED and schedule.shape.keeps_every > 1


def peak_kept_inputs(schedule: Schedule, device: int) -> int:
    """The most inputs that a device keeps for backwards, that of the head included, if inputs stay on it.

    The input of the first stage is the tokens, which do not count. Forwards keep the input of every k-th stage
    (`Shape.keeps_every`), and R makes the input of the stage above.
    """
    every, top = schedule.shape.keeps_every, schedule.shape.num_stages - 1
    held = most = 0
    for action in schedule.compute(device):
        stage, ends = action.stage, action.stage == top
        if action.kind is Kind.F:
            held += (stage > 0 and stage % every == 0) + ends
        elif action.kind is Kind.R:
            held += not ends and (stage + 1) % every > 0
        most = max(most, held)
        if action.kind is Kind.B:
            held -= (stage > 0) + ends
    return most


def prefetch_depth(schedule: Schedule) -> int:
    """The most stages whose weights a device has beside those of the running stage; 1 without any LOAD:P.

    Every LOAD:P counts once, with all its pieces, until its FREE:P.
    """
    held = most = 0
    for _, lane, row in schedule.items():
        if lane == "h2d":
            held = 0
            for kind, part, what in map(itemgetter(0, 3, 5), row):
                if what == "P":
                    held += (kind is Kind.LOAD and not part) - (kind is Kind.FREE)
                    most = max(most, held)
    return most - 1 if most else 1


def resident_levels(index: Index, starts: Sequence[int], ends: Sequence[int]) -> list[set[tuple[int, ...]]]:
    """Per device, how many microbatches of each stage it holds at any one time, every combination once.

    A forward and a LOAD:A take room as they begin. A backward makes room as it ends, and so does the FREE:A behind a
    STORE:A. A partner named as peer holds activations from the STORE:A to the LOAD:A. `starts` and `ends` are the slots
    of every action (`rpbench.ir.checks.deadlock.slots_of`).
    """
    return _levels(index, sorted(_changes(index, starts, ends)))


def hosted_levels(index: Index, starts: Sequence[int], ends: Sequence[int]) -> list[set[tuple[int, ...]]]:
    """The same for the activations of each device that wait on the host, from their STORE:A to the end of LOAD:A."""
    changes = [
        (starts[at], 1, device, action.stage) if action.kind is Kind.STORE else (ends[at], -1, device, action.stage)
        for device, _, first, stop in index.lanes
        for at, action in enumerate(index.actions[first:stop], first)
        if action.object == "A" and action.kind in (Kind.STORE, Kind.LOAD) and action.peer is None
    ]
    changes.sort(key=lambda each: (each[0], -each[1]))  # of a slot, what comes before what goes
    return _levels(index, changes)


def _levels(index: Index, changes: Iterable[tuple[int, int, int, int]]) -> list[set[tuple[int, ...]]]:
    """Per device, the microbatches of each stage after every change (slot, change, device, stage)."""
    shape = index.shape
    stages = max(shape.num_stages, shape.num_backward_stages)
    levels = [[0] * stages for _ in range(shape.num_ranks)]
    found = [{(0,) * stages} for _ in levels]
    for _, change, device, stage in changes:
        levels[device][stage] += change
        found[device].add(tuple(levels[device]))
    return found


def _changes(index: Index, starts: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(slot, change, device, stage); sorted, the releases of a slot come before what takes room in it."""
    for device, lane, first, stop in index.lanes:
        for action, begin, end in zip(index.actions[first:stop], starts[first:stop], ends[first:stop], strict=True):
            for part in action.sub or (action,):
                if part[0] in TAKE:
                    yield begin, 1, device, part[1]
                if part[0] in RELEASE:
                    yield end, -1, device, part[1]
            if action.object == "A":
                if action.kind is Kind.FREE and lane == "d2h":
                    yield begin, -1, device, action.stage
                elif action.kind is Kind.LOAD:
                    yield begin, 1, device, action.stage
                if isinstance(action.peer, int):
                    yield begin, 1 if action.kind is Kind.STORE else -1, action.peer, action.stage


def turns_at_once(schedule: Schedule) -> bool:
    """Whether every forward of the last stage is directly followed by its own backward, as in 1F1B.

    The activations of the forward can then stay for the backward: that holds no more than recomputing them would. In
    another order the last stage's activations of every microbatch in flight would stay.

        device 0   0F0 0F1     0B0 0F2     0B1      0B2
        device 1       1F0 1B0     1F1 1B1      ...

    False if the directions have different last stages, or if sequences are cut in parts.
    """
    shape, partition = schedule.shape, schedule.partition
    if shape.fused or shape.num_parts > 1 or (partition and partition.forward[-1] != partition.backward[-1]):
        return False
    last, top = shape.num_stages - 1, shape.num_backward_stages - 1
    for _, _, row in schedule.items():
        for place in [place for place, pair in enumerate(map(itemgetter(0, 1), row)) if pair == (Kind.F, last)]:
            following = row[place + 1] if place + 1 < len(row) else None
            if following is None or following.kind not in (Kind.B, Kind.I):
                return False
            if (following.stage, following.microbatch) != (top, row[place].microbatch):
                return False
    return not any(
        part.kind is Kind.F and part.stage == last
        for _, _, row in (schedule.items() if Kind.OVERLAP in schedule.kinds else ())
        for action in row
        for part in action.sub
    )
