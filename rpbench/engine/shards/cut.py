"""Cut: the workload, and the state to resume from, of a schedule whose devices have shards of the head or every matrix.

A checkpoint is of the whole model: what was saved by devices with shards can be resumed with any number of shards, or
with whole layers. An optimizer's moments are cut and joined as weights are.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.policy import STEPS_BEHIND, Policy
from rpbench.ir.schedule import Schedule
from rpbench.models.layers import DecoderLayer
from rpbench.models.shards import cut_ends, cut_layer, cut_rows, cut_tensors, joined_tensors
from rpbench.models.vocab_shards import EmbeddingInShards, cut_vocabulary


def cut(workload: Workload, schedule: Schedule, start: State | None) -> tuple[Workload, State | None]:
    """The workload and the state to resume from, in shards if the schedule has shards of the head or every matrix."""
    if schedule.shape.num_head_shards:
        workload = cut_head(workload, schedule)
        start = start and cut_head_state(start, workload)
    if schedule.shape.tensor_parallel:
        workload = cut_workload(workload, schedule)
        start = start and cut_layers_state(start, workload, schedule.shape.num_ranks)
    return (workload if start is None else replace(workload, first_step=start.num_steps)), start


def cut_head(workload: Workload, schedule: Schedule) -> Workload:
    """The workload with its head in shards; ValueError if it cannot be cut, or stage d does not update shard d."""
    shape = schedule.shape
    if shape.separate_cuts or shape.num_stages != shape.num_ranks or shape.num_parts > 1:
        raise ValueError(
            f"{schedule.name}: with a head in shares the engine runs one stage on each device, cut alike in both "
            "directions, and whole sequences; use schedule=vocab_parallel as it is, or mode=simulate"
        )
    if schedule.policy not in STEPS_BEHIND:
        raise ValueError(
            f"policy {schedule.policy.value} leaves it to the order which version a share reads, and all must read the "
            f"same; use policy {' or '.join(policy.value for policy in STEPS_BEHIND)}"
        )
    shares = shape.num_head_shards
    if workload.num_head_shards == shares:
        return workload
    return replace(workload, modules=cut_vocabulary(workload.modules, shares), num_head_shards=shares)


def cut_head_state(state: State, workload: Workload) -> State:
    """A state with the whole head, cut into the places of a workload whose head is in shards."""
    pieces = _pieces(workload)

    def in_pieces(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for place, tensor in tensors.items():
            parts = pieces.get(place)
            found |= {place: tensor} if parts is None else dict(zip(parts, cut_rows(tensor, len(parts)), strict=True))
        return found

    return state.changed(in_pieces)


def joined_head_state(state: State, workload: Workload) -> State:
    pieces = _pieces(workload)
    whole_of = {part: place for place, parts in pieces.items() for part in parts}

    def join(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for place, tensor in tensors.items():
            whole = whole_of.get(place, place)
            if whole not in found:
                found[whole] = _joined([tensors[part] for part in pieces[whole]]) if place in whole_of else tensor
        return found

    return state.changed(join)


def _pieces(workload: Workload) -> dict[Place, list[Place]]:
    """Place in the whole model -> the places of its pieces, in order, for every tensor that is cut."""
    pieces = {(workload.chain[-1], "weight"): [(share, "weight") for share in workload.shards]}
    if isinstance(workload.modules[0], EmbeddingInShards):
        pieces[0, "weight"] = [(0, f"rows.{number}") for number in range(workload.num_head_shards)]
    return pieces


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts[0].dim() else parts[0]


_RUN = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.SUM_F, Kind.SUM_B, Kind.STEP})

DRAWS_APART = (
    "dropout with schedule.sequence_parallel=true: a device would draw for its own tokens alone, and other numbers "
    "than for whole sequences; take model.dropout=0, or schedule.sequence_parallel=false"
)


def cut_workload(workload: Workload, schedule: Schedule) -> Workload:
    """The workload with one shard of the layers for each device; ValueError if layers or schedule do not allow it."""
    _check_layers(workload, schedule)
    num_shards, along = schedule.shape.num_ranks, schedule.shape.sequence_parallel
    for number in range(len(workload.lengths) or 1):
        schedule.shape.check_length(workload.batch(number).tokens.shape[1])
    if along and workload.draws_random:
        raise ValueError(DRAWS_APART)
    decoders = (layer for layer in workload.modules[1:-1] if isinstance(layer, DecoderLayer))
    layers = [cut_layer(layer, num_shards, along_sequence=along) for layer in decoders]
    embedding, head = cut_ends(workload.modules[0], workload.modules[-1], num_shards, along_sequence=along)
    return replace(workload, modules=[embedding, *layers, head])


def _check_layers(workload: Workload, schedule: Schedule) -> None:
    strange = schedule.kinds - _RUN
    if strange:
        names = ", ".join(kind.name for kind in sorted(strange))
        raise ValueError(
            f"{names} in {schedule.name or 'a schedule'}: devices that have shares of matrices run F, B or I and W, "
            "SUM_F, SUM_B and STEP in the engine; use mode=simulate"
        )
    if schedule.policy is not Policy.FLUSH:
        raise ValueError(f"policy {schedule.policy.value}: shares of matrices are trained with policy=flush only")
    for module in workload.modules[1:-1]:
        if not isinstance(module, DecoderLayer):
            raise ValueError(f"{type(module).__name__} has no shares: tensor parallelism cuts decoder layers")


def cut_layers_state(state: State, cut: Workload, num_shards: int) -> State:
    """A state of the whole model, cut into shards of its layers."""
    owners = set(cut.owner_of.values())

    def in_shards(tensors: Tensors) -> Tensors:
        found = _by_module(tensors, lambda named: cut_tensors(named, num_shards, norms_too=True))
        return {place: tensor for place, tensor in found.items() if place in owners}

    return state.changed(in_shards)


def joined(tensors: Tensors) -> Tensors:
    """The weights or gradients of whole layers from those of their shards."""
    return _by_module(tensors, joined_tensors)


def _by_module(tensors: Tensors, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Tensors:
    modules: dict[int, dict[str, torch.Tensor]] = {}
    for (module, name), tensor in tensors.items():
        modules.setdefault(module, {})[name] = tensor
    return {(module, name): tensor for module, named in modules.items() for name, tensor in change(named).items()}
