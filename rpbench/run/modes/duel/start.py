"""A start: one process of a duel, from resident contenders to their runs.

Where a process puts its weights, and on which pages, stays for as long as it lives, and all runs of it share that.
Two starts are therefore two processes. Plans are made once and come with the job.

What helps is done to everybody, and is in the record: each worker and each rank computes on a core of its own, memory
stays with the process (`rpbench.run.allocator`), one warm-up run each, no garbage collection in a run.
"""

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from random import Random

from baselines.systems.case import Case
from baselines.systems.ranks import Ranks
from rpbench.engine.backends.cpu import CpuBackend, usable_cores
from rpbench.engine.program import make_program
from rpbench.engine.training import Settings
from rpbench.plan.whole import WholePlan
from rpbench.run.allocator import is_tuned
from rpbench.run.modes.duel.contenders import REFERENCES
from rpbench.run.modes.duel.job import Job
from rpbench.run.modes.duel.neighbours import compare
from rpbench.run.modes.duel.order import family_order, turn_order
from rpbench.run.modes.duel.runs import columns_of, runs_by
from rpbench.run.modes.duel.started import Started, apart
from rpbench.run.modes.duel.team import EngineTeam, LimitTeam, Team, TorchTeam
from rpbench.run.modes.duel.turns import Run, play
from rpbench.run.modes.duel.verdict import find_start
from rpbench.run.training.tensors import one_thread, workload_of


def start_apart(job: Job) -> Started:
    """A start in a process of its own, which ends with it."""
    return apart(play_start, job)


def play_start(job: Job) -> Started:
    """A start in this process."""
    names = [entrant.name for entrant in job.entrants]
    references = [name for name in REFERENCES if name in names]

    draw = Random(job.order_seed)

    def make_turn() -> list[str]:
        if job.families:
            return family_order(job.families, draw)
        return turn_order([name for name in names if name not in references], references, draw)

    def is_enough(runs: Sequence[Run]) -> bool:
        if job.families:
            return False
        walls = runs_by(columns_of(names, runs), "wall")
        known = [names.index(name) for name in references]
        found = (find_start(compare(walls, number, known), job.rules) for number in range(len(names)))
        return all(start.is_enough(job.rules) for start in found)

    def tell(line: str) -> None:
        print(f"duel {job.model.name}, order {job.order_seed}: {line}", file=sys.stderr, flush=True)

    with one_thread(), ExitStack() as stack:
        teams = dict(make_teams(job, stack))
        runs = play(teams, make_turn, _budget_s(job), is_enough, tell)
    used = resource.getrusage(resource.RUSAGE_SELF)
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
        "minor_faults": used.ru_minflt,
        "times_preempted": used.ru_nivcsw,
    }
    return Started(about, columns_of(names, runs))


def _budget_s(job: Job) -> float:
    """Nothing more than one turn where devices share a core: there is no verdict whatever comes."""
    return job.budget_s if len(usable_cores()) >= job.num_devices else 0.0


def make_teams(job: Job, stack: ExitStack) -> Iterator[tuple[str, Team]]:
    """Every contender, ready to run, with workers and ranks that `stack` closes."""
    workload = workload_of(job.model, job.sequences, job.dtype, job.seed, job.num_microbatches)
    cores = usable_cores()
    backend = stack.enter_context(CpuBackend(cores))
    for entrant in job.entrants:
        plan = job.plans[entrant.name]
        if entrant.engine == "torch":
            ranks = stack.enter_context(Ranks(job.num_devices, job.timeout_s))
            program = make_program(plan.schedule, plan.costs)
            yield entrant.name, TorchTeam(plan, _case(job, plan), ranks, program, cores)
        else:
            kind = LimitTeam if entrant.engine == "side by side" else EngineTeam
            settings = Settings(job.optimizer, recompute="except_last" if plan.keeps_last else "all")
            yield entrant.name, kind(plan, workload, settings, backend)


def _case(job: Job, plan: WholePlan) -> Case:
    assert plan.schedule.partition is not None
    return Case(
        "torch_pipelining",
        asdict(job.model),
        job.num_microbatches,
        "1F1B",
        job.sequences,
        job.num_steps,
        job.seed,
        job.dtype,
        plan.schedule.partition.forward,
        recompute="except_last" if plan.keeps_last else "all",
        optimizer={"learning_rate": job.optimizer.learning_rate, "weight_decay": job.optimizer.weight_decay},
    )
