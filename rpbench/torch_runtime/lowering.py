"""Lowering: the rows of a table with every message in its place, as torch's runtime runs them.

torch's own lowering takes one rank for each stage; ours also takes two copies that go opposite ways (`Chains`).
torch's messages carry no names: between two ranks only their order tells them apart, and on one communicator both
directions share a queue. So each pair of ranks must have one order of all its messages, both ways.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from rpbench.ir.action import RECV, SEND, Action, Kind, parts_of, receive_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.schedule import Row, Schedule, ScheduleError, to_text
from rpbench.passes.lower import lower_communication
from rpbench.torch_runtime.communication.settings import with_reduction_waits, with_send_waits
from rpbench.torch_runtime.communication.tokens import read_token
from rpbench.torch_runtime.formats.tables import Chains, find_chains, make_table


@dataclass(frozen=True)
class Lowered:
    """A table, what each rank does to run it with SEND and RECV between computations, and torch's numbers for ours."""

    table: Schedule
    schedule: Schedule
    chains: Chains

    @property
    def num_ranks(self) -> int:
        return self.table.shape.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one chain: to torch these are all."""
        return len(self.chains.microbatches[0])

    def row(self, rank: int) -> Row:
        """Every action of a rank, messages included."""
        return self.schedule.compute(rank)

    def tokens(self, rank: int, *, sharded: bool = False) -> list[str]:
        """A rank's row as torch writes it; with `sharded`, weights are gathered first and gradients reduced last."""
        found = [self.chains.token(action) for action in self.row(rank)]
        if not sharded:
            return found
        stages = self.chains.stages_of(rank)
        last = {
            self.chains.to_torch(part)[0]: place
            for place, action in enumerate(self.row(rank))
            for part in parts_of(action)
            if part.kind in (Kind.B, Kind.W)
        }
        for stage, place in sorted(last.items(), key=lambda item: -item[1]):
            found.insert(place + 1, f"{stage}REDUCE_GRAD")
        return [f"{stage}UNSHARD" for stage in stages] + found + [f"{stage}RESHARD" for stage in stages]

    def to_csv(self, *, sharded: bool = False, waits: bool = False) -> str:
        """All rows as `compute_comms` of `_load_csv`; `waits`: for a torch that has them (`versions.HAS_WAITS`)."""
        rows = [self.tokens(rank, sharded=sharded) for rank in range(self.num_ranks)]
        if waits:
            tokens = [[read_token(cell, rank) for cell in row] for rank, row in enumerate(rows)]
            rows = [list(map(str, with_send_waits(with_reduction_waits(row)))) for row in tokens]
        return "\n".join(map(",".join, rows))

    @cached_property
    def digest(self) -> str:
        """A hash of the table and its cut, which must be equal on all ranks."""
        return hashlib.sha256((to_text(self.table) + to_text(self.schedule)).encode()).hexdigest()


def lower(schedule: Schedule) -> Lowered:
    """The rows that ranks run; ScheduleError if torch cannot, or a pair of ranks would mix up its messages."""
    table = make_table(schedule, two_way=True)
    lowered = lower_communication(table)
    check_message_order(lowered)
    return Lowered(table, lowered, find_chains(table))


def check_message_order(lowered: Schedule) -> None:
    """Each pair of ranks has one order of its messages, both ways; ScheduleError with the first two apart."""
    seen: dict[tuple[int, int], list[tuple[int, Action]]] = {}  # (rank, peer) -> its messages with that peer
    number = -1
    for rank, _, row in lowered.items():
        for action in row:
            number += 1
            if action.kind in SEND or action.kind in RECV:
                assert isinstance(action.peer, int)
                seen.setdefault((rank, action.peer), []).append((number, action))
    for (rank, peer), own in seen.items():
        others = seen.get((peer, rank), [])
        if rank < peer and len(own) == len(others):
            for (first, action), (second, other) in zip(own, others, strict=True):
                send, receive = (action, other) if action.kind in SEND else (other, action)
                if send.kind not in SEND or receive.kind not in RECV or receive_of(send)[:3] != receive[:3]:
                    raise _mixed_up(lowered, rank, peer, (first, action), (second, other))
        elif len(own) != len(others):
            last = own[-1]
            raise _mixed_up(lowered, rank, peer, last, others[-1] if others else last)


def _mixed_up(
    lowered: Schedule, rank: int, peer: int, one: tuple[int, Action], other: tuple[int, Action]
) -> ScheduleError:
    rule = f"rank {rank} is at {one[1]} where rank {peer} is at {other[1]}: a pair of ranks keeps one order of messages"
    return broken(lowered, rule, sorted({one[0], other[0]}), way_out="lower the compute rows again")
