"""Megatron-LM's arguments for a plan: sizes, batch, precision, recomputation, what replicas share, and the layout.

The order is not in them. Megatron runs 1F1B, interleaved over chunks in groups of microbatches, and hides the exchanges
of experts in it where these are dealt over devices and nothing runs again.

Source: megatron-core 0.16 to 0.19, `training/arguments.py` (`validate_args`), `TransformerConfig`,
`pipeline_parallel_layer_layout.py`, and `schedules.py`, which takes groups of at least as many microbatches as ranks.
"""

from collections.abc import Sequence
from typing import Any

from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule
from rpbench.torch_runtime.formats.frameworks import PlanNumbers, counts_of, is_1f1b
from rpbench.torch_runtime.formats.tables import make_table, placement_of

ORDERS = ("interleaved_1f1b", "combined_1f1b")  # beside 1F1B


def megatron_text(schedule: Schedule, partition: Partition, plan: PlanNumbers) -> str:
    """One option a line, without the order, which is Megatron's own. Equal virtual stages also in the older options.

    A first comment says so where the schedule has another order. ValueError for what Megatron refuses.
    """
    told, notes, equal = megatron_numbers(plan), list(plan.notes), None
    if plan.pipeline > 1:
        table = make_table(schedule)
        told |= megatron_options(partition, schedule.shape.num_ranks, placement_of(table))
        equal = megatron_virtual_stages(partition, schedule.shape.num_ranks)
        told |= _groups(schedule)
        if schedule.name not in ORDERS and not is_1f1b(schedule):
            notes.insert(
                0, f"Megatron does not run {schedule.name}: with this cut it runs 1F1B, interleaved over chunks"
            )
    else:
        told |= {"num-layers": partition.num_layers}
    if schedule.name == "combined_1f1b":
        told |= _combined(plan)
    if plan.stage == 3 and plan.once_a_step:
        notes.append("the plan scatters gradients once a step, Megatron after every backward: slower, and fits")
    if plan.stage < 2 and plan.tensor * plan.context > 1:
        notes.append("devices before Blackwell: set CUDA_DEVICE_MAX_CONNECTIONS=1, or Megatron does not start")
    text = "".join(f"# {note}\n" for note in notes)
    text += "".join(f"--{name}\n" if value is True else f"--{name} {value}\n" for name, value in told.items())
    if equal is not None:
        text += "# or, because the stages are equal, instead of the layout:\n"
        text += "".join(f"# --{name} {value}\n" for name, value in equal.items())
    return text


def _groups(schedule: Schedule) -> dict[str, int]:
    """How many microbatches go through a chunk in a row, where a rank has several chunks and it is not one a rank."""
    shape = schedule.shape
    ranks, count = shape.num_ranks, shape.num_microbatches
    if shape.num_stages == ranks:
        return {}
    if count < ranks:
        raise ValueError(
            f"{count} microbatches on {ranks} ranks with several stages each: Megatron takes at least {ranks}; take "
            f"num_microbatches={ranks}, or one stage a rank"
        )
    group = next(size for size in range(ranks, count + 1) if not 0 < count % size < ranks)
    return {} if group == ranks else {"microbatch-group-size-per-virtual-pipeline-stage": group}


def _combined(plan: PlanNumbers) -> dict[str, Any]:
    """The option for pairs of a forward and a backward; ValueError where Megatron has none."""
    if plan.expert == 1 or plan.recompute == "full":
        seen = f"expert={plan.expert}" if plan.expert == 1 else "recomputation of whole layers"
        raise ValueError(
            f"schedule=combined_1f1b with {seen}: Megatron pairs passes only where experts are dealt over devices and "
            "no layer runs again; take schedule=interleaved_1f1b, or mesh.expert above 1 and recompute=none"
        )
    return {"overlap-moe-expert-parallel-comm": True}


def megatron_numbers(plan: PlanNumbers) -> dict[str, Any]:
    """Megatron-LM's arguments for a plan's numbers; True stands for a flag without a value."""
    if plan.expert_tensor and plan.tensor > 1 and not plan.sequence_parallel:
        raise ValueError(
            f"tensor={plan.tensor} with experts: Megatron trains them with sequence parallelism alone; take "
            "mesh.sequence_parallel=true"
        )
    found: dict[str, Any] = {"bf16": True} | ({} if plan.seq_len is None else {"seq-length": plan.seq_len})
    found |= {"micro-batch-size": plan.sequences, "global-batch-size": plan.global_batch}
    found |= {"tensor-model-parallel-size": plan.tensor, "context-parallel-size": plan.context}
    found |= {"expert-model-parallel-size": plan.expert} if plan.expert > 1 else {}
    if plan.expert_tensor not in (0, plan.tensor):  # Megatron cuts experts as it cuts other matrices if nothing is said
        found["expert-tensor-parallel-size"] = plan.expert_tensor
    found |= {"sequence-parallel": True} if plan.sequence_parallel else {}
    found |= {"use-distributed-optimizer": True} if plan.stage else {}
    if plan.data * plan.context > 1 and plan.gradients_beside:
        found |= {"overlap-grad-reduce": True}
        found |= {"overlap-param-gather": True} if plan.stage and plan.parameters_beside else {}
    if plan.shards < plan.data and plan.stage:
        found["num-distributed-optimizer-instances"] = plan.data // plan.shards
    if plan.stage == 3 and not plan.reshard:
        raise ValueError("mesh.reshard=false: Megatron drops parameters after every use; take mesh.reshard=true")
    if plan.stage > 1:
        what = {2: "optim_grads", 3: "optim_grads_params"}[plan.stage]
        found |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": what, "ckpt-format": "fsdp_dtensor"}
    if plan.recompute == "full":
        how = ("block", plan.recomputed_layers) if plan.recomputed_layers else ("uniform", 1)
        found |= {"recompute-granularity": "full", "recompute-method": how[0], "recompute-num-layers": how[1]}
    elif plan.recompute == "selective":
        found["recompute-granularity"] = "selective"
    return found


def megatron_options(
    partition: Partition, num_ranks: int, placement: Sequence[Sequence[int]] = ()
) -> dict[str, str | int]:
    """Megatron-LM's options for a partition: sizes and `pipeline-model-parallel-layout`.

    Megatron counts the virtual stages of a rank from the layout, and refuses to be told both. The placement is by
    default its own, stage s on rank s mod `num_ranks`. Raises ValueError for separate cuts, stages that are no multiple
    of the ranks, or another placement.
    """
    counts = counts_of(partition)
    if len(counts) % num_ranks:
        raise ValueError(
            f"{len(counts)} stages on {num_ranks} ranks: Megatron gives every rank as many virtual stages; take a "
            f"multiple of {num_ranks}"
        )
    looped = [list(range(rank, len(counts), num_ranks)) for rank in range(num_ranks)]
    if placement and [sorted(own) for own in placement] != looped:
        raise ValueError(
            f"stages {[list(own) for own in placement]} by rank: Megatron has stage s on rank s mod {num_ranks}; V and "
            "wave placements have no layout there"
        )
    return {
        "num-layers": partition.num_layers,
        "pipeline-model-parallel-size": num_ranks,
        "pipeline-model-parallel-layout": megatron_layout(partition),
    }


def megatron_virtual_stages(partition: Partition, num_ranks: int) -> dict[str, str | int] | None:
    """`megatron_options` without a layout, for equal stages; None where stages differ or a rank has one."""
    options = megatron_options(partition, num_ranks)
    counts = counts_of(partition)
    if len(set(counts)) > 1 or len(counts) == num_ranks:
        return None
    del options["pipeline-model-parallel-layout"]
    return options | {"num-virtual-stages-per-pipeline-rank": len(counts) // num_ranks}


def megatron_layout(partition: Partition) -> str:
    """Stages parted by bars: E embedding, t a layer, L head and loss, as `Ett|t*3L`; ValueError for two cuts."""
    counts = counts_of(partition)
    last = len(counts) - 1
    return "|".join(
        ("E" if stage == 0 else "") + ("t" * count if count < 3 else f"t*{count}") + ("L" if stage == last else "")
        for stage, count in enumerate(counts)
    )
