"""Dry run: what a request would be on GPUs that are not here: its ranks, their memory, and the command that starts it.

Everything that needs no device is really done: the schedule is lowered and its messages checked, every stage's modules
are built on the meta device. Memory is predicted from their sizes, the order's activations in flight and the receive
buffers, of which torch makes one for every microbatch, stage and direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpbench.engine.layout import layout_of
from rpbench.ir.action import Kind, parts_of
from rpbench.ir.schedule import Row
from rpbench.torch_runtime.processes.hosts import torchrun_command
from rpbench.torch_runtime.request import DTYPES, TorchRequest
from rpbench.workload.architecture import Architecture

ADAM_STATES = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes one GPU of a pipeline rank is predicted to hold at its fullest.

    Args:
        weights, gradients, optimizer: of its stages.
        activations: what its order keeps for backwards at the same time, nothing recomputed.
        buffers: receive buffers of all microbatches.
        logits: of the last stage's head, one chunk of tokens at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.logits


@dataclass(frozen=True)
class DryRun:
    """A request that has not run.

    Args:
        memory: by pipeline rank.
        command: what starts it.
    """

    memory: tuple[RankMemory, ...]
    command: str

    def fields(self) -> dict[str, Any]:
        """What a record has of it; the bytes are predicted."""
        return {
            "evidence": "predicted",
            "peak_memory_bytes": [each.total for each in self.memory],
            "memory_parts_bytes": [vars(each) for each in self.memory],
            "command": self.command,
        }


def dry_run(request: TorchRequest, *, num_hosts: int = 1, overrides: Sequence[str] = ()) -> DryRun:
    """What a checked request would take.

    Args:
        overrides: of the command line, to be repeated under torchrun.

    Raises:
        ValueError: if the ranks cannot be dealt to the hosts evenly.
    """
    if request.num_ranks % num_hosts:
        raise ValueError(f"num_hosts={num_hosts}: {request.num_ranks} ranks cannot be dealt evenly; take a divisor")
    memory = tuple(rank_memory(request, rank) for rank in range(request.num_pipeline_ranks))
    return DryRun(memory, torchrun_command(request.num_ranks // num_hosts, num_hosts, overrides))


def rank_memory(request: TorchRequest, rank: int) -> RankMemory:
    """The prediction for one pipeline rank; sharded dimensions divide what they shard."""
    model, lowered = Architecture(**request.model), request.lowered
    table, chains = lowered.table, lowered.chains
    assert table.partition is not None  # or the request had been refused
    layout = layout_of(table.partition)
    size = DTYPES[request.dtype].itemsize
    stages = [chains.place(stage)[1] for stage in chains.stages_of(rank)]
    modules = [module for stage in stages for module in layout.forward[stage]]
    built = request.workload(own=()).modules  # on the meta device
    trained = sum(p.numel() for m in modules for p in built[m].parameters() if p.requires_grad)
    held = sum(p.numel() for m in modules for p in built[m].parameters())
    shards = request.tensor_parallel
    owners = request.data_parallel if request.data_mode == "fsdp2" else 1
    tokens = request.microbatch_sequences * model.seq_len
    boundary = tokens * model.hidden * size
    top = table.shape.num_stages - 1
    return RankMemory(
        held * size // shards,
        trained * size // shards,
        ADAM_STATES * trained * size // (shards * owners) if request.optimizer is not None else 0,
        _activations(table.compute(rank), model, table.partition.forward, tokens, size) // shards,
        sum(lowered.num_microbatches * boundary * ((stage > 0) + (stage < top)) for stage in stages),
        2 * min(tokens, 4096) * model.vocab * size if top in stages else 0,
    )


def _activations(row: Row, model: Architecture, counts: Sequence[int], tokens: int, size: int) -> int:
    """The most that a row's order keeps at one time: a microbatch of a stage from its F to its B or W."""
    per_layer = model.layer_activation_bytes(tokens) * size / torch.float16.itemsize
    held = most = 0.0
    for action in row:
        for part in parts_of(action):
            if part.kind is Kind.F:
                held += counts[part.stage] * per_layer
                most = max(most, held)
            elif part.kind in (Kind.B, Kind.W):
                held -= counts[part.stage] * per_layer
    return round(most)
