"""Ours: the losses of one of our methods on a case, to be compared with those of a system that does the same."""

from typing import Any, NamedTuple

from baselines.systems.case import Case
from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.training import Settings, Training
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry


class Method(NamedTuple):
    """A schedule of ours and its options."""

    name: str
    options: dict[str, Any]


def our_losses(method: Method, case: Case, num_devices: int) -> list[float]:
    """The mean loss of every step on as many devices, on a virtual clock; the same weights and microbatches."""
    workload = case.workload()
    layers = [1.0] * (len(workload.modules) - 2)
    partition = symmetric((1,) * len(layers))
    schedule = _schedule(method, case, num_devices, partition)
    costs = LayerTimes(layers, layers, layers, 1.0, 1.0).table(partition, recompute_ahead=False)
    training = Training(workload, schedule, Settings(case.settings()))
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return [training.mean_loss(step) for step in range(case.num_steps)]


def _schedule(method: Method, case: Case, num_devices: int, partition: Partition) -> Schedule:
    """With all it moves."""
    found = entry(method.name)
    shape = Shape(num_devices, len(partition.forward), case.num_microbatches, num_steps=case.num_steps)
    order = found.build(shape, **method.options).with_partition(partition)
    assert found.lower is not None  # methods of replicas say what they move
    return found.lower(order, prefetch=1, **(found.options | method.options))
