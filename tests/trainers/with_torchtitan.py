"""torchtitan's Llama 3 on its own pipeline: `pipeline_llm`, its table option, its clipping."""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, model_registry

from tests.trainers import parity
from tests.trainers.parity import CLIP, STEPS, Ran


def config_of(asked: dict) -> Llama3Model.Config:
    """Their debug model in our sizes."""
    found = model_registry("debugmodel").model
    assert len(found.layers) == asked["num_layers"]
    for layer in found.layers:  # theirs for language models are compiled for GPUs; this one runs on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return found


def main() -> None:
    asked = parity.asked()
    parallel_dims.device_type = "cpu"  # theirs is "cuda" wherever torch sees no device
    dist.init_process_group("gloo")
    config = config_of(asked)
    asked["vocab"] = config.vocab_size
    num_tokens = asked["num_microbatches"] * asked["microbatch_sequences"] * asked["seq_len"]

    def make() -> nn.Module:
        torch.manual_seed(parity.SEED)
        model = config.build()
        model.init_weights() if hasattr(model, "init_weights") else model.init_states()
        return model

    def part(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        summed = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")
        return summed / num_tokens

    parallelism = ParallelismConfig(**asked["options"])
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    schedule, parts, _, has_last = pipeline_llm(
        make(),
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=asked["num_microbatches"] * asked["microbatch_sequences"]),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=lambda model, **_: model,
        loss_fn=lambda logits, labels, **_: (part(logits, labels), {}),
    )
    named = [found for model in parts for found in model.named_parameters()]
    steps, ran = parity.optimizer([parameter for _, parameter in named]), Ran()
    for step in range(STEPS):
        tokens, labels = parity.batch(step, asked)
        steps.zero_grad()
        losses: list[torch.Tensor] = []
        first = any(stage.is_first for stage in schedule._stages)
        if "arg_mbs" in inspect.signature(schedule.step).parameters:
            size = asked["microbatch_sequences"]
            schedule.step(
                arg_mbs=[(piece,) for piece in tokens.split(size)] if first else None,
                target_mbs=list(labels.split(size)) if has_last else None,
                losses=losses,
                return_outputs=False,
            )
        else:
            schedule.step(*((tokens,) if first else ()), target=labels, losses=losses, return_outputs=False)
        if has_last:
            ran.losses.append(float(torch.stack([loss.detach() for loss in losses]).sum()))
        if step == 0:
            ran.gradients = {name: parameter.grad.clone() for name, parameter in named}
        norm = clip_grad_norm_([parameter for _, parameter in named], CLIP, foreach=False, pp_mesh=dims.get_mesh("pp"))
        ran.norms.append(float(norm))
        steps.step()
    parity.answered(ran, [name for name, _ in named], make, lambda m, t, lab: part(m(t), lab), asked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
