"""DeepSpeed's ZeRO: stages 1 to 3, and stages 2 and 3 with the optimizer on the host.

    zero_1, zero_2, zero_3     shards of the optimizer's state, of gradients too, of weights too
    zero_offload               stage 2, gradients and torch's AdamW on the host (DeepSpeed's own would be compiled)
    zero_infinity              stage 3, weights on the host as well

Data parallel: rank r trains the microbatches r, r + p, ... of every step, and gradients are averaged over the ranks.
Runs on accelerators, or over gloo on any machine with DeepSpeed's CPU accelerator.

DeepSpeed's step clears the gradients, so they are read before it.

Sources: DeepSpeed 0.19; Rajbhandari et al., "ZeRO", SC'20; Ren et al., "ZeRO-Offload", USENIX ATC'21 (arXiv
2101.06840).
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from baselines.systems.case import Case, Method, System, require
from rpbench.engine.state.gradients import Tensors

# `schedule` of a case -> our method with the same transfers.
METHODS = {
    "zero_1": Method("zero_2", {"reduce_each_microbatch": False}),
    "zero_2": Method("zero_2", {}),
    "zero_3": Method("zero_3", {}),
    "zero_offload": Method("zero_offload", {}),
    "zero_infinity": Method("zero_infinity", {}),
}
_STAGES = {"zero_1": 1, "zero_2": 2, "zero_3": 3, "zero_offload": 2, "zero_infinity": 3}
_OFFLOADED = {"zero_offload": ("offload_optimizer",), "zero_infinity": ("offload_optimizer", "offload_param")}


class _Whole(nn.Module):
    """All modules of a workload in a row; the output is the loss."""

    def __init__(self, modules: list[nn.Module], recompute: bool) -> None:
        super().__init__()
        *layers, self.head = modules
        self.layers, self.recompute = nn.ModuleList(layers), recompute

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        loss: torch.Tensor = self.head(x, labels)
        return loss


class DeepSpeed(System):
    """One rank; ValueError if DeepSpeed is not installed, or the case does not fit."""

    def __init__(self, case: Case) -> None:
        if case.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
        self._deepspeed = require("deepspeed")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        case.check_replicas("DeepSpeed", METHODS, self.num_ranks)
        if case.optimizer is None or case.dtype == "float64":
            raise ValueError(
                "deepspeed: give an optimizer and dtype=float32; ZeRO-Offload has float32 masters and steps"
            )
        super().__init__(case)
        self.ours = METHODS[case.schedule]
        self._stage = _STAGES[case.schedule]
        self._gradients: Tensors = {}
        whole = _Whole(list(self.workload.modules), case.recompute == "all")
        self.device = case.device
        optimizer = case.make_adamw(whole.parameters())
        self.engine, *_ = self._deepspeed.initialize(model=whole, optimizer=optimizer, config=self._config())

    def train(self) -> None:
        for step in range(self.case.num_steps):
            own = self.case.microbatches(step)[self.rank :: self.num_ranks]
            self.losses.append(0.0)
            for microbatch in own:
                tokens, labels = (tensor.to(self.device) for tensor in self.workload.batch(microbatch))
                loss = self.engine(tokens, labels)
                self.engine.backward(loss)
                self.losses[-1] += float(loss.detach()) / len(own)
                if self.case.verify and self.engine.is_gradient_accumulation_boundary():
                    self._gradients = self._read(self._deepspeed.utils.safe_get_full_grad)
                self.engine.step()

    def gradients(self) -> Tensors:
        """Gradients of the last step, kept only where the case has `verify`."""
        return self._gradients

    def weights(self) -> Tensors:
        """The master weights, float32 in every precision."""
        return self._read(self._deepspeed.utils.safe_get_full_fp32_param)

    def _read(self, whole: Callable[[nn.Parameter], torch.Tensor]) -> Tensors:
        """Host copies of what `whole` gathers from the shards of each parameter."""
        return {place: whole(parameter).detach().cpu().clone() for place, parameter in self.parameters.items()}

    def _config(self) -> dict[str, object]:
        host = {"device": "cpu", "pin_memory": self.device != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": self.case.microbatch_sequences,
            "gradient_accumulation_steps": self.case.num_microbatches // self.num_ranks,
            "zero_optimization": {"stage": self._stage} | dict.fromkeys(_OFFLOADED.get(self.case.schedule, ()), host),
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.case.dtype == "bfloat16"},
            "fp16": {"enabled": self.case.dtype == "float16"},
        }
