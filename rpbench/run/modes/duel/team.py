"""Teams: contenders ready to run."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, Protocol

from baselines.systems.case import Case
from baselines.systems.ranks import Ranks
from rpbench.engine.backends.cpu import CpuBackend, bind
from rpbench.engine.backends.virtual import replay_clock
from rpbench.engine.executor import execute
from rpbench.engine.measure.other_load import ForeignLoad
from rpbench.engine.program import Program
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import verified
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.models.data import SyntheticTokens
from rpbench.plan.whole import WholePlan
from rpbench.run.modes.duel.sample import Sample

Parity = dict[str, Any]


class Team(Protocol):
    """A contender that can be run any number of times."""

    tolerance: float

    def check(self, sequence_tokens: int) -> Parity:
        """How far it is from plain training, on short sequences."""

    def run(self) -> Sample:
        """Train once, from the same weights every time."""


class EngineTeam:
    """A plan on our engine: a thread a device."""

    tolerance = 0.0  # bit for bit

    def __init__(self, plan: WholePlan, workload: Workload, settings: Settings, backend: CpuBackend) -> None:
        self.plan, self._workload, self._settings, self._backend = plan, workload, settings, backend

    def check(self, sequence_tokens: int) -> Parity:
        training = Training(
            shortened(self._workload, sequence_tokens),
            self.plan.schedule,
            replace(self._settings, keep_gradients=True),
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
        loss = self._last_loss(training)
        sample = Sample(wall_s, float(replayed.makespan), sum(cpu_s), foreign.elapsed_s, foreign.others_s, loss)
        busy_s = sum(span.end - span.start for span in timeline.spans())
        return self._counted(sample, busy_s)

    def _counted(self, sample: Sample, busy_s: float) -> Sample:
        return sample

    def _last_loss(self, training: Training) -> float:
        return training.mean_loss(training.schedule.shape.num_steps - 1)


class LimitTeam(EngineTeam):
    """The same actions without any waiting: half of them on each of two threads, whatever is between them left out."""

    def _counted(self, sample: Sample, busy_s: float) -> Sample:
        num_devices = self.plan.schedule.shape.num_ranks
        return replace(sample, wall_s=busy_s / num_devices, replay_s=sample.cpu_s / num_devices)


class TorchTeam:
    """torch's Schedule1F1B on processes, with the partition of a plan.

    Its replay is that of its forwards, backwards and steps on our 1F1B's graph: messages between its ranks take no
    processor time there.
    """

    tolerance = 1e-6  # another engine may add in another order

    def __init__(self, plan: WholePlan, case: Case, ranks: Ranks, program: Program, cores: Sequence[int]) -> None:
        self.plan, self._case, self._ranks, self._program, self._cores = plan, case, ranks, program, cores
        self._is_warm = False

    def check(self, sequence_tokens: int) -> Parity:
        short = replace(self._case, model={**self._case.model, "seq_len": sequence_tokens}, verify=True)
        answers = self._ranks.run(short)
        self._is_warm = False
        return {key: max(answer[key] for answer in answers) for key in ("grad_max_abs_diff", "weight_max_abs_diff")}

    def run(self) -> Sample:
        if not self._is_warm:
            self._ranks.run(self._case)
            for pid, core in zip(self._ranks.pids, cycle(self._cores), strict=False):
                bind(pid, core)  # the thread that computes; those of its messages go where the system puts them
            self._is_warm = True
        with ForeignLoad(self._ranks.pids) as foreign:
            answers = self._ranks.again()
        took = self._cpu_by_action([action for answer in answers for action in answer["actions"]])
        replayed = replay_clock(self._program, [0.0] * len(took), took)
        wall_s = max(answer["wall_s"] for answer in answers)
        cpu_s = sum(answer["cpu_s"] for answer in answers)
        return Sample(wall_s, float(replayed.makespan), cpu_s, foreign.elapsed_s, foreign.others_s)

    def _cpu_by_action(self, actions: Sequence[tuple[str, int, int, float]]) -> list[float]:
        """Processor time of every action of our program; torch counts microbatches within a step."""
        window = self._case.num_microbatches
        seen: Counter[tuple[str, int, int]] = Counter()
        took: dict[tuple[str, int, int], float] = {}
        for kind, stage, number, cpu_s in actions:
            step = seen[kind, stage, number]
            seen[kind, stage, number] += 1
            took[kind, stage, step + 1 if kind == "STEP" else step * window + number] = cpu_s
        return [
            took[
                action.kind.name, action.stage, (action.version if action.kind is Kind.STEP else action.microbatch) or 0
            ]
            for action in self._program.actions
        ]


def shortened(workload: Workload, sequence_tokens: int) -> Workload:
    """The same model on sequences of so many tokens; what is computed in which order does not depend on it."""
    data = workload.data
    if not isinstance(data, SyntheticTokens):
        return workload
    sequences, _ = data.shape
    return replace(workload, data=SyntheticTokens(data.vocab, sequence_tokens, sequences, data.seed))
