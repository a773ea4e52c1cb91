"""Relative throughput of schedules within groups of measured runs, predicted from shapes alone.

    python -m analysis.predictions.schedules_measured      write schedules_measured.csv

A run is simulated with one rate for all floating-point operations; stages differ by their layers and the head.
Splitting a backward makes its kernels `SPLIT` longer. `relative_pace` is the model's operations over the operations
that fit into the time of all devices, relative to the first row of the group. `memory_GB` is that of the fullest
device: state, activations of the chunks in flight, logits.

`schedules_measured.yaml` has the assumptions on each group: sizes, microbatches, bytes of state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from analysis.predictions.tables import FOLDER, Row, write
from rpbench.cost.footprint.sizes import LayerActivations
from rpbench.cost.published import published_rows
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.plan.problem import Problem
from rpbench.registry import entries
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture, architecture
from rpbench.workload.counts import Experts
from rpbench.yaml_file import read_keys

SPLIT = 1.03  # factor of the kernels of a split backward: 2 to 4 % in other measured runs
UTILISATION = 0.45  # of the peak; converts transfers between stages to operations
LOGIT_BYTES = 8  # fp32 logits and their gradient on the last stage
ORDERS = {"zbb": "interleaved_zb", "zero_bubble (zb1p)": "zb_h1", "zb_2p": "zb_h2"}  # names in the files -> ours


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other, and assumptions on them."""

    # first, last: numbers of the rows
    first: int
    last: int
    model: Architecture
    num_ranks: int  # pipeline ranks
    # num_microbatches, microbatch_sequences: of a step
    num_microbatches: int
    microbatch_sequences: int
    # tflops, link_gb_per_s: of a device, and of its link to the next rank (vendor figures)
    tflops: float
    link_gb_per_s: float
    state_bytes: float = 18  # for a parameter on a device, with master weights and optimizer
    shards: int = 1  # devices that share a stage's matrices (tensor parallelism)
    expert_shards: int = 1  # devices that share its experts
    chunks: int = 2  # of looped orders if the row does not say
    kept: float = 1.0  # fraction of the activations that is kept; recomputing the rest takes no time
    # names of rows -> (order, ranks, microbatches), where they differ within the group
    orders: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)


def _model(name: str) -> Architecture:
    own = dict(_FILE["models"][name])
    if experts := own.pop("experts", None):
        own["experts"] = Experts(*experts)
    return replace(architecture(own.pop("of")), **own) if "of" in own else Architecture(name, **own)


_FILE = read_keys(Path(__file__).with_suffix(".yaml"))
GROUPS = tuple(Group(**row | {"model": _model(row["model"])}) for row in _FILE["groups"])

SHARDED_EFFICIENCY = 0.85  # assumed, of FSDP with expert parallelism: exposed gathers and all-to-alls, no bubble


class Found(NamedTuple):
    """The model's operations over those that fit into the time, and bytes on the fullest device."""

    efficiency: float
    memory_bytes: float


def layer_flops(model: Architecture, num_tokens: int, *, split: bool, recompute: bool, hop: float) -> LayerTimes:
    """Operations of every layer for one microbatch; gradients of weights take those of the matrices alone."""
    forward = model.layer_forward_flops(num_tokens, "causal")
    matrices = 2 * num_tokens * model.layer_matrix_weights(None)
    attention = forward - matrices
    longer = SPLIT if split else 1.0
    inputs, weights = longer * (matrices + 2.5 * attention), longer * matrices
    head = float(model.head_forward_flops(num_tokens))

    num = model.num_layers
    return LayerTimes(
        forward=[forward] * num,
        recompute=[forward if recompute else 0.0] * num,
        backward=[inputs + weights] * num,
        head_forward=head,
        head_backward=2 * longer * head,
        input_grad=[inputs] * num,
        weight_grad=[weights] * num,
        head_input_grad=longer * head,
        head_weight_grad=longer * head,
        hop=hop,
    )


def cut(num_layers: int, num_stages: int) -> Partition:
    """Even stages; embedding and head count as a layer each if only that makes stages equal (Megatron's layouts)."""
    if num_layers % num_stages and not (num_layers + 2) % num_stages:
        first, *middle, last = split_evenly(num_layers + 2, num_stages)
        return symmetric((first - 1, *middle, last - 1))
    return symmetric(split_evenly(num_layers, num_stages))


def find(group: Group, row: dict[str, str]) -> Found:
    name, num_ranks, num_microbatches = group.orders.get(
        row["schedule"], (ORDERS.get(row["schedule"], row["schedule"]), group.num_ranks, group.num_microbatches)
    )
    model, sequences = group.model, group.microbatch_sequences * group.num_microbatches // num_microbatches
    tokens, recompute = sequences * model.seq_len, row["activation_checkpointing"] == "full"
    if not name:
        kept = _activation_bytes(group, tokens, recompute) * model.num_layers
        return Found(SHARDED_EFFICIENCY, group.state_bytes * model.total_parameters / num_ranks + kept / num_ranks)
    entry = entries()[name]
    looped = row["vpp"] if row["vpp"].isdigit() else str(group.chunks)
    chunks = (entry.chunks or int(looped)) if entry.looped else 1
    split = name.startswith(("zb", "v_", "interleaved_zb"))
    hop = model.boundary_bytes(tokens) * (1e3 * group.tflops / group.link_gb_per_s) * UTILISATION
    problem = Problem(
        entry=entry,
        times=layer_flops(model, tokens, split=split, recompute=recompute, hop=hop),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        chunks_per_rank=chunks,
        activations=LayerActivations(34, 32),  # all, and those kept until W: Qi et al., fused attention
    )
    partition = cut(model.num_layers, num_ranks * chunks)
    graph = build_graph(problem.order(partition))
    makespan = float(simulate_graph(graph, problem.costs(partition)).makespan)
    plain = layer_flops(model, tokens, split=False, recompute=False, hop=0)
    work = num_microbatches * (sum(plain.forward) + sum(plain.backward) + plain.head_forward + plain.head_backward)
    # State of the first rank's layers and embedding, activations of the fullest rank's chunks, and logits.
    expert, longest = model.layer_parameters - model.layer_matrix_weights(0), max(partition.forward)
    layer = model.layer_matrix_weights(0) + expert / group.expert_shards
    state = group.state_bytes * (longest * chunks * layer + model.embedding_parameters) / group.shards
    held = max(peak_in_flight(graph)) * longest * _activation_bytes(group, tokens, recompute)
    memory = state + held + LOGIT_BYTES * tokens * model.vocab / group.shards / chunks
    return Found(work / (num_ranks * makespan), memory)


def _activation_bytes(group: Group, num_tokens: int, recompute: bool) -> float:
    model = group.model
    kept = model.boundary_bytes(num_tokens) if recompute else model.layer_activation_bytes(num_tokens, "causal")
    return group.kept * kept / group.shards


def rows() -> list[Row]:
    asked = {int(row["id"].split("/")[1]): row for row in published_rows("challenge/schedules_measured.csv")}
    made = []
    for group in GROUPS:
        found = {number: find(group, asked[number]) for number in range(group.first, group.last + 1)}
        first = found[group.first].efficiency
        made += [
            {
                "id": asked[number]["id"],
                "relative_pace": f"{own.efficiency / first:.3f}",
                "memory_GB": f"{own.memory_bytes / 1e9:.1f}",
            }
            for number, own in found.items()
        ]
    return made


if __name__ == "__main__":
    write(FOLDER / "schedules_measured.csv", rows())
