"""Ownership: how the replicas of a stage share its weights, gradients and optimizer state.

A schedule says by its actions how a stage is shared:

    UNSHARD                          each replica keeps a shard of the weights and gathers the others' (ZeRO-2, -3)
    REDUCE_GRAD, UNSHARD or STORE:G  a reduce-scatter: each keeps a shard of the gradient and of the optimizer state
    REDUCE_GRAD alone                an all-reduce: each keeps everything and steps a copy of its own (data parallel)

A shard is a contiguous run of the stage's parameters laid end to end; frozen parameters are cut apart from trained
ones. Shards are equal up to `ALIGNMENT` elements and a remainder: nothing is padded, and a gather moves only what a
device does not have.

Sources: Rajbhandari et al., "ZeRO", SC'20, section 5; Zhao et al., "PyTorch FSDP", VLDB'23, section 3.2 (flat shards).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rpbench.engine.layout import Layout
from rpbench.engine.state.checkpoint import Moments
from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.state.weights import PlaceOf
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
    """Tensors of these sizes laid end to end, cut for some owners; each owner has at most one piece of a tensor."""
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
    """The last place up to a bound that is a multiple of `ALIGNMENT` behind the start of its tensor."""
    first = 0
    for size in sizes.values():
        if bound < first + size:
            return first + (bound - first) // ALIGNMENT * ALIGNMENT
        first += size
    return bound


def take(tensors: Tensors, pieces: Iterable[Piece]) -> Tensors:
    """Views of some pieces of those tensors that are there."""
    return {place: tensors[place].detach().reshape(-1)[start:stop] for place, start, stop in pieces if place in tensors}


def join(shards: Iterable[Tensors], shapes: Mapping[Place, torch.Size]) -> Tensors:
    """Whole tensors from the pieces of all owners, in order."""
    found: dict[Place, list[torch.Tensor]] = defaultdict(list)
    for shard in shards:
        for place, piece in shard.items():
            found[place].append(piece.detach())
    return {place: torch.cat(pieces).view(shapes[place]) for place, pieces in found.items()}


@dataclass(frozen=True)
class Sharing:
    """How the replicas of a stage share it."""

    owned: Mapping[int, Pieces]  # replica -> the elements it owns of the trained parameters, devices ascending
    frozen: Mapping[int, Pieces]  # the same of the frozen ones
    shapes: Mapping[Place, torch.Size]
    gathers: bool  # weights are in shards
    scatters: bool  # gradients and optimizer state are in shards
    copies: bool  # nothing is in shards; every replica keeps the stage and steps it by itself
    loaded: bool  # shards of weights come from the host
    stored: bool  # shards of gradients go there

    def kept_elements(self, module: int, device: int) -> tuple[int, int]:
        """Elements of a module's weights and of its gradient that stay on a device."""
        trained, frozen = (
            {
                owner: sum(stop - start for (other, _), start, stop in pieces if other == module)
                for owner, pieces in cut.items()
            }
            for cut in (self.owned, self.frozen)
        )
        every = sum(trained.values())
        weights = every + sum(frozen.values())
        if self.gathers:
            weights = 0 if self.loaded else trained[device] + frozen[device]
        gradients = every
        if self.scatters:
            gradients = 0 if self.stored else trained[device]
        return weights, gradients


def sharing_of(analysis: Analysis, layout: Layout, workload: Workload) -> dict[int, Sharing]:
    """Stage -> how it is shared, for those that are gathered or reduced."""
    if not {Kind.UNSHARD, Kind.REDUCE_GRAD} & analysis.schedule.kinds:
        return {}
    moves = analysis.moves
    devices: dict[int, set[int]] = defaultdict(set)
    for kind in (Kind.UNSHARD, Kind.REDUCE_GRAD):
        for transfer in moves.transfers[kind, None]:
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


# --- masters and optimizer state of each owner ---

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Part:
    """The masters that one owner steps, with their optimizer."""

    owner: int | None  # the device it is a part of; None where masters are stepped whole
    masters: Tensors  # by place; flat views of the whole ones where there are pieces
    optimizer: torch.optim.Optimizer
    pieces: Pieces | None = None  # which elements they are; None where they are whole

    @property
    def place(self) -> torch.device:
        """The device of its masters."""
        return next(iter(self.masters.values())).device

    def own(self, tensors: Tensors) -> Tensors:
        """The part's pieces of some whole tensors, or all of them."""
        return tensors if self.pieces is None else take(tensors, self.pieces)


def make_parts(
    masters: Tensors, sharing: Sharing | None, make: Make, *, recut: bool, place_of: PlaceOf | None = None
) -> list[Part]:
    """The parts of some of a stage's masters, one for each replica that steps some.

    With `recut` these masters are cut by themselves: parameters whose gradients come from several stages. Owners keep
    what they step at `place_of`; None: all have views of one memory.
    """
    if sharing is None or not (sharing.scatters or sharing.copies):
        return [Part(None, masters, make(list(masters.values())))]
    if sharing.copies:
        first, *others = sharing.owned
        copies = {first: masters} | {owner: _copied(masters, owner, place_of) for owner in others}
        return [Part(owner, own, make(list(own.values()))) for owner, own in copies.items()]
    cuts = dict(sharing.owned)
    if recut:
        sizes = {place: master.numel() for place, master in masters.items()}
        cuts = dict(zip(cuts, cut_evenly(sizes, len(cuts)), strict=True))
    shards = {owner: take(masters, pieces) for owner, pieces in cuts.items()}
    if place_of is not None:
        shards = {owner: _copied(own, owner, place_of) for owner, own in shards.items()}
    return [Part(owner, own, make(list(own.values())), cuts[owner]) for owner, own in shards.items() if own]


def moments_of(parts: Iterable[Part], masters: Tensors) -> Moments:
    """The optimizer's state of every master that has been updated; the first replica's, where several keep copies."""
    found: dict[Place, dict[str, list[torch.Tensor]]] = {}
    for part in parts:
        for place, master in part.masters.items():
            for name, value in part.optimizer.state.get(master, {}).items():
                found.setdefault(place, {}).setdefault(name, []).append(value.cpu())
    return {
        place: {name: _joined(values, masters[place].shape) for name, values in state.items()}
        for place, state in found.items()
    }


def resume(parts: Iterable[Part], moments: Mapping[Place, Mapping[str, torch.Tensor]]) -> None:
    """Give every part its share of an earlier run's state."""
    for part in parts:
        for place, master in part.masters.items():
            for name, value in moments.get(place, {}).items():
                own = part.own({place: value})[place] if value.dim() else value
                part.optimizer.state.setdefault(master, {})[name] = own.to(master.device, copy=True)


def _copied(masters: Tensors, owner: int, place_of: PlaceOf | None) -> Tensors:
    return {
        place: master.to(place_of(place[0], owner) if place_of else master.device, copy=True)
        for place, master in masters.items()
    }


def _joined(values: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The whole state from its pieces; a number, or a whole tensor, is the first owner's."""
    first = values[0]
    is_whole = first.shape == shape or not first.dim() or (first.dim() > 1 and first.dim() == len(shape))  # or by rows
    return first if is_whole else torch.cat(values).view(shape)
