"""Plan: a training run on several processes, the holders of copies of their states, and the planned deaths."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.workload import Workload, synthetic
from rpbench.ir.action import Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Weights, from_text
from rpbench.workload.architecture import Architecture

START_S = 120.0  # within which a process has torch and its modules on any machine
SOURCES = ("memory", "store")
_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.STEP})


@dataclass(frozen=True)
class Death:
    """A process that is killed (SIGKILL) just before an action, by its place in the rank's row of a step, from 0."""

    rank: int
    step: int
    action: int = 0


@dataclass(frozen=True)
class Plan:
    """A training run on one process a rank; ValueError for what processes cannot do."""

    schedule: str  # one step in our text form, with its partition and STEP actions
    model: Mapping[str, Any]
    num_steps: int
    holders: tuple[tuple[int, ...], ...]  # for each rank, the ranks that keep its state, itself first
    deaths: tuple[Death, ...] = ()
    source: str = "memory"  # what a lost rank comes back from: `memory` of other processes, or files in `folder`
    store_every: int = 0  # steps from one file to the next; 0: none are written
    folder: str = ""
    microbatch_sequences: int = 1
    seed: int = 0
    dtype: str = "float32"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    stall_s: float = 60.0  # no process may wait longer for another that runs

    def __post_init__(self) -> None:
        order = self.order
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r}: one of {', '.join(SOURCES)}")
        if self.source == "store" and not (self.folder and self.store_every > 0):
            raise ValueError("source='store': states come from files; name a folder and store_every of at least 1")
        if order.policy is not Policy.FLUSH or order.weights is not Weights.BOUND or not order.kinds <= _KINDS:
            raise ValueError(
                f"schedule={order.name}: processes run flushed schedules whose stages stay where they are, made of "
                "forwards and backwards; take schedule=1f1b"
            )
        _ = self.rank_of
        for death in self.deaths:
            self._check_death(death)

    def _check_death(self, death: Death) -> None:
        ranks, row = self.num_ranks, len(self.order.compute(death.rank)) if 0 <= death.rank < self.num_ranks else 0
        if not row:
            raise ValueError(f"death of rank {death.rank}: the run has ranks 0 to {ranks - 1}; name one of them")
        if not 0 <= death.step < self.num_steps:
            raise ValueError(
                f"death in step {death.step}: the run has steps 0 to {self.num_steps - 1}; name one of them"
            )
        if not 0 <= death.action < row:
            raise ValueError(f"death before action {death.action}: its row has 0 to {row - 1}; name one of them")

    @cached_property
    def order(self) -> Schedule:
        return from_text(self.schedule)

    @property
    def num_ranks(self) -> int:
        return self.order.shape.num_ranks

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """For each stage, the rank that runs it; raises ValueError if a stage is on several."""
        found: dict[int, set[int]] = {}
        for rank in range(self.num_ranks):
            for action in self.order.compute(rank):
                found.setdefault(action.stage, set()).add(rank)
        for stage, ranks in found.items():
            if len(ranks) > 1:
                raise ValueError(
                    f"schedule={self.order.name}: stage {stage} is on ranks {sorted(ranks)}, and a process keeps whole "
                    "stages; take a schedule with one copy of each stage, such as schedule=1f1b"
                )
        return tuple(min(found[stage]) for stage in sorted(found))

    def workload(self) -> Workload:
        """The workload of the plan, the same in every process; raises ValueError if stages share parameters."""
        model, num_microbatches = Architecture(**self.model), self.order.shape.num_microbatches
        found = synthetic(model, self.microbatch_sequences, self.dtype, self.seed, num_microbatches)
        if found.tied:
            raise ValueError(
                f"model={model.name}: embedding and head share a matrix, and their stages are in different processes; "
                "set model.tied=false"
            )
        return found

    def settings(self) -> OptimizerSettings:
        """The settings of the optimizer; raises ValueError if a step needs the gradients of other stages."""
        found = OptimizerSettings(**self.optimizer)
        if found.clip_norm is not None:
            raise ValueError(
                f"optimizer.clip_norm={found.clip_norm}: the norm is of all gradients, and processes step by "
                "themselves; set optimizer.clip_norm=null"
            )
        return found

    @property
    def subject(self) -> dict[str, Any]:
        return {"model": dict(self.model), "dtype": self.dtype, "seed": self.seed, "schedule": self.schedule}
