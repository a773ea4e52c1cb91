"""Parts: what each owner of a stage's masters steps, with the optimizer state of that and of nothing else."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.state.ownership import Pieces, Sharing, cut_evenly, take
from rpbench.engine.state.weights import PlaceOf

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Moments = dict[Place, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """What one owner steps.

    Args:
        owner: the device it is a part of; None where masters are stepped whole.
        masters: by place; flat views of the whole ones where there are pieces.
        pieces: which elements they are; None where they are whole.
    """

    owner: int | None
    masters: Tensors
    optimizer: torch.optim.Optimizer
    pieces: Pieces | None = None

    @property
    def place(self) -> torch.device:
        """Where it is."""
        return next(iter(self.masters.values())).device


def make_parts(
    masters: Tensors, sharing: Sharing | None, make: Make, *, recut: bool, place_of: PlaceOf | None = None
) -> list[Part]:
    """The parts of some of a stage's masters.

    Args:
        sharing: how replicas share the stage; None where there is one of it.
        recut: cut these masters by themselves, because their gradients come from several stages.
        place_of: where owners keep what they step; None: all have views of one memory.
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
    """The optimizer's state of every master that has been updated; of one replica, where several keep copies."""
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
                own = value if part.pieces is None or not value.dim() else take({place: value}, part.pieces)[place]
                part.optimizer.state.setdefault(master, {})[name] = own.to(master.device, copy=True)


def _copied(masters: Tensors, owner: int, place_of: PlaceOf | None) -> Tensors:
    return {
        place: master.to(place_of(place[0], owner) if place_of else master.device, copy=True)
        for place, master in masters.items()
    }


def _joined(values: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The state of all pieces; a number, or what is whole, as any owner has it."""
    first = values[0]
    is_whole = first.shape == shape or not first.dim() or (first.dim() > 1 and first.dim() == len(shape))  # or by rows
    return first if is_whole else torch.cat(values).view(shape)
