"""DeepSpeed's pipeline engine over Llama layers of transformers, cut where our plan cuts: a subclass sets `parts`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.trainers import parity
from tests.trainers.parity import CLIP, STEPS, Ran

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.pipe import PipelineModule


class Layer(nn.Module):
    """One decoder layer as DeepSpeed takes it: x (B, S, H) -> (B, S, H)."""

    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        self.layer, self.rotary = LlamaDecoderLayer(config, number), LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        found = self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return found[0] if isinstance(found, tuple) else found


class Head(nn.Module):
    """Norm and logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def layers_of(asked: dict) -> list[nn.Module]:
    config = LlamaConfig(
        hidden_size=asked["hidden"],
        intermediate_size=asked["inner"],
        num_attention_heads=asked["heads"],
        num_hidden_layers=asked["num_layers"],
        vocab_size=asked["vocab"],
        attn_implementation="sdpa",
    )
    torch.manual_seed(parity.SEED)
    embedding = nn.Embedding(asked["vocab"], asked["hidden"])
    return [embedding, *(Layer(config, number) for number in range(asked["num_layers"])), Head(config)]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def main() -> None:
    asked = parity.asked()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiles for minutes; gloo does the same
    deepspeed.init_distributed("gloo", verbose=False)

    class Planned(PipelineModule):
        """Its stages hold the layers that the plan gives them."""

        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = list(asked["options"])
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    whole = layers_of(asked)
    module = Planned(whole, num_stages=dist.get_world_size(), loss_fn=loss_of, partition_method="uniform")
    count, size = asked["num_microbatches"], asked["microbatch_sequences"]
    config = {
        "train_batch_size": count * size,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": count,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    steps = parity.optimizer([p for p in module.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(model=module, optimizer=steps, config=config, dist_init_required=False)
    ran, named = Ran(), list(module.named_parameters())
    clip = deepspeed.runtime.engine.clip_grad_norm_

    def watched(**options: object) -> torch.Tensor:
        """Their clipping, with a look at the gradients before the first."""
        ran.gradients = ran.gradients or {name: parameter.grad.clone() for name, parameter in named}
        norm = clip(**options)
        ran.norms.append(float(norm))
        return norm

    deepspeed.runtime.engine.clip_grad_norm_ = watched
    for step in range(STEPS):
        tokens, labels = parity.batch(step, asked)
        ran.losses.append(float(engine.train_batch(zip(tokens.split(size), labels.split(size), strict=True))))

    def make() -> nn.Module:
        return nn.Sequential(*layers_of(asked))

    def part(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(model(tokens), labels) / count

    parity.answered(ran, [name for name, _ in named], make, part, asked, of_first_rank)
    dist.destroy_process_group()


def of_first_rank(groups: list[list[torch.Tensor]]) -> torch.Tensor:
    """The norm as DeepSpeed 0.19.8 takes it in 32 bits without ZeRO: of the first pipeline rank's gradients alone.

    Its pipeline's grid counts a pipeline rank as a rank of model parallelism, and `clip_grad_norm_` leaves out
    parameters of ranks other than 0 that nobody has marked as model parallel.
    """
    return torch.stack([gradient.norm(2.0) for gradient in groups[0]]).pow(2.0).sum().pow(0.5)


if __name__ == "__main__":
    main()
