"""Cut head: the workload of a schedule whose devices share the head, and checkpoints that do not know of it.

A checkpoint is of the model, not of a schedule: what was saved by devices that share the head goes on with any number
of them, and with a head that is whole. Adam's moments are cut and joined as weights are.
"""

from dataclasses import replace

import torch

from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.gradient_sums.gradients import Place, Tensors
from rpbench.engine.workload import Workload
from rpbench.ir.policy import STEPS_BEHIND
from rpbench.ir.schedule import Schedule
from rpbench.models.sharded.vocab_shards import EmbeddingInShares, cut_vocabulary, share_rows


def cut_head(workload: Workload, schedule: Schedule) -> Workload:
    """The same workload with as many shares of the head as a schedule has; as it is if it has them.

    Raises:
        ValueError: if the model has no head that can be cut, or the schedule cannot update share d with stage d.
    """
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
    if workload.num_head_shares == shares:
        return workload
    return replace(workload, modules=cut_vocabulary(workload.modules, shares), num_head_shares=shares)


def cut_state(state: State, workload: Workload) -> State:
    """A state of the whole head by the places of a workload whose head is cut."""
    pieces = _pieces(workload)

    def cut(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for place, tensor in tensors.items():
            parts = pieces.get(place)
            found |= {place: tensor} if parts is None else dict(zip(parts, _split(tensor, len(parts)), strict=True))
        return found

    return state.changed(cut)


def join_state(state: State, workload: Workload) -> State:
    """The inverse of `cut_state`."""
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
    """Every place of a model that is cut -> the places of its pieces, in order."""
    pieces = {(workload.chain[-1], "weight"): [(share, "weight") for share in workload.shares]}
    if isinstance(workload.modules[0], EmbeddingInShares):
        pieces[0, "weight"] = [(0, f"rows.{number}") for number in range(workload.num_head_shares)]
    return pieces


def _split(tensor: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """The pieces of a tensor; each has the whole of one that has no rows, such as a number of steps."""
    if not tensor.dim():
        return [tensor] * num_parts
    return [tensor[rows.start : rows.stop] for rows in share_rows(len(tensor), num_parts)]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts[0].dim() else parts[0]
