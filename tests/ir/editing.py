"""Small edits that break a good schedule, for the tests of the checks."""

from collections.abc import Callable
from dataclasses import replace

from rpbench.ir.action import Action, parse
from rpbench.ir.schedule import Schedule, Shape


def schedule_of(*rows: str, **fields) -> Schedule:
    """A schedule from one string of tokens a rank; sizes are counted from the tokens, or given by `shape`."""
    actions = [tuple(parse(token) for token in row.split()) for row in rows]
    shape = fields.pop("shape", None)
    if shape is None:
        plain = [part for row in actions for action in row for part in action.sub or (action,)]
        stages = 1 + max(action.stage for action in plain)
        microbatches = 1 + max(action.microbatch or 0 for action in plain)
        shape = Shape(len(rows), stages, microbatches)
    return Schedule(shape, tuple(actions), **fields)


def edit(schedule: Schedule, device: int, change: Callable[[list[Action]], object], lane: str = "compute") -> Schedule:
    """The schedule with one row changed in place by `change`."""
    rows = [{name: list(row) for name, row in lanes} for lanes in schedule.rows]
    change(rows[device].setdefault(lane, []))
    return replace(schedule, rows=tuple({name: tuple(row) for name, row in lanes.items()} for lanes in rows))


def without(schedule: Schedule, device: int, token: str) -> Schedule:
    return edit(schedule, device, lambda row: row.remove(parse(token)))


def with_action(schedule: Schedule, device: int, place: int, token: str, lane: str = "compute") -> Schedule:
    return edit(schedule, device, lambda row: row.insert(place, parse(token)), lane)


def instead(schedule: Schedule, device: int, token: str, *others: str) -> Schedule:
    """The schedule with other actions in the place of one."""

    def change(row: list[Action]) -> None:
        place = row.index(parse(token))
        row[place : place + 1] = [parse(other) for other in others]

    return edit(schedule, device, change)


def swapped(schedule: Schedule, device: int, token: str, other: str) -> Schedule:
    def change(row: list[Action]) -> None:
        first, second = row.index(parse(token)), row.index(parse(other))
        row[first], row[second] = row[second], row[first]

    return edit(schedule, device, change)
