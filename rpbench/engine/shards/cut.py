"""What devices that share the head, or every matrix, have of a workload and of a state to go on from."""

from dataclasses import replace

from rpbench.engine.shards import cut_head, cut_layers
from rpbench.engine.state.checkpoint import State
from rpbench.engine.workload import Workload
from rpbench.ir.schedule import Schedule


def cut(workload: Workload, schedule: Schedule, start: State | None) -> tuple[Workload, State | None]:
    """The workload, and what to go on from, as devices that share the head or every matrix have them."""
    if schedule.shape.num_head_shards:
        workload = cut_head.cut_head(workload, schedule)
        start = start and cut_head.cut_state(start, workload)
    if schedule.shape.tensor_parallel:
        workload = cut_layers.cut_workload(workload, schedule)
        start = start and cut_layers.cut_state(start, workload, schedule.shape.num_ranks)
    return (workload if start is None else replace(workload, first_step=start.num_steps)), start
