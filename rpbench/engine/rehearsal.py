"""Rehearsal: whether a schedule, a workload and the settings make a run, found before any tensor is there."""

from dataclasses import replace

from rpbench.cost.table import CostTable
from rpbench.engine.executor import check_kinds
from rpbench.engine.training import Settings, Training
from rpbench.engine.verification import check_reference
from rpbench.engine.workload import Workload
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.schedule import Schedule


def rehearse(
    workload: Workload,
    schedule: Schedule | Analysis,
    settings: Settings,
    costs: CostTable,
    *,
    real_time: bool = False,
    verify: bool = False,
) -> None:
    """Refuse what `Training` and `execute` would, and what no reference is for where one is asked for.

    Args:
        workload: its modules may be on the device `meta`: nothing is computed.
        schedule: with its partition.
        real_time: whether the backend runs on a real clock (`Training.program`).
        verify: whether the run is to be held against plain training.

    Raises:
        ValueError: with the value, the rule and a way out; a device with too little memory is no such case.
    """
    analysis = analysed(schedule)
    training = Training(workload, analysis, replace(settings, device_memory_bytes=None))
    program = training.program(costs, real_time=real_time)
    check_kinds(program, training.handlers)
    if verify:
        check_reference(training)
