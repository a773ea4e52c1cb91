"""Stages: the modules of a rank as torch's pipeline takes them.

The last stage has the head and the labels, and so computes the loss. As in our engine the loss is divided by the number
of microbatches of the step before backward.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from rpbench.engine.compute.randomness import seeded
from rpbench.engine.workload import Workload


class StageModule(nn.Module):
    """Consecutive modules of a model: x (B, S, H) -> (B, S, H); the first takes tokens (B, S), the last returns (1,).

    The inputs of a microbatch come by keyword, one for each chain: `tokens_0`, `labels_0`, `numbers_0` (1,).
    """

    def __init__(self, workload: Workload, modules: range, chain: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): workload.modules[number] for number in modules})
        self.first, self.last = 0 in modules, len(workload.modules) - 1 in modules
        self.chain, self.num_microbatches = chain, workload.num_microbatches
        self.seed = workload.seed if workload.draws_random else None

    def forward(self, x: torch.Tensor | None = None, **batch: torch.Tensor) -> torch.Tensor:
        values: Any = batch[f"tokens_{self.chain}"] if self.first else x
        *below, top = self.layers
        for name in below if self.last else self.layers:
            with self._random(int(name), batch):
                values = self.layers[name](values)
        if not self.last:
            return values
        loss: torch.Tensor = self.layers[top](values, batch[f"labels_{self.chain}"])
        return (loss / self.num_microbatches).reshape(1)

    def _random(self, module: int, batch: dict[str, torch.Tensor]) -> AbstractContextManager[object]:
        if self.seed is None:
            return nullcontext()
        return seeded(self.seed, module, int(batch[f"numbers_{self.chain}"]))


class ChainStage(PipelineStage):
    """A stage of one of several chains that torch takes for one pipeline: chains exchange no tensors."""

    def __init__(self, *arguments: Any, chain_length: int, **options: Any) -> None:
        self._chain_length = chain_length
        super().__init__(*arguments, **options)

    @property
    def is_first(self) -> bool:
        return self.stage_index % self._chain_length == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index % self._chain_length == self._chain_length - 1

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if not self.is_first:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Hand down the gradient of the input, unless this stage begins a chain."""
        return None if self.is_first else super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the neighbour's gradient, unless this stage ends a chain."""
        if not self.is_last:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """W; torch asks here for stage 0 where it means a stage without input gradient."""
        index = self.stage_index
        self.stage_index = 0 if self.is_first else index
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        finally:
            self.stage_index = index
