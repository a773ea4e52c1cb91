"""What other frameworks take: lines for torchtitan and NeMo AutoModel, Megatron's layout, DeepSpeed's partition.

They read a partition or an order from options of their own. Only what they can express is written: torchtitan and
AutoModel find the placement by the schedule's NAME and not in the file, Megatron and DeepSpeed run their own order.

Source: torchtitan 0.3 (whose head was named `output` before) and NeMo AutoModel, `pipeline_parallel_schedule_csv` and
`pp_schedule_csv` and what builds stages for them; Megatron-LM, `pipeline_model_parallel_layout` (megatron-core 0.16);
DeepSpeed 0.19, `PipelineModule`, which has no option for a list of boundaries: a subclass sets `parts`; roundpipe
0.1.1, `ModelExecutePlan`, whose `check_valid` takes the type of run and the number of layers.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rpbench.engine.layout import layout_of
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.models.build import build_layer
from rpbench.torch_runtime.tables import make_table
from rpbench.torch_runtime.torch_csv import placement_of
from rpbench.workload.architecture import Architecture

Framework = Literal["torchtitan", "automodel"]
FRAMEWORKS: tuple[Framework, ...] = ("torchtitan", "automodel")


@dataclass(frozen=True)
class ModuleNames:
    """How a framework's model names its modules.

    Args:
        embedding: before the layers; all of them go to the first stage.
        layer: of decoder layer `{layer}`, counted from 0.
        head: behind the layers; all of them go to the last stage.
        everywhere: what every stage has.
    """

    embedding: tuple[str, ...] = ("tok_embeddings",)
    layer: str = "layers.{layer}"
    head: tuple[str, ...] = ("norm", "lm_head")
    everywhere: tuple[str, ...] = ()


NAMES = {
    "torchtitan": ModuleNames(),
    "automodel": ModuleNames(
        ("model.embed_tokens",), "model.layers.{layer}", ("model.norm", "lm_head"), ("model.rotary_emb",)
    ),
}


@dataclass(frozen=True)
class Lines:
    """What to paste, and what must be true beside it.

    Args:
        options: as a config has them, `key = value` in TOML's form, one a line.
        notes: sentences for a person.
    """

    options: dict[str, object]
    notes: tuple[str, ...] = field(default=())

    def to_toml(self) -> str:
        """Notes as comments, then one option a line."""
        return "\n".join(
            [*(f"# {note}" for note in self.notes), *(f"{k} = {json.dumps(v)}" for k, v in self.options.items())]
        )


def module_names_per_stage(partition: Partition, names: ModuleNames) -> list[list[str]]:
    """The modules of every stage in model order; torchtitan's `module_fqns_per_model_part`.

    Raises:
        ValueError: if forward and backward are cut apart, or a stage holds nothing.
    """
    counts = _counts(partition)
    last = len(counts) - 1
    found = []
    for stage, layers in enumerate(partition.forward_ranges()):
        own = [*(names.embedding if stage == 0 else ()), *(names.layer.format(layer=layer) for layer in layers)]
        own += names.head if stage == last else ()
        if not own:
            raise ValueError(f"partition {partition}: stage {stage} holds no module; give it a layer at least")
        found.append([*own, *names.everywhere])
    return found


def table_lines(
    schedule: Schedule,
    csv_path: str,
    framework: Framework = "torchtitan",
    names: ModuleNames | None = None,
    sequences: int = 1,
) -> Lines:
    """The options that make a framework run a table.

    Args:
        sequences: of a microbatch.

    Raises:
        ScheduleError: if the framework would place its stages elsewhere than the table does.
        ValueError: for a framework we know no options of.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework}: one of {', '.join(FRAMEWORKS)}")
    table = make_table(schedule)
    name = _placed_by(table, framework)
    m, stages = table.shape.num_microbatches, table.shape.num_stages
    options: dict[str, object] = {"pipeline_parallel_degree": table.shape.num_ranks}
    if framework == "torchtitan":
        options |= {"pipeline_parallel_schedule": name, "pipeline_parallel_schedule_csv": csv_path}
        options |= {"pipeline_parallel_microbatch_size": sequences}
        notes = [f"local_batch_size must be {m * sequences}: the table's {m} microbatches"]
    else:
        options = {"pp_size": table.shape.num_ranks, "pp_schedule": name, "pp_schedule_csv": csv_path}
        options |= {"pp_microbatch_size": sequences, "pp_batch_size": m * sequences}
        notes = [f"pp_batch_size / pp_microbatch_size must stay the table's {m} microbatches"]
    if table.partition is not None:
        parts = module_names_per_stage(table.partition, names or NAMES[framework])
        options["module_fqns_per_model_part"] = parts
        notes.append("names of modules differ by model and version: compare them with model.named_modules()")
    else:
        notes.append(f"cut the model into {stages} stages: module_fqns_per_model_part has as many lists")
    notes.append(f"the name {name} decides where stages are, the file in which order they run")
    return Lines(options, tuple(notes))


def roundpipe_plan(partition: Partition) -> dict[str, object]:
    """A partition as the fields of `ModelExecutePlan` of the released library: ranges of its layers, [start, stop).

    Its layer 0 is the embedding, 1 to L are the decoder layers, L + 1 is norm, head and loss. Forward ranges ascend,
    backward ranges descend; of a fused plan the first backward range does its forward as well.

    Raises:
        ValueError: if a stage has no layer, which the library refuses.
    """
    layout = layout_of(partition)
    forward, backward = list(layout.forward), list(reversed(layout.backward))
    for name, ranges in (("forward", forward), ("backward", backward)):
        empty = next((number for number, found in enumerate(ranges) if not found), None)
        if empty is not None:
            raise ValueError(
                f"partition {partition}: {name} range {empty} of the plan has no layer, and roundpipe takes none "
                "without; give every stage a layer"
            )
    return {
        "run_type": "fused" if layout.fused else "train",
        "num_layers": layout.num_modules,
        "fwd_plan": [[found.start, found.stop] for found in forward],
        "bwd_plan": [[found.start, found.stop] for found in backward],
    }


# Bytes of a trainable parameter that the library never pins: master, gradient of the optimizer and Adam's two moments,
# in 32 bits each.
_UNPINNED_BYTES = 16


def roundpipe_host_bytes(model: Architecture) -> dict[str, int]:
    """The host's memory under the released library by its `pin_model`, without inputs that are kept to recompute from.

    16-bit weights are pinned by torch's allocator (`alloc`), whose blocks are powers of two, in place (`register`), or
    not at all (`off`). Their gradients come home into blocks of that allocator whichever it is.

    Source: roundpipe 0.1.1, `memory.py`, `transfer.py` and `optim`; torch, `c10/core/CachingHostAllocator`.
    """
    weights: Counter[str] = Counter()
    for index, copies in ((0, 1), (1, model.num_layers), (model.num_layers + 1, 1)):
        for name, parameter in build_layer(model, index, device="meta").named_parameters():
            if model.tied and index > model.num_layers and name == "weight":
                continue  # the embedding's
            size = 2 * parameter.numel()
            block = 1 << (size - 1).bit_length()
            weights["exact"] += copies * size
            weights["blocks"] += copies * block
            if parameter.requires_grad:
                weights["trained"] += copies * (block + _UNPINNED_BYTES * parameter.numel())
    return {
        pin: weights["blocks" if pin == "alloc" else "exact"] + weights["trained"]
        for pin in ("alloc", "register", "off")
    }


def _placed_by(table: Schedule, framework: Framework) -> str:
    """A schedule of theirs whose stages stand where the table's do."""
    p, stages = table.shape.num_ranks, table.shape.num_stages
    placed = placement_of(table)
    if stages == p and placed == [[rank] for rank in range(p)]:
        return "1F1B"
    if placed == [list(range(rank, stages, p)) for rank in range(p)]:
        return "Interleaved1F1B"
    if stages == 2 * p and placed == [[rank, stages - 1 - rank] for rank in range(p)]:
        return "ZBVZeroBubble"
    where = "; ".join(f"rank {rank}: {','.join(map(str, own))}" for rank, own in enumerate(placed))
    raise ScheduleError(
        f"schedule={table.name}: {framework} places stages one a rank, in loops or in a V of two a rank, and this "
        f"table has {where}; run it with backend=torch, or take two chunks a device"
    )


def megatron_options(
    partition: Partition, num_ranks: int, placement: Sequence[Sequence[int]] = ()
) -> dict[str, str | int]:
    """Megatron-LM's options for a partition: sizes and `pipeline-model-parallel-layout`.

    Megatron counts the virtual stages of a rank from the layout, and refuses to be told both.

    Args:
        placement: the stages of each rank; none: Megatron's own, stage s on rank s mod `num_ranks`.

    Raises:
        ValueError: for separate cuts, stages that are no multiple of the ranks, or another placement.
    """
    counts = _counts(partition)
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
    """The options that say the same without a layout; None where stages differ or a rank has one of them.

    Raises:
        ValueError: as `megatron_options`.
    """
    options = megatron_options(partition, num_ranks)
    counts = _counts(partition)
    if len(set(counts)) > 1 or len(counts) == num_ranks:
        return None
    del options["pipeline-model-parallel-layout"]
    return options | {"num-virtual-stages-per-pipeline-rank": len(counts) // num_ranks}


def megatron_layout(partition: Partition) -> str:
    """Stages in model order parted by bars: E embedding, t a decoder layer, L head and loss; `Ett|t*3L`.

    Raises:
        ValueError: if forward and backward are cut apart.
    """
    counts = _counts(partition)
    last = len(counts) - 1
    return "|".join(
        ("E" if stage == 0 else "") + _repeated("t", count) + ("L" if stage == last else "")
        for stage, count in enumerate(counts)
    )


def _repeated(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"


def deepspeed_parts(partition: Partition, *, embedding_layers: int = 1, head_layers: int = 1) -> list[int]:
    """The boundaries of `PipelineModule.parts`: stage s runs layers parts[s] to parts[s + 1] - 1 of its layer list.

    Args:
        embedding_layers, head_layers: entries of that list before and behind the decoder layers.

    Raises:
        ValueError: if forward and backward are cut apart.
    """
    counts = _counts(partition)
    last, bounds = len(counts) - 1, [0]
    for stage, count in enumerate(counts):
        ends = (embedding_layers if stage == 0 else 0) + (head_layers if stage == last else 0)
        bounds.append(bounds[-1] + count + ends)
    return bounds


def _counts(partition: Partition) -> tuple[int, ...]:
    if partition.fused or partition.forward != partition.backward:
        raise ValueError(
            f"partition {partition} cuts forward and backward apart, which only our engine runs; take one cut for both"
        )
    return partition.forward
