"""Checks: a schedule is complete, well placed, free of deadlock, within memory, and reads the right versions.

`check` runs them all. Each raises `ScheduleError` with the first action that breaks its rule: the rule, the rows around
the action, which is marked, and a way out if there is one.
"""

from collections.abc import Iterator, Sequence

from rpbench.ir.action import HEAD, Action, Kind, parts_of
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.checks.actions import check_fields, check_placement
from rpbench.ir.checks.deadlock import execution_rounds
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.checks.versions import Versions, check_settled
from rpbench.ir.communication import check_communication, check_pair_order
from rpbench.ir.index import Index
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Weights
from rpbench.ir.waits.edges import Rows, edges_of, window
from rpbench.ir.waits.late_rest import check_late_rest

# Speculation: steps that are taken before overflow and norm of the gradients are known, and the actions that end them.
#
#     VALIDATE@v     after every gradient of the step to v, transfers included; it stands for all stages
#     sSTEP@v        with sROLLBACK@v: as soon as the gradient of stage s is there; without: after VALIDATE@v
#     sROLLBACK@v    after sSTEP@v and VALIDATE@v; forwards that read version v wait for it
#
# The weights that a LOAD:P brings between STEP and ROLLBACK may be wrong: ROLLBACK waits for it, and brings them again
# if they were.


def check_speculation(index: Index) -> None:
    """Check that every step that may be taken back is validated, and that no other is taken back."""
    schedule = index.schedule
    if not {Kind.VALIDATE, Kind.ROLLBACK} & schedule.plain_kinds:
        return
    first = min((*index.validations.values(), *index.rollbacks.values()))
    if schedule.policy is not Policy.OPTIMISTIC:
        rule = f"{index.actions[first]}: policy {schedule.policy.value} takes no step before it knows that it lasts"
        raise broken(schedule, rule, [first], way_out="take policy optimistic, or take it out")
    for (stage, version), number in index.rollbacks.items():
        step = index.steps.get((stage, version))
        if step is None:
            rule = f"{index.actions[number]} ends a STEP that the schedule lacks"
            raise broken(schedule, rule, [number], way_out=f"add {stage}STEP@{version}, or take it out")
        if index.lane_of[step] != index.lane_of[number]:
            rule = f"{index.actions[number]} stands on another lane than {index.actions[step]}: one lane runs both"
            raise broken(schedule, rule, [step, number])
    for version in range(1, schedule.shape.num_steps + 1):
        if version not in index.validations:
            rule = f"0VALIDATE@{version} is missing: either all steps are validated or none is"
            raise broken(schedule, rule, [first], way_out="add it behind the last gradient of its step")
    for (stage, version), step in index.steps.items():
        look = index.validations[version]
        if (stage, version) not in index.rollbacks and step < look and index.lane_of[step] == index.lane_of[look]:
            rule = f"{index.actions[step]} stands before {index.actions[look]} and nothing takes it back"
            raise broken(schedule, rule, [step, look], way_out=f"add {stage}ROLLBACK@{version}, or put it behind")


def check(
    schedule: Schedule | Analysis,
    *,
    # check the stronger rule that a SEND ends together with its RECV; what crosses devices must then have both
    rendezvous: bool = False,
    max_in_flight: int | Sequence[int] | None = None,  # the most chunk activations of all devices, or of each
    max_versions: int | None = None,  # the most weight versions a stage may keep
) -> Versions:
    """The weight versions that a schedule's actions read (`rpbench.ir.checks.versions.replay_in`).

    ScheduleError, of eight lines at most, unless it can run and means what its shape, placement and policy say.
    """
    analysis = checked_actions(schedule, rendezvous=rendezvous)
    if rendezvous:
        execution_rounds(analysis.index, analysis.producers, rendezvous=True)
    _ = analysis.rounds  # or no rank can move
    if max_in_flight is not None:
        check_in_flight(analysis.index, max_in_flight)
    check_versions(analysis, max_versions)
    return analysis.versions


def checked_actions(schedule: Schedule | Analysis, *, rendezvous: bool = False) -> Analysis:
    """The analysis of a schedule that passes every check but those of the order of its lanes; raises as `check`."""
    analysis = analysed(schedule)
    _check_size(analysis.schedule)
    index = analysis.index  # indices in range, nothing twice
    check_fields(index)
    check_complete(index)
    check_placement(index)
    check_overlaps(index)
    check_communication(index, required=rendezvous)
    if rendezvous:
        check_pair_order(index)
    check_windows(index)
    check_speculation(index)
    check_late_rest(index)
    return analysis


# --- complete -----------------------------------------------------------------------------------------------


def _check_size(schedule: Schedule) -> None:
    """Refuse a shape far larger than the rows, before tables of that size are made."""
    shape = schedule.shape
    for stages, name in ((shape.num_stages, "forward"), (shape.num_backward_stages, "backward")):
        needed = stages * shape.total_microbatches * shape.num_parts
        if schedule.num_actions >= needed:
            continue
        present = sum(len(action.sub) or 1 for _, _, row in schedule.items() for action in row)
        if present < needed:
            raise ScheduleError(
                f"the rows hold {present} actions, too few to run {shape.total_microbatches} microbatches "
                f"through {stages} {name} stages ({needed} {name}s): add the missing, or change the sizes"
            )


def check_complete(index: Index) -> None:
    """Check that every stage runs every microbatch forward and backward once (as B, or as I and W), with its inputs."""
    for kind, stage, gap in gaps(index):
        place = index.place(stage, 0) + gap
        if kind is not Kind.B:
            raise _missing(index, kind, place)
        full, inputs, weights = numbers = [index.numbers(of)[place] for of in (Kind.B, Kind.I, Kind.W)]
        if full < 0:
            raise _missing(index, kind if inputs == weights else Kind.I if inputs < 0 else Kind.W, place)
        present = sorted(number for number in numbers if number >= 0)
        names = " and ".join(str(index.actions[number]) for number in present)
        rule = f"{names}: B is I and W in one, so a microbatch has B, or I and W"
        raise broken(index.schedule, rule, present, way_out="take out B, or I and W")


def gaps(rows: Rows) -> Iterator[tuple[Kind, int, int]]:
    """Kind, stage and place (by microbatch and part) of the first gap of each stage: an action that is missing, or a
    backward that is neither B nor I and W."""
    shape = rows.schedule.shape
    bottom = shape.num_backward_stages - shape.fused
    needed = [(Kind.F, stage) for stage in range(shape.num_stages)]
    needed += [(Kind.B, stage) for stage in range(bottom)]
    needed += [(Kind.FB, bottom)] if shape.fused else []
    needed += [(kind, share) for kind in HEAD for share in range(shape.num_head_shards)]
    needed += [(Kind.R, stage - 1) for stage in range(1, shape.num_stages) if stage % shape.keeps_every]
    for kind, stage in needed:
        gap = rows.gap_of_backwards(stage) if kind is Kind.B else rows.gap(kind, stage)
        if gap is not None:
            yield kind, stage, gap


def _missing(index: Index, kind: Kind, place: int) -> ScheduleError:
    microbatch, part = divmod(place, index.shape.num_parts)
    stage, microbatch = divmod(microbatch, index.shape.total_microbatches)
    action = Action(kind, stage, microbatch, part)
    # Show where it is expected: beside the stage's action for a neighbouring microbatch, or its forward.
    start, stop = index.place(stage, 0), index.place(stage + 1, 0)
    beside = sorted(range(start, stop), key=lambda other: abs(other - place))
    siblings = (index.numbers(other)[near] for other in (kind, Kind.B, Kind.F) for near in beside)
    shown = next((number for number in siblings if number >= 0), None)
    direction = "forward" if kind is Kind.F else "backward"
    total = index.shape.total_microbatches
    rule = f"{action} is missing: every {direction} stage runs each of the {total} microbatches once"
    if kind in (Kind.I, Kind.W):
        rule = f"{action} is missing: a microbatch has B, or I and W"
    if shown is None:
        return broken(index.schedule, rule)
    near = f"add it; {index.actions[shown]} is its nearest relative"
    return broken(index.schedule, rule, [shown], way_out=near)


def check_overlaps(index: Index) -> None:
    """Check that the parts of an OVERLAP do not wait for each other."""
    if Kind.OVERLAP not in index.schedule.kinds:
        return
    for edges in edges_of(index):
        for place, (producer, number) in enumerate(zip(edges.producers, edges.consumers, strict=True)):
            if producer == number >= 0:
                action, waiting = index.actions[number], (edges.kind, edges.stage, place, edges.part)
                part = next(part for part in action.sub if part[:4] == waiting)
                rule = f"{action} runs its parts together, but {part} waits for the other"
                raise broken(index.schedule, rule, [number], way_out="let them stand one after the other")


# --- memory -------------------------------------------------------------------------------------------------


def check_in_flight(index: Index, bound: int | Sequence[int]) -> None:
    """Check that no device holds more chunk activations than `bound`: one more at F, one less at B or W.

    ValueError if the weights are streamed, because activations then leave the device between visits; or if the number
    of bounds is not that of the devices.
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
                    rank, allowed = lane.device, bounds[lane.device]
                    rule = f"{part} leaves {held} activations in flight on rank {rank}, {allowed} may be"
                    raise broken(index.schedule, rule, [number], way_out="run a backward before it")


# --- versions -----------------------------------------------------------------------------------------------


def check_windows(index: Index) -> None:
    """Check that each STEP adds up the gradients of all its own microbatches, and on its lane of no later ones."""
    if index.steps:
        for stage in range(index.shape.num_backward_stages):
            for version in range(1, index.shape.num_steps + 1):
                _check_window(index, stage, version)


def _check_window(index: Index, stage: int, version: int) -> None:
    own = index.gradients(stage, version)
    batch = window(index.shape, version)
    microbatches = f"microbatches {batch.start} to {batch.stop - 1}"
    if (stage, version) not in index.steps:
        rule = f"{stage}STEP@{version} is missing: the gradients of {microbatches} are never applied"
        raise broken(index.schedule, rule, [max(own)])
    step = index.steps[stage, version]
    lane = index.lanes[index.lane_of[step]]
    late = next((number for number in own if step < number < lane.stop), None)
    if late is not None:
        rule = f"{index.actions[step]} stands before {index.actions[late]}, whose gradient it must include"
        raise broken(index.schedule, rule, [step, late])
    following = index.gradients(stage, version + 1) if version < index.shape.num_steps else ()
    early = next((number for number in following if lane.start <= number < step), None)
    if early is not None:
        rule = f"{index.actions[step]} stands after {index.actions[early]}, but is to apply only {microbatches}"
        raise broken(index.schedule, rule, [early, step])


def check_versions(analysis: Analysis, max_versions: int | None = None) -> None:
    """Check that the versions written on actions are those of a replay, and that no stage keeps over `max_versions`."""
    index, versions = analysis.index, analysis.versions
    for number in index.marked:
        action = index.actions[number]
        for part in parts_of(action) if action.sub or action.version is not None else ():
            read = versions.of(number, part)
            if read is not None and part.version not in (None, read):
                rule = f"{part} reads version {read} here, by policy {index.schedule.policy.value}"
                raise broken(index.schedule, rule, [number], way_out=f"write @{read}, or take another policy")
    if max_versions is not None and versions.max_live > max_versions:
        stage = versions.live.index(versions.max_live)
        step = index.steps.get((stage, versions.max_live - 1))  # with it that many versions are out
        rule = f"stage {stage} keeps {versions.max_live} weight versions at one time, {max_versions} may be"
        raise broken(index.schedule, rule, [] if step is None else [step])
    check_settled(index.schedule, versions)
