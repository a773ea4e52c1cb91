"""Teams: entrants ready to run a step, all resident side by side.

Nobody recomputes and nobody steps the optimizer: a step is the forwards and backwards of one table.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from rpbench.cost.table import CostTable
from rpbench.engine.backends.cpu import CpuBackend, bind
from rpbench.engine.executor import execute
from rpbench.engine.measure.action_times import measured_costs
from rpbench.engine.measure.other_load import ForeignLoad
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import verified
from rpbench.ir.timeline import Timeline
from rpbench.run.modes.duel.team import Parity, shortened
from rpbench.run.modes.torch_duel.sample import StepSample
from rpbench.torch_runtime.own_schedules import ONE_STAGE
from rpbench.torch_runtime.ranks import Ranks
from rpbench.torch_runtime.replay import (
    TimeParts,
    predicted_makespan,
    profiled_costs,
    replay_makespan,
    time_parts,
    unexplained,
)
from rpbench.torch_runtime.request import TorchRequest
from rpbench.torch_runtime.resident import StepRequest, cpu_s


class RankTeam:
    """A table, or torch's own schedule, on ranks that hold the other entrants as well.

    Args:
        name: of the resident.
        cores: which the ranks compute on.
    """

    def __init__(self, name: str, request: TorchRequest, ranks: Ranks, cores: Sequence[int]) -> None:
        self._asked, self._ranks, self._cores = StepRequest(name, request), ranks, cores
        self._costs: CostTable | None = None
        self._is_warm = False
        self.tolerance = 0.0 if request.order_of == "table" else 1e-6  # another order may add in another order

    def check(self, sequence_tokens: int) -> Parity:
        """How far it is from plain training, on short sequences."""
        request = self._asked.request
        short = replace(request, model={**request.model, "seq_len": sequence_tokens}, verify=True, optimizer={})
        found = self._ranks.run(short).answer
        return {key: found[key] for key in ("grad_max_abs_diff", "weight_max_abs_diff")}

    def run(self) -> StepSample:
        """One step."""
        if not self._is_warm:
            self._ranks.step(self._asked)
            for pid, core in zip(self._ranks.pids, cycle(self._cores), strict=False):
                bind(pid, core)  # the thread that computes; those of its messages go where the system puts them
            self._is_warm = True
        with ForeignLoad(self._ranks.pids) as foreign:
            found = self._ranks.step(self._asked)
        timeline, table = found.timeline(), self._asked.request.lowered.table
        wall_s, replay_s = found.wall_s(), replay_makespan(timeline)
        predicted_s = None if self._costs is None else predicted_makespan(table, self._costs)
        self._costs = profiled_costs(timeline, found.hop_s)
        parts = time_parts(found)
        if self._asked.request.order_of in ONE_STAGE:  # whose messages are not recorded apart
            parts = _all_late(parts, wall_s, len(self._ranks.pids))
        return StepSample(
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
    """The same table on our engine, a thread a rank.

    Args:
        costs: that order what the engine's program is made of.
    """

    tolerance = 0.0

    def __init__(self, request: TorchRequest, costs: CostTable, backend: CpuBackend) -> None:
        self._table, self._workload = request.lowered.table, request.workload()
        self._order, self._backend = costs, backend
        self._costs: CostTable | None = None

    def check(self, sequence_tokens: int) -> Parity:
        """How far it is from plain training, on short sequences."""
        short = shortened(self._workload, sequence_tokens)
        training = Training(short, self._table, Settings(recompute="none", keep_gradients=True))
        self._execute(training)
        return verified(training)

    def run(self) -> StepSample:
        """One step."""
        training = Training(self._workload, self._table, Settings(recompute="none"))
        with ForeignLoad() as foreign:
            used, began = time.process_time(), time.perf_counter()
            timeline = self._execute(training)
            wall_s, used = time.perf_counter() - began, time.process_time() - used
        replay_s = replay_makespan(timeline)
        predicted_s = None if self._costs is None else predicted_makespan(self._table, self._costs)
        self._costs = measured_costs(timeline, recompute_ahead=False)
        return StepSample(
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
    """What a step on threads took longer than its replay: they have no messages, and wait between actions."""
    num_ranks = timeline.schedule.shape.num_ranks
    computing = sum(float(span.end - span.start) for span in timeline.spans())
    parts = TimeParts(computing, 0.0, 0.0, 0.0, 0.0, timeline.schedule.num_actions)
    return unexplained(wall_s, replay_s, _all_late(parts, wall_s, num_ranks), num_ranks)


def _all_late(parts: TimeParts, wall_s: float, num_ranks: int) -> TimeParts:
    """The parts of a step in which computations alone are recorded: whatever else there is, is waiting."""
    waiting = num_ranks * wall_s - parts.computing - parts.after
    return replace(parts, waiting=waiting, messages=0.0, between=0.0)
