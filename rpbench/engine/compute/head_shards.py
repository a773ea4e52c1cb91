"""Head shards: forward and backward of a head that is cut over the devices.

The last stage leaves a microbatch's normed x, which every shard reads twice. Its first half (HF) makes the maximum and
sum of its own logits; its second half (HB) reads those of all shards and makes gradients. The last stage then takes the
sum of the shards' gradients of x, added in the order of the shards. All waits are edges of the program.
"""

from collections.abc import Callable

import torch

from rpbench.engine.compute.segments import Segment
from rpbench.engine.peers import here
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.weights import WeightSource
from rpbench.engine.workload import Workload
from rpbench.models.vocab_shards import Half, Rows, Shard, Sums, summed_loss, together

LossScale = Callable[[torch.Tensor], torch.Tensor | None]  # the loss -> its gradient; None for 1


class HeadShards:
    """The tensors between the last stage's forward and its backward, and the work of the shards on them."""

    def __init__(self, workload: Workload, weights: WeightSource) -> None:
        self._workload, self._weights = workload, weights
        self._inputs: dict[Segment, torch.Tensor] = {}  # (B, S, H)
        self._halves: dict[Segment, dict[int, Half]] = {}  # by share
        self._grads: dict[Segment, dict[int, torch.Tensor]] = {}  # by share, (B * S, H)

    def __len__(self) -> int:
        return len(self._inputs) + sum(len(found) for part in (self._halves, self._grads) for found in part.values())

    def enter(self, segment: Segment, x: torch.Tensor) -> None:
        """Store the last stage's output of a microbatch."""
        self._inputs[segment], self._halves[segment], self._grads[segment] = x, {}, {}

    def forward(self, share: int, segment: Segment, version: int) -> Half:
        with torch.no_grad():
            found = self._shard(share, version).forward(*self._read(segment))
        self._halves[segment][share] = found
        return found

    def backward(
        self, share: int, segment: Segment, version: int, loss_scale: LossScale
    ) -> tuple[torch.Tensor, Tensors]:
        """The second half of a shard: the loss as `Workload.share`, equal on all shards, and its rows' gradients."""
        hidden, labels = self._read(segment)
        halves = self._halves[segment]
        whole = together([Sums(*map(here, halves[other].sums)) for other in range(self._workload.num_head_shards)])
        with torch.enable_grad():
            total = summed_loss(whole).requires_grad_()
            loss = self._workload.share(total / len(labels), *segment, num_parts=1)
        (scale,) = torch.autograd.grad(loss, total, loss_scale(loss))
        with torch.no_grad():
            half = halves[share]
            grad, rows = self._shard(share, version).backward(hidden, labels, half, whole, scale)
            halves[share] = half._replace(exponentials=grad.new_empty(0))  # used up; the others still need the sums
        self._grads[segment][share] = grad
        return loss, {} if rows is None else {(self._workload.shards[share], "weight"): rows}

    def leave(self, segment: Segment) -> torch.Tensor:
        """The gradient of the last stage's output, when all shards have done their second half."""
        x, grads = self._inputs.pop(segment), self._grads.pop(segment)
        del self._halves[segment]
        grad = here(grads[0])
        for share in range(1, self._workload.num_head_shards):
            grad = grad + here(grads[share])
        return grad.view_as(x)

    def _shard(self, share: int, version: int) -> Shard:
        number = self._workload.shards[share]
        module = self._workload.modules[number]
        assert isinstance(module, Rows)
        return module.shard(self._weights.all_of(number, version)["weight"])

    def _read(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (N, H) and labels (N,) of a microbatch."""
        microbatch, _ = segment
        return here(self._inputs[segment]).flatten(0, 1), self._workload.batch(microbatch).labels.flatten()
