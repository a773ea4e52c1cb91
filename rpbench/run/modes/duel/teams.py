"""Teams: contenders that are ready to run, all resident side by side, and the times of their runs."""

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
from rpbench.torch_runtime.recorded.outcome import TimeParts, replay_makespan, time_parts, unexplained
from rpbench.torch_runtime.request import ONE_STAGE, TorchRequest

Parity = dict[str, Any]
DIFFERENCES = ("grad_max_abs_diff", "weight_max_abs_diff")
# On accelerators gradients are compared, not weights: AdamW can turn the rounding of a gradient near its epsilon into a
# whole step of the weights.
ON_DEVICE = "device_grad_max_rel_diff"


class Absent(ValueError):
    """The package or the device of a contender is missing."""


@dataclass(frozen=True)
class Sample:
    """One run of a contender: all steps with the optimizer's; in a torch duel one step without the optimizer's."""

    wall_s: float
    # makespan of the action graph with the actions' processor times, so without disturbance by other programs; in a
    # torch duel with the wall-clock durations of the step; None on accelerators
    replay_s: float | None
    cpu_s: float  # these times together; in a torch duel the processor time of all threads of the processes that ran it
    elapsed_s: float  # time in which other programs were watched
    others_s: float | None  # processor time of other programs meanwhile; None where unknown
    # simulated from the durations in the step before of this contender; None for the first step
    predicted_s: float | None = None
    missing: Mapping[str, float] | None = None  # rank-seconds that the replay does not explain, by cause


class Team(Protocol):
    """A contender that can be run any number of times."""

    tolerance: float  # largest distance from plain training

    def check(self, sequence_tokens: int) -> Parity:
        """Its distance from plain training, on short sequences."""

    def run(self) -> Sample:
        """Train once, from the same weights every time."""


class EngineTeam:
    """A plan on our engine, a thread a device; unless it `waits`, times are those of computation without gaps."""

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
        took = self._backend.pre_cpu_s, self._backend.main_cpu_s
        replay_s, used = float(replay_clock(program, *took).makespan), sum(map(sum, zip(*took, strict=True)))
        sample = Sample(wall_s, replay_s, used, foreign.elapsed_s, foreign.others_s)
        if self._waits:
            return sample
        num_devices = self.plan.schedule.shape.num_ranks
        busy_s = sum(span.end - span.start for span in timeline.spans())
        return replace(sample, wall_s=busy_s / num_devices, replay_s=sample.cpu_s / num_devices)


class _OnRanks:
    """A contender on processes that compute on the given cores."""

    def __init__(self, ranks: Ranks, cores: Sequence[int]) -> None:
        self._ranks, self._cores, self._is_warm = ranks, cores, False

    def _warm_up(self, run: Callable[[], Any]) -> None:
        """Run once before the first run: this starts the threads that compute, which are then bound to cores."""
        if not self._is_warm:
            run()
            for pid, core in zip(self._ranks.pids, cycle(self._cores), strict=False):
                bind(pid, core)  # the computing thread; the system places those for messages
            self._is_warm = True


class SystemTeam(_OnRanks):
    """Another runtime on processes of its own, by its adapter in `baselines.systems`.

    It may add in another order than plain training: what is `compared` may differ by `tolerance`.
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
        """A run without a replay, and the answers of all ranks."""
        self._warm_up(lambda: self._ranks.run_case(self._case))
        with ForeignLoad(self._ranks.pids) as foreign:
            answers = self._ranks.run_case(self._case)
        wall_s = max(answer["wall_s"] for answer in answers)
        cpu_s = sum(answer["cpu_s"] for answer in answers)
        return Sample(wall_s, None, cpu_s, foreign.elapsed_s, foreign.others_s), answers


class TorchTeam(SystemTeam):
    """torch's Schedule1F1B on processes, with the partition of a plan.

    Its forwards, backwards and steps are replayed on the graph of our 1F1B, where messages take no processor time.
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
    """A table, or torch's own schedule, on ranks that also hold the other entrants, each under its name.

    A step is the forwards and backwards of one table, without recomputation and optimizer.
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
        # With torch's split functions the first stage's I does nothing and its W is the whole backward, and the parts
        # of an overlapped pair run one after the other. The times contain both, so nothing is gained by an overlap.
        self._costs = measured_costs(timeline, recompute_ahead=False, hop_s=found.hop_s)
        parts = time_parts(found)
        if self._asked.request.order_of in ONE_STAGE:  # their messages are not recorded separately
            parts = _all_late(parts, wall_s, len(self._ranks.pids))
        missing = unexplained(wall_s, replay_s, parts, len(self._ranks.pids))
        used = cpu_s(found.answer)
        return Sample(wall_s, replay_s, used, foreign.elapsed_s, foreign.others_s, predicted_s, missing)


class ThreadTeam:
    """The same schedule on our engine, a thread a rank; `costs` order the actions of its program."""

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
        # Threads have no messages, and wait between actions.
        num_ranks = timeline.schedule.shape.num_ranks
        computing = sum(float(span.end - span.start) for span in timeline.spans())
        parts = _all_late(TimeParts(computing, 0.0, 0.0, 0.0, 0.0), wall_s, num_ranks)
        missing = unexplained(wall_s, replay_s, parts, num_ranks)
        return Sample(wall_s, replay_s, used, foreign.elapsed_s, foreign.others_s, predicted_s, missing)

    def _execute(self, training: Training) -> Timeline:
        return execute(training.program(self._order, real_time=True), training.handlers, self._backend)


def _all_late(parts: TimeParts, wall_s: float, num_ranks: int) -> TimeParts:
    """The parts of a step where only computation is recorded: all the rest is waiting."""
    waiting = num_ranks * wall_s - parts.computing - parts.after
    return replace(parts, waiting=waiting, messages=0.0, between=0.0)


def shortened(workload: Workload, sequence_tokens: int) -> Workload:
    """The workload on sequences of another length; the order of computation stays the same."""
    data = workload.data
    if not isinstance(data, SyntheticTokens):
        return workload
    sequences, _ = data.shape
    return replace(workload, data=SyntheticTokens(data.vocab, sequence_tokens, sequences, data.seed))
