"""Survey: what else is predicted of every plan: by the machine calibrated between the starts, and by emulation.

Emulated, the same schedules run on the engine's threads, every action a sleep of its profiled time.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rpbench.config.request import load
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.machine import Machine
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.executor import execute
from rpbench.engine.measure.calibration import Calibration
from rpbench.engine.program import make_program
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.plan.whole import WholePlan
from rpbench.run.cluster_file import cluster_of, to_text
from rpbench.sim.longest_path import simulate
from rpbench.workload.architecture import Architecture

NAME = "this_machine"


@dataclass
class Survey:
    """Calibrations of one duel, each with the cluster that its file would hold.

    Args:
        measure: calibrates the machine.
        model, num_tokens: what the contenders train, and the tokens of a microbatch.
        num_devices: of the duel.
    """

    measure: Callable[[], Calibration]
    model: Architecture
    num_tokens: int
    num_devices: int
    found: list[tuple[Calibration, Machine]] = field(default_factory=list)

    def __call__(self) -> None:
        """Calibrate once more."""
        calibration = self.measure()
        self.found.append((calibration, cluster_of(NAME, calibration, {"num_devices": self.num_devices})))

    @property
    def foreign_cores(self) -> list[float | None]:
        """What other programs had of the machine during each."""
        return [calibration.foreign_cores for calibration, _ in self.found]

    def first_file(self) -> str:
        """The cluster file of the calibration before the first round."""
        calibration, cluster = self.found[0]
        return to_text(
            cluster, "python -m rpbench calibrate, before the first round of a duel", calibration.foreign_cores
        )

    def makespans(self, plan: WholePlan, *, waits: bool = True) -> list[float]:
        """Seconds a plan takes by each calibration.

        Args:
            waits: without, what every device has to do is all there is: perfect balance, and no dependencies.
        """
        return [self._makespan(plan, cluster, waits) for _, cluster in self.found]

    def _makespan(self, plan: WholePlan, cluster: Machine, waits: bool) -> float:
        cost = load(["cost=analytic"]).cost
        numbers = make_basis(cluster, cost.constants, cost.declared)
        times = times_of(setting_of(self.model, self.num_tokens, numbers, "engine"))
        assert plan.schedule.partition is not None
        timeline = simulate(
            plan.schedule,
            times.table(
                plan.schedule.partition,
                recompute_ahead=plan.costs.recompute_ahead,
                fused_ahead=plan.costs.fused_ahead,
                num_head_shards=plan.schedule.shape.num_head_shards,
                keeps_last=plan.keeps_last,
            ),
        )
        if waits:
            return float(timeline.makespan)
        return sum(float(span.end - span.start) for span in timeline.spans()) / plan.schedule.shape.num_ranks


def emulated_makespans(plans: Mapping[str, WholePlan]) -> dict[str, float]:
    """Seconds each plan takes; all at once, because sleeping takes no core."""
    if not plans:
        return {}
    with ThreadPoolExecutor(len(plans)) as pool:
        return dict(zip(plans, pool.map(_emulated, plans.values()), strict=True))


def _emulated(plan: WholePlan) -> float:
    with EmulatedBackend(plan.costs) as backend:
        return float(execute(make_program(plan.schedule, plan.costs), backend.handlers, backend).makespan)
