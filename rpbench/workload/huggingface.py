"""Hugging Face: an architecture from a `config.json`; a field that matters and is not modelled is refused.

Fields are of four kinds: sizes that are read (`READ`), those that say nothing of time or bytes (`SILENT`), those that
may only hold what leaves them without effect (`ONLY`), and all others, which are refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpbench.workload.architecture import FROM_THE_OTHERS, MOST_LAYERS, Architecture, Family
from rpbench.workload.parts import Experts, Latent

FAMILY_OF: Mapping[str, Family] = {  # whose activation and norms each model type has, as our modules know them
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "gpt_oss": "gpt_oss",
    "deepseek_v2": "llama",
    "deepseek_v3": "llama",
    "kimi_k2": "llama",
    "gpt2": "gpt",
}
READ = frozenset(
    [
        "model_type",
        "num_hidden_layers",
        "n_layer",
        "hidden_size",
        "n_embd",
        "num_attention_heads",
        "n_head",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "n_inner",
        "vocab_size",
        "tie_word_embeddings",
        "hidden_act",
        "activation_function",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "max_window_layers",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "experts_per_token",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "attention_bias",
        "n_positions",
        "n_ctx",
        "num_nextn_predict_layers",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
        "attention_dropout",
    ]
)
SILENT = frozenset(
    [
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "initializer_range",
        "layer_norm_epsilon",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_interleave",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "initial_context_length",
        "use_cache",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "norm_topk_prob",
        "scoring_func",
        "topk_method",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "router_jitter_noise",
        "swiglu_limit",
        "quantization_config",
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "mlp_bias",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "task_specific_params",
        "reorder_and_upcast_attn",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "id2label",
        "label2id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "ep_size",
        "qk_head_dim",
    ]
)
ONLY: Mapping[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "mlp_only_layers": ([], None),
    "hidden_act": ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "swiglu", "relu"),
}
UNGATED = ("gpt2",)  # all others multiply by a gate, whatever their activation is
LARGEST = 10**9  # no size of a model comes near; larger ones are slips, and sums of them leave 64 bits


def from_config(source: Mapping[str, Any] | str | Path) -> Architecture:
    """The architecture of a `config.json`.

    Raises:
        ValueError: naming a model type or a field that is not modelled, or a size that is missing.
    """
    values = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    _check(values)
    heads = _size(values, "num_attention_heads", "n_head")
    hidden = _size(values, "hidden_size", "n_embd")
    experts = _experts(values)
    return Architecture(
        str(values.get("_name_or_path") or values["model_type"]),
        _num_layers(values),
        hidden,
        heads,
        _size(values, "vocab_size"),
        _known(values, "num_key_value_heads") or heads,
        FROM_THE_OTHERS if "kv_lora_rank" in values else _known(values, "head_dim") or FROM_THE_OTHERS,
        _known(values, "intermediate_size", "n_inner") or 4 * hidden,
        gated=values["model_type"] not in UNGATED,
        tied=bool(values.get("tie_word_embeddings", values["model_type"] == "gpt2")),
        experts=experts,
        num_dense_layers=_known(values, "first_k_dense_replace", least=0) if experts else 0,
        latent=_latent(values),
        windows=_windows(values),
        learned_positions=_known(values, "n_positions") if values["model_type"] == "gpt2" else 0,
        num_prediction_layers=_known(values, "num_nextn_predict_layers", least=0),
        dropout=max(values.get(name) or 0.0 for name in ("attn_pdrop", "resid_pdrop", "attention_dropout")),
        biases=bool(values.get("attention_bias", values["model_type"] in ("gpt2", "qwen2"))),
        qk_norm=FAMILY_OF[values["model_type"]] == "qwen3",
        attention_sinks=values["model_type"] == "gpt_oss",
        family=FAMILY_OF[values["model_type"]],
    )


def _check(values: Mapping[str, Any]) -> None:
    kind = values.get("model_type")
    if kind not in FAMILY_OF:
        raise ValueError(f"model_type={kind!r} is not modelled; known: {', '.join(FAMILY_OF)}")
    for name, value in values.items():
        if name in ONLY and value not in ONLY[name]:
            raise ValueError(f"{name}={value!r} of a {kind} is not modelled; only {ONLY[name][0]!r} is")
        if name not in READ | SILENT and name not in ONLY:
            raise ValueError(f"{name}={value!r} of a {kind}: this field is not modelled")


def context_of(values: Mapping[str, Any]) -> int | None:
    """Tokens that a `config.json` has positions for; None if it does not say."""
    return _known(values, "max_position_embeddings", "n_positions", "n_ctx") or None


def _size(values: Mapping[str, Any], *names: str) -> int:
    found = _known(values, *names)
    if not found:
        raise ValueError(f"config.json has no {names[0]}")
    return found


def _num_layers(values: Mapping[str, Any]) -> int:
    found = _size(values, "num_hidden_layers", "n_layer")
    if found > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers={found}: at most {MOST_LAYERS:,}; the deepest that was trained")
    return found


def _known(values: Mapping[str, Any], *names: str, least: int = 1) -> int:
    """The first of the fields that is there and not null; 0 if none is.

    Raises:
        ValueError: for what is no whole number in range. A size that is cut or guessed would answer for another model.
    """
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if type(value) is not int or not least <= value <= LARGEST:
            raise ValueError(f"{name}={_short(value)}: a whole number from {least} to {LARGEST:,}")
        return value
    return 0


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 40 else f"{words[:37]}..."


def _experts(values: Mapping[str, Any]) -> Experts | None:
    total = _known(values, "n_routed_experts", "num_experts", "num_local_experts", least=0)
    if not total:
        return None
    inner = _size(values, "moe_intermediate_size", "intermediate_size")
    active = _size(values, "num_experts_per_tok", "experts_per_token")
    return Experts(total, active, inner, inner * _known(values, "n_shared_experts", least=0))


def _latent(values: Mapping[str, Any]) -> Latent | None:
    if "kv_lora_rank" not in values:
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(_known(values, "q_lora_rank"), *(_size(values, name) for name in names))


def _windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Keys a query sees, in turn over the layers, as each model type's own code has it."""
    window, kind = _known(values, "sliding_window", least=0), values["model_type"]
    if not window or values.get("use_sliding_window") is False:
        return ()
    kinds, num_layers = values.get("layer_types"), _num_layers(values)
    if kinds is None:
        if kind == "gpt_oss":
            return (window, None)
        if kind in ("qwen2", "qwen3") and values.get("use_sliding_window"):
            plain = min(num_layers, _known(values, "max_window_layers", least=0))
            return (None,) * plain + (window,) * (num_layers - plain)
        return (window,) if kind in ("mistral", "mixtral") or values.get("use_sliding_window") else ()
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types={_short(kinds)}: a list, with a kind for each layer")
    unknown = [each for each in kinds if each not in ("sliding_attention", "full_attention")]
    if unknown:
        raise ValueError(f"layer_types has {_short(unknown[0])}, which is not modelled")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} kinds; one for each of the {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
