"""Emulation: the same schedules on the engine's threads, every action a sleep of its profiled time."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.executor import execute
from rpbench.engine.program import make_program
from rpbench.plan.whole import WholePlan


def emulated_makespans(plans: Mapping[str, WholePlan]) -> dict[str, float]:
    """Seconds each plan takes; all at once, because sleeping takes no core."""
    if not plans:
        return {}
    with ThreadPoolExecutor(len(plans)) as pool:
        return dict(zip(plans, pool.map(_emulated, plans.values()), strict=True))


def _emulated(plan: WholePlan) -> float:
    with EmulatedBackend(plan.costs) as backend:
        return float(execute(make_program(plan.schedule, plan.costs), backend.handlers, backend).makespan)
