"""Parameters on one device of each pipeline rank, dense and of experts, under a mesh."""

from typing import NamedTuple

from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import padded_vocab


class Held(NamedTuple):
    """Parameters of a device before data parallelism shares them.

    Args:
        dense, experts: of the layers, embedding and head among the dense ones.
        largest: dense and expert parameters of the largest layer.
    """

    dense: float
    experts: float
    largest: float


def held(job: Job, rank: int) -> Held:
    """The parameters of a device of a pipeline rank."""
    own, mesh = job.architecture, job.mesh
    dense = experts = largest = 0.0
    for stage in job.stages_of(rank):
        for kind, count in job.stage_layers[stage]:
            of_layer = own.dense_parameters(kind) / mesh.tensor
            of_experts = own.expert_parameters(kind) / (mesh.expert * mesh.expert_tensor)
            dense, experts = dense + count * of_layer, experts + count * of_experts
            largest = max(largest, of_layer + of_experts)
    rows = padded_vocab(job.setting) / mesh.tensor
    first, last = rank == 0, rank == mesh.pipeline - 1
    if first:
        dense += (rows + own.learned_positions) * own.hidden
    if last and not (own.tied and first):
        dense += rows * own.hidden
    return Held(dense, experts, largest)
