"""Carried: gradients whose sum goes from device to device, each adding its own part before it passes the sum on.

    device 0   g0           -> device 1
    device 1   (g0) + g1    -> device 2
    device 2   ((g0) + g1) + g2 -> device 0, and so on; the last one sends it to the home of the stage

A STORE:G>q is one arrow. The order of the sum is that of the arrows, whatever the pace of the devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from rpbench.engine.state.gradients import Place, Sum, Tensors, Window
from rpbench.engine.state.reductions import microbatches_of
from rpbench.ir.index import Index
from rpbench.ir.moves import has_transfers
from rpbench.ir.schedule import Schedule


class CarriedWindow:
    """The gradient of one stage for one step; see `rpbench.engine.state.gradients.Window`.

    Args:
        order: the step's microbatches in the order in which the sum comes to them.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._own = {microbatch: Sum() for microbatch in order}
        self._missing = set(order)  # whose gradient has not been made
        self._num_carried = 0
        self._sum = Sum()

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        self._own[microbatch].add(gradients)
        self._missing.discard(microbatch)

    def store(self, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the gradients of some microbatches to the sum, and hand it on.

        Raises:
            RuntimeError: if the sum is not there yet, or a gradient has not been made.
        """
        for microbatch in microbatches:
            due = self._order[self._num_carried]
            if microbatch != due or microbatch in self._missing:
                raise RuntimeError(f"the sum is handed on for microbatch {microbatch}, but that of {due} is not in it")
            self._sum.add(self._own.pop(microbatch).values)
            self._num_carried += 1
        values = {place: copy(value) for place, value in self._sum.values.items()}
        owned = {place for place in values if place in self._sum.owned or values[place] is not self._sum.values[place]}
        self._sum = Sum(values, owned)

    @property
    def is_complete(self) -> bool:
        return self._num_carried == len(self._order)

    @property
    def total(self) -> Tensors:
        return self._sum.values

    def share(self, device: int) -> Tensors:
        return self._sum.values

    def drop(self) -> None:
        self._sum = Sum()


def carried_windows(schedule: Schedule) -> dict[tuple[int, int], Window]:
    """(backward stage, version of the step) -> the gradient that goes round; none where nothing does."""
    if not has_transfers(schedule):
        return {}
    index = Index(schedule)
    return {
        (stage, step + 1): CarriedWindow([mb for transfer in carriers for mb in microbatches_of(index, transfer)])
        for (stage, step), carriers in index.moves.handovers.carried.items()
    }
