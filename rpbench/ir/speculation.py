"""Speculation: steps that are taken before overflow and norm are known, and what ends them.

    VALIDATE@v     after every gradient of the step to v, wherever it goes; it stands for all stages
    sSTEP@v        with sROLLBACK@v: as soon as the gradient of stage s is there; without: after VALIDATE@v
    sROLLBACK@v    after sSTEP@v and VALIDATE@v; forwards that read version v wait for it

What a LOAD:P brings between STEP and ROLLBACK may be wrong: ROLLBACK waits for it, and brings it again where it was.
"""

from collections.abc import Iterator

from rpbench.ir.action import Kind
from rpbench.ir.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import ScheduleError


def check_speculation(index: Index) -> None:
    """Every step that may be taken back is validated, and no other is taken back.

    Raises:
        ScheduleError: naming the first action that breaks a rule.
    """
    if not {Kind.VALIDATE, Kind.ROLLBACK} & index.schedule.plain_kinds:
        return
    for error in _faults(index):
        raise error


def _faults(index: Index) -> Iterator[ScheduleError]:
    schedule, first = index.schedule, min((*index.validations.values(), *index.rollbacks.values()))
    if schedule.policy is not Policy.OPTIMISTIC:
        rule = f"{index.actions[first]}: policy {schedule.policy.value} takes no step before it knows that it lasts"
        yield broken(schedule, rule, [first], way_out="take policy optimistic, or take it out")
    for (stage, version), number in index.rollbacks.items():
        step = index.steps.get((stage, version))
        if step is None:
            rule = f"{index.actions[number]} ends a step that is not there"
            yield broken(schedule, rule, [number], way_out=f"add {stage}STEP@{version}, or take it out")
        elif index.lane_of[step] != index.lane_of[number]:
            rule = f"{index.actions[number]} stands on another lane than {index.actions[step]}: who steps takes back"
            yield broken(schedule, rule, [step, number])
    for version in range(1, schedule.shape.num_steps + 1):
        if version not in index.validations:
            rule = f"0VALIDATE@{version} is missing: either all steps are validated or none is"
            yield broken(schedule, rule, [first], way_out="add it behind the last gradient of its step")
    for (stage, version), step in index.steps.items():
        look = index.validations[version]
        if (stage, version) not in index.rollbacks and step < look and index.lane_of[step] == index.lane_of[look]:
            rule = f"{index.actions[step]} stands before {index.actions[look]} and nothing takes it back"
            yield broken(schedule, rule, [step, look], way_out=f"add {stage}ROLLBACK@{version}, or put it behind")
