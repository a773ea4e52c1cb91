"""Parity: ten steps of a trainer's model in its pipeline beside ten steps of the same model in one process.

Gradients are clipped in every step. A trainer takes the norm of each rank's gradients, then that of those norms; one
process takes it in the same order, and once more of all gradients together, which rounds otherwise.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 10
CLIP = 0.1  # below the norm of every step
LEARNING_RATE = 1e-3
SEED = 7

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Norm = Callable[[Sequence[Sequence[torch.Tensor]]], torch.Tensor]
Named = dict[str, torch.Tensor]


@dataclass
class Ran:
    """What a run came to: mean losses of its steps, norms before clipping, and the first step's unclipped gradients."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)


def asked() -> dict[str, Any]:
    """What the driver asks for: the trainer's own options with our plan in them, and sizes."""
    torch.set_num_threads(1)
    return json.loads(sys.argv[1])  # type: ignore[no-any-return]


def batch(step: int, asked: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all microbatches of a step, (sequences, S)."""
    made = torch.Generator().manual_seed(SEED + step)
    shape = (asked["num_microbatches"] * asked["microbatch_sequences"], asked["seq_len"] + 1)
    tokens = torch.randint(asked["vocab"], shape, generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The same for everybody."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, foreach=False)


def plain(
    model: nn.Module, loss_of: Loss, asked: Mapping[str, Any], groups: Sequence[Sequence[str]], norm_of: Norm
) -> Ran:
    """Train a whole model in this process.

    Args:
        loss_of: the part of a step's mean loss that one microbatch has.
        groups: names of each rank's parameters, in the order of its clipping.
        norm_of: their gradients' norm as the trainer takes it.
    """
    found, named = Ran(), dict(model.named_parameters())
    steps, size = optimizer(list(named.values())), asked["microbatch_sequences"]
    for step in range(STEPS):
        tokens, labels = batch(step, asked)
        model.zero_grad()
        losses = []
        for first in range(0, len(tokens), size):
            loss = loss_of(model, tokens[first : first + size], labels[first : first + size])
            loss.backward()
            losses.append(loss.detach())
        found.losses.append(float(torch.stack(losses).sum()))
        if step == 0:
            found.gradients = {name: tensor.grad.clone() for name, tensor in named.items() if tensor.grad is not None}
        norm = norm_of([[named[name].grad for name in group] for group in groups])
        found.norms.append(float(norm))
        torch.nn.utils.clip_grads_with_norm_(named.values(), CLIP, norm)
        steps.step()
    return found


def rank_by_rank(groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The norm of each rank's gradients, then that of those norms."""
    return torch.stack([torch.nn.utils.get_total_norm(group) ** 2.0 for group in groups]).sum() ** 0.5


def at_once(groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The norm of all gradients."""
    return torch.nn.utils.get_total_norm([gradient for group in groups for gradient in group])


def answered(
    own: Ran,
    names: Sequence[str],
    make: Callable[[], nn.Module],
    loss_of: Loss,
    asked: Mapping[str, Any],
    norm_of: Norm = rank_by_rank,
) -> None:
    """Gather all ranks' runs and compare them on rank 0, which prints the answer as one line of JSON.

    Args:
        names: of this rank's parameters in the whole model, in the order of its clipping.
        make: the whole model with its first weights.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, list(names)))
    if dist.get_rank() == 0:
        groups = [each for _, each in gathered]
        expected = plain(make(), loss_of, asked, groups, norm_of)
        together = plain(make(), loss_of, asked, groups, at_once)
        gradients = {name: tensor for run, _ in gathered for name, tensor in run.gradients.items()}
        assert gradients.keys() == expected.gradients.keys(), gradients.keys() ^ expected.gradients.keys()
        losses = next(run.losses for run, _ in reversed(gathered) if run.losses)
        answer = {
            "losses": losses,
            "loss_diff": _apart(losses, expected.losses),
            "grad_diff": max(
                float((gradients[name] - found).abs().max()) for name, found in expected.gradients.items()
            ),
            "grad_largest": max(float(found.abs().max()) for found in expected.gradients.values()),
            "norm_diff": _apart(own.norms, expected.norms),
            "loss_diff_one_norm": _apart(losses, together.losses),
            "norm_diff_one_norm": _apart(own.norms, together.norms),
            "clipped_steps": sum(norm > CLIP for norm in own.norms),
            "torch": torch.__version__,
        }
        print("ANSWER " + json.dumps(answer), flush=True)
    dist.barrier()


def _apart(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) == STEPS
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))
