"""Replica weights: stages that several devices share, each with its shard or its copy; a gather is a real one.

    UNSHARD   a device fetches the others' shards and puts whole tensors together, in memory of its own
    RESHARD   the whole tensors are freed; a later read finds NaN

A shard is kept on its device, or on the host if LOAD:P loads it: then the others fetch the loaded one. A computation
reads only what its own device has gathered; without shards, its device's own copy.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rpbench.engine.peers import fill, here
from rpbench.engine.shards.reduced_gradients import Hold
from rpbench.engine.state.device_weights import DeviceWeights, num_bytes, users_of
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.ownership import Sharing, join, take
from rpbench.engine.state.weights import MastersOf, Named, Weights
from rpbench.engine.workload import Workload
from rpbench.ir.action import Action, Kind
from rpbench.ir.waits.moves import Transfer


class ReplicaWeights(DeviceWeights):
    """`DeviceWeights` of which every replica has its part; `hold` also counts gathered weights."""

    def __init__(
        self, workload: Workload, *given: Any, sharing: Mapping[int, Sharing], hold: Hold, **options: Any
    ) -> None:
        self._stages = sharing
        self._sharing = {module: found for found in sharing.values() for module, _ in found.shapes}
        super().__init__(workload, *given, hold=hold, **options)
        gathers = self._moves.transfers[Kind.UNSHARD, None]
        self._gathers = {transfer.pieces[0]: transfer for transfer in gathers}
        self._sources = self._moves.sources
        self._ends |= {transfer.end: transfer for transfer in gathers}
        self._users |= users_of(gathers)
        self._streamed |= {stage for stage, found in sharing.items() if found.gathers}
        self._buffers = [dict(layer.named_buffers()) for layer in workload.modules]

    def gather(self, number: int) -> None:
        """Gather a stage on a device from the shards of all replicas."""
        transfer = self._gathers[number]
        visit = transfer.visits[0]
        sharing, version, shards = self._stages[visit.stage], self._version(visit), list[Tensors]()
        for owner in sharing.owned:
            shard = self._shard(visit.stage, version, owner, self._sources.get(number, {}).get(owner))
            away = owner != visit.device
            shards.append(
                {
                    place: self._copy(piece, visit.device, "net") if away else here(piece)
                    for place, piece in shard.items()
                }
            )
        copies: dict[int, Named] = {module: {} for module in self._layout.backward[visit.stage]}
        for (module, name), tensor in join(shards, sharing.shapes).items():
            copies[module][name] = tensor.requires_grad_(name not in self._frozen[module])
        self._copies[transfer] = copies
        self._count(transfer, num_bytes(copies))

    def load(self, action: Action, number: int) -> None:
        transfer = self._loads[number]
        before = num_bytes(self._copies.get(transfer, {}))
        super().load(action, number)
        self._count(transfer, num_bytes(self._copies[transfer]) - before)

    def free(self, number: int) -> None:
        transfer = self._ends[number]
        self._count(transfer, -num_bytes(self._copies[transfer]))
        super().free(number)

    def _count(self, transfer: Transfer, change_bytes: int) -> None:
        """Count gathered weights; a stage loaded whole counts as staying."""
        visit = transfer.visits[0]
        sharing = self._stages.get(visit.stage)
        if sharing is not None and sharing.gathers:
            self._hold(visit.device, "gathered weights", change_bytes)

    def all_of(self, module: int, version: int) -> Named:
        sharing = self._sharing.get(module)
        if sharing is None or getattr(self._now, "action", None) is None:
            return super().all_of(module, version)
        if sharing.copies:
            return self._frozen[module] | self.part(module, version, self._now.device)
        return self._buffers[module] | super().all_of(module, version)

    def _brings(self, stage: int) -> str:
        sharing = self._stages.get(stage)
        return "UNSHARD" if sharing is not None and sharing.gathers else super()._brings(stage)

    def part(self, module: int, version: int, owner: int) -> Named:
        """A replica's trainable weights of a shared module: flat pieces, or all."""
        prefix = _key(owner, "")
        kept = Weights.leaves(self, module, version)
        return {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}

    # --- what is kept between gathers ---

    def _shard(self, stage: int, version: int, owner: int, load: Transfer | None) -> Tensors:
        """An owner's shard of a stage: as loaded by a LOAD:P, or as it keeps it."""
        if load is not None:
            found = self._copies[load]
        else:
            found = {module: self._loaded(module, version, owner) for module in self._layout.backward[stage]}
        return {(module, name): piece for module, named in found.items() for name, piece in named.items()}

    def _loaded(self, module: int, version: int, device: int) -> Named:
        sharing = self._sharing.get(module)
        if sharing is None or not sharing.gathers:
            return super()._loaded(module, version, device)
        pieces = [piece for piece in sharing.frozen[device] if piece.place[0] == module]
        frozen = take({(module, name): tensor for name, tensor in self._frozen[module].items()}, pieces)
        return {name: piece for (_, name), piece in frozen.items()} | self.part(module, version, device)

    def _at_home(self, module: int, version: int) -> Named:
        """A whole module outside of actions, for a checkpoint."""
        sharing = self._sharing.get(module)
        if sharing is None or not self._is_divided(module) or not self._trains(module):
            return super()._at_home(module, version)
        parts = [self.part(module, version, owner) for owner in sharing.owned]
        if sharing.copies:
            return self._frozen[module] | parts[0]
        whole = join([{(module, name): piece for name, piece in part.items()} for part in parts], sharing.shapes)
        return self._frozen[module] | {name: tensor.requires_grad_() for (_, name), tensor in whole.items()}

    def _kept(self, module: int, tensors: Named) -> Named:
        kept = self._divided(module, lambda _: tensors)
        return {key: self._copied(module, tensor, _owner(key)) for key, tensor in kept.items()}

    def _write(self, module: int, fresh: Named, masters: MastersOf) -> None:
        def of_module(owner: int | None) -> Named:
            return {name: value for (other, name), value in masters(owner).items() if other == module}

        for name, value in self._divided(module, of_module).items():
            fill(fresh[name], value)

    def _is_divided(self, module: int) -> bool:
        sharing = self._sharing.get(module)
        return sharing is not None and (sharing.gathers or sharing.copies)

    def _divided(self, module: int, tensors_of: Callable[[int | None], Named]) -> Named:
        """A module's trainable tensors as they are kept, with every owner's part under names of its own."""
        sharing = self._sharing.get(module)
        if sharing is None or not self._is_divided(module):
            return tensors_of(None)
        kept: Named = {}
        for owner in sharing.owned:
            own = tensors_of(owner)
            if sharing.gathers:
                whole = {n: tensor for n, tensor in own.items() if tensor.shape == sharing.shapes[module, n]}
                pieces = take({(module, name): tensor for name, tensor in whole.items()}, sharing.owned[owner])
                shards = {n: tensor for n, tensor in own.items() if n not in whole}
                own = shards | {name: piece for (_, name), piece in pieces.items()}
            kept |= {_key(owner, name): tensor for name, tensor in own.items()}
        return kept


def _key(owner: int, name: str) -> str:
    return f"{owner}/{name}"


def _owner(key: str) -> int | None:
    owner, divided, _ = key.partition("/")
    return int(owner) if divided else None
