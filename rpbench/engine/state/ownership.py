"""Sharing: what the replicas of a stage divide among themselves, and which sums over them a step is made of.

A schedule says by its actions how a stage is shared:

    UNSHARD                          each replica keeps a shard of the weights and gathers the others' (ZeRO-2, -3)
    REDUCE_GRAD, UNSHARD or STORE:G  a reduce-scatter: each keeps a shard of the gradient and of the optimizer state
    REDUCE_GRAD alone                an all-reduce: each keeps everything and steps a copy of its own (data parallel)

A shard is a run of the stage's parameters laid end to end, frozen ones apart from those that train. Shards are equal
but for `ALIGNMENT` elements and the odd rest, so nothing is padded: together they are the stage, and a gather moves
what a device does not have.

Sources: Rajbhandari et al., "ZeRO", SC'20, section 5; Zhao et al., "PyTorch FSDP", VLDB'23, section 3.2 (flat shards).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rpbench.engine.layout import Layout
from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.waits.moves import Moves

# The fused AdamW takes elements in whole vectors and rounds those behind the last one otherwise. A cut at a multiple of
# the longest vector leaves every element where it was, so a stage stepped in shards has the bits of one stepped whole.
ALIGNMENT = 64


class Piece(NamedTuple):
    """Elements `start` to `stop` - 1 of a tensor laid out flat."""

    place: Place
    start: int
    stop: int


Pieces = tuple[Piece, ...]


def cut_evenly(sizes: Mapping[Place, int], num_owners: int) -> list[Pieces]:
    """Tensors laid end to end, cut for some owners; at most one piece of a tensor for each.

    Args:
        sizes: elements of every tensor.
    """
    total = sum(sizes.values())
    bounds = [*(_aligned(sizes, total * owner // num_owners) for owner in range(num_owners)), total]
    found: list[list[Piece]] = [[] for _ in range(num_owners)]
    first = 0
    for place, size in sizes.items():
        for owner, pieces in enumerate(found):
            start, stop = max(bounds[owner] - first, 0), min(bounds[owner + 1] - first, size)
            if start < stop:
                pieces.append(Piece(place, start, stop))
        first += size
    return [tuple(pieces) for pieces in found]


def _aligned(sizes: Mapping[Place, int], bound: int) -> int:
    """The last place up to a bound where a cut changes no bit: whole vectors behind the start of a tensor."""
    first = 0
    for size in sizes.values():
        if bound < first + size:
            return first + (bound - first) // ALIGNMENT * ALIGNMENT
        first += size
    return bound


def take(tensors: Mapping[Place, torch.Tensor], pieces: Iterable[Piece]) -> Tensors:
    """Views of some pieces of those tensors that are there."""
    return {place: tensors[place].detach().reshape(-1)[start:stop] for place, start, stop in pieces if place in tensors}


def join(shards: Iterable[Mapping[Place, torch.Tensor]], shapes: Mapping[Place, torch.Size]) -> Tensors:
    """Whole tensors, made of the pieces of all owners in order; none of what no shard has."""
    found: dict[Place, list[torch.Tensor]] = defaultdict(list)
    for shard in shards:
        for place, piece in shard.items():
            found[place].append(piece.detach())
    return {place: torch.cat(pieces).view(shapes[place]) for place, pieces in found.items()}


@dataclass(frozen=True)
class Sharing:
    """How the replicas of a stage share it.

    Args:
        owned: replica -> the elements it owns of what trains, devices ascending.
        frozen: the same of what does not.
        shapes: of every parameter of the stage.
        gathers: weights are in shards.
        scatters: gradients and optimizer state are in shards.
        copies: nothing is; every replica keeps the stage and steps it by itself.
        loaded, stored: shards of weights come from the host, shards of gradients go there.
    """

    owned: Mapping[int, Pieces]
    frozen: Mapping[int, Pieces]
    shapes: Mapping[Place, torch.Size]
    gathers: bool
    scatters: bool
    copies: bool
    loaded: bool
    stored: bool

    def kept_elements(self, module: int, device: int) -> tuple[int, int]:
        """Elements of a module's weights and of its gradient that stay on a device."""
        trained, frozen = (
            {owner: _num_elements(pieces, module) for owner, pieces in cut.items()} for cut in (self.owned, self.frozen)
        )
        every = sum(trained.values())
        weights = every + sum(frozen.values())
        if self.gathers:
            weights = 0 if self.loaded else trained[device] + frozen[device]
        gradients = every
        if self.scatters:
            gradients = 0 if self.stored else trained[device]
        return weights, gradients


def _num_elements(pieces: Pieces, module: int) -> int:
    return sum(stop - start for (other, _), start, stop in pieces if other == module)


def sharing_of(analysis: Analysis, layout: Layout, workload: Workload) -> dict[int, Sharing]:
    """Stage -> how it is shared, for those that are gathered or reduced."""
    if not {Kind.UNSHARD, Kind.REDUCE_GRAD} & analysis.schedule.kinds:
        return {}
    moves = analysis.moves
    devices: dict[int, set[int]] = defaultdict(set)
    for what in ((Kind.UNSHARD, None), (Kind.REDUCE_GRAD, None)):
        for transfer in moves.transfers[what]:
            devices[transfer.visits[0].stage].add(transfer.visits[0].device)
    return {
        stage: _sharing(moves, stage, sorted(found), layout.backward[stage], workload)
        for stage, found in devices.items()
    }


def _sharing(moves: Moves, stage: int, devices: Sequence[int], modules: range, workload: Workload) -> Sharing:
    parameters = {
        (module, name): parameter
        for module in modules
        for name, parameter in workload.modules[module].named_parameters(remove_duplicate=False)
    }
    trained, frozen = (
        cut_evenly({place: p.numel() for place, p in parameters.items() if p.requires_grad is trains}, len(devices))
        for trains in (True, False)
    )
    gathers, reduces, stored, loaded = (
        moves.moves(what, stage)
        for what in ((Kind.UNSHARD, None), (Kind.REDUCE_GRAD, None), (Kind.STORE, "G"), (Kind.LOAD, "P"))
    )
    stored = stored and moves.index.schedule.late_rest is None  # a part of it goes to the host, and all stays
    return Sharing(
        dict(zip(devices, trained, strict=True)),
        dict(zip(devices, frozen, strict=True)),
        {place: parameter.shape for place, parameter in parameters.items()},
        gathers,
        scatters=reduces and (gathers or stored),
        copies=reduces and not (gathers or stored or loaded),
        loaded=loaded,
        stored=stored,
    )
