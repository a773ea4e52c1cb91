"""NeMo AutoModel's `AutoPipeline` over Hugging Face's Llama, with its options for a table and for names of modules."""

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from nemo_automodel.components.training.utils import clip_grad_norm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainers import parity
from tests.trainers.parity import CLIP, STEPS, Ran


def main() -> None:
    asked = parity.asked()
    dist.init_process_group("gloo")
    config = LlamaConfig(
        hidden_size=asked["hidden"],
        intermediate_size=asked["inner"],
        num_attention_heads=asked["heads"],
        num_hidden_layers=asked["num_layers"],
        vocab_size=asked["vocab"],
        attn_implementation="sdpa",
        use_cache=False,
    )

    def make() -> nn.Module:
        torch.manual_seed(parity.SEED)
        return LlamaForCausalLM(config)

    def part(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        return loss / asked["num_microbatches"]

    options = dict(asked["options"])
    mesh = init_device_mesh("cpu", (options.pop("pp_size"),), mesh_dim_names=("pp",))
    pipeline = AutoPipeline(world_mesh=mesh, device=torch.device("cpu"), **options).build(make(), loss_fn=part)
    named = [found for model in pipeline.parts for found in model.named_parameters()]
    steps, ran = parity.optimizer([parameter for _, parameter in named]), Ran()
    for step in range(STEPS):
        tokens, labels = parity.batch(step, asked)
        steps.zero_grad()
        losses: list[torch.Tensor] = []
        pipeline.step(tokens, target=labels if pipeline.info.has_last_stage else None, losses=losses)
        if pipeline.info.has_last_stage:
            ran.losses.append(float(torch.stack([loss.detach() for loss in losses]).sum()))
        if step == 0:
            ran.gradients = {name: parameter.grad.clone() for name, parameter in named}
        norm = clip_grad_norm(CLIP, pipeline.parts, foreach=False, pp_enabled=True, device_mesh=mesh, pp_axis_name="pp")
        ran.norms.append(float(norm))
        steps.step()
    parity.answered(ran, [name for name, _ in named], make, lambda m, t, lab: part(m(t).logits, lab), asked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
