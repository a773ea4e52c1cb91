"""Layout: which modules each stage runs. Module 0 is the embedding, 1 to L are the layers, L + 1 is the head.

A partition counts decoder layers only. The embedding goes with the first stage of either direction; the head and
the loss go with the last one, or with the fused stage.
"""

from dataclasses import dataclass
from functools import cached_property

from rpbench.ir.partition import Partition


@dataclass(frozen=True)
class Layout:
    """Modules of a model of `num_modules`, per forward stage and per backward stage."""

    forward: tuple[range, ...]
    backward: tuple[range, ...]
    num_modules: int
    fused: bool

    @property
    def head(self) -> int:
        """The module that makes the loss."""
        return self.num_modules - 1

    @property
    def top(self) -> int:
        """The last backward stage."""
        return len(self.backward) - 1

    @cached_property
    def starts(self) -> frozenset[int]:
        """Where backward stages begin: the inputs a forward keeps for recomputation."""
        return frozenset(modules.start for modules in self.backward)

    def stage_of(self, module: int) -> int:
        """The backward stage of a module."""
        return next(stage for stage, modules in enumerate(self.backward) if module in modules)


def layout_of(partition: Partition) -> Layout:
    """The modules behind a partition."""
    num_modules = partition.num_layers + 2
    backward = _modules(partition.backward_ranges(), num_modules)
    stop = backward[-1].start if partition.fused else num_modules
    return Layout(_modules(partition.forward_ranges(), stop), backward, num_modules, partition.fused)


def _modules(layers: tuple[range, ...], stop: int) -> tuple[range, ...]:
    """Layers shifted by the embedding, which the first stage takes; the last stage reaches to `stop`."""
    last = len(layers) - 1
    starts = [0 if stage == 0 else found.start + 1 for stage, found in enumerate(layers)]
    stops = [stop if stage == last else found.stop + 1 for stage, found in enumerate(layers)]
    return tuple(range(min(start, stop), min(end, stop)) for start, end in zip(starts, stops, strict=True))
