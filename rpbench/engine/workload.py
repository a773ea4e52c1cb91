"""Workload: a model and its microbatches; the same object for the engine, its baselines and the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from rpbench.engine.state.gradients import Place
from rpbench.models.build import build_model
from rpbench.models.data import Batch, Data, SyntheticTokens
from rpbench.models.layers import DecoderLayer
from rpbench.workload.architecture import Architecture


@dataclass(frozen=True)
class Workload:
    """A model as a sequence of modules, and its microbatches."""

    # embedding (tokens -> x), decoder layers (x -> x), head (x, labels -> mean loss). Parameters that appear in several
    # modules are tied; those without `requires_grad` are frozen
    modules: Sequence[nn.Module]
    data: Data  # microbatches by (step, number)
    num_microbatches: int
    seed: int = 0  # decides what dropout draws
    draws_random: bool = False  # whether forward draws random numbers
    first_step: int = 0  # optimizer steps done before; microbatches are counted from there
    # modules at the end that are shards of the head, behind a final norm (x -> x); 0: it is whole
    num_head_shards: int = 0
    # tokens of every sequence of each of so many microbatches in turn; empty: all microbatches are alike
    lengths: tuple[tuple[int, ...], ...] = ()

    @property
    def chain(self) -> range:
        """The modules that x goes through, one after another."""
        return range(len(self.modules) - self.num_head_shards)

    @property
    def head(self) -> int | None:
        """The module that makes the loss; None where shards of it do."""
        return None if self.num_head_shards else self.chain[-1]

    @property
    def shards(self) -> range:
        return range(self.chain.stop, len(self.modules))

    def batch(self, microbatch: int) -> Batch:
        """The microbatch of that number, counted through over all steps of this run."""
        return self.data.microbatch(*divmod(self.absolute(microbatch), self.num_microbatches))

    def absolute(self, microbatch: int) -> int:
        """The number of a microbatch since the beginning of training."""
        return self.first_step * self.num_microbatches + microbatch

    def segment(self, microbatch: int, part: int, num_parts: int) -> Batch:
        """One of the parts that a microbatch's sequences are cut into, equally long if that can be."""
        if num_parts == 1:
            return self.batch(microbatch)
        tokens, labels = self.batch(microbatch)
        length = tokens.shape[1]
        cut = slice(length * part // num_parts, length * (part + 1) // num_parts)
        return Batch(tokens[:, cut], labels[:, cut])

    def share(self, loss: torch.Tensor, microbatch: int, part: int, num_parts: int) -> torch.Tensor:
        """The mean loss of a segment as its share of the mean over its step's tokens."""
        if self.lengths:
            tokens, first = self.tokens(microbatch), microbatch - microbatch % self.num_microbatches
            if num_parts > 1:
                tokens = self.segment(microbatch, part, num_parts).labels.numel()
            return loss * tokens / sum(self.tokens(first + number) for number in range(self.num_microbatches))
        if num_parts == 1:
            return loss / self.num_microbatches
        whole, own = self.batch(microbatch).tokens, self.segment(microbatch, part, num_parts).tokens
        return loss * own.shape[1] / (whole.shape[1] * self.num_microbatches)

    def tokens(self, microbatch: int) -> int:
        """The tokens of a microbatch; 1 where all microbatches are alike."""
        return sum(self.lengths[self.absolute(microbatch) % len(self.lengths)]) if self.lengths else 1

    def packed(self, module: int, microbatch: int) -> tuple[int, ...]:
        """The lengths of packed sequences that a module must keep apart; empty if it need not."""
        if not self.lengths or not isinstance(self.modules[module], DecoderLayer):
            return ()
        own = self.lengths[self.absolute(microbatch) % len(self.lengths)]
        return own if len(set(own)) > 1 else ()

    @cached_property
    def owner_of(self) -> dict[Place, Place]:
        """Every trainable parameter's place -> the first place that holds the same parameter."""
        owners: dict[int, Place] = {}
        return {
            (module, name): owners.setdefault(id(parameter), (module, name))
            for module, layer in enumerate(self.modules)
            for name, parameter in layer.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }

    @cached_property
    def tied(self) -> dict[Place, tuple[Place, ...]]:
        """The owner of every parameter that stands in several places -> these places, in model order."""
        places: dict[Place, list[Place]] = {}
        for place, owner in self.owner_of.items():
            places.setdefault(owner, []).append(place)
        return {owner: tuple(found) for owner, found in places.items() if len(found) > 1}

    def parameter(self, place: Place) -> torch.Tensor:
        module, name = place
        return self.modules[module].get_parameter(name)


def synthetic(
    model: Architecture, sequences: int, dtype: str, seed: int, num_microbatches: int, device: str = "cpu"
) -> Workload:
    """A model and drawn tokens: every caller, in any process, gets the same weights and batches; on `meta` no weights.

    The dtype is a name of torch's, such as `float32`.
    """
    return Workload(
        list(build_model(model, seed=seed, dtype=getattr(torch, dtype), device=device)),
        SyntheticTokens(model.vocab, model.seq_len, sequences, seed),
        num_microbatches,
        seed,
        draws_random=model.dropout > 0,
    )
