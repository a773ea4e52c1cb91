"""DeepSpeed's JSON for a plan: batch, ZeRO with what is offloaded, and the boundaries of a pipeline.

Source: DeepSpeed 0.19, `DeepSpeedConfig`, `runtime/zero/offload_config.py`, and `PipelineModule`, which has no option
for a list of boundaries: a subclass sets `parts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.torch_runtime.formats.frameworks import PlanNumbers, check_replicas, counts_of, is_1f1b


def check_deepspeed(schedule: Schedule, plan: PlanNumbers, form: str = "deepspeed") -> None:
    """Raise ScheduleError for what DeepSpeed does not run: late updates, and pipelines in another order than 1F1B."""
    check_replicas(schedule, plan, form)
    if plan.options.get("delayed_update"):
        raise ScheduleError(
            f"schedule={schedule.name} with delayed_update=true: DeepSpeed has no delayed update; take "
            "schedule.delayed_update=false"
        )
    if plan.pipeline > 1 and not is_1f1b(schedule):
        raise ScheduleError(
            f"schedule={schedule.name}: DeepSpeed's pipelines run 1F1B alone, a stage a rank with every backward whole "
            f"and a flush a step; take schedule=1f1b with format={form}, or write this order by format=text"
        )


def deepspeed_config(plan: PlanNumbers, parts: Sequence[int] = ()) -> dict[str, Any]:
    """DeepSpeed's JSON for a plan, with the boundaries of a pipeline's stages (`deepspeed_parts`).

    Values without a key are in a section `rpbench`, which it does not read. ValueError for what its engines do not
    compose.
    """
    _refuse_what_it_does_not_compose(plan)
    notes = list(plan.notes)
    found: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.sequences,
        "gradient_accumulation_steps": plan.num_microbatches,
        "bf16": {"enabled": True},
        "zero_optimization": _zero(plan, notes),
    }
    if plan.pipeline > 1:
        interval = int(plan.recompute != "none")  # layers between two inputs that are kept; 0: nothing runs again
        found["pipeline"] = {"stages": plan.pipeline, "parts": list(parts), "activation_checkpoint_interval": interval}
    if plan.tensor > 1:
        found["tensor_parallel"] = {"autotp_size": plan.tensor}
    if plan.tensor > 1 == plan.pipeline:  # it compares this key with all devices, tensor shards too
        del found["train_batch_size"]
        notes.append(f"a step has {plan.global_batch} sequences; DeepSpeed says {plan.tensor} times as many")
    if plan.optimizer_bits < 32 and plan.stage and not plan.on_host:
        found["zero_allow_untested_optimizer"] = True  # it knows torch's and its own
    own = {"seq_len": plan.seq_len, "recompute": plan.recompute, "data": plan.data, "notes": notes}
    return found | {"rpbench": own}


def _refuse_what_it_does_not_compose(plan: PlanNumbers) -> None:
    if plan.pipeline > 1 and plan.shared in ("gradients", "parameters"):
        raise ValueError(f"{plan.shared} shared under a pipeline: DeepSpeed's pipeline takes ZeRO-1 at most")
    if (plan.stage and plan.shards < plan.data) or (plan.stage == 3 and not plan.reshard):
        raise ValueError(
            "mesh.shard_group or mesh.reshard=false: DeepSpeed's ZeRO shares among all replicas and drops what it "
            "gathers; take format=torchtitan, or leave both out"
        )
    if plan.context > 1:
        raise ValueError(f"context={plan.context}: DeepSpeed cuts sequences in the model's code, not in its config")
    if plan.expert > 1:
        raise ValueError(
            f"expert={plan.expert}: DeepSpeed deals experts in the model's code, not in its config; take "
            "format=megatron_layout"
        )


def _zero(plan: PlanNumbers, notes: list[str]) -> dict[str, Any]:
    """Its section on ZeRO, with what is offloaded; `notes` gets what the section cannot say."""
    zero: dict[str, Any] = {"stage": plan.stage}
    options = plan.options
    if plan.data > 1 and plan.stage and plan.pipeline == 1:
        zero["overlap_comm"] = plan.gradients_beside
    elif plan.data > 1 and plan.gradients_beside:
        notes.append("the plan exchanges gradients beside computation, DeepSpeed after it here: slower, and fits")
    host, ssds = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
    if plan.on_host:
        zero["offload_optimizer"] = ssds if plan.on_ssd else host
    if plan.on_host == "parameters":
        zero["offload_param"] = ssds if plan.on_ssd == "all" else host
    if plan.on_host and plan.optimizer_bits < 32:
        notes.append("on the host DeepSpeed steps with its own Adam, in 32 bits: the host needs more memory")
    if plan.on_ssd:
        notes.append("nvme_path is the folder of your SSDs")
    if plan.stage == 3 and plan.once_a_step:
        notes.append("the plan scatters gradients once a step, DeepSpeed after every backward: slower, and fits")
    if plan.sequence_parallel:
        notes.append("DeepSpeed cuts no element-wise work between tensor-parallel maps: it keeps more activations")
    if "speculate" in options:
        zero["offload_optimizer"] = host | {"super_offload": True}
        notes += _other_superoffload(options)
    if options.get("share", 1.0) != 1.0:
        notes.append(f"the host steps {options['share']} of the parameters; DeepSpeed has that at ZeRO-3 alone (ratio)")
    if "topk" in options and plan.num_microbatches > 1:
        notes.append("DeepSpeed's ZenFlow has no accumulation of its own: update_interval counts microbatches there")
    if "topk" in options:
        every = options["select_interval"]
        zero["zenflow"] = {
            "topk_ratio": options["topk"],
            "update_interval": options["update_interval"],
            **({"select_strategy": "step", "select_interval": every} if every else {}),
            "overlap_step": options["overlap"],
            "full_warm_up_rounds": options["num_warmup_steps"],
        }
    return zero


def _other_superoffload(options: Mapping[str, Any]) -> Iterator[str]:
    """What DeepSpeed's SuperOffload does in another way than a plan with these options."""
    if options.get("device_stages"):
        where = f"the devices step the first {options['device_stages']} stages"
        yield f"{where}; DeepSpeed takes a share of the parameters, offload_optimizer's ratio"
    if not options.get("gather_each_visit", True):
        yield "weights are gathered once a step; DeepSpeed gathers them for every visit, which is slower and fits"


def deepspeed_parts(partition: Partition) -> list[int]:
    """The boundaries of `PipelineModule.parts`: stage s runs layers parts[s] to parts[s + 1] - 1 of its layer list.

    That list has an embedding before the decoder layers and a head behind them. Raises ValueError if forward and
    backward are cut apart.
    """
    ends = list(accumulate(counts_of(partition), initial=1))
    return [0, *ends[1:-1], ends[-1] + 1]
