"""Tables: which schedules a table of torch's pipeline runtime can hold, and why it cannot hold the others.

torch runs whatever rows it is given as one flush and says nothing of what it leaves out: an asynchronous order gives
the gradients of another method, an offload lane is dropped. So a schedule is refused here, by the name of what is in
the way, before anything is written or started.
"""

import itertools
from dataclasses import replace

from rpbench.ir.action import Action, Kind, parts_of
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Row, Schedule, ScheduleError, Weights
from rpbench.torch_runtime.chains import Chains, find_chains

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)  # what a table has tokens for, beside OVERLAP of a forward and a backward


def make_table(schedule: Schedule, *, two_way: bool = False) -> Schedule:
    """The compute rows of a schedule whose every action torch runs as it is meant.

    STEP actions leave the rows: torch has none, and the optimizer steps once all rows have ended.

    Args:
        two_way: take two copies of every stage that go opposite ways (chimera, dualpipe) as well. Our runner can
            (`rpbench.torch_runtime.lowering`), a plain table cannot.

    Raises:
        ScheduleError: with the reason and a way out.
    """
    name = schedule.name or "this schedule"
    for reason in (_policy(schedule), _shape(schedule), _lanes(schedule)):
        if reason:
            raise ScheduleError(f"schedule={name}: {reason}")
    rows = tuple(tuple(action for action in row if action.kind is not Kind.STEP) for row in _compute_rows(schedule))
    table = replace(schedule, rows=rows)
    chains = find_chains(table)
    for reason in (_kinds(table), _copies(chains, table.shape.num_ranks, two_way=two_way), _last_stage(table, chains)):
        if reason:
            raise ScheduleError(f"schedule={name}: {reason}")
    return table


def _compute_rows(schedule: Schedule) -> list[Row]:
    return [schedule.compute(device) for device in range(schedule.shape.num_ranks)]


def _policy(schedule: Schedule) -> str:
    if schedule.policy in (Policy.FLUSH, Policy.OPTIMISTIC):  # in whose order nothing is late
        return ""
    return (
        f"policy {schedule.policy.value} is asynchronous: torch ends every step with a flush and keeps one version of "
        "the weights, so it would train another method without a word; use backend=cpu or cuda"
    )


def _shape(schedule: Schedule) -> str:
    shape = schedule.shape
    if schedule.weights is Weights.STREAMED or shape.separate_cuts:
        return (
            "its weights are streamed to where the work is, and in torch's runtime a stage belongs to one rank; use "
            "backend=cpu or cuda on one host, or replicas of it on several"
        )
    if shape.num_steps > 1:
        return f"it holds {shape.num_steps} optimizer steps, a table holds one; make it for num_steps=1 and repeat it"
    if shape.num_head_shards:
        return "every device runs a part of the head, for which a table has no token; use backend=cpu"
    if shape.num_parts > 1:
        what = "shards of every matrix" if shape.tensor_parallel else "segments of sequences"
        return f"it runs {shape.num_parts} {what}, for which a table has no token; use backend=cpu"
    return ""


def _lanes(schedule: Schedule) -> str:
    for device, lane, row in schedule.items():
        extra = next((action for action in row if lane != "compute" and action.kind is not Kind.STEP), None)
        if extra is not None:
            return (
                f"{extra} stands on lane {lane} of rank {device}: a table has the compute lane alone, and what the "
                "lane moves would be left out without a word; use backend=cpu or cuda"
            )
    return ""


def _kinds(table: Schedule) -> str:
    for _, _, row in table.items():
        for action in row:
            if any(part.kind not in KINDS for part in parts_of(action)):
                return f"{action} has no token in a table, which knows F, B, I, W and an overlap of them"
            if action.sub and [part.kind is Kind.F for part in action.sub] not in ([True, False], [False, True]):
                return f"{action}: a table overlaps one forward with one backward"
    return ""


def _copies(chains: Chains, num_ranks: int, *, two_way: bool) -> str:
    routes = chains.routes
    if len(routes) == 1:
        return ""
    stage = next(stage for stage in range(len(routes[0])) if len({route[stage] for route in routes}) > 1)
    holders = " and ".join(str(rank) for rank in sorted({route[stage] for route in routes}))
    last = num_ranks - 1
    if len(routes) != 2 or routes[1] != tuple(last - rank for rank in routes[0]):
        return (
            f"stage {stage} has copies on ranks {holders} that do not go opposite ways: copies of whole pipelines are "
            "data parallelism; use a schedule without copies and data_parallel"
        )
    if not two_way:
        return (
            f"stage {stage} has copies on ranks {holders}, a table has one rank for each stage; backend=torch runs two "
            "copies that go opposite ways"
        )
    if len(set(map(len, chains.microbatches))) > 1:
        counts = " and ".join(str(len(own)) for own in chains.microbatches)
        return f"its two directions have {counts} microbatches, torch's runtime needs equal numbers"
    return ""


def _last_stage(table: Schedule, chains: Chains) -> str:
    """torch keeps losses in the order they are made and reads them by microbatch."""
    last = table.shape.num_stages - 1
    for route, expected in zip(chains.routes, chains.microbatches, strict=True):
        own = frozenset(expected)
        found = [part.microbatch or 0 for part in _parts(table.compute(route[last])) if part[:2] == (Kind.F, last)]
        found = [microbatch for microbatch in found if microbatch in own]
        if found != sorted(found):
            late = next(b for a, b in itertools.pairwise(found) if b < a)
            return (
                f"the last stage runs {last}F{late} after a later microbatch: torch would take another microbatch's "
                "loss and give wrong gradients without an error; keep its forwards in ascending order"
            )
    return ""


def _parts(row: Row) -> list[Action]:
    return [part for action in row for part in parts_of(action)]


def splits_backward(table: Schedule) -> bool:
    """Whether some backward comes as I and W."""
    return any(part.kind is Kind.I for _, _, row in table.items() for part in _parts(row))
