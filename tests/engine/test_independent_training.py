"""The engine against plain torch alone: what it shares with the reference of `verify`, done here by hand.

Both take from the same code the batches, each microbatch's part of the loss, the learning rates and the optimizer with
its betas. Here labels are shifted by hand, the loss is `torch.nn.functional.cross_entropy`, and `torch.optim.AdamW` has
its numbers written out.
"""

from copy import deepcopy
from itertools import combinations

import pytest
import torch
from cases import build
from torch import nn
from torch.nn import functional
from training_cases import train

from rpbench.engine.workload import Workload
from rpbench.models.data import SyntheticTokens

STEPS, MICROBATCHES, VOCAB, HIDDEN = 4, 3, 23, 8
RATE, DECAY = 1e-2, 0.1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


def modules() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(nn.Sequential(nn.Embedding(VOCAB, HIDDEN), Layer(), Layer(), Head()).double())


def by_hand(found: list[nn.Module], data: SyntheticTokens, rates: list[float]) -> tuple[dict, list[float]]:
    """Weights after some steps, by module and name, and the loss of each step."""
    model, losses = nn.ModuleList(deepcopy(found)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    for step, rate in enumerate(rates):
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in range(MICROBATCHES):
            tokens, labels = data.microbatch(step, microbatch)
            following = torch.cat((tokens[:, 1:], labels[:, -1:]), dim=1)  # what stands behind each token
            x = model[2](model[1](model[0](tokens)))
            logits = functional.linear(x, model[3].linear.weight, model[3].linear.bias)
            total = total + functional.cross_entropy(logits.reshape(-1, VOCAB), following.reshape(-1))
        optimizer.zero_grad()
        (total / MICROBATCHES).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        losses.append(float(total.detach()) / MICROBATCHES)
    weights = {(place, name): p.detach() for place, own in enumerate(model) for name, p in own.named_parameters()}
    return weights, losses


@pytest.mark.parametrize("num_warmup_steps, factors", [(0, (1, 1, 1, 1)), (2, (1 / 3, 2 / 3, 1, 1))])
def test_weights_and_losses_are_those_of_plain_torch(num_warmup_steps, factors):
    schedule = build("gpipe", 2, MICROBATCHES, num_layers=2, num_steps=STEPS)
    data = SyntheticTokens(VOCAB, 5, 2, 0)
    workload = Workload(modules(), data, MICROBATCHES)
    run = train(schedule, workload, learning_rate=RATE, weight_decay=DECAY, num_warmup_steps=num_warmup_steps)
    weights, losses = by_hand(modules(), data, [RATE * factor for factor in factors])
    for place, expected in weights.items():
        found = run.training.optimizer.masters[place]
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10), place
    assert [run.training.mean_loss(step) for step in range(STEPS)] == pytest.approx(losses, rel=1e-12)


def test_every_microbatch_of_every_step_is_another_one_whose_labels_follow_its_tokens():
    schedule = build("gpipe", 2, MICROBATCHES, num_layers=2, num_steps=STEPS)
    workload = Workload(modules(), SyntheticTokens(VOCAB, 5, 2, 0), schedule.shape.num_microbatches)
    batches = [workload.batch(number) for number in range(STEPS * MICROBATCHES)]
    assert all(not torch.equal(one.tokens, other.tokens) for one, other in combinations(batches, 2))
    assert all(torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:]) for batch in batches)
