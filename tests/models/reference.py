"""The same models in `transformers`, and where each of our parameters stands there."""

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing here needs a network

import torch
from torch import nn

from rpbench.workload.architecture import Architecture

Tensors = dict[str, torch.Tensor]


def reference_model(family: str, model: Architecture) -> nn.Module:
    """The reference implementation with the sizes of `model`, weights unset; in the default dtype."""
    config_class, model_class, extra = _classes()[family]
    config = config_class(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.experts.inner if model.experts else model.inner,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied,
        rope_parameters={"rope_type": "default", **extra.pop("rope", {}), "rope_theta": model.rope_theta},
        attn_implementation="eager",
        experts_implementation="eager",
        **{name: value(model) for name, value in extra.pop("sizes", {}).items()},
        **extra,
    )
    return model_class(config).eval()


def in_reference_names(family: str, model: Architecture, ours: Tensors) -> Tensors:
    """Our parameters, or their gradients, under the names and in the shapes of the reference."""
    theirs = {"model.embed_tokens.weight": ours["0.weight"]}
    last = model.num_layers + 1
    theirs["model.norm.weight"] = ours[f"{last}.norm.scale"]
    if not model.tied:
        theirs["lm_head.weight"] = ours[f"{last}.weight"]
    for layer in range(model.num_layers):
        prefix = f"{layer + 1}."
        own = {name.removeprefix(prefix): value for name, value in ours.items() if name.startswith(prefix)}
        mapped = _attention(own) | _MLPS[family](own)
        theirs |= {f"model.layers.{layer}.{name}": value for name, value in mapped.items()}
    return theirs


def _attention(own: Tensors) -> Tensors:
    names = {
        "attention_norm.scale": "input_layernorm.weight",
        "mlp_norm.scale": "post_attention_layernorm.weight",
        "attention.sinks": "self_attn.sinks",
        "attention.q_norm.scale": "self_attn.q_norm.weight",
        "attention.k_norm.scale": "self_attn.k_norm.weight",
    }
    for part in "qkvo":
        for kind in ("weight", "bias"):
            names[f"attention.{part}.{kind}"] = f"self_attn.{part}_proj.{kind}"
    return {theirs: own[ours] for ours, theirs in names.items() if ours in own}


def _dense(own: Tensors) -> Tensors:
    parts = ("gate", "up", "down")
    return {f"mlp.{part}_proj.weight": own[f"mlp.{part}.weight"] for part in parts if f"mlp.{part}.weight" in own}


def _qwen3_experts(own: Tensors) -> Tensors:
    return {
        "mlp.gate.weight": own["mlp.router.weight"],
        "mlp.experts.gate_up_proj": torch.cat((own["mlp.gate.weight"], own["mlp.up.weight"]), dim=1),
        "mlp.experts.down_proj": own["mlp.down.weight"],
    }


def _gpt_oss_experts(own: Tensors) -> Tensors:
    """Gate and up alternate, and matrices stand transposed."""
    gate_up = torch.stack((own["mlp.gate.weight"], own["mlp.up.weight"]), dim=2).flatten(1, 2)
    return {
        "mlp.router.weight": own["mlp.router.weight"],
        "mlp.router.bias": own["mlp.router.bias"],
        "mlp.experts.gate_up_proj": gate_up.transpose(1, 2),
        "mlp.experts.gate_up_proj_bias": torch.stack((own["mlp.gate.bias"], own["mlp.up.bias"]), dim=2).flatten(1),
        "mlp.experts.down_proj": own["mlp.down.weight"].transpose(1, 2),
        "mlp.experts.down_proj_bias": own["mlp.down.bias"],
    }


_MLPS = {"gpt": _dense, "llama": _dense, "qwen3": _dense, "qwen3_moe": _qwen3_experts, "gpt_oss": _gpt_oss_experts}


def _classes() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    import transformers  # seconds, which only the worker that runs these tests need spend

    return {
        # Arcee's is a Llama with an MLP of two matrices, which is what our small GPT is.
        "gpt": (transformers.ArceeConfig, transformers.ArceeForCausalLM, {"hidden_act": "gelu_pytorch_tanh"}),
        "llama": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {
                "rope": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
        ),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            transformers.Qwen3MoeForCausalLM,
            {
                "norm_topk_prob": True,
                "sizes": {
                    "moe_intermediate_size": lambda model: model.experts.inner,
                    "num_experts": lambda model: model.experts.total,
                    "num_experts_per_tok": lambda model: model.experts.active,
                },
            },
        ),
        "gpt_oss": (
            transformers.GptOssConfig,
            transformers.GptOssForCausalLM,
            {
                "rope": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "sizes": {
                    "sliding_window": lambda model: model.windows[0],
                    "num_local_experts": lambda model: model.experts.total,
                    "num_experts_per_tok": lambda model: model.experts.active,
                },
            },
        ),
    }
