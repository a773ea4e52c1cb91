"""What an action waits for, found for it alone from the rules: what edges derived all at once are held to."""

from collections.abc import Iterator

from rpbench.ir.action import STEPPING, Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.waits.edges import names_versions, needs, stages_updated, version_read


def waits_for(index: Index, action: Action) -> list[tuple[int, str]]:
    """What a plain action waits for, each with "activation", "gradient" or "order" for what moves."""
    kind, stage, microbatch, part, version, _, _, _ = action
    if kind in STEPPING:
        return [(number, "order") for number in _step_waits_for(index, kind, stage, version)]
    if microbatch is None:
        return []
    found = []
    for need in needs(index.shape, kind, stage, part):
        places = ((option, at, microbatch, part + need.part_offset) for option, at in need.options)
        number = next((number for place in places if (number := index.at(*place)) >= 0), None)
        found += [] if number is None else [(number, need.input)]
    if kind in (Kind.F, Kind.FB):
        found += [(number, "order") for number in _steps_read(index, action)]
    return found


def _step_waits_for(index: Index, kind: Kind, stage: int, version: int) -> Iterator[int]:
    if kind is Kind.VALIDATE:
        for other in range(index.shape.num_backward_stages):
            yield from index.gradients(other, version)
        return
    goes_ahead = (stage, version) in index.rollbacks
    if version in index.validations and (kind is Kind.ROLLBACK or not goes_ahead):
        yield index.validations[version]
    if kind is Kind.ROLLBACK:
        yield index.steps[stage, version]
        return
    before = index.published(stage, version - 1)
    if before is not None:
        yield before
    yield from index.gradients(stage, version)


def _steps_read(index: Index, reader: Action) -> Iterator[int]:
    """The steps that publish what a forward must read."""
    schedule, stage = index.schedule, reader.stage
    named = reader.version if names_versions(schedule) else None
    version = version_read(schedule.policy, index.shape, reader.microbatch or 0, stage) if named is None else named
    for updated in stages_updated(schedule, stage) if reader.kind is Kind.F else (stage,):
        number = index.published(updated, version or 0)
        if number is not None:
            yield number
