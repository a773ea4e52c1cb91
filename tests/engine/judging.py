"""What becomes of a schedule's text: refused with a sentence, trained as plain training does, or a fault of ours."""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch
from torch import nn
from torch.nn import functional
from training_cases import TINY, uneven_costs

from rpbench.cost.table import CostTable, Work
from rpbench.engine.backends.threads import use_one_core
from rpbench.engine.backends.virtual import Together, run_clock
from rpbench.engine.executor import Perform, execute
from rpbench.engine.program import Program
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import rehearse, verified
from rpbench.engine.workload import Workload
from rpbench.ir.analysis import peak_resident
from rpbench.ir.checks.residency import moves_activations
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.passes.recomputation import Recompute, check_nothing_leaves, check_recompute
from rpbench.sim.checked import checked_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import measure
from rpbench.torch_runtime.formats.tables import read_schedule

LIMIT_S = 300  # of the wall clock: nothing waits that long, on however busy a machine


class Hang(BaseException):
    """A run that did not come to its end."""


@dataclass
class Verdict:
    """What happened: "refused", "same", "wrong", "crash" or "hang", and the sentence or the difference."""

    what: str
    detail: str = ""


def judged(text: str, rng: random.Random) -> Verdict:
    """Read, check, simulate and train a schedule in text form, its actions in any order that its edges allow."""
    try:
        with limited(LIMIT_S):
            return _judged(text, rng)
    except Hang:
        return Verdict("hang")
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {error}")


def _judged(text: str, rng: random.Random) -> Verdict:
    try:
        schedule = read_schedule(text)
        graph, _ = checked_graph(schedule)
        if schedule.partition is None:
            schedule = schedule.with_partition(symmetric((1,) * schedule.shape.num_stages))
        workload, settings, costs = workload_of(schedule), _settings(schedule, rng), uneven_costs(schedule)
        rehearse(_without_values(workload), schedule, settings, costs, real_time=True, verify=True)
    except ValueError as error:
        return Verdict("refused", str(error))
    training = Training(workload, schedule, settings)
    program = training.program(costs, real_time=True)
    measure(graph, simulate_graph(graph, costs), costs, switch_after_last_forward=False)
    if moves_activations(schedule):
        peak_resident(graph.analysis)
    execute(program, training.handlers, ShuffledBackend(rng.randrange(2**30)))
    found = verified(training)
    same = found["grad_max_abs_diff"] == found["weight_max_abs_diff"] == 0.0 and found["versions_as_reference"]
    left = training.passes.num_left
    return Verdict("same" if same and not left else "wrong", f"{found}, {left} tensors left")


def _settings(schedule: Schedule, rng: random.Random) -> Settings:
    """Any settings that the schedule takes."""
    recompute: Recompute = rng.choice(["all", "all", "none", "except_last"])
    recompute = "all" if schedule.shape.num_parts > 1 or schedule.shape.tensor_parallel else recompute
    try:
        check_recompute(schedule, recompute)
        if recompute != "all":
            check_nothing_leaves(schedule, recompute, {"P", "G"})
    except ValueError:
        recompute = "all"
    optimizer = OptimizerSettings(1e-2, clip_norm=rng.choice([None, None, 0.1]))
    return Settings(
        optimizer,
        recompute_grain=rng.choice(["stage", "stage", "layer"]),
        recompute=recompute,
        keep_gradients=True,
    )


def _without_values(workload: Workload) -> Workload:
    return replace(workload, modules=list(deepcopy(nn.Sequential(*workload.modules)).to("meta")))


class ShuffledBackend:
    """A virtual clock on which every action takes a random time: whatever an edge does not order comes in any order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def run(self, program: Program, perform: Perform) -> Timeline:
        works = [Work(Fraction(self._rng.choice((0, 1, 1, 7, 31))), Fraction(0)) for _ in program.waits]
        with Together(program, perform, use_one_core) as joint:
            return run_clock(program, works, joint.perform, CostTable({}))


def workload_of(schedule: Schedule) -> Workload:
    """Random weights and tokens for a schedule, in float64."""
    shape, partition = schedule.shape, schedule.partition
    assert partition is not None
    shares = shape.num_ranks * shape.tensor_parallel
    whole = shape.num_parts == 1 and not shape.num_head_shards and not shape.tensor_parallel
    return _workload(partition.num_layers, shares, shape.num_microbatches, whole=whole)


@cache
def _workload(num_layers: int, num_shards: int, num_microbatches: int, *, whole: bool) -> Workload:
    seq_len = 2 * num_shards or TINY.seq_len  # which tensor parallelism may cut along the sequence
    tokens = SyntheticTokens(TINY.vocab, seq_len, 2, 0)
    if whole:
        layers = [_Layer(TINY.hidden) for _ in range(num_layers)]
        modules = [nn.Embedding(TINY.vocab, TINY.hidden), *layers, _Head(TINY.hidden, TINY.vocab)]
        return Workload(list(nn.Sequential(*modules).double()), tokens, num_microbatches)
    model = replace(TINY, num_layers=num_layers)
    if num_shards:
        model = replace(
            model, seq_len=seq_len, heads=num_shards, key_value_heads=num_shards, head_dim=4, inner=4 * num_shards
        )
    return Workload(list(build_model(model, seed=0, dtype=torch.float64)), tokens, num_microbatches)


class _Layer(nn.Module):
    """As little as a layer can be: most schedules ask for no more."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class _Head(nn.Module):
    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, vocab)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` after some time; on the main thread alone."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
