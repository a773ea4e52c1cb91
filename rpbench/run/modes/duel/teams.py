"""Teams: contenders ready to run, all resident side by side, and what a run of one takes."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Protocol

from baselines.systems.case import Case
from rpbench.cost.table import CostTable
from rpbench.engine.backends.threads import CpuBackend, bind
from rpbench.engine.backends.virtual import replay_clock
from rpbench.engine.executor import execute
from rpbench.engine.measure.profiles import measured_costs
from rpbench.engine.measure.stopwatch import ForeignLoad
from rpbench.engine.program import Program
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import verified
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.timeline import Timeline
from rpbench.models.data import SyntheticTokens
from rpbench.plan.whole import WholePlan
from rpbench.sim.longest_path import simulate
from rpbench.torch_runtime.processes.ranks import Ranks
from rpbench.torch_runtime.processes.worker import StepRequest, cpu_s
from rpbench.torch_runtime.recorded.outcome import (
    TimeParts,
    replay_makespan,
    time_parts,
    unexplained,
)
from rpbench.torch_runtime.request import ONE_STAGE, TorchRequest

Parity = dict[str, Any]
DIFFERENCES = ("grad_max_abs_diff", "weight_max_abs_diff")
# On accelerators: AdamW makes of a rounding of a gradient near its epsilon up to a whole step of the weights.
ON_DEVICE = "device_grad_max_rel_diff"


class Absent(ValueError):
    """A contender is not installed here, or has not what it runs on."""


@dataclass(frozen=True)
class Sample:
    """One run of a contender: all steps, the optimizer's among them; in a torch duel one step without it.

    Args:
        wall_s: by the clock on the wall.
        replay_s: what the actions' processor times give on the same action graph, whatever else the machine did; in a
            torch duel the graph timed with the step's own durations, by the clock on the wall; None on accelerators.
        cpu_s: these times together; in a torch duel what all threads of the processes that ran it used.
        elapsed_s: that passed in which other programs were watched.
        others_s: processor time that they had meanwhile; None where the system does not say.
        loss: of the last step; None if it is not ours to know.
        predicted_s: the simulator's, from the durations in this contender's step before; None for the first.
        missing: rank-seconds that the replay does not explain, by name; None where not asked for.
    """

    wall_s: float
    replay_s: float | None
    cpu_s: float
    elapsed_s: float
    others_s: float | None
    loss: float | None = None
    predicted_s: float | None = None
    missing: Mapping[str, float] | None = None


class Team(Protocol):
    """A contender that can be run any number of times."""

    tolerance: float

    def check(self, sequence_tokens: int) -> Parity:
        """How far it is from plain training, on short sequences."""

    def run(self) -> Sample:
        """Train once, from the same weights every time."""


class EngineTeam:
    """A plan on our engine, a thread a device; unless it `waits`, each device has its part of the work without gaps."""

    tolerance = 0.0  # bit for bit

    def __init__(
        self, plan: WholePlan, workload: Workload, settings: Settings, backend: CpuBackend, *, waits: bool = True
    ) -> None:
        self.plan, self._workload, self._settings, self._backend = plan, workload, settings, backend
        self._waits = waits

    def check(self, sequence_tokens: int) -> Parity:
        training = Training(
            shortened(self._workload, sequence_tokens), self.plan.schedule, replace(self._settings, keep_gradients=True)
        )
        execute(training.program(self.plan.costs, real_time=True), training.handlers, self._backend)
        return verified(training)

    def run(self) -> Sample:
        training = Training(self._workload, self.plan.schedule, self._settings)
        program = training.program(self.plan.costs, real_time=True)
        with ForeignLoad() as foreign:
            began = time.perf_counter()
            timeline = execute(program, training.handlers, self._backend)
            wall_s = time.perf_counter() - began
        cpu_s = [sum(both) for both in zip(self._backend.pre_cpu_s, self._backend.main_cpu_s, strict=True)]
        replayed = replay_clock(program, self._backend.pre_cpu_s, self._backend.main_cpu_s)
        loss = training.mean_loss(training.schedule.shape.num_steps - 1)
        sample = Sample(wall_s, float(replayed.makespan), sum(cpu_s), foreign.elapsed_s, foreign.others_s, loss)
        if self._waits:
            return sample
        num_devices = self.plan.schedule.shape.num_ranks
        busy_s = sum(span.end - span.start for span in timeline.spans())
        return replace(sample, wall_s=busy_s / num_devices, replay_s=sample.cpu_s / num_devices)


class _OnRanks:
    """A contender on processes, which compute on some cores."""

    def __init__(self, ranks: Ranks, cores: Sequence[int]) -> None:
        self._ranks, self._cores, self._is_warm = ranks, cores, False

    def _warm_up(self, run: Callable[[], Any]) -> None:
        """Run once before the first run, which starts the thread of every rank that computes."""
        if not self._is_warm:
            run()
            for pid, core in zip(self._ranks.pids, cycle(self._cores), strict=False):
                bind(pid, core)  # the thread that computes; those of its messages go where the system puts them
            self._is_warm = True


class SystemTeam(_OnRanks):
    """Another runtime, by its adapter in `baselines.systems`, on processes of its own.

    `tolerance` is how far it may be from plain training in what is `compared`: it may add in another order.
    """

    def __init__(
        self,
        case: Case,
        ranks: Ranks,
        cores: Sequence[int],
        tolerance: float = 1e-6,
        compared: Sequence[str] = DIFFERENCES,
    ) -> None:
        super().__init__(ranks, cores)
        self._case, self.tolerance, self._compared = case, tolerance, compared

    def check(self, sequence_tokens: int) -> Parity:
        short = replace(self._case, model={**self._case.model, "seq_len": sequence_tokens}, verify=True)
        answers = self._ranks.run_case(short)
        return {key: max(answer[key] for answer in answers) for key in self._compared}

    def run(self) -> Sample:
        return self._sampled()[0]

    def _sampled(self) -> tuple[Sample, list[Any]]:
        """A run without a replay, and what every rank answers."""
        self._warm_up(lambda: self._ranks.run_case(self._case))
        with ForeignLoad(self._ranks.pids) as foreign:
            answers = self._ranks.run_case(self._case)
        wall_s = max(answer["wall_s"] for answer in answers)
        cpu_s = sum(answer["cpu_s"] for answer in answers)
        return Sample(wall_s, None, cpu_s, foreign.elapsed_s, foreign.others_s), answers


class TorchTeam(SystemTeam):
    """torch's Schedule1F1B on processes, with the partition of a plan.

    Its replay is that of its forwards, backwards and steps on our 1F1B's graph: messages between its ranks take no
    processor time there.
    """

    def __init__(self, plan: WholePlan, case: Case, ranks: Ranks, program: Program, cores: Sequence[int]) -> None:
        super().__init__(case, ranks, cores)
        self.plan, self._program = plan, program

    def run(self) -> Sample:
        sample, answers = self._sampled()
        took = self._cpu_by_action([action for answer in answers for action in answer["actions"]])
        replayed = replay_clock(self._program, [0.0] * len(took), took)
        return replace(sample, replay_s=float(replayed.makespan))

    def _cpu_by_action(self, actions: Sequence[tuple[str, int, int, float]]) -> list[float]:
        """Processor time of every action of our program; torch counts microbatches within a step."""
        window = self._case.num_microbatches
        seen: Counter[tuple[str, int, int]] = Counter()
        took: dict[tuple[str, int, int], float] = {}
        for kind, stage, number, used_s in actions:
            step = seen[kind, stage, number]
            seen[kind, stage, number] += 1
            took[kind, stage, step + 1 if kind == "STEP" else step * window + number] = used_s
        return [
            took[
                action.kind.name, action.stage, (action.version if action.kind is Kind.STEP else action.microbatch) or 0
            ]
            for action in self._program.actions
        ]


class RankTeam(_OnRanks):
    """A table, or torch's own schedule, on ranks that hold the other entrants as well, by the name of its resident.

    There is no recomputation and no optimizer step: a step is the forwards and backwards of one table.
    """

    def __init__(self, name: str, request: TorchRequest, ranks: Ranks, cores: Sequence[int]) -> None:
        super().__init__(ranks, cores)
        self._asked = StepRequest(name, request)
        self._costs: CostTable | None = None
        self.tolerance = 0.0 if request.order_of == "table" else 1e-6  # another order may add in another order

    def check(self, sequence_tokens: int) -> Parity:
        request = self._asked.request
        short = replace(request, model={**request.model, "seq_len": sequence_tokens}, verify=True, optimizer={})
        found = self._ranks.run(short).answer
        return {key: found[key] for key in DIFFERENCES}

    def run(self) -> Sample:
        self._warm_up(lambda: self._ranks.step(self._asked))
        with ForeignLoad(self._ranks.pids) as foreign:
            found = self._ranks.step(self._asked)
        timeline, table = found.timeline(), self._asked.request.lowered.table
        wall_s, replay_s = found.wall_s(), replay_makespan(timeline)
        predicted_s = None if self._costs is None else float(simulate(table, self._costs).makespan)
        # torch's own split functions: the first stage's I does nothing and its W is the whole backward, and the members
        # of an overlap run one after the other. Both are in the times, so nothing is gained by an overlap.
        self._costs = measured_costs(timeline, recompute_ahead=False, hop_s=found.hop_s)
        parts = time_parts(found)
        if self._asked.request.order_of in ONE_STAGE:  # whose messages are not recorded apart
            parts = _all_late(parts, wall_s, len(self._ranks.pids))
        return Sample(
            wall_s,
            replay_s,
            cpu_s(found.answer),
            foreign.elapsed_s,
            foreign.others_s,
            found.losses[-1],
            predicted_s,
            unexplained(wall_s, replay_s, parts, len(self._ranks.pids)),
        )


class ThreadTeam:
    """The same schedule on our engine, a thread a rank; the costs order what its program is made of."""

    tolerance = 0.0

    def __init__(self, request: TorchRequest, costs: CostTable, backend: CpuBackend) -> None:
        self._table, self._workload = request.lowered.table, request.workload()
        self._order, self._backend = costs, backend
        self._costs: CostTable | None = None

    def check(self, sequence_tokens: int) -> Parity:
        short = shortened(self._workload, sequence_tokens)
        training = Training(short, self._table, Settings(recompute="none", keep_gradients=True))
        self._execute(training)
        found = verified(training)
        return {key: found[key] for key in DIFFERENCES}

    def run(self) -> Sample:
        training = Training(self._workload, self._table, Settings(recompute="none"))
        with ForeignLoad() as foreign:
            used, began = time.process_time(), time.perf_counter()
            timeline = self._execute(training)
            wall_s, used = time.perf_counter() - began, time.process_time() - used
        replay_s = replay_makespan(timeline)
        predicted_s = None if self._costs is None else float(simulate(self._table, self._costs).makespan)
        self._costs = measured_costs(timeline, recompute_ahead=False)
        return Sample(
            wall_s,
            replay_s,
            used,
            foreign.elapsed_s,
            foreign.others_s,
            training.mean_loss(0),
            predicted_s,
            _of_threads(timeline, wall_s, replay_s),
        )

    def _execute(self, training: Training) -> Any:
        return execute(training.program(self._order, real_time=True), training.handlers, self._backend)


def _of_threads(timeline: Timeline, wall_s: float, replay_s: float) -> dict[str, float]:
    """The time by which a step on threads exceeds its replay: they have no messages, and wait between actions."""
    num_ranks = timeline.schedule.shape.num_ranks
    computing = sum(float(span.end - span.start) for span in timeline.spans())
    parts = TimeParts(computing, 0.0, 0.0, 0.0, 0.0)
    return unexplained(wall_s, replay_s, _all_late(parts, wall_s, num_ranks), num_ranks)


def _all_late(parts: TimeParts, wall_s: float, num_ranks: int) -> TimeParts:
    """The parts of a step in which only computations are recorded: all the rest is waiting."""
    waiting = num_ranks * wall_s - parts.computing - parts.after
    return replace(parts, waiting=waiting, messages=0.0, between=0.0)


def shortened(workload: Workload, sequence_tokens: int) -> Workload:
    """The model on sequences of another length, which the order of computation does not depend on."""
    data = workload.data
    if not isinstance(data, SyntheticTokens):
        return workload
    sequences, _ = data.shape
    return replace(workload, data=SyntheticTokens(data.vocab, sequence_tokens, sequences, data.seed))
