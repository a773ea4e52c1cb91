"""Checks: a schedule is complete, well placed, free of deadlock, in memory, and reads the versions it should.

`check` runs them all. Each raises `ScheduleError` with the smallest counter-example it has: what is wrong, the rows
around it with the action marked, and a way out where there is one.
"""

from collections.abc import Sequence

from rpbench.ir.action import COMPUTE, Action, Kind
from rpbench.ir.communication import check_communication, check_pair_order
from rpbench.ir.deadlock import execution_order
from rpbench.ir.dependencies import window
from rpbench.ir.excerpt import broken
from rpbench.ir.index import GRADIENT, Index
from rpbench.ir.schedule import Schedule, ScheduleError, Weights
from rpbench.ir.versions import replay_in


def check(
    schedule: Schedule,
    *,
    rendezvous: bool = False,
    max_in_flight: int | Sequence[int] | None = None,
    max_versions: int | None = None,
) -> None:
    """Raise unless the schedule can run and means what its shape, placement and policy say.

    Args:
        rendezvous: hold it to the stronger rule that a SEND ends together with its RECV. Every tensor that
            crosses devices must then have both.
        max_in_flight: the most chunk activations a device may hold, for all devices or for each of them.
        max_versions: the most weight versions a stage may keep.

    Raises:
        ScheduleError: eight lines at most.
    """
    index = Index(schedule)  # indices in range, nothing twice
    check_complete(index)
    check_placement(index)
    check_overlaps(index)
    check_communication(index, required=rendezvous)
    if rendezvous:
        check_pair_order(index)
    check_windows(index)
    order = execution_order(index, rendezvous=rendezvous)
    if max_in_flight is not None:
        check_in_flight(index, max_in_flight)
    if max_versions is not None or index.steps or any(action.version is not None for action in index.actions):
        check_versions(index, order, max_versions)


# --- complete ------------------------------------------------------------------------------------------------


def check_complete(index: Index) -> None:
    """Every stage runs every microbatch forward once, and backward once: as B, or as I and W."""
    shape = index.shape
    bottom = shape.num_backward_stages - shape.fused
    _check_all_there(index, Kind.F, 0, shape.num_stages)
    _check_backwards(index, bottom)
    if shape.fused:
        _check_all_there(index, Kind.FB, bottom, bottom + 1)


def _check_all_there(index: Index, kind: Kind, first_stage: int, stop_stage: int) -> None:
    numbers = index.numbers(kind)[index.place(first_stage, 0) : index.place(stop_stage, 0)]
    if -1 in numbers:
        raise _missing(index, kind, index.place(first_stage, 0) + numbers.index(-1))


def _check_backwards(index: Index, num_stages: int) -> None:
    full, inputs, weights = (index.numbers(kind) for kind in (Kind.B, Kind.I, Kind.W))
    for place in range(index.place(num_stages, 0)):
        halves = (inputs[place] >= 0) + (weights[place] >= 0)
        if halves == (0 if full[place] >= 0 else 2):
            continue
        if full[place] < 0:
            raise _missing(index, Kind.B if not halves else Kind.I if inputs[place] < 0 else Kind.W, place)
        present = sorted(numbers[place] for numbers in (full, inputs, weights) if numbers[place] >= 0)
        names = " and ".join(str(index.actions[number]) for number in present)
        rule = f"{names}: B is I and W in one, so a microbatch has B, or I and W"
        raise broken(index.schedule, rule, present, way_out="take out B, or I and W")


def _missing(index: Index, kind: Kind, place: int) -> ScheduleError:
    microbatch, part = divmod(place, index.shape.num_parts)
    stage, microbatch = divmod(microbatch, index.shape.total_microbatches)
    action = Action(kind, stage, microbatch, part)
    # Show where it would be expected: beside the same stage's action for a neighbouring microbatch, or its forward.
    start, stop = index.place(stage, 0), index.place(stage + 1, 0)
    beside = sorted(range(start, stop), key=lambda other: abs(other - place))
    siblings = (index.numbers(other)[near] for other in (kind, Kind.B, Kind.F) for near in beside)
    shown = next((number for number in siblings if number >= 0), None)
    direction = "forward" if kind is Kind.F else "backward"
    total = index.shape.total_microbatches
    rule = f"{action} is missing: every {direction} stage runs each of the {total} microbatches once"
    if kind in (Kind.I, Kind.W):
        rule = f"{action} is missing: a microbatch has B, or I and W"
    return broken(index.schedule, rule, [] if shown is None else [shown])


# --- placed --------------------------------------------------------------------------------------------------


def check_placement(index: Index) -> None:
    """Compute on the compute lane, on a device that may hold the stage, backward where the forward was."""
    _check_lanes(index)
    if index.schedule.placement:
        _check_holders(index)
    if index.schedule.weights is Weights.BOUND:
        _check_bound(index)


def _check_lanes(index: Index) -> None:
    for lane in index.lanes:
        if lane.name != "compute":
            for number in range(lane.start, lane.stop):
                if index.actions[number].kind in COMPUTE:
                    rule = f"{index.actions[number]} stands on lane {lane.name}; {index.actions[number].kind.name} "
                    raise broken(index.schedule, rule + "belongs on the compute lane", [number])


def _check_holders(index: Index) -> None:
    placement, shape = index.schedule.placement, index.shape
    if shape.separate_cuts or len(placement) != shape.num_stages:
        raise ScheduleError(
            f"placement lists {len(placement)} stages, the shape has {shape.num_stages} forward and "
            f"{shape.num_backward_stages} backward: a placement names the devices of stages that are the same in both"
        )
    for lane in index.lanes:
        for number in range(lane.start, lane.stop):
            action = index.actions[number]
            if action.kind in COMPUTE or action.kind is Kind.STEP:
                for part in action.sub or (action,):
                    if lane.device not in placement[part.stage]:
                        holders = " and ".join(map(str, placement[part.stage]))
                        rule = f"{part} stands on rank {lane.device}, but stage {part.stage} is placed on rank {holders}"
                        raise broken(index.schedule, rule, [number], way_out="move it, or change the placement")


def _check_bound(index: Index) -> None:
    """One microbatch's forward, recompute and backward of a stage meet on one device, its weights' home."""
    kinds = (Kind.B, Kind.I, Kind.W, Kind.R) if index.shape.separate_cuts else (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    home: dict[int, int] = {}  # stage and microbatch -> the first action found
    for kind in kinds:
        for place, number in enumerate(index.numbers(kind)):
            if number < 0:
                continue
            first = home.setdefault(place // index.shape.num_parts, number)
            if index.device(first) != index.device(number):
                raise broken(
                    index.schedule,
                    f"{index.actions[number]} on rank {index.device(number)} needs the weights of {index.actions[first]} "
                    f"on rank {index.device(first)}: bound weights stay on one rank",
                    [first, number],
                    way_out="move one of them, or declare weights=streamed",
                )
    for (stage, version), step in index.steps.items():
        gradients = list(index.gradients(stage, version))
        if index.device(step) not in map(index.device, gradients):
            rule = f"{index.actions[step]} stands on rank {index.device(step)}, which holds no gradient of stage {stage}"
            raise broken(index.schedule, rule, [step, *gradients[:1]])


def check_overlaps(index: Index) -> None:
    """The parts of an OVERLAP do not wait for each other."""
    for number, action in enumerate(index.actions):
        for part in action.sub:
            if number in (producer for producer, _ in index.waits_for(part)):
                rule = f"{action} runs its parts together, but {part} waits for the other"
                raise broken(index.schedule, rule, [number], way_out="let them stand one after the other")


# --- memory --------------------------------------------------------------------------------------------------


def check_in_flight(index: Index, bound: int | Sequence[int]) -> None:
    """No device holds more chunk activations than `bound`: one more at F, one less at B or W.

    Raises:
        ScheduleError: with the row up to the forward that is one too many.
        ValueError: if the weights are streamed, since activations then leave the device between visits; or if
            there is not one bound for each device.
    """
    if index.schedule.weights is Weights.STREAMED:
        raise ValueError("max_in_flight counts activations that stay on a device; a streamed schedule keeps none")
    bounds = [bound] * index.shape.num_ranks if isinstance(bound, int) else list(bound)
    if len(bounds) != index.shape.num_ranks:
        raise ValueError(f"max_in_flight has {len(bounds)} values: give one for each of {index.shape.num_ranks} ranks")
    change = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
    for lane in index.lanes:
        held = 0
        for number in range(lane.start, lane.stop):
            action = index.actions[number]
            for part in action.sub or (action,):
                held += change.get(part.kind, 0)
                if held > bounds[lane.device]:
                    rule = f"{part} leaves {held} activations in flight on rank {lane.device}, {held - 1} may be"
                    raise broken(index.schedule, rule, [number], way_out="run a backward before it")


# --- versions ------------------------------------------------------------------------------------------------


def check_windows(index: Index) -> None:
    """Each STEP adds up the gradients of its own microbatches: all of them, and on its lane no later ones."""
    if not index.steps:
        return
    shape = index.shape
    for stage in range(shape.num_backward_stages):
        for version in range(1, shape.num_steps + 1):
            batch = window(shape, version)
            if (stage, version) not in index.steps:
                last = max(index.gradients(stage, version))
                raise broken(
                    index.schedule,
                    f"{stage}STEP@{version} is missing: the gradients of microbatches {batch.start} to "
                    f"{batch.stop - 1} are never applied to stage {stage}",
                    [last],
                )
            step = index.steps[stage, version]
            lane = index.lanes[index.lane_of[step]]
            for number in index.gradients(stage, version):
                if step < number < lane.stop:
                    rule = f"{index.actions[step]} stands before {index.actions[number]}, whose gradient it must include"
                    raise broken(index.schedule, rule, [step, number])
            if version < shape.num_steps:
                for number in index.gradients(stage, version + 1):
                    if lane.start <= number < step:
                        rule = (
                            f"{index.actions[step]} stands after {index.actions[number]}, whose gradient belongs to the "
                            f"next step: this one takes microbatches {batch.start} to {batch.stop - 1}"
                        )
                        raise broken(index.schedule, rule, [number, step])


def check_versions(index: Index, order: Sequence[int], max_versions: int | None = None) -> None:
    """Versions written on actions are the ones a replay finds, and no stage keeps more than `max_versions`."""
    versions = replay_in(index, order)
    for number, (action, read) in enumerate(zip(index.actions, versions.read, strict=True)):
        if read is not None and action.version is not None and action.version != read:
            rule = f"{action} reads version {read} here, by policy {index.schedule.policy.value}"
            raise broken(index.schedule, rule, [number], way_out=f"write @{read}, or take another policy")
    if max_versions is not None and versions.max_live > max_versions:
        stage = versions.live.index(versions.max_live)
        steps = [number for (owner, _), number in index.steps.items() if owner == stage]
        rule = f"stage {stage} keeps {versions.max_live} weight versions at one time, {max_versions} may be"
        raise broken(index.schedule, rule, steps[versions.max_live - 1 : versions.max_live])
