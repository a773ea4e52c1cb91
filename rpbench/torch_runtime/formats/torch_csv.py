"""torch's schedule CSV: ours written as it reads them, and its files read as schedules of ours.

A file has a row for each rank and no header. The compute-only form holds F, B, I, W and `(0F7;7B3)OVERLAP_F_B`; the
lowered form also the messages, `0SEND_F3` and the like, and UNSHARD, RESHARD and REDUCE_GRAD. Neither says where the
stages' layers are cut, nor sizes of anything. Reading it leaves out what is not computation: our own passes add it.

Source: torch 2.13, `_PipelineScheduleRuntime._load_csv` and `_dump_csv`.
"""

import csv
import io
import re

from rpbench.ir.action import Action, Kind, overlap
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_torch_csv
from rpbench.torch_runtime.formats.tables import make_table

_TOKEN = re.compile(r"([0-9]{1,6})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,7})")
_STAGE_TOKEN = re.compile(r"[0-9]{1,6}(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB][0-9]{1,7})")
_OVERLAP = re.compile(r"\((?P<inner>[^()]+)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """The compute-only file of a schedule, to be given to `_load_csv`; no line end after the last row.

    Raises:
        ScheduleError: with the reason, if a table cannot hold the schedule.
    """
    table = make_table(schedule)
    for device in range(table.shape.num_ranks):
        if not table.compute(device):
            raise ScheduleError(f"rank {device} has no action: a row of a table holds at least one; use fewer ranks")
    return to_torch_csv(table)


def placement_of(schedule: Schedule) -> list[list[int]]:
    """The stages of each rank, ascending; what stages must be built for before the file is loaded."""
    table = make_table(schedule)
    return [
        sorted({part.stage for action in table.compute(rank) for part in (action.sub or (action,))})
        for rank in range(table.shape.num_ranks)
    ]


def read_schedule(source: str, name: str = "torch_csv") -> Schedule:
    """The schedule of a file in our text form or in torch's CSV; what `schedule_file` takes.

    Raises:
        ScheduleError: naming what cannot be read, in the form that the file's beginning says it has.
    """
    return from_text(source) if source.startswith("#") else from_csv(source, name)


def from_csv(source: str, name: str = "torch_csv") -> Schedule:
    """The schedule a file of either form stands for, checked; its placement is the row each stage stands in.

    Raises:
        ScheduleError: naming the row and token that cannot be read, or the action that is missing, stands twice or
            can never run.
    """
    rows = [_read_row(tokens, rank) for rank, tokens in enumerate(_cells(source))]
    plain = [part for row in rows for action in row for part in (action.sub or (action,))]
    if not plain:
        raise ScheduleError("the file holds no action: expected rows of tokens such as 0F0,0F1,0B0,0B1, one a rank")
    num_stages = 1 + max(part.stage for part in plain)
    num_microbatches = 1 + max(part.microbatch or 0 for part in plain)
    shape = Shape(len(rows), num_stages, num_microbatches)
    schedule = Schedule(shape, tuple(rows), name=name, placement=_placement(rows, num_stages))
    check(schedule)
    make_table(schedule)
    return schedule


def _cells(source: str) -> list[list[str]]:
    """The tokens of each row; blank lines at the end are no rows, and a row ends as torch's own reader ends it."""
    lines = io.StringIO(source.strip("\r\n"), newline="")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    except csv.Error as error:
        raise ScheduleError(f"no CSV, {error}: expected rows of tokens such as 0F0,0F1,0B0,0B1, one a rank") from None
    return [[cell for cell in row if cell] for row in rows]


def _read_row(tokens: list[str], rank: int) -> tuple[Action, ...]:
    found = []
    for token in tokens:
        if _STAGE_TOKEN.fullmatch(token):
            continue
        action = _read_overlap(token, rank) or _read_plain(token, rank)
        if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP):
            found.append(action)
    return tuple(found)


def _read_overlap(token: str, rank: int) -> Action | None:
    match = _OVERLAP.fullmatch(token)
    if match is None:
        return None
    parts = tuple(_read_plain(part.strip(), rank) for part in match["inner"].split(";"))
    if len(parts) < 2:
        raise _unreadable(token, rank)
    return overlap(*parts)


def _read_plain(token: str, rank: int) -> Action:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise _unreadable(token, rank)
    stage, kind, microbatch = match.groups()
    return Action(Kind[kind], int(stage), int(microbatch))


def _unreadable(token: str, rank: int) -> ScheduleError:
    return ScheduleError(
        f"row {rank + 1} (rank {rank}): {token[:40]!r} is no action of torch's schedule CSV: expected stage, kind and "
        "microbatch, such as 2F5, 3SEND_B0 or (0F7;7B3)OVERLAP_F_B"
    )


def _placement(rows: list[tuple[Action, ...]], num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The ranks whose rows hold each stage: one each, or the first one stands and the check names the other."""
    first: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.sub or (action,):
                first.setdefault(part.stage, rank)
    missing = [stage for stage in range(num_stages) if stage not in first]
    if missing:
        raise ScheduleError(
            f"stage {missing[0]} stands in no row, though there are stages up to {num_stages - 1}: add its actions"
        )
    return tuple((first[stage],) for stage in range(num_stages))
