"""Starts: the processes in which the contenders of a duel run; and the check that decides which contenders run.

The weights of a process stay at one place in memory, which affects all its runs. Two starts are therefore two
processes. Plans are made once and come with the job. Every contender gets the same help, which the record names: each
worker and each rank computes on a core of its own, memory stays with the process (`rpbench.run.allocator`), one warm-up
run each, no garbage collection in a run.

Turns: all contenders are resident side by side and run once each, in an order drawn anew, until enough is known. The
references of a turn run the same plan, each with weights of its own. They split the other contenders into groups of
about equal size, one for each reference:

    turn 1   c a  R2  d  R1  e b  R3        turn 2   b  R1  d a  R3  c e  R2

A run is then at most a group away from a reference on either side, and shares a drift over seconds with it. In a
run-off the plans of a contender are compared with each other only, so they run one after the other, in an order drawn
anew:

    turn 1   b1 b3 b2  c2 c1  a1 a2         turn 2   c1 c2  a2 a1  b2 b1 b3

The record keeps the seed of the draws. The first turn is a warm-up and does not count. Garbage is collected between
runs only; objects from before the first run are frozen, so that a collection takes milliseconds.
"""

import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, Literal, NamedTuple

from baselines.systems.case import Case
from rpbench.config.choices import Duel, Turns
from rpbench.config.request import Request
from rpbench.engine.backends.threads import CpuBackend, one_thread, usable_cores
from rpbench.engine.executor import ActionFailed
from rpbench.engine.program import make_program
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings
from rpbench.engine.workload import synthetic
from rpbench.plan.whole import WholePlan
from rpbench.run.allocator import is_tuned
from rpbench.run.modes.duel.contenders import Contender, is_reference
from rpbench.run.modes.duel.findings import find_starts
from rpbench.run.modes.duel.runs import DECIMALS, MISSING
from rpbench.run.modes.duel.teams import DIFFERENCES, ON_DEVICE, Absent, EngineTeam, Parity, Sample, Team, TorchTeam
from rpbench.run.modes.duel.verdict import Rules, Started
from rpbench.side_processes import side_processes
from rpbench.torch_runtime.processes.diagnosis import RunFailed
from rpbench.torch_runtime.processes.ranks import Ranks

Told = Callable[[str], None]

LOOK_EVERY = 5  # turns between two looks at whether enough is known
FAILURES = (RunFailed, ActionFailed, ValueError, RuntimeError)  # of a contender; the others go on


def why_lost(error: Exception) -> str:
    words = str(error).partition("\n")[0]
    return words if isinstance(error, RunFailed) else f"{type(error).__name__}: {words}"


class Run(NamedTuple):
    """One run of a contender; `at_s` is its middle, counted from the first run."""

    name: str
    at_s: float
    sample: Sample


def turn_order(others: Sequence[str], references: Sequence[str], draw: Random) -> list[str]:
    """One turn; ValueError without a reference."""
    if not references:
        raise ValueError("no reference: a turn needs at least 1 run to compare the others with")
    shuffled, last = draw.sample(others, len(others)), draw.sample(references, len(references))
    size, left = divmod(len(shuffled), len(last))
    longer = draw.sample(range(len(last)), left)
    found: list[str] = []
    for number, reference in enumerate(last):
        found += [*(shuffled.pop() for _ in range(size + (number in longer))), reference]
    return found


def family_order(families: Sequence[Sequence[str]], draw: Random) -> list[str]:
    """One turn of a run-off; a family are the plans of a contender."""
    return [name for family in draw.sample(families, len(families)) for name in draw.sample(family, len(family))]


def play(
    teams: Mapping[str, Team],
    make_turn: Callable[[], Sequence[str]],
    budget_s: float,
    is_enough: Callable[[Sequence[Run]], bool],
    tell: Told = lambda line: None,
    lost: dict[str, str] | None = None,
) -> list[Run]:
    """The runs, in their order; no turn begins after `budget_s`, or once there are enough.

    A turn has all teams, with a reference last if there are any. `lost` gets the reason of each that fails.
    """
    began, lost = time.perf_counter(), {} if lost is None else lost
    runs: list[Run] = []
    with _collection_between_runs():
        for turn in count():
            made = list(_made(teams, make_turn(), began, lost))
            if turn == 0:
                made = made[-1:]  # the neighbour of the next run
            runs += made
            spent = time.perf_counter() - began
            if turn % LOOK_EVERY == 0:
                tell(f"{turn} turns in {spent:.0f} s")
            if turn and (spent >= budget_s or (turn % LOOK_EVERY == 0 and is_enough(runs))):
                break
    return [run for run in runs if run.name not in lost]


def _made(teams: Mapping[str, Team], names: Sequence[str], began: float, lost: dict[str, str]) -> Iterator[Run]:
    for name in names:
        if name not in lost:
            gc.collect()
            before = time.perf_counter()
            try:
                sample = teams[name].run()
            except FAILURES as error:
                lost[name] = why_lost(error)
            else:
                yield Run(name, (before + time.perf_counter()) / 2 - began, sample)


@contextmanager
def _collection_between_runs() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def columns_of(names: Sequence[str], runs: Sequence[Run]) -> dict[str, dict[str, list[Any]]]:
    """Contender -> columns of its runs; None where the load of other programs is unknown.

    Steps of a torch duel also have a prediction, and the time that their replay leaves unexplained.
    """
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in names}
    for name, at_s, sample in runs:
        values: dict[str, float | None] = {"at_s": at_s}
        values |= {key: getattr(sample, key) for key in ("wall_s", "replay_s", "cpu_s", "elapsed_s", "others_s")}
        if sample.missing is not None:
            values["predicted_s"] = sample.predicted_s
            values |= {f"missing_{part}_s": sample.missing.get(part, 0.0) for part in MISSING}
        for key, value in values.items():
            found[name].setdefault(key, []).append(None if value is None else round(value, DECIMALS))
    return found


# --- starts ---

MakeTeams = Callable[[Sequence[Contender], ExitStack], Iterator[tuple[str, Team]]]
"""(contenders, stack that closes their workers and ranks) -> name and team of each; sent to another process."""


@dataclass(frozen=True)
class Job:
    """The job of a start; the jobs of a duel differ only in the seed of the order."""

    label: str  # in front of its messages
    entrants: tuple[Contender, ...]
    make_teams: MakeTeams
    num_devices: int
    rules: Rules
    budget_s: float  # no turn begins later
    order_seed: int
    families: tuple[tuple[str, ...], ...] = ()  # in a run-off: names of entrants that run one after the other

    @property
    def names(self) -> list[str]:
        return [entrant.name for entrant in self.entrants]

    def tell(self, line: str) -> None:
        print(f"{self.label}: {line}", file=sys.stderr, flush=True)


def planned_teams(
    asked: Request, plans: Mapping[str, WholePlan], entrants: Sequence[Contender], stack: ExitStack
) -> Iterator[tuple[str, Team]]:
    """Contenders with their plans, on the same weights and tokens, which follow from the seed."""
    sequences, num_microbatches = asked.workload.microbatch_sequences, asked.num_microbatches
    workload = synthetic(asked.given_model, sequences, asked.dtype, asked.seed, num_microbatches)
    optimizer = OptimizerSettings(asked.optimizer.learning_rate, asked.optimizer.weight_decay)
    cores = usable_cores()
    backend = stack.enter_context(CpuBackend(cores))
    for entrant in entrants:
        plan = plans[entrant.name]
        recompute: Literal["all", "except_last"] = "except_last" if plan.keeps_last else "all"
        if entrant.engine == "torch":
            cut = plan.schedule.cut.forward
            case = case_of(asked, "torch_pipelining", "1F1B", partition=cut, recompute=recompute)
            ranks = stack.enter_context(Ranks(asked.num_devices, asked.mode_as(Duel).timeout_s))
            yield entrant.name, TorchTeam(plan, case, ranks, make_program(plan.schedule, plan.costs), cores)
        else:
            settings, waits = Settings(optimizer, recompute=recompute), entrant.engine != "side by side"
            yield entrant.name, EngineTeam(plan, workload, settings, backend, waits=waits)


def case_of(request: Request, system: str, schedule: str, **more: Any) -> Case:
    """The training of a request on another system; `more` are further fields of the case."""
    asked = request.optimizer
    return Case(
        system,
        asdict(request.given_model),
        request.num_microbatches,
        schedule,
        request.workload.microbatch_sequences,
        request.num_steps,
        request.seed,
        request.dtype,
        optimizer={"learning_rate": asked.learning_rate, "weight_decay": asked.weight_decay},
        **more,
    )


def planned_job(request: Request, entrants: Sequence[Contender], plans: Mapping[str, WholePlan]) -> Job:
    """The job of the starts of a request whose contenders have plans."""
    return job_of(request, f"duel {request.model_name}", entrants, partial(planned_teams, request, plans))


def job_of(request: Request, label: str, entrants: Sequence[Contender], make_teams: MakeTeams) -> Job:
    mode = request.mode
    assert isinstance(mode, Duel | Turns)
    rules = Rules(half_width=mode.half_width, least_starts=max(Rules.least_starts, mode.num_starts))
    return Job(label, tuple(entrants), make_teams, request.num_devices, rules, mode.budget_s, request.seed)


def start_apart(job: Job) -> Started:
    """A start in a process of its own."""
    with side_processes(1, "spawn") as pool:
        return pool.submit(play_start, job).result()


def play_start(job: Job) -> Started:
    names, draw = job.names, Random(job.order_seed)
    references = [name for name in names if is_reference(name)]

    def make_turn() -> list[str]:
        if job.families:
            return family_order(job.families, draw)
        return turn_order([name for name in names if name not in references], references, draw)

    lost: dict[str, str] = {}

    def is_enough(runs: Sequence[Run]) -> bool:
        if job.families:
            return False
        found = find_starts(columns_of([name for name in names if name not in lost], runs), "wall", job.rules)
        return all(start.is_enough(job.rules) for start in found.values())

    with one_thread(), ExitStack() as stack:
        teams = dict(job.make_teams(job.entrants, stack))
        runs = play(
            teams, make_turn, _budget_s(job), is_enough, lambda line: job.tell(f"order {job.order_seed}, {line}"), lost
        )
    if lost and (job.families or len(lost) == len(names)):
        raise RuntimeError(f"{job.label}: " + "; ".join(f"{name}: {why}" for name, why in lost.items()))
    used = resource.getrusage(resource.RUSAGE_SELF)
    about = {
        "process": os.getpid(),
        "order_seed": job.order_seed,
        "num_turns": (len(runs) - 1) // (len(names) - len(lost)),
        "spent_s": round(runs[-1].at_s, 1),
        "budget_s": job.budget_s,
        "is_enough": is_enough(runs),
        "num_cores": len(usable_cores()),
        "is_pinned": True,
        "is_malloc_tuned": is_tuned(),
        "lost": lost,
        "minor_faults": used.ru_minflt,
        "times_preempted": used.ru_nivcsw,
    }
    return Started(about, columns_of(names, runs))


def _budget_s(job: Job) -> float:
    """Zero, for a single turn, where devices share a core: such a duel has no verdict."""
    return job.budget_s if len(usable_cores()) >= job.num_devices else 0.0


# --- parity: contenders that train as plain training does may take part -------------------------------------------


def check_parity(job: Job, sequence_tokens: int) -> dict[str, Parity]:
    """Every contender's distance from plain training on short sequences, and the reason if it may not take part."""
    found: dict[str, Parity] = {}
    with one_thread(), ExitStack() as stack:
        for name, team in job.make_teams(job.entrants, stack):
            found[name] = _parity(team, sequence_tokens) | {"parity_seq_len": sequence_tokens}
            if found[name]["parity"]:
                job.tell(f"{name} within {_far(found[name]):g} of plain training")
    return found


def _parity(team: Team, sequence_tokens: int) -> Parity:
    try:
        found = team.check(sequence_tokens)
    except Absent as error:
        return {"parity": False, "status": "not applicable", "reason": str(error)}
    except FAILURES as error:
        return {"parity": False, "reason": why_lost(error)}
    far = _far(found)
    sound = far <= team.tolerance and found.get("versions_as_reference", True)
    reason = None if sound else f"it does not train as plain training does: off by {far:g}"
    reason = found.get("reason") or reason
    return found | {"parity": reason is None, "reason": reason}


def _far(found: Parity) -> float:
    """A contender's distance from plain training: the largest of the compared quantities."""
    return max(found[key] for key in (*DIFFERENCES, ON_DEVICE) if key in found)


def without(job: Job, parities: Mapping[str, Parity]) -> Job:
    """The job of the contenders that may take part."""
    return replace(job, entrants=tuple(entrant for entrant in job.entrants if parities[entrant.name]["parity"]))
