"""Tables: which schedules a table of torch's pipeline runtime can hold, and why it cannot hold the others.

torch runs any rows as one flush and silently leaves out the rest: an asynchronous order gets the gradients of another
method, an offload lane is dropped. So such a schedule is refused here, with the reason, before anything is written or
started.

A file has a row for each rank and no header. The compute-only form holds F, B, I, W and `(0F7;7B3)OVERLAP_F_B`; the
lowered form also the messages, `0SEND_F3` and the like, and UNSHARD, RESHARD and REDUCE_GRAD. Neither says where the
stages' layers are cut, nor sizes of anything. Reading it leaves out what is not computation: our own passes add it.

Chains are the routes that microbatches take through the ranks. Where every stage has one rank there is one chain, and
torch's numbers are ours. Two copies of the weights that go opposite ways are two chains: to torch they are one pipeline
of twice as many stages, cut in the middle, each half with microbatches of its own, counted from 0:

    our stage      0 1 2 3 | 0 1 2 3          chimera on 4 ranks: the second half runs from rank 3 to rank 0
    torch's        0 1 2 3 | 4 5 6 7
    rank           0 1 2 3 | 3 2 1 0

Source: torch 2.13, `_PipelineScheduleRuntime._load_csv` and `_dump_csv`.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

from rpbench.ir.action import Action, Kind, overlap, parts_of
from rpbench.ir.checks.check import check
from rpbench.ir.policy import DRAINED
from rpbench.ir.schedule import Row, Schedule, ScheduleError, Shape, Weights, from_text
from rpbench.torch_runtime.communication.tokens import COMPUTE, Token, TokenRow, read_rows, read_token


@dataclass(frozen=True)
class Chains:
    """Routes of the microbatches: per chain the rank of each of our stages, and our microbatches, ascending."""

    routes: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages as torch counts them, over all chains."""
        return sum(map(len, self.routes))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for route in self.routes for rank in route)

    def stages_of(self, rank: int) -> list[int]:
        """Torch's numbers of the stages of a rank, ascending."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def place(self, stage: int) -> tuple[int, int]:
        """(chain, our stage) of one of torch's stages."""
        return divmod(stage, len(self.routes[0]))

    @cached_property
    def _numbers(self) -> dict[int, tuple[int, int]]:
        """Our microbatch -> its chain and its number there."""
        return {
            microbatch: (chain, number)
            for chain, own in enumerate(self.microbatches)
            for number, microbatch in enumerate(own)
        }

    def to_torch(self, action: Action) -> tuple[int, int]:
        """Torch's stage and microbatch of a plain action that names a microbatch."""
        assert action.microbatch is not None
        chain, number = self._numbers[action.microbatch]
        return chain * len(self.routes[0]) + action.stage, number

    def token(self, action: Action) -> str:
        if action.sub:
            return f"({';'.join(map(self.token, action.sub))})OVERLAP_F_B"
        stage, microbatch = self.to_torch(action)
        return f"{stage}{action.kind.name}{microbatch}"

    def action(self, token: str) -> Action:
        """The inverse of `token`, peers apart."""
        found = read_token(token, 0)
        return overlap(*map(self._from_torch, found.members)) if found.members else self._from_torch(found)

    def _from_torch(self, token: Token) -> Action:
        assert token.microbatch is not None
        chain, own = self.place(token.stage)
        return Action(Kind[token.kind], own, self.microbatches[chain][token.microbatch])


def find_chains(schedule: Schedule) -> Chains:
    """The routes, in the order of their first microbatch; ScheduleError if a forward is missing."""
    num_stages, num_microbatches = schedule.shape.num_stages, schedule.shape.total_microbatches
    rank_of = {
        (part.microbatch, part.stage): device
        for device, _, row in schedule.items()
        for part in _parts(row)
        if part.kind is Kind.F
    }
    found: dict[tuple[int, ...], list[int]] = {}
    for microbatch in range(num_microbatches):
        missing = [stage for stage in range(num_stages) if (microbatch, stage) not in rank_of]
        if missing:
            raise ScheduleError(f"{missing[0]}F{microbatch} is missing: every stage runs every microbatch once")
        route = tuple(rank_of[microbatch, stage] for stage in range(num_stages))
        found.setdefault(route, []).append(microbatch)
    return Chains(tuple(found), tuple(map(tuple, found.values())))


KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)  # what a table has tokens for, beside OVERLAP of a forward and a backward


def make_table(schedule: Schedule, *, two_way: bool = False) -> Schedule:
    """The compute rows of a schedule; ScheduleError with a way out if torch would run an action in another way.

    STEP actions are removed: torch has none, and the optimizer steps once all rows have ended. `two_way` also takes two
    copies of every stage that go opposite ways (chimera, dualpipe): our runner can (`rpbench.torch_runtime.lowering`),
    a plain table cannot.
    """
    name = schedule.name or "this schedule"
    for reason in (_policy(schedule), _shape(schedule), _lanes(schedule)):
        if reason:
            raise ScheduleError(f"schedule={name}: {reason}")
    computed = map(schedule.compute, range(schedule.shape.num_ranks))
    rows = tuple(tuple(action for action in row if action.kind is not Kind.STEP) for row in computed)
    table = replace(schedule, rows=rows)
    chains = find_chains(table)
    for reason in (_kinds(table), _copies(chains, table.shape.num_ranks, two_way=two_way), _last_stage(table, chains)):
        if reason:
            raise ScheduleError(f"schedule={name}: {reason}")
    return table


def _policy(schedule: Schedule) -> str:
    if schedule.policy in DRAINED:
        return ""
    return (
        f"policy {schedule.policy.value} is asynchronous: torch ends every step with a flush and keeps one version of "
        "the weights, so it would train another method without a word; use backend=cpu or device"
    )


def _shape(schedule: Schedule) -> str:
    shape = schedule.shape
    if schedule.weights is Weights.STREAMED or shape.separate_cuts:
        return (
            "its weights are streamed to where the work is, and in torch's runtime a stage belongs to one rank; use "
            "backend=cpu or device on one host"
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
                "lane moves would be left out without a word; use backend=cpu or device"
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


def to_csv(schedule: Schedule) -> str:
    """The compute-only file for `_load_csv`, without a final newline; ScheduleError says why a table cannot hold it."""
    table = make_table(schedule)
    rows = list(map(table.compute, range(table.shape.num_ranks)))
    for device, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"rank {device} has no action: a row of a table holds at least one; use fewer ranks")
    token = find_chains(table).token
    return "\n".join(",".join(map(token, row)) for row in rows)


def placement_of(schedule: Schedule) -> list[list[int]]:
    """The stages of each rank, ascending; they must be built before the file is loaded."""
    table = make_table(schedule)
    return [sorted({part.stage for part in _parts(table.compute(rank))}) for rank in range(table.shape.num_ranks)]


def read_schedule(source: str, name: str = "torch_csv") -> Schedule:
    """The schedule of a file in our text form, which begins with #, or in torch's CSV; ScheduleError as of these."""
    return from_text(source) if source.startswith("#") else from_csv(source, name)


def from_csv(source: str, name: str = "torch_csv") -> Schedule:
    """The checked schedule of a file of either form; ScheduleError names the wrong row and token, or the action that is
    missing, stands twice or can never run.
    """
    rows = list(map(_computed, read_rows(source)))
    plain = [part for row in rows for part in _parts(row)]
    if not plain:
        raise ScheduleError("the file holds no action: expected rows of tokens such as 0F0,0F1,0B0,0B1, one a rank")
    num_stages = 1 + max(part.stage for part in plain)
    num_microbatches = 1 + max(part.microbatch or 0 for part in plain)
    shape = Shape(len(rows), num_stages, num_microbatches)
    schedule = Schedule(shape, tuple(rows), name=name, placement=_placement(rows, num_stages))
    check(schedule)
    make_table(schedule)
    return schedule


def _computed(row: TokenRow) -> Row:
    """The computations of a row as our actions."""
    return tuple(
        overlap(*map(_action, token.members)) if token.members else _action(token)
        for token in row
        if token.parts[0].kind in COMPUTE
    )


def _action(token: Token) -> Action:
    return Action(Kind[token.kind], token.stage, token.microbatch)


def _placement(rows: list[Row], num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The first rank whose row holds each stage; `check` refuses a stage on two."""
    first: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for part in _parts(row):
            first.setdefault(part.stage, rank)
    missing = [stage for stage in range(num_stages) if stage not in first]
    if missing:
        raise ScheduleError(
            f"stage {missing[0]} stands in no row, though there are stages up to {num_stages - 1}: add its actions"
        )
    return tuple((first[stage],) for stage in range(num_stages))
