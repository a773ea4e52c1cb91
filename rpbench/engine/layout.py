"""Layout: which modules each stage runs. Module 0 is the embedding, 1 to L are the layers, L + 1 is the head.

A partition counts decoder layers only. The embedding goes with the first stage of either direction; the head and
the loss go with the last one, or with the fused stage. If the head is cut over the devices, module L + 1 is its norm;
the modules behind that are its shards, and shard d is updated together with stage d.
"""

from dataclasses import dataclass
from functools import cached_property

from rpbench.ir.action import COMPUTE, HEAD, Action, Kind, parts_of
from rpbench.ir.index import Index
from rpbench.ir.partition import Partition


@dataclass(frozen=True)
class Layout:
    """Modules of a model of `num_modules` and `num_head_shards`, per forward stage and per backward stage.

    Forwards keep the input of one stage in `keeps_every`. That of the first one is the tokens, or with `keeps_embedded`
    the embedding's output, as in Megatron-LM.
    """

    forward: tuple[range, ...]
    backward: tuple[range, ...]
    num_modules: int
    fused: bool
    num_head_shards: int = 0
    keeps_every: int = 1
    keeps_embedded: bool = False

    @property
    def head(self) -> int | None:
        """The module that makes the loss; None where shards of it do."""
        return None if self.num_head_shards else self.num_modules - 1

    @property
    def top(self) -> int:
        return len(self.backward) - 1

    @cached_property
    def starts(self) -> frozenset[int]:
        """The modules whose input a forward keeps for recomputation: the first of backward stages, or of the layers."""
        embedded = {1} if self.keeps_embedded else set()
        return frozenset(modules.start for modules in self.backward[:: self.keeps_every]) | embedded

    def stage_of(self, module: int) -> int:
        """The backward stage that a module is updated with."""
        if module >= self.num_modules:
            return module - self.num_modules
        return next(stage for stage, modules in enumerate(self.backward) if module in modules)

    def shard(self, stage: int) -> range:
        """The shard of the head that is updated with a backward stage: one module or none."""
        first = self.num_modules + stage
        return range(first, first + (stage < self.num_head_shards))

    def modules_of(self, action: Action) -> range:
        """The modules whose weights an action reads."""
        if action.kind in HEAD:
            return self.shard(action.stage)
        return (self.forward if action.kind is Kind.F else self.backward)[action.stage]

    def devices(self, index: Index) -> dict[int, int]:
        """Module -> the first device that computes with its weights."""
        found: dict[int, int] = {}
        for number, action in enumerate(index.actions):
            for part in parts_of(action):
                if part.kind in COMPUTE:
                    modules = self.shard(part.stage) if part.kind in HEAD else self.backward[part.stage]
                    found = dict.fromkeys(modules, index.device(number)) | found
        return found


def layout_of(
    partition: Partition, num_head_shards: int = 0, keeps_every: int = 1, *, keeps_embedded: bool = False
) -> Layout:
    num_modules = partition.num_layers + 2
    backward = _modules(partition.backward_ranges(), num_modules)
    stop = backward[-1].start if partition.fused else num_modules
    forward = _modules(partition.forward_ranges(), stop)
    return Layout(forward, backward, num_modules, partition.fused, num_head_shards, keeps_every, keeps_embedded)


def _modules(layers: tuple[range, ...], stop: int) -> tuple[range, ...]:
    """Layers shifted by the embedding, which the first stage takes; the last stage reaches to `stop`."""
    last = len(layers) - 1
    starts = [0 if stage == 0 else found.start + 1 for stage, found in enumerate(layers)]
    stops = [stop if stage == last else found.stop + 1 for stage, found in enumerate(layers)]
    return tuple(range(min(start, stop), min(end, stop)) for start, end in zip(starts, stops, strict=True))
