"""Watch: trains a plan through its failures.

A step counts once every rank has done it and every holder has its copies. If a rank is gone before, the others go back
to the last step that counts, a new process takes the lost rank's place with the copy of a holder, and the step begins
anew. Where nobody holds a copy, or states are kept in files alone, all go back to their files. Every wait has the
plan's limit, and whatever happens the processes end with the block that started them.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from rpbench.engine.recovery.plan import Plan
from rpbench.engine.recovery.ranks import CannotRecover, RankDied, Ranks, Said
from rpbench.engine.state.gradients import Tensors


@dataclass(frozen=True)
class Return:
    """How training came back after a failure.

    Args:
        ranks: that died.
        step: that was running, counted from 0.
        source: where the state came from: `memory` or `store`.
        lost_steps: that had counted and were done again.
        num_actions: of the step that was running, by rank, that had begun and were done again.
        num_microbatches: of it that had begun at the first stage.
        fetched_bytes: that crossed to another process, or came from files.
        stop_s: from when it was known until training went on.
    """

    ranks: tuple[int, ...]
    step: int
    source: str
    lost_steps: int
    num_actions: tuple[int, ...]
    num_microbatches: int
    fetched_bytes: int
    stop_s: float


@dataclass(frozen=True)
class Result:
    """What came of a plan.

    Args:
        masters: of all stages, after the last step.
        returns: one for each failure, in order.
        num_actions: that began in all, those that were done again counted each time.
    """

    masters: Tensors
    returns: tuple[Return, ...]
    num_actions: int


def train(plan: Plan) -> Result:
    """Train a plan to its end.

    Raises:
        CannotRecover: if a state is lost, or a rank hangs or raises.
    """
    with Watch(plan) as watch:
        return watch.train()


class Watch:
    """A plan with its processes. Use it in a `with` block."""

    def __init__(self, plan: Plan) -> None:
        plan.workload(), plan.settings()  # refused here, not in every process
        self._plan, self._ranks = plan, Ranks(plan)
        self._deaths = plan.deaths
        self._num_steps, self._has_begun = 0, False
        self._stored: int | None = None  # the newest step in files
        self._lost: set[int] = set()
        self._returns: list[Return] = []

    def __enter__(self) -> Self:
        try:
            self._ranks.start(range(self._plan.num_ranks), self._deaths)
        except BaseException:
            self._ranks.close(at_once=True)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._ranks.close(at_once=exception[0] is not None)

    @property
    def pids(self) -> Mapping[int, int]:
        """By rank, of the processes that live now."""
        return self._ranks.pids

    def train(self) -> Result:
        """Every step, through every failure.

        Raises:
            CannotRecover: as of `rpbench.engine.recovery.watch.train`.
        """
        while True:
            try:
                if self._lost:
                    self._recover()
                if not self._has_begun:
                    self._go_back(range(self._plan.num_ranks))  # everybody has copies of what training begins with
                    self._store()
                    self._has_begun = True
                if self._num_steps == self._plan.num_steps:
                    self._ranks.ask("result")
                    self._ranks.hear_all("state")
                    break
                self._step()
            except RankDied as died:
                self._lost.add(died.rank)
        return Result(dict(sorted(self._ranks.masters.items())), tuple(self._returns), self._ranks.num_actions)

    # --- steps ---

    def _step(self) -> None:
        step, ranks = self._num_steps, self._ranks
        ranks.begin_step()
        ranks.ask("step", step)
        ranks.hear_all("done", step)
        ranks.hear(self._copies(step + 1, range(self._plan.num_ranks)))
        self._num_steps += 1
        self._store()

    def _store(self) -> None:
        """Let everybody write to files where that is due."""
        if self._plan.store_every and self._num_steps % self._plan.store_every == 0:
            self._ranks.ask("store", self._num_steps)
            self._ranks.hear_all("kept", self._num_steps)
            self._stored = self._num_steps

    def _copies(self, step: int, among: Iterable[int]) -> set[Said]:
        """What is said once all other holders of all states, of those among some ranks, have them."""
        return {
            ("holds", owner, holder, step)
            for owner, holders in enumerate(self._plan.holders)
            for holder in (set(holders) & set(among)) - {owner}
        }

    def _go_back(self, fresh: Iterable[int], *, from_file: bool = False) -> None:
        """Bring everybody to the last step that counts, with copies on the ranks that have begun anew."""
        step, fresh = self._num_steps, tuple(fresh)
        self._ranks.ask("back", step, fresh, from_file)
        self._ranks.hear_all("back", step)
        self._ranks.hear(self._copies(step, fresh))

    # --- failures ---

    def _recover(self) -> None:
        """Bring every rank back to one step."""
        began, step, lost, ranks = time.monotonic(), self._num_steps, tuple(sorted(self._lost)), self._ranks
        # Before training has begun, every process has the same weights by itself.
        givers = self._givers(lost) if self._has_begun else {}
        ranks.next_epoch(lost)
        self._deaths = tuple(death for death in self._deaths if death.rank not in lost or death.step > step)
        ranks.start(lost, self._deaths)
        if givers is None:
            assert self._stored is not None  # written before the first step
            self._num_steps = self._stored
            self._go_back(range(self._plan.num_ranks), from_file=True)
        else:
            for rank, giver in givers.items():
                ranks.tell(giver, "give", rank, step)
            ranks.hear({("holds", rank, rank, step) for rank in givers})
            fetched = ranks.bytes_given  # the rest of what is given keeps copies, and brings nobody back
            self._go_back(lost)
        self._lost.clear()
        self._returns.append(
            Return(
                lost,
                step,
                "store" if givers is None else "memory",
                step - self._num_steps,
                tuple(ranks.ran[rank] for rank in range(self._plan.num_ranks)),
                ranks.num_begun,
                ranks.bytes_read if givers is None else fetched,
                time.monotonic() - began,
            )
        )

    def _givers(self, lost: tuple[int, ...]) -> dict[int, int] | None:
        """For each lost rank one that lives and holds its state; None where files are to be read.

        Raises:
            CannotRecover: if there are no files either.
        """
        living = {rank: [each for each in self._plan.holders[rank] if each not in lost] for rank in lost}
        if self._plan.source == "memory" and all(living.values()):
            return {rank: holders[0] for rank, holders in living.items()}
        if not self._plan.store_every:
            rank = next(rank for rank, holders in living.items() if not holders)
            raise CannotRecover(
                f"rank {rank} and every holder of its state, {list(self._plan.holders[rank])}, are gone, and nothing "
                "is in files; keep more copies, or set store_every"
            )
        return None
