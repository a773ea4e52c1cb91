"""The released RoundPipe library: one process for all accelerators of the host, weights and optimizer on the host.

The library cuts the layers by the times that it has measured. Its optimizer, here torch's AdamW as in the other
systems, runs in a thread of its own, and each step waits for it, so that no weights are old. It needs torch.cuda (CUDA
or ROCm).

Source: the interface of roundpipe 0.1.1, `RoundPipe.forward_backward` and `RoundPipe.step`.
"""

from typing import Any

import torch
from torch import nn

from baselines.systems.case import Case, System, require
from rpbench.engine.state.gradients import Tensors


class _Link(nn.Module):
    """A module that also passes the labels on; the last one returns the loss."""

    def __init__(self, module: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.module, self.is_last = module, is_last

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> Any:
        x, labels = both
        return self.module(x, labels) if self.is_last else (self.module(x), labels)


class Released(System):
    """All accelerators of the host; ValueError if the library or a CUDA device is missing, or the case does not fit."""

    def __init__(self, case: Case) -> None:
        library: Any = require("roundpipe", needs_cuda=True)
        if case.optimizer is None or case.recompute != "all":
            raise ValueError("system=released: it steps an optimizer and recomputes every layer; give recompute=all")
        super().__init__(case)
        last = len(self.workload.modules) - 1
        links = [_Link(module, is_last=number == last) for number, module in enumerate(self.workload.modules)]
        masters = torch.float64 if case.dtype == "float64" else torch.float32
        self._config = library.RoundPipeRunConfig(num_microbatch=case.num_microbatches)
        self._model = library.RoundPipe(nn.Sequential(*links), optim_dtype=masters, name="rpbench")
        self._masters = dict(self._model.optim_named_parameters())
        self._optimizer = case.make_adamw(self._masters.values())

    def train(self) -> None:
        num = self.case.num_microbatches
        for step in range(self.case.num_steps):
            batches = map(self.workload.batch, self.case.microbatches(step))
            tokens, labels = (torch.cat(each) for each in zip(*batches, strict=True))
            self._optimizer.zero_grad()
            loss = self._model.forward_backward(
                input_args=((tokens, labels),), loss_fn=lambda loss, _: loss / num, run_config=self._config
            )
            self._model.step(self._optimizer.step, is_async=False)
            self.losses.append(float(loss))

    def gradients(self) -> Tensors:
        return {_place(name): master.grad for name, master in self._masters.items() if master.grad is not None}

    def weights(self) -> Tensors:
        return {_place(name): master.detach() for name, master in self._masters.items()}


def _place(name: str) -> tuple[int, str]:
    """`model.3.module.attention.weight` -> (3, `attention.weight`)."""
    number, _, parameter = name.removeprefix("model.").split(".", 2)
    return int(number), parameter
