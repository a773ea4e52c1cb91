"""Chains: the routes that microbatches take through the ranks, and torch's numbers for stages and microbatches.

Where every stage has one rank there is one chain, and torch's numbers are ours. Two copies of the weights that go
opposite ways are two chains: to torch they are one pipeline of twice as many stages, cut in the middle, each half with
microbatches of its own, counted from 0:

    our stage      0 1 2 3 | 0 1 2 3          chimera on 4 ranks: the second half runs from rank 3 to rank 0
    torch's        0 1 2 3 | 4 5 6 7
    rank           0 1 2 3 | 3 2 1 0
"""

from dataclasses import dataclass
from functools import cached_property

from rpbench.ir.action import Action, Kind, overlap, parts_of
from rpbench.ir.schedule import Schedule, ScheduleError


@dataclass(frozen=True)
class Chains:
    """Where microbatches go.

    Args:
        routes: per chain, the rank of each of our stages.
        microbatches: per chain, our numbers of its microbatches, ascending.
    """

    routes: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages as torch counts them, over all chains."""
        return sum(map(len, self.routes))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each of torch's stages."""
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

    def from_torch(self, kind: Kind, stage: int, microbatch: int) -> Action:
        """Our action behind torch's stage and microbatch."""
        chain, own = self.place(stage)
        return Action(kind, own, self.microbatches[chain][microbatch])

    def token(self, action: Action) -> str:
        """An action as torch writes it."""
        if action.sub:
            return f"({';'.join(map(self.token, action.sub))})OVERLAP_F_B"
        stage, microbatch = self.to_torch(action)
        return f"{stage}{action.kind.name}{microbatch}"

    def action(self, token: str) -> Action:
        """The inverse of `token`, peers apart."""
        if token.startswith("("):
            inner = token[1 : token.index(")")]
            return overlap(*(self.action(part) for part in inner.split(";")))
        digits = len(token) - len(token.lstrip("0123456789"))
        kind = token[digits:].rstrip("0123456789")
        return self.from_torch(Kind[kind], int(token[:digits]), int(token[digits + len(kind) :]))


def find_chains(schedule: Schedule) -> Chains:
    """The routes of a schedule's microbatches, in the order of their first microbatch.

    Raises:
        ScheduleError: if a forward is missing.
    """
    num_stages, num_microbatches = schedule.shape.num_stages, schedule.shape.total_microbatches
    rank_of: dict[tuple[int, int], int] = {}
    for device, _, row in schedule.items():
        for action in row:
            for part in parts_of(action):
                if part.kind is Kind.F and part.microbatch is not None:
                    rank_of[part.microbatch, part.stage] = device
    found: dict[tuple[int, ...], list[int]] = {}
    for microbatch in range(num_microbatches):
        missing = [stage for stage in range(num_stages) if (microbatch, stage) not in rank_of]
        if missing:
            raise ScheduleError(f"{missing[0]}F{microbatch} is missing: every stage runs every microbatch once")
        route = tuple(rank_of[microbatch, stage] for stage in range(num_stages))
        found.setdefault(route, []).append(microbatch)
    return Chains(tuple(found), tuple(map(tuple, found.values())))
