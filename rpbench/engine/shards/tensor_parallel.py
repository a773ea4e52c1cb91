"""Tensor parallelism: every device runs every action, each with its own shard of the layers' matrices.

The host keeps the shards of all devices (`rpbench.models.shards`), with their weights, gradients and optimizer state,
and one copy of the parameters that are whole on every device (norms). A device runs modules of its own shard, and meets
the others wherever outputs are added up: inside F and B, twice a layer in forward, recomputation and backward each, and
at both ends of the model. The gradients of whole parameters are equal on every device; the first device's are taken.

Parameters that every shard has whole but uses on a part of the work - norms of queries and keys, an expert router -
are tied over the shards, and the optimizer adds up their gradients, as those of all tied weights.

SUM_F and SUM_B stand for these sums in a schedule. At that time everything has been added up already: they check that
their F or B has made as many sums as they stand for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from rpbench.engine.compute.forward_backward import Passes
from rpbench.engine.compute.stage import Shells, Stages
from rpbench.engine.executor import Gate, Handler
from rpbench.engine.layout import Layout
from rpbench.engine.shards.collectives import Rank, Rendezvous
from rpbench.engine.state.accumulation import Groups
from rpbench.engine.state.gradients import Gradients, Tensors
from rpbench.engine.state.weights import Named, Weights
from rpbench.engine.workload import Workload
from rpbench.ir.action import SUMS, Action, Kind
from rpbench.ir.moved_objects import SUMS_A_LAYER, sums_of_ends
from rpbench.models.shards import one_shard

Operator = Callable[[torch.Tensor], torch.Tensor]

# --- one device ------------------------------------------------------------------------------------------------


class AcrossRanks:
    """One shard on each device: the operators as all-reduces (`rpbench.models.shards.Adding`).

    Where a device has a slice of the tokens between its matrices (`Shape.sequence_parallel`), one all-reduce becomes
    two halves: slices (B, S / p, H) are gathered before the matrices, and each device adds up its own slice behind
    them.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys'23, section
    4.2.2.
    """

    def __init__(self, rank: Rank, *, along_sequence: bool) -> None:
        self._rank = rank
        # between its matrices and what devices have around them
        self._inwards: Operator = rank.gather_slices if along_sequence else _as_it_is
        self._outwards: Operator = rank.scatter_sum if along_sequence else rank.all_reduce

    def spread(self, x: torch.Tensor, num_shards: int) -> Sequence[torch.Tensor]:
        return [_ForthAndBack.apply(x, self._inwards, self._outwards)]

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return _ForthAndBack.apply(parts[0], self._outwards, self._inwards)

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._rank.all_reduce(parts[0])

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._rank.all_reduce(parts[0], torch.maximum)


class _ForthAndBack(torch.autograd.Function):
    """One operator on x, and another on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: Operator, back: Operator) -> torch.Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class OwnWeights:
    """The weights of one device's modules, as a `WeightSource`."""

    def __init__(self, weights: Weights, modules: Sequence[nn.Module]) -> None:
        self._weights = weights
        self._names = [{*dict(module.named_parameters()), *dict(module.named_buffers())} for module in modules]

    def all_of(self, module: int, version: int) -> Named:
        return self._own(module, self._weights.all_of(module, version))

    def leaves(self, module: int, version: int) -> Named:
        return self._own(module, self._weights.leaves(module, version))

    def release(self, module: int, version: int) -> None:
        self._weights.release(module, version)

    def _own(self, module: int, found: Named) -> Named:
        return {name: tensor for name, tensor in found.items() if name in self._names[module]}


class TeamGradients(Gradients):
    """The gradients of all devices, each device's added up by itself, in the same groups."""

    def __init__(self, groups: Mapping[tuple[int, int], Groups], num_ranks: int, *, keep: bool = False) -> None:
        super().__init__(groups, keep=keep)  # the first device's
        self.by_rank = [self, *(Gradients(groups, keep=keep) for _ in range(num_ranks - 1))]

    def total(self, stage: int, version: int) -> Tensors:
        """The gradients of every shard, and the first device's of whole parameters."""
        found = dict(super().total(stage, version))
        for other in self.by_rank[1:]:
            found = other.total(stage, version) | found
        return found

    def drop(self, stage: int, version: int) -> None:
        super().drop(stage, version)
        for other in self.by_rank[1:]:
            other.drop(stage, version)

    def copies(self) -> Iterator[tuple[Tensors, Tensors]]:
        """Each other device's gradients of what the first has too, and the first's, for every stage and step."""
        for other in self.by_rank[1:]:
            for place in sorted(self._windows):
                first, gradients = Gradients.total(self, *place), other.total(*place)
                common = first.keys() & gradients.keys()
                yield {place: gradients[place] for place in common}, {place: first[place] for place in common}


# All-reduces of one number a token: the largest logit, the sum of exponentials, the label's logit.
NUMBERS_A_TOKEN = {Kind.SUM_F: 3, Kind.SUM_B: 0}

# --- the devices together --------------------------------------------------------------------------------------


_HANDLERS = {
    Kind.F: Passes.forward,
    Kind.B: Passes.backward,
    Kind.I: Passes.backward_for_input,
    Kind.W: Passes.backward_for_weights,
}


class Team:
    """All devices, and the handlers of their joint actions, on a workload of layers in shards."""

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        weights: Weights,
        gradients: TeamGradients,
        make_passes: Callable[[Stages, Gradients], Passes],  # the passes of a device, from its stages and its gradients
        *,
        splits: bool = False,  # whether some backward comes in halves
        along_sequence: bool = False,  # whether a device has a slice of the tokens between its matrices
    ) -> None:
        self._layout, self._along = layout, along_sequence
        self._embedding_is_frozen = not any(weight.requires_grad for weight in workload.modules[0].parameters())
        self._accounts: dict[Action, Fraction] = {}  # SUM_F or SUM_B -> the sums that have been made for it
        self.meeting = Rendezvous(len(gradients.by_rank))
        self.ranks: list[Rank] = []  # each device's end of the collectives
        self.passes: list[Passes] = []  # each device's
        for number, own in enumerate(gradients.by_rank):
            rank = Rank(self.meeting, number)
            adding = AcrossRanks(rank, along_sequence=along_sequence)
            layers = [one_shard(layer, number, adding) for layer in workload.modules]
            stages = Stages(workload, OwnWeights(weights, layers), Shells(layers), splits=splits)
            self.ranks.append(rank)
            self.passes.append(make_passes(stages, own))
            self.passes[-1].read = self.passes[0].read

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        return dict.fromkeys(_HANDLERS, self._run) | dict.fromkeys(SUMS, self._close)

    def _run(self, action: Action, number: int, gate: Gate) -> None:
        """A device's shard of an action, which is a whole action to its passes."""
        rank, passes = self.ranks[action.part], self.passes[action.part]
        before = rank.num_sums
        _HANDLERS[action.kind](passes, action._replace(part=0), number, gate)
        if action.kind is not Kind.W:  # which leaves sums to its I
            kind = Kind.SUM_F if action.kind is Kind.F else Kind.SUM_B
            self._accounts[action._replace(kind=kind, version=None)] = rank.num_sums - before

    def _close(self, action: Action, number: int, gate: Gate) -> None:
        """Check that all sums which a SUM action stands for have been made."""
        modules = (self._layout.forward if action.kind is Kind.SUM_F else self._layout.backward)[action.stage]
        of_embedding, of_head = sums_of_ends(action.kind, along_sequence=self._along)
        expected: int | Fraction = SUMS_A_LAYER[action.kind] * sum(
            0 < module < self._layout.num_modules - 1 for module in modules
        )
        expected += (0 in modules) * of_embedding
        expected += (self._layout.head in modules) * (of_head + NUMBERS_A_TOKEN[action.kind])
        made = self._accounts.pop(action)
        # The gradient of a frozen embedding's output, the last sum, is not needed.
        fewest = expected - (expected > 0 and action.kind is Kind.SUM_B and 0 in modules and self._embedding_is_frozen)
        if not fewest <= made <= expected:
            raise RuntimeError(f"{action} stands for {expected} sums, and {made} have been made")
