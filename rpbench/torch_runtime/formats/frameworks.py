"""Options of other frameworks: a plan's numbers, torchtitan's TOML, accelerate's YAML for FSDP2, RoundPipe's ranges.

Megatron's arguments and DeepSpeed's JSON are in `megatron` and `deepspeed` beside this file.

Only what a framework can express is written, the rest is a note: torchtitan and NeMo AutoModel take the placement from
the schedule's NAME and not from the file, Megatron and DeepSpeed run their own order, and none of them recomputes more
layers of some stages than of others.

Source: torchtitan 0.3 (`TrainingConfig`, `ParallelismConfig`; its head was named `output` before) and NeMo AutoModel,
`pipeline_parallel_schedule_csv` and `pp_schedule_csv` and what builds stages for them; accelerate 1.15, `ClusterConfig`
and `Accelerator.accumulate`; roundpipe 0.1.1, `ModelExecutePlan`, whose `check_valid` takes the type of run and the
number of layers.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Literal

from rpbench.engine.layout import layout_of
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.ir.action import Kind
from rpbench.ir.partition import Partition, filled
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.ir.waits.moves import has_transfers
from rpbench.models.build import build_layer
from rpbench.registry import entry
from rpbench.torch_runtime.formats.tables import make_table, placement_of
from rpbench.workload.architecture import Architecture

Framework = Literal["torchtitan", "automodel"]
FRAMEWORKS: tuple[Framework, ...] = ("torchtitan", "automodel")


@dataclass(frozen=True)
class ModuleNames:
    """How a framework's model names its modules."""

    embedding: tuple[str, ...] = ("tok_embeddings",)  # before the layers; all of them go to the first stage
    layer: str = "layers.{layer}"  # of decoder layer `{layer}`, counted from 0
    head: tuple[str, ...] = ("norm", "lm_head")  # behind the layers; all of them go to the last stage
    everywhere: tuple[str, ...] = ()


NAMES = {
    "torchtitan": ModuleNames(),
    "automodel": ModuleNames(
        ("model.embed_tokens",), "model.layers.{layer}", ("model.norm", "lm_head"), ("model.rotary_emb",)
    ),
}


# Methods whose devices run whole microbatches -> what their replicas share, and what of that lives on the host.
_SHARED = {
    "zero_2": "gradients",
    "zero_offload": "gradients",
    "zenflow": "gradients",
    "zero_3": "parameters",
    "zero_infinity": "parameters",
    "superoffload": "parameters",
}
_ON_HOST = {"zero_offload": "optimizer", "zenflow": "optimizer", "superoffload": "optimizer"}

# Where a form can say that state lives, beside the devices; DeepSpeed's says all that a plan has.
_HOSTS = {"torchtitan": ("parameters",), "fsdp2": ("parameters",), "megatron_layout": ()}
_REPLICAS = ("data_parallel", *_SHARED)  # all methods that are no pipeline and run elsewhere as data parallelism


@dataclass(frozen=True)
class PlanNumbers:
    """The numbers of a plan beside its order and its cut."""

    sequences: int = 1  # of a microbatch on one device
    num_microbatches: int = 1  # of a step, on each replica
    seq_len: int | None = None  # tokens of a sequence; None where no model says
    data: int = 1  # devices along this axis, as of the next four
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0  # shards of one expert; 0: there are no experts, or as many as of other matrices
    sequence_parallel: bool = False  # element-wise work between tensor-parallel maps is cut as well
    shared: str = "none"  # what replicas share: none, optimizer, gradients, parameters
    shard_group: int = 0  # devices of data x context that share it; 0: all
    reshard: bool = True  # gathered parameters are dropped between forward and backward
    on_host: str = ""  # the shared state that lives on the host: "", optimizer or parameters
    recompute: str = "full"  # none; selective: what is cheap; full: all but the inputs of layers
    recomputed_layers: int = 0  # of every stage, the first ones; 0: all, where `recompute` is full
    # gradients_beside, parameters_beside: whether replicas exchange them beside computation
    gradients_beside: bool = True
    parameters_beside: bool = True
    nodes: int = 1  # machines
    optimizer_bits: int = 32  # of each of Adam's moments
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences about what none of the files can say

    @property
    def global_batch(self) -> int:
        """Sequences of a step on all devices."""
        return self.sequences * self.num_microbatches * self.data

    @property
    def shards(self) -> int:
        """Devices along the data axis that share state; the others are copies of them."""
        group = self.shard_group // self.context or self.data
        return 1 if self.shared == "none" else group

    @property
    def on_ssd(self) -> str:
        """What of the state on the host lives on SSDs: "", optimizer or all."""
        return {"none": ""}.get(found := str(self.options.get("ssd", "none")), found)

    @property
    def once_a_step(self) -> bool:
        """Whether a device sums gradients and scatters them once a step, instead of after every backward."""
        return not self.options.get("reduce_each_microbatch", True)

    @property
    def stage(self) -> int:
        """ZeRO's number for what replicas share; gradients that are scattered once a step are whole until then."""
        found = ("none", "optimizer", "gradients", "parameters").index(self.shared)
        return 1 if found == 2 and self.once_a_step else found


def numbers_of(schedule: Schedule, options: Mapping[str, Any] | None = None, **known: Any) -> PlanNumbers:
    """The numbers of a schedule made with options; those `known` otherwise replace them."""
    shape, options = schedule.shape, dict(options or {})
    ranks, placement = shape.num_ranks, schedule.placement
    everywhere = schedule.name in _SHARED or (bool(placement) and len(placement[0]) == ranks > 1)  # of one device too
    found: dict[str, Any] = {"num_microbatches": shape.num_microbatches, "options": options}
    if shape.tensor_parallel:
        found |= {"tensor": ranks, "sequence_parallel": bool(options.get("sequence_parallel"))}
    elif everywhere:
        stays_home = options.get("offload") or schedule.name == "zero_infinity"
        on_host = "parameters" if stays_home else _ON_HOST.get(schedule.name, "")
        found |= {"data": ranks, "shared": _SHARED.get(schedule.name, "none"), "on_host": on_host}
        found["num_microbatches"] //= ranks
    else:
        found["pipeline"] = ranks
    return PlanNumbers(**(found | known))


def _check_context(plan: PlanNumbers, form: str) -> None:
    """Raise ValueError for sequences or groups that frameworks do not cut evenly over a context group.

    Each device has a part of both halves of a sequence; torchtitan cuts each of them over tensor shards.
    """
    context, shards = plan.context, plan.tensor if plan.sequence_parallel else 1
    least = context * (2 * shards if form == "torchtitan" else lcm(2, shards))
    if context > 1 and plan.seq_len is not None and plan.seq_len % least:
        raise ValueError(
            f"seq_len={plan.seq_len} with context={context}: format={form} has a part of both halves of a sequence on "
            f"each device; take a multiple of {least}"
        )
    if plan.shard_group % context:
        raise ValueError(
            f"mesh.shard_group={plan.shard_group} with mesh.context={context}: frameworks share among whole context "
            f"groups; take a multiple of {context}"
        )


def check_replicas(schedule: Schedule, plan: PlanNumbers, form: str) -> None:
    """Raise ScheduleError for a plan that a file would turn into plain data parallelism: for an order that it cannot
    hold, or for state on the host or its SSDs that it would keep on the devices.
    """
    _check_context(plan, form)
    shape, where = schedule.shape, plan.on_host
    if form in _HOSTS and where and (where not in _HOSTS[form] or plan.on_ssd):
        place = "SSDs" if plan.on_ssd else "the host"
        raise ScheduleError(
            f"schedule={schedule.name}: {where} on {place}, which format={form} cannot say; take format=deepspeed"
        )
    if plan.pipeline > 1 or shape.num_ranks == 1 or shape.tensor_parallel or schedule.name in _REPLICAS:
        return
    raise ScheduleError(
        f"schedule={schedule.name}: format={form} would make plain data parallelism of it, which is another method; "
        "take schedule=data_parallel or zero_3 there, or write this order by format=text"
    )


def is_1f1b(schedule: Schedule) -> bool:
    """Whether every rank has one stage and runs it in the order of 1F1B, steps and recomputation aside."""
    shape = schedule.shape
    if schedule.policy is not Policy.FLUSH or shape.num_stages != shape.num_ranks or has_transfers(schedule):
        return False
    ranks = shape.num_ranks
    plain = entry("1f1b").build(Shape(ranks, ranks, shape.num_microbatches, num_steps=shape.num_steps))
    return all(
        [action[:3] for action in schedule.compute(rank) if action.kind not in (Kind.R, Kind.STEP)]
        == [action[:3] for action in plain.compute(rank)]
        for rank in range(ranks)
    )


@dataclass(frozen=True)
class Lines:
    """Options to paste, of which a mapping is a section of its own, and notes for people."""

    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def to_toml(self) -> str:
        """Notes as comments, then one option a line, sections last."""
        found = [f"# {note}" for note in self.notes]
        found += [f"{key} = {json.dumps(value)}" for key, value in self.options.items() if not isinstance(value, dict)]
        for name, section in self.options.items():
            if isinstance(section, dict):
                found += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        return "\n".join(found)


def module_names_per_stage(partition: Partition, names: ModuleNames) -> list[list[str]]:
    """The modules of every stage in model order; torchtitan's `module_fqns_per_model_part`. Raises ValueError if
    forward and backward are cut apart, or a stage holds nothing.
    """
    counts = counts_of(partition)
    last = len(counts) - 1
    found = []
    for stage, layers in enumerate(partition.forward_ranges()):
        own = [*(names.embedding if stage == 0 else ()), *(names.layer.format(layer=layer) for layer in layers)]
        own += names.head if stage == last else ()
        if not own:
            near = "-".join(map(str, next(filled(counts), ())))
            out = f"take the cut beside it, 'partition=\"{near}\"'" if near else "take fewer stages"
            raise ValueError(f"partition {partition}: stage {stage} holds no module, and theirs hold one each; {out}")
        found.append([*own, *names.everywhere])
    return found


def table_lines(
    schedule: Schedule, csv_path: str, framework: Framework = "torchtitan", plan: PlanNumbers | None = None
) -> Lines:
    """The options that make a framework run a plan, by default one sequence a microbatch; a pipeline's by its table.

    Raises ScheduleError if the framework would place stages elsewhere, ValueError for one we know no options of.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework}: one of {', '.join(FRAMEWORKS)}")
    plan = plan or numbers_of(schedule)
    staged: dict[str, Any] = {}
    notes = list(plan.notes)
    if plan.pipeline > 1:
        table = make_table(schedule)
        staged = {"schedule": _placed_by(table, framework), "schedule_csv": csv_path}
        notes.append(f"the name {staged['schedule']} decides where stages are, the file in which order they run")
        if table.partition is not None:
            parts = module_names_per_stage(table.partition, NAMES[framework])
            staged["module_fqns_per_model_part"] = parts
            notes.append("names of modules differ by model and version: compare them with model.named_modules()")
        else:
            stages = table.shape.num_stages
            notes.append(f"cut the model into {stages} stages: module_fqns_per_model_part has as many lists")
    options = _torchtitan(plan, staged, notes) if framework == "torchtitan" else _automodel(plan, staged)
    return Lines(options, tuple(notes))


def _torchtitan(plan: PlanNumbers, staged: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Sections of torchtitan's config. A step's local batch is all its microbatches where a pipeline runs them."""
    if plan.shared == "optimizer" and plan.data > 1:
        notes.append("torchtitan has no ZeRO-1: gradients are sharded as well")
    if plan.once_a_step:
        notes.append("the plan scatters gradients once a step, torchtitan after every backward: slower, and fits")
    notes.append("torchtitan 0.3 takes each key on its command line, --training.seq_len and so on, and")
    notes.append(f"the word activation-checkpoint:{plan.recompute} for the last section")
    local = plan.sequences * (plan.num_microbatches if plan.pipeline > 1 else 1)
    training = {"local_batch_size": local, "global_batch_size": plan.global_batch}
    training |= {} if plan.seq_len is None else {"seq_len": plan.seq_len}
    training |= {"enable_cpu_offload": True} if plan.on_host == "parameters" else {}
    if plan.pipeline > 1 or plan.expert > 1:
        training["disable_cuda_graphs"] = True  # torchtitan 0.3 has them by default, and refuses both with them
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.data // plan.shards,
        "data_parallel_shard_degree": plan.shards,
        "fsdp_reshard_after_forward": "always" if plan.shared == "parameters" and plan.reshard else "never",
        "tensor_parallel_degree": plan.tensor,
        "enable_sequence_parallel": plan.sequence_parallel,
        "context_parallel_degree": plan.context,
        "expert_parallel_degree": plan.expert,
        "pipeline_parallel_degree": plan.pipeline,
        "pipeline_parallel_microbatch_size": plan.sequences,
    }
    parallel |= {k if k.startswith("module") else f"pipeline_parallel_{k}": value for k, value in staged.items()}
    return {"training": training, "parallelism": parallel, "activation_checkpoint": {"mode": plan.recompute}}


def _automodel(plan: PlanNumbers, staged: Mapping[str, Any]) -> dict[str, Any]:
    """AutoModel's options of a pipeline; its batch is that of one replica's step."""
    options: dict[str, Any] = {"pp_size": plan.pipeline}
    options |= {k if k.startswith("module") else f"pp_{k}": value for k, value in staged.items()}
    return options | {"pp_microbatch_size": plan.sequences, "pp_batch_size": plan.sequences * plan.num_microbatches}


def roundpipe_plan(partition: Partition) -> dict[str, object]:
    """A partition as the fields of `ModelExecutePlan` of the released library: ranges of its layers, [start, stop).

    Its layer 0 is the embedding, 1 to L are the decoder layers, L + 1 is norm, head and loss. Forward ranges ascend,
    backward ranges descend; of a fused plan the first backward range does its forward as well. Raises ValueError if a
    stage has no layer, which the library refuses.
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


def roundpipe_host_bytes(model: Architecture, optimizer: OptimizerSettings) -> dict[str, int]:
    """Host bytes under the released library by its `pin_model`, without inputs saved for recomputation.

    16-bit weights are pinned by torch's allocator (`alloc`), whose blocks are powers of two, in place (`register`), or
    not at all (`off`). Their gradients always arrive in blocks of that allocator. The optimizer's masters, gradients
    and moments, in 32 bits each, are never pinned.

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
                weights["trained"] += copies * (block + 4 * parameter.numel() + optimizer.state_bytes(parameter.shape))
    return {
        pin: weights["blocks" if pin == "alloc" else "exact"] + weights["trained"]
        for pin in ("alloc", "register", "off")
    }


def _placed_by(table: Schedule, framework: Framework) -> str:
    """The name of the framework's schedule that places stages as the table does; ScheduleError without one."""
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


def accelerate_yaml(plan: PlanNumbers) -> str:
    """accelerate's YAML for FSDP2, a trainer's own options as comments; ValueError for a plan that it does not run."""
    if plan.pipeline > 1 or plan.shared not in ("gradients", "parameters"):
        raise ValueError("format=fsdp2 writes plans whose replicas share gradients or parameters: zero_2, zero_3")
    if plan.expert > 1:
        raise ValueError(f"expert={plan.expert}: accelerate's FSDP2 deals no experts; take format=megatron_layout")
    if plan.data * plan.context == 1 < plan.tensor:
        raise ValueError(f"tensor={plan.tensor} with data=1: accelerate's FSDP2 wants replicas; take mesh.data above 1")
    told: dict[str, Any] = {"per_device_train_batch_size": plan.sequences}
    told |= {"gradient_accumulation_steps": plan.num_microbatches}
    told |= {} if plan.seq_len is None else {"max_length": plan.seq_len}
    if plan.num_microbatches > 1 and not plan.once_a_step:  # else it sums gradients whole, and scatters the last
        told["gradient_accumulation_kwargs"] = "{sync_each_batch: true}"
    flag = {True: "true", False: "false"}
    notes = list(plan.notes)
    if plan.nodes > 1:
        notes.append("start it on every machine, with --machine_rank, --main_process_ip and --main_process_port")
    if plan.sequence_parallel:
        notes.append("accelerate takes the model's tp_plan, which may keep activations between its maps whole")
    lines = [f"# {note}" for note in notes] + [f"# {key}: {value}" for key, value in told.items()]
    lines += [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        "mixed_precision: bf16",
        f"num_processes: {plan.data * plan.tensor * plan.context}",
        f"num_machines: {plan.nodes}",
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {flag[plan.shared == 'parameters' and plan.reshard]}",
        f"  fsdp_offload_params: {flag[plan.on_host == 'parameters']}",
        f"  fsdp_activation_checkpointing: {flag[plan.recompute != 'none']}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    ]
    if plan.tensor * plan.context > 1 or plan.shards < plan.data:
        lines += ["parallelism_config:", f"  parallelism_config_dp_shard_size: {plan.shards}"]
        lines += [f"  parallelism_config_dp_replicate_size: {plan.data // plan.shards}"]
        lines += [f"  parallelism_config_tp_size: {plan.tensor}", f"  parallelism_config_cp_size: {plan.context}"]
    return "\n".join(lines) + "\n"


def counts_of(partition: Partition) -> tuple[int, ...]:
    """Layers of each stage; ValueError if forward and backward are cut apart."""
    if partition.fused or partition.forward != partition.backward:
        raise ValueError(
            f"partition {partition} cuts forward and backward apart, which only our engine runs; take one cut for both"
        )
    return partition.forward
