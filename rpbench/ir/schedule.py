"""Shape and Schedule: the actions of every device and lane, in order."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from rpbench.ir import partition as partitions
from rpbench.ir.action import MOVES, Action, Kind, PlainRow, parse, parts_of, text
from rpbench.ir.partition import Partition
from rpbench.ir.policy import LateRest, Policy, check_selective

LANES = ("compute", "h2d", "d2h", "net", "host")
ON_SSD = {"none": "", "optimizer": "O", "all": "OP"}  # option -> objects that live on SSDs
SCHEMA = "rpbench-schedule 1"
VISIT_LETTERS = 1024  # most letters of a row for each visit of a microbatch to a stage: a few actions and transfers

Row = tuple[Action, ...] | PlainRow
Named = TypeVar("Named", bound=Enum)
Lanes = tuple[tuple[str, Row], ...]


class ScheduleError(ValueError):
    """A schedule that cannot run; the message shows where it breaks."""


class Weights(Enum):
    """Where a stage's weights live while it computes."""

    BOUND = "bound"  # forward and backward of a stage and microbatch meet on one device
    STREAMED = "streamed"  # weights follow the work; any device may run any stage


@dataclass(frozen=True)
class Shape:
    """The sizes a schedule is made for.

    Stages are counted over all ranks. Forward and backward stages differ in number only for schedules that
    cut the two directions apart. `num_microbatches` is per optimizer step. Microbatches are numbered through
    all steps: step t begins with microbatch t * num_microbatches.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_backward_stages: int = 0  # 0: as many as forward stages
    num_steps: int = 1
    num_parts: int = 1
    fused: bool = False  # the last backward stage runs forward, loss and backward in one visit
    num_head_shards: int = 0  # shards of the head, one on each device; 0: the last stage holds it whole
    tensor_parallel: bool = False  # parts are shards of every matrix, one on each device, not segments of a sequence
    outer_replicas: int = 1  # in a mesh, the devices that do the same work as a rank, that rank included
    keeps_every: int = 1  # forwards keep the input of every k-th stage; R recomputes the inputs of the others
    sequence_parallel: bool = False  # between tensor-parallel matrices a device has a slice of every sequence

    def __post_init__(self) -> None:
        if not self.num_backward_stages:
            object.__setattr__(self, "num_backward_stages", self.num_stages)
        for name, value in vars(self).items():
            if name not in ("fused", "num_head_shards", "tensor_parallel", "sequence_parallel") and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(f"{name}={value!r}: sizes are whole numbers of at least 1")
        if self.num_head_shards not in (0, self.num_ranks):
            raise ValueError(f"num_head_shards={self.num_head_shards}: one for each of {self.num_ranks} ranks, or 0")
        if self.tensor_parallel and self.num_parts != self.num_ranks:
            raise ValueError(
                f"num_parts={self.num_parts}: every matrix has one share on each of {self.num_ranks} ranks"
            )
        if self.keeps_every > 1 and (self.separate_cuts or self.num_parts > 1 or self.num_head_shards):
            raise ValueError(
                f"keeps_every={self.keeps_every}: inputs are made again of whole sequences by stages that are the same "
                "both ways, the head in the last; keep all inputs, keeps_every=1"
            )
        if self.sequence_parallel and not self.tensor_parallel:
            raise ValueError(
                "sequence_parallel=True: slices lie between shares of matrices; set tensor_parallel as well"
            )
        if (self.tensor_parallel or self.num_head_shards) and self.separate_cuts:
            raise ValueError("layers or a head in shares: stages are the same both ways, not cut apart or fused")
        if self.num_head_shards and (self.num_parts > 1 or self.num_stages < self.num_head_shards):
            raise ValueError(
                f"num_head_shards={self.num_head_shards}: sequences are whole (num_parts={self.num_parts}) and share d "
                f"is stepped with stage d of {self.num_stages}"
            )

    def check_length(self, num_tokens: int) -> None:
        """Refuse sequences without equal slices under sequence parallelism; ValueError with the nearest that can."""
        if self.sequence_parallel:
            check_slices(num_tokens, self.num_ranks, "schedule.sequence_parallel")

    @property
    def separate_cuts(self) -> bool:
        """Whether forward stage s and backward stage s may hold different layers."""
        return self.fused or self.num_stages != self.num_backward_stages

    @property
    def num_segments(self) -> int:
        """Segments of each sequence; with tensor parallelism parts are shards of matrices instead."""
        return 1 if self.tensor_parallel else self.num_parts

    @property
    def total_microbatches(self) -> int:
        """Microbatches of all steps."""
        return self.num_microbatches * self.num_steps

    @property
    def batches(self) -> tuple[range, ...]:
        """The microbatches of each step."""
        size = self.num_microbatches
        return tuple(range(first, first + size) for first in range(0, self.total_microbatches, size))

    @property
    def chunks_per_rank(self) -> int:
        """Stages on each rank (v in papers); ValueError if the stages cannot be dealt evenly."""
        chunks, rest = divmod(self.num_stages, self.num_ranks)
        if rest or not chunks:
            raise ValueError(
                f"{self.num_stages} stages on {self.num_ranks} ranks: the number of stages must be a "
                "multiple of the number of ranks; change num_devices, chunks_per_device or the partition"
            )
        return chunks


def check_slices(num_tokens: int, num_devices: int, option: str) -> None:
    """Raise ValueError, with the nearest lengths, for sequences that are no equal slices; `option` asks for these."""
    p = num_devices
    if num_tokens % p:
        ways = " or ".join(str(length) for length in (num_tokens // p * p, num_tokens + -num_tokens % p) if length)
        raise ValueError(
            f"sequences of {num_tokens} tokens on {p} devices: with {option}=true every device has as many tokens as "
            f"any other, so they must be a multiple of {p}; take model.seq_len={ways}, or {option}=false"
        )


@dataclass(frozen=True)
class Schedule:
    """An order of work: for every device, lanes of actions that run one after another.

    A generator gives one row of compute actions per device; passes in `rpbench.passes.lower` add the other lanes.
    """

    shape: Shape  # the sizes it was made for
    # per device either its compute row, or a mapping lane -> row
    rows: tuple[Any, ...]  # as given; `Lanes` for every device once constructed
    name: str = ""  # registered name of the generator
    policy: Policy = Policy.FLUSH  # which weights forward and backward read (`rpbench.ir.policy`)
    weights: Weights = Weights.BOUND  # bound to a device, or streamed to where the work is
    # per stage the devices that may hold it; empty when nothing is declared
    placement: tuple[tuple[int, ...], ...] = ()
    partition: Partition | None = None  # the layers behind the stages, when known
    # fields of a record by which a searching generator describes its result; not compared
    told: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # under policy selective, which columns are stepped at once, and when the others are
    late_rest: LateRest | None = None
    # objects that live on SSDs instead of in the host's memory: "O", optimizer state, "OP", weights as well
    on_ssd: str = ""
    # whether the devices of the first and the last stage sum gradients of a matrix that both have, before STEP 0
    tied: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(_lanes_of(row) for row in self.rows))
        if len(self.rows) != self.shape.num_ranks:
            raise ScheduleError(
                f"{len(self.rows)} rows for {self.shape.num_ranks} ranks: a schedule has one row per rank"
            )
        if self.on_ssd not in ON_SSD.values():
            raise ScheduleError(f"on_ssd={self.on_ssd}: O for optimizer state, OP for weights as well")

    @cached_property
    def lanes(self) -> tuple[Mapping[str, Row], ...]:
        """`lanes[device][lane]` is the tuple of actions of that lane."""
        return tuple(dict(row) for row in self.rows)

    def compute(self, device: int) -> Row:
        """The compute row of a device."""
        return self.lanes[device].get("compute", ())

    def items(self) -> Iterator[tuple[int, str, Row]]:
        """Every lane as (device, lane, actions), devices ascending."""
        for device, row in enumerate(self.rows):
            for lane, actions in row:
                yield device, lane, actions

    @property
    def num_actions(self) -> int:
        return sum(len(actions) for _, _, actions in self.items())

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions, without the parts of OVERLAPs."""
        return frozenset(kind for _, _, row in self.items() for kind in kinds_of(row))

    @cached_property
    def plain_kinds(self) -> frozenset[Kind]:
        """The kinds of its actions and of the parts of OVERLAPs."""
        if Kind.OVERLAP not in self.kinds:
            return self.kinds
        return self.kinds | {part.kind for _, _, row in self.items() for action in row for part in action.sub}

    @cached_property
    def moves(self) -> frozenset[tuple[Kind, str]]:
        """The kind and object of every action that names an object."""
        if MOVES.isdisjoint(self.kinds):
            return frozenset()
        return frozenset(chain.from_iterable(_moves_of(row) for _, _, row in self.items()))

    @cached_property
    def ends_together(self) -> bool:
        """Whether every device with the first or the last stage has both, or a shard of both."""
        shape = self.shape
        if shape.num_head_shards or self.weights is Weights.STREAMED:
            return True
        ends = {0, shape.num_stages - 1}
        return all(ends <= own for own in self.stages_of_ranks() if ends & own)

    def stages_of_ranks(self) -> list[set[int]]:
        """The stages that run on each rank."""
        rows = map(self.compute, range(self.shape.num_ranks))
        if Kind.OVERLAP not in self.kinds:
            return [set(map(itemgetter(1), row)) for row in rows]
        return [{part.stage for action in row for part in parts_of(action)} for row in rows]

    @property
    def cut(self) -> Partition:
        """Its partition; ValueError without one."""
        if self.partition is None:
            raise ValueError("the bytes of a schedule follow from its layers: give it a partition first")
        return self.partition

    def with_partition(self, partition: Partition) -> "Schedule":
        """The same order with the layers behind its stages; the stage counts must agree."""
        counts = len(partition.forward), len(partition.backward), partition.fused
        if counts != (self.shape.num_stages, self.shape.num_backward_stages, self.shape.fused):
            raise ScheduleError(
                f"partition {partition} has {counts[0]} forward and {counts[1]} backward stages, the "
                f"schedule {self.shape.num_stages} and {self.shape.num_backward_stages}; "
                "a fused stage must be in both"
            )
        found = copy(self)  # with all that is known of the actions, which are the same: searches ask for many cuts
        found.__dict__.update(partition=partition, kinds=self.kinds, moves=self.moves)
        return found

    def __str__(self) -> str:
        return to_text(self)


def _lanes_of(row: Row | Mapping[str, Row] | Lanes) -> Lanes:
    given: Any = (("compute", row),)
    try:
        if isinstance(row, Mapping):
            given = row.items() or (("compute", ()),)
        elif row and not isinstance(row[0], Action):
            given = row
        pairs = [(lane, actions if isinstance(actions, PlainRow) else tuple(actions)) for lane, actions in given]
    except (TypeError, ValueError):
        raise ScheduleError(
            f"{row!r:.60} is no row: a row has the actions of a device in order, as in (Action(Kind.F, 0, 0), ...), or "
            "a lane's actions under its name"
        ) from None
    unknown = [lane for lane, _ in pairs if lane not in LANES]
    if unknown:
        raise ScheduleError(f"unknown lane {unknown[0]!r}: lanes are {', '.join(LANES)}")
    return tuple(sorted(pairs, key=lambda pair: LANES.index(pair[0])))


def _moves_of(row: Row) -> set[tuple[Kind, str]]:
    if isinstance(row, PlainRow):
        return {(kind, row.moved) for kind in row.kinds() & MOVES if row.moved}
    return {(kind, what) for kind, what in set(map(itemgetter(0, 5), row)) if what}


def kinds_of(row: Row) -> Set[Kind]:
    """The kinds of a row's actions, without the parts of OVERLAPs."""
    return row.kinds() if isinstance(row, PlainRow) else set(map(itemgetter(0), row))


def check_one_stage(name: str, shape: Shape, other: str = "") -> None:
    """Refuse a shape that has not one stage on each rank; ValueError for another number of stages than ranks.

    Args:
        name: of the schedule.
        other: a schedule that takes several stages a rank, named in the error.
    """
    if shape.num_stages != shape.num_ranks:
        raise ValueError(
            f"{name} puts one stage on each rank, got {shape.num_stages} stages on {shape.num_ranks} ranks; "
            f"set chunks_per_device=1{other and f' or try schedule={other}'}"
        )


def check_even(name: str, shape: Shape, devices: str = "devices") -> None:
    """Raise ValueError unless the devices can share the microbatches of a step evenly."""
    p, m = shape.num_ranks, shape.num_microbatches
    if m % p:
        raise ValueError(
            f"{name} deals {m} microbatches to {p} {devices}: they must be a multiple of {p}; "
            f"take num_microbatches={m + -m % p}"
        )


def looped_placement(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Stage s on rank s mod p: contiguous for one chunk per rank, looped for more."""
    return tuple((stage % shape.num_ranks,) for stage in range(shape.num_stages))


def step_rows(shape: Shape, step: Callable[[int, range], Iterable[Action]]) -> tuple[Row, ...]:
    """The rows of all ranks: `step(rank, microbatches of the step)` of every optimizer step in turn."""
    ranks = range(shape.num_ranks)
    return tuple(tuple(chain.from_iterable(step(rank, batch) for batch in shape.batches)) for rank in ranks)


# --- text form ----------------------------------------------------------------------------------------------


def to_text(schedule: Schedule) -> str:
    """The schedule as text: a header, then one line a lane. `from_text` reads it back exactly."""
    lines = [f"# {SCHEMA}", _header(schedule)]
    lines += [" ".join([f"{device}/{lane}:", *map(text, row)]) for device, lane, row in schedule.items()]
    return "\n".join(lines) + "\n"


def _header(schedule: Schedule) -> str:
    shape = schedule.shape
    header = {
        "name": schedule.name or "-",
        "ranks": shape.num_ranks,
        "stages": shape.num_stages,
        "backward_stages": shape.num_backward_stages,
        "microbatches": shape.num_microbatches,
        "steps": shape.num_steps,
        "parts": shape.num_parts,
        "fused": int(shape.fused),
        **({"head_shards": shape.num_head_shards} if shape.num_head_shards else {}),
        **({"tensor_parallel": 1} if shape.tensor_parallel else {}),
        **({"outer_replicas": shape.outer_replicas} if shape.outer_replicas > 1 else {}),
        **({"keeps_every": shape.keeps_every} if shape.keeps_every > 1 else {}),
        **({"sequence_parallel": 1} if shape.sequence_parallel else {}),
        **({"late_rest": schedule.late_rest} if schedule.late_rest else {}),
        **({"on_ssd": schedule.on_ssd} if schedule.on_ssd else {}),
        "policy": schedule.policy.value,
        "weights": schedule.weights.value,
        "placement": ",".join("+".join(map(str, holders)) for holders in schedule.placement) or "-",
        "partition": schedule.partition or "-",
    }
    return "# " + " ".join(f"{key}={value}" for key, value in header.items())


def from_text(source: str) -> Schedule:
    """The schedule a text stands for; ScheduleError naming the line, and the token if one is malformed."""
    lines = source.splitlines()
    if len(lines) < 2 or lines[0] != f"# {SCHEMA}":
        raise ScheduleError(f"not a schedule: the first line must be '# {SCHEMA}', the second its sizes")
    empty = _read_header(lines[1], len(lines) - 2)
    shape, rows = empty.shape, [dict[str, Row]() for _ in range(empty.shape.num_ranks)]
    visits = (shape.num_stages + shape.num_backward_stages) * shape.total_microbatches * shape.num_parts
    for number, line in enumerate(lines[2:], start=3):
        if len(line) > VISIT_LETTERS * (visits + 1):  # before so many actions are made
            raise ScheduleError(
                f"line {number}: {len(line):,} letters are more than {shape.total_microbatches} microbatches take "
                f"through the {shape.num_stages} stages of line 2; an action stands once"
            )
        _read_row(rows, line, number)
    return replace(empty, rows=tuple(rows))  # type: ignore[arg-type]


def _read_header(line: str, num_rows: int) -> Schedule:
    """The schedule of a header, its rows still empty."""
    header = dict(pair.partition("=")[::2] for pair in line.removeprefix("# ").split())
    try:
        shape = Shape(
            _whole("ranks", header["ranks"]),
            _whole("stages", header["stages"]),
            _whole("microbatches", header["microbatches"]),
            _whole("backward_stages", header["backward_stages"]),
            _whole("steps", header["steps"]),
            _whole("parts", header["parts"]),
            header["fused"] == "1",
            _whole("head_shards", header.get("head_shards", "0")),
            header.get("tensor_parallel") == "1",
            _whole("outer_replicas", header.get("outer_replicas", "1")),
            _whole("keeps_every", header.get("keeps_every", "1")),
            header.get("sequence_parallel") == "1",
        )
        if shape.num_ranks > num_rows:
            raise ValueError(f"{shape.num_ranks} ranks but {num_rows} rows")
        placement, cut = header["placement"], header["partition"]
        schedule = Schedule(
            shape,
            ((),) * shape.num_ranks,
            name="" if header["name"] == "-" else header["name"],
            policy=_one_of(Policy, "policy", header["policy"]),
            weights=_one_of(Weights, "weights", header["weights"]),
            placement=()
            if placement == "-"
            else tuple(tuple(_whole("placement", rank) for rank in part.split("+")) for part in placement.split(",")),
            late_rest=LateRest.parse(header["late_rest"]) if "late_rest" in header else None,
            on_ssd=header.get("on_ssd", ""),
        )
        check_selective(schedule.policy, schedule.late_rest)
        if cut != "-":
            schedule = schedule.with_partition(partitions.parse(cut))
    except KeyError as error:
        raise ScheduleError(f"line 2: bad header (no {error.args[0]}=): expected the one `show` prints") from None
    except ValueError as error:
        raise ScheduleError(f"line 2: bad header ({error}): expected the one `show` prints") from None
    if _header(schedule) != line:
        raise ScheduleError(f"line 2: bad header: it is read as\n  {_header(schedule)}\nwrite it like that")
    return schedule


def _whole(key: str, digits: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", digits):
        raise ValueError(f"{key}={digits:.40}: a whole number of at most 9 digits")
    return int(digits)


def _one_of(known: type[Named], key: str, value: str) -> Named:
    if value not in (names := [each.value for each in known]):
        raise ValueError(f"{key}={value}: one of {', '.join(names)}")
    return known(value)


def _read_row(rows: list[dict[str, Row]], line: str, number: int) -> None:
    head, colon, tokens = line.partition(":")
    device, slash, lane = head.partition("/")
    if not (colon and slash and re.fullmatch("[0-9]{1,9}", device) and lane in LANES and int(device) < len(rows)):
        raise ScheduleError(
            f"line {number}: {line[:40]!r}: a row starts with device/lane: such as 0/compute:, "
            f"device below {len(rows)}, lane one of {', '.join(LANES)}"
        )
    if lane in rows[int(device)]:
        raise ScheduleError(f"line {number}: a second row for {head}; a lane has one row")
    try:
        rows[int(device)][lane] = tuple(parse(token) for token in tokens.split())
    except ValueError as error:
        raise ScheduleError(f"line {number}: {error}") from None
