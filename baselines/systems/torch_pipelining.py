"""torch.distributed.pipelining: its seven schedules on our modules, one process a rank, boundary tensors over gloo.

Every rank builds the modules of its own stages with the weights they have in the whole model. The head is in the last
stage and takes the labels by keyword, so that its output is the loss and no logits are sent. As in our engine, a
microbatch's loss is divided by the number of microbatches before backward, and layers are recomputed but not the head.

Source: torch 2.13, torch.distributed.pipelining.
"""

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

from baselines.systems.case import Case, System
from rpbench.engine.layout import layout_of
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.workload import Workload
from rpbench.ir.partition import symmetric

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
RECOMPUTES = ("all", "except_last", "none")
_ONE_STAGE = ("GPipe", "1F1B")  # a rank
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # two stages a rank, the second in reverse order
# Input gradients first, weight gradients later: torch walks the graph twice, and a recomputed graph exists only once.
SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class _Stage(nn.Module):
    """Consecutive modules of a model; with the head among them the output is a microbatch's part of the loss."""

    def __init__(self, workload: Workload, modules: range, recompute: bool) -> None:
        super().__init__()
        last = len(workload.modules) - 1
        self.layers = nn.ModuleDict({str(number): workload.modules[number] for number in modules if number < last})
        self.head = workload.modules[last] if last in modules else None
        self.recompute = recompute
        self.num_microbatches = workload.num_microbatches

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.layers:
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(self._run, x, use_reentrant=False) if again else self._run(x)
        if self.head is None:
            return x
        return (self.head(x, labels) / self.num_microbatches).reshape(1)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class TorchPipeline(System):
    """One rank of a pipeline; ValueError for an unknown schedule, or a partition that does not fit the ranks."""

    def __init__(self, case: Case) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        if case.schedule not in SCHEDULES:
            raise ValueError(f"schedule={case.schedule!r}: torch has {', '.join(SCHEDULES)}")
        per_rank = 1 if case.schedule in _ONE_STAGE else 2
        if len(case.partition) != self.num_ranks * per_rank:
            raise ValueError(
                f"partition={case.partition}: {case.schedule} on {self.num_ranks} ranks takes "
                f"{self.num_ranks * per_rank} stages"
            )
        if case.recompute not in RECOMPUTES:
            raise ValueError(f"recompute={case.recompute!r}: one of {', '.join(RECOMPUTES)}")
        if case.recompute != "none" and case.schedule in SPLITS_BACKWARD:
            raise ValueError(
                f"recompute={case.recompute}: {case.schedule} splits backward, which torch cannot recompute for"
            )
        super().__init__(case)
        layout = layout_of(symmetric(case.partition))
        own = _stages_of(case.schedule, self.rank, self.num_ranks)
        self.modules = {number for stage in own for number in layout.forward[stage]}
        stages = [self._stage(layout.forward[stage], stage) for stage in own]
        kind = schedules.get_schedule_class(case.schedule)
        self.schedule = kind(
            stages[0] if case.schedule in _ONE_STAGE else stages,  # type: ignore[arg-type]
            n_microbatches=case.num_microbatches,
            loss_fn=lambda loss, labels: loss.sum(),
            scale_grads=False,
        )
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        if self.case.optimizer is None:
            return None
        return self.case.make_adamw(self.parameters.values(), fused=True)

    @cached_property
    def _first_weights(self) -> Tensors:
        return {place: parameter.detach().clone() for place, parameter in self.parameters.items()}

    def reset(self) -> None:
        """Go back to the first weights, with a fresh optimizer."""
        with torch.no_grad():
            for place, parameter in self.parameters.items():
                parameter.copy_(self._first_weights[place])
                parameter.grad = None
        self.optimizer = self._make_optimizer()

    def prepare(self) -> None:
        """Make the batches of all steps and go back to the first weights."""
        self.reset()
        self.batches = [self._batch(step) for step in range(self.case.num_steps)]
        self.actions.clear()

    def train(self) -> None:
        for tokens, labels in self.batches:
            for parameter in self.parameters.values():
                parameter.grad = None
            losses: list[torch.Tensor] = []
            self.schedule.step(tokens, labels=labels, target=labels, losses=losses, return_outputs=False)
            if self.optimizer is not None:
                began = time.thread_time()
                self.optimizer.step()
                self.actions.append(("STEP", self.rank, 0, time.thread_time() - began))

    def gradients(self) -> Tensors:
        return {place: p.grad for place, p in self.parameters.items() if p.grad is not None}

    def weights(self) -> Tensors:
        return {place: parameter.detach() for place, parameter in self.parameters.items()}

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = zip(*map(self.workload.batch, self.case.microbatches(step)), strict=True)
        return torch.cat(tokens), torch.cat(labels)

    def _stage(self, modules: range, index: int) -> PipelineStage:
        num_stages = len(self.case.partition)
        tokens, _ = self.workload.batch(0)
        shape = *tokens.shape, self.case.model["hidden"]
        x = torch.empty(shape, dtype=getattr(torch, self.case.dtype), requires_grad=True)  # or no gradient comes back
        kept = {"all": range(0), "except_last": range(num_stages - 1, num_stages), "none": range(num_stages)}
        recompute = index not in kept[self.case.recompute]
        stage = PipelineStage(
            _Stage(self.workload, modules, recompute),
            index,
            num_stages,
            torch.device("cpu"),
            input_args=(tokens if index == 0 else x,),
            output_args=(x.new_empty(1, requires_grad=True) if index == num_stages - 1 else x,),
        )
        for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
            setattr(stage, name, self._timed(getattr(stage, name), kind, index))
        return stage

    def _timed(self, call: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        """The call, which also records its processor time."""

        def timed(microbatch: int, *arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            found = call(microbatch, *arguments, **options)
            self.actions.append((kind, stage, microbatch, time.thread_time() - began))
            return found

        return timed


def _stages_of(schedule: str, rank: int, num_ranks: int) -> list[int]:
    if schedule in _ONE_STAGE:
        return [rank]
    if schedule in _V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank, num_ranks + rank]
