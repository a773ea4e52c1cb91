"""Cut layers: the workload of a schedule whose devices share every matrix, and checkpoints that do not know of it.

A checkpoint is of the model, not of its shares: what was saved by devices that have shares goes on with any number of
them, and with whole layers. An optimizer's moments are cut and joined as weights are.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.gradient_sums.gradients import Tensors
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule
from rpbench.models.layers import DecoderLayer
from rpbench.models.sharded.cut_ends import cut_ends
from rpbench.models.sharded.shards import cut_layer, cut_tensors, joined_tensors

_RUN = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.SUM_F, Kind.SUM_B, Kind.STEP})

DRAWS_APART = (
    "dropout with schedule.sequence_parallel=true: a device would draw for its own tokens alone, and other numbers "
    "than for whole sequences; take model.dropout=0, or schedule.sequence_parallel=false"
)


def cut_workload(workload: Workload, schedule: Schedule) -> Workload:
    """The same training of layers in shares, one for each device.

    Raises:
        ValueError: if the layers cannot be cut evenly, or the schedule is not one that trains them.
    """
    _check(workload, schedule)
    num_shares, along = schedule.shape.num_ranks, schedule.shape.sequence_parallel
    for number in range(len(workload.lengths) or 1):
        schedule.shape.check_length(workload.batch(number).tokens.shape[1])
    if along and workload.draws_random:
        raise ValueError(DRAWS_APART)
    decoders = (layer for layer in workload.modules[1:-1] if isinstance(layer, DecoderLayer))
    layers = [cut_layer(layer, num_shares, along_sequence=along) for layer in decoders]
    embedding, head = cut_ends(workload.modules[0], workload.modules[-1], num_shares, along_sequence=along)
    return replace(workload, modules=[embedding, *layers, head])


def _check(workload: Workload, schedule: Schedule) -> None:
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


def cut_state(state: State, cut: Workload, num_shares: int) -> State:
    """A state of the whole model as one of its shares."""
    owners = set(cut.owner_of.values())

    def in_shares(tensors: Tensors) -> Tensors:
        found = _by_module(tensors, lambda named: cut_tensors(named, num_shares, norms_too=True))
        return {place: tensor for place, tensor in found.items() if place in owners}

    return state.changed(in_shares)


def joined_state(state: State) -> State:
    """A state of shares as one of the whole model."""
    return state.changed(joined)


def joined(tensors: Tensors) -> Tensors:
    """Weights, or gradients, of shares as those of the whole layers."""
    return _by_module(tensors, joined_tensors)


def _by_module(tensors: Tensors, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Tensors:
    modules: dict[int, dict[str, torch.Tensor]] = {}
    for (module, name), tensor in tensors.items():
        modules.setdefault(module, {})[name] = tensor
    return {(module, name): tensor for module, named in modules.items() for name, tensor in change(named).items()}
