"""A start: one process of a torch duel, with the ranks and threads that it starts, from residents to their steps."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random

from rpbench.cost.table import CostTable
from rpbench.engine.backends.cpu import CpuBackend, usable_cores
from rpbench.run.allocator import is_tuned
from rpbench.run.modes.duel.order import turn_order
from rpbench.run.modes.duel.started import Started, apart
from rpbench.run.modes.duel.team import Parity, Team
from rpbench.run.modes.duel.turns import Run, play
from rpbench.run.modes.duel.verdict import Rules
from rpbench.run.modes.torch_duel.entrants import THREADS, Entrant
from rpbench.run.modes.torch_duel.findings import find_starts
from rpbench.run.modes.torch_duel.sample import columns_of
from rpbench.run.modes.torch_duel.teams import RankTeam, ThreadTeam
from rpbench.run.training.tensors import one_thread
from rpbench.torch_runtime.diagnosis import RunFailed
from rpbench.torch_runtime.ranks import Ranks
from rpbench.torch_runtime.request import TorchRequest


@dataclass(frozen=True)
class Job:
    """What a start is asked for; every start of a duel is asked for the same but the seed.

    Args:
        entrants: who takes part.
        requests: entrant -> its table, model and microbatches, and whose order they run in.
        costs: schedule -> times that order the programs of our engine.
        budget_s: no turn begins after that.
        order_seed: of the order of runs.
        stall_s: ranks end when none has moved for so long.
    """

    entrants: tuple[Entrant, ...]
    requests: Mapping[str, TorchRequest]
    costs: Mapping[str, CostTable]
    rules: Rules
    budget_s: float
    order_seed: int
    stall_s: float

    @property
    def num_devices(self) -> int:
        return next(iter(self.requests.values())).num_ranks


def start_apart(job: Job) -> Started:
    """A start in a process of its own, which ends with it."""
    return apart(play_start, job)


def play_start(job: Job) -> Started:
    """A start in this process."""
    names = [entrant.name for entrant in job.entrants]

    def is_enough(runs: Sequence[Run]) -> bool:
        found = find_starts(job.entrants, columns_of(names, runs), "wall", job.rules)
        return all(start.is_enough(job.rules) for start in found.values())

    def tell(line: str) -> None:
        print(f"torch duel, order {job.order_seed}: {line}", file=sys.stderr, flush=True)

    references = [entrant.name for entrant in job.entrants if entrant.is_reference]
    others = [name for name in names if name not in references]
    make_turn = partial(turn_order, others, references, Random(job.order_seed))
    enough_cores = len(usable_cores()) >= job.num_devices
    with one_thread(), ExitStack() as stack:
        teams = dict(make_teams(job, stack))
        budget_s = job.budget_s if enough_cores else 0.0  # devices that share a core have no verdict whatever comes
        runs = play(teams, make_turn, budget_s, is_enough, tell)
    about = {
        "process": os.getpid(),
        "order_seed": job.order_seed,
        "num_turns": (len(runs) - 1) // len(names),
        "spent_s": round(runs[-1].at_s, 1),
        "budget_s": job.budget_s,
        "is_enough": is_enough(runs),
        "num_cores": len(usable_cores()),
        "is_pinned": True,
        "is_malloc_tuned": is_tuned(),
    }
    return Started(about, columns_of(names, runs))


def check_parity(job: Job, sequence_tokens: int) -> dict[str, Parity]:
    """Every entrant's distance from plain training on short sequences, and why it may not take part."""
    with one_thread(), ExitStack() as stack:
        return {name: _parity(team, sequence_tokens) for name, team in make_teams(job, stack)}


def _parity(team: Team, sequence_tokens: int) -> Parity:
    try:
        found = team.check(sequence_tokens)
    except RunFailed as error:
        return {"parity": False, "reason": str(error).partition("\n")[0]}
    differences = {key: found[key] for key in ("grad_max_abs_diff", "weight_max_abs_diff")}
    far = max(differences.values())
    reason = None if far <= team.tolerance else f"it does not train as plain training does: off by {far:g}"
    return {**differences, "parity": reason is None, "reason": reason, "parity_seq_len": sequence_tokens}


def make_teams(job: Job, stack: ExitStack) -> Iterator[tuple[str, Team]]:
    """Every entrant, ready to run, with workers and ranks that `stack` closes."""
    cores = usable_cores()
    backend = stack.enter_context(CpuBackend(cores))
    ranks = stack.enter_context(Ranks(job.num_devices, job.stall_s))
    for entrant in job.entrants:
        request = job.requests[entrant.name]
        if entrant.role == THREADS:
            yield entrant.name, ThreadTeam(request, job.costs[entrant.schedule], backend)
        else:
            yield entrant.name, RankTeam(entrant.name, request, ranks, cores)
