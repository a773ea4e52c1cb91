"""Placement: every action stands on a device and lane that may run it."""

from rpbench.ir.action import COMPUTE, HEAD, Action, Kind
from rpbench.ir.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.schedule import ScheduleError, Weights


def check_placement(index: Index) -> None:
    """Compute on the compute lane, on a device that may hold the stage, backward where the forward was.

    Raises:
        ScheduleError: naming the first action that stands elsewhere.
    """
    _check_lanes(index)
    if index.schedule.placement:
        _check_holders(index)
    if index.schedule.weights is Weights.BOUND:
        _check_bound(index)
        _check_bound_steps(index)


def _check_lanes(index: Index) -> None:
    for lane in index.lanes:
        if lane.name != "compute":
            for number in range(lane.start, lane.stop):
                if index.actions[number].kind in COMPUTE:
                    rule = f"{index.actions[number]} stands on lane {lane.name}, it belongs on lane compute"
                    raise broken(index.schedule, rule, [number])


def _check_holders(index: Index) -> None:
    placement, shape = index.schedule.placement, index.shape
    if shape.separate_cuts or len(placement) != shape.num_stages:
        raise ScheduleError(
            f"placement lists {len(placement)} stages, the shape has {shape.num_stages} forward and "
            f"{shape.num_backward_stages} backward: one list serves stages that are the same both ways"
        )
    for number, action in enumerate(index.actions):
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            for part in action.sub or (action,):
                holders = (part.stage,) if part.kind in HEAD else placement[part.stage]
                if index.device(number) not in holders:
                    raise _not_placed(index, number, part, holders)


def _not_placed(index: Index, number: int, action: Action, holders: tuple[int, ...]) -> ScheduleError:
    what = f"share {action.stage} of the head" if action.kind in HEAD else f"stage {action.stage}"
    ranks = " or ".join(map(str, holders))
    rule = f"{action} stands on rank {index.device(number)}, but {what} is placed on rank {ranks}"
    return broken(index.schedule, rule, [number], way_out="move it, or change the placement")


def _check_bound(index: Index) -> None:
    """One microbatch's forward, recompute and backward of a stage meet on one device, its weights' home."""
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    home: dict[int, int] = {}  # stage and microbatch -> the first action found
    for kind in kinds[index.shape.separate_cuts :]:
        for place, number in enumerate(index.numbers(kind)):
            if number < 0:
                continue
            first = home.setdefault(place // index.shape.num_parts, number)
            if index.device(first) != index.device(number):
                raise _torn(index, first, number)


def _torn(index: Index, first: int, number: int) -> ScheduleError:
    rule = (
        f"{index.actions[number]} on rank {index.device(number)} needs the weights that "
        f"{index.actions[first]} uses on rank {index.device(first)}: bound weights stay on one rank"
    )
    return broken(index.schedule, rule, [first, number], way_out="move one of them, or declare weights=streamed")


def _check_bound_steps(index: Index) -> None:
    for (stage, version), step in index.steps.items():
        gradients = list(index.gradients(stage, version))
        if index.device(step) not in map(index.device, gradients):
            rank = index.device(step)
            rule = f"{index.actions[step]} stands on rank {rank}, which has no gradient of stage {stage}"
            raise broken(index.schedule, rule, [step, *gradients[:1]])
