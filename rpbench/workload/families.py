"""Families: what the model types of Hugging Face have besides their sizes, as data.

A type is a row of `FAMILIES`, which says what a `config.json` of it leaves unsaid. Source: the modules and the usual
values of the configuration classes in `transformers` 5; `tests/workload/test_families.py` builds every type and counts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

QKV = ("q_proj", "k_proj", "v_proj")
QKVO = (*QKV, "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY = (*QKVO, *MLP)

Modules = Literal["gpt", "llama", "qwen3", "gpt_oss"]


@dataclass(frozen=True)
class Family:
    """The properties of a Hugging Face model type.

    Args:
        modules: whose activation and norms our own modules use for it.
        usual: fields that a `config.json` may leave out, as the configuration class sets them.
        gated: three matrices in an MLP, whatever its activation is.
        norms: norms of a layer over its hidden values; the final one stands in `end_norms`.
        norm_values: values that a norm has for each channel: 1, a scale; 2, with a bias; 0, none.
        biases: which linear maps have one, and the field that switches them on; None: always.
        head_bias: the same of the output matrix; False: never.
        query_key_norms: norms of queries and keys, for a head or for all together, and the field that switches them on.
        sinks: one number a head.
        shared_gate: one map from hidden to a number, which weighs the shared experts.
        positions: learned positions beside those that sequences have; None: none are learned.
        end_norms: norms at both ends of the model.
        window_period: of so many layers one sees all keys where a window is given; 1: none does; 0: windows are off.
        encoder: every token sees all others.
    """

    modules: Modules = "llama"
    usual: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = True
    norms: int = 2
    norm_values: int = 1
    biases: tuple[tuple[tuple[str, ...], str | None], ...] = ()
    head_bias: str | bool = False
    query_key_norms: tuple[Literal["head", "all"], str | None] | None = None
    sinks: bool = False
    shared_gate: bool = False
    positions: int | None = None
    end_norms: int = 1
    window_period: int = 0
    encoder: bool = False


TIED: Mapping[str, Any] = {"tie_word_embeddings": True}
_ATTENTION = ((QKVO, "attention_bias"),)
_LATENT = Family(biases=((("q_a_proj", "kv_a_proj_with_mqa", "o_proj"), "attention_bias"),))
_LLAMA = Family(biases=((QKVO, "attention_bias"), (MLP, "mlp_bias")))
_PHI = Family(
    "gpt",
    gated=False,
    norms=1,
    norm_values=2,
    biases=((EVERY, None),),
    head_bias=True,
    query_key_norms=("head", "qk_layernorm"),
)
_GPT = Family("gpt", usual=TIED, gated=False, norm_values=2, biases=((EVERY, None),))
_GEMMA = {**TIED, "head_dim": 256}
_DELTA = Family("qwen3", {"head_dim": 256}, biases=_ATTENTION, query_key_norms=("head", None), shared_gate=True)
_ENCODER = Family("gpt", {}, False, norm_values=2, biases=((EVERY, None),), head_bias=True, encoder=True)
_BERT = replace(_ENCODER, usual=TIED, positions=0)
_GLM = Family(usual={"head_dim": 128, "attention_bias": True}, biases=((QKV, "attention_bias"),))

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "llama4_text": Family(biases=_ATTENTION),
    "ministral": Family(window_period=4),
    "mistral": Family(window_period=1),
    "mixtral": Family(window_period=1),
    "smollm3": Family(usual=TIED, biases=_LLAMA.biases),
    "seed_oss": Family(
        usual={"head_dim": 128, "attention_bias": True},
        biases=((QKV, "attention_bias"), (("o_proj",), "attention_out_bias")),
    ),
    "ernie4_5": Family(usual={**TIED, "head_dim": 128}, biases=((EVERY, "use_bias"),)),
    "qwen2": Family(biases=((QKV, None),)),
    "qwen2_moe": Family(usual={"qkv_bias": True}, biases=((QKV, "qkv_bias"),), shared_gate=True),
    "qwen3": Family("qwen3", {"head_dim": 128}, biases=_ATTENTION, query_key_norms=("head", None)),
    "qwen3_moe": Family("qwen3", biases=_ATTENTION, query_key_norms=("head", None)),
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "gemma": Family(usual=_GEMMA, biases=_ATTENTION),
    "gemma2": Family(usual=_GEMMA, norms=4, biases=_ATTENTION, window_period=2),
    "gemma3_text": Family(usual=_GEMMA, norms=4, biases=_ATTENTION, query_key_norms=("head", None), window_period=6),
    "phi": _PHI,
    "phi3": Family(window_period=1),
    "phimoe": Family(norm_values=2, biases=_ATTENTION, head_bias="lm_head_bias", window_period=1),
    "falcon": Family("gpt", {**TIED, "parallel_attn": True}, False, norm_values=2, biases=((EVERY, "bias"),)),
    "gpt2": replace(_GPT, positions=0),
    "gpt_bigcode": replace(_GPT, positions=0),
    "gpt_neox": Family(
        "gpt", {"attention_bias": True}, False, norm_values=2, biases=((QKVO, "attention_bias"), (MLP, None))
    ),
    "gptj": Family("gpt", {}, False, norms=1, norm_values=2, biases=((MLP, None),), head_bias=True),
    "bloom": replace(_GPT, end_norms=2),
    "mpt": Family("gpt", TIED, False),
    "opt": Family(
        "gpt", {**TIED, "enable_bias": True}, False, norm_values=2, biases=((EVERY, "enable_bias"),), positions=2
    ),
    "olmo": Family(norm_values=0, biases=_ATTENTION),
    "olmo2": Family(biases=_ATTENTION, query_key_norms=("all", None)),
    "olmo3": Family(biases=_ATTENTION, query_key_norms=("all", None), window_period=4),
    "olmoe": Family(biases=_ATTENTION, query_key_norms=("all", None)),
    "granite": _LLAMA,
    "granitemoe": Family(biases=_ATTENTION),
    "granitemoeshared": Family(biases=_ATTENTION),
    "cohere": Family(usual=TIED, norms=1, biases=_ATTENTION, query_key_norms=("all", "use_qk_norm")),
    "cohere2": Family(usual=TIED, norms=1, biases=_ATTENTION, window_period=4),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "glm": _GLM,
    "glm4": Family(usual=_GLM.usual, norms=4, biases=_GLM.biases),
    "glm4_moe": Family(biases=_GLM.biases, query_key_norms=("head", "use_qk_norm")),
    "gpt_oss": Family("gpt_oss", {"attention_bias": True}, biases=((EVERY, None),), sinks=True, window_period=2),
    "minimax": Family(window_period=1),
    "minimax_m2": Family(query_key_norms=("all", None)),
    "nemotron": Family("gpt", {}, False, norm_values=2, biases=_LLAMA.biases),
    "starcoder2": Family(
        "gpt", {**TIED, "use_bias": True}, False, norm_values=2, biases=((EVERY, "use_bias"),), window_period=1
    ),
    "stablelm": Family(norm_values=2, biases=((QKV, "use_qkv_bias"),)),
    "bert": _BERT,
    "roberta": _BERT,
    "vit": _ENCODER,
}

# Sizes under other names: the field's name in some families, and the name used here.
SPELLINGS: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "kv_n_heads": "num_key_value_heads",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "n_ctx": "max_position_embeddings",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "attn_type_list": "layer_types",
}

# Sizes that the configuration class sets where a file has no such field: `transformers` writes what differs from them.
LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "llama": {"intermediate_size": 11008},
    "llama4_text": {"intermediate_size": 8192, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "attention_chunk_size": 8192},
    "ministral": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "mistral": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "mixtral": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "smollm3": {"intermediate_size": 11008, "num_key_value_heads": 4},
    "seed_oss": {"intermediate_size": 27648, "num_key_value_heads": 8, "head_dim": 128},
    "ernie4_5": {"intermediate_size": 3072, "num_key_value_heads": 2, "head_dim": 128},
    "qwen2": {"intermediate_size": 22016, "num_key_value_heads": 32},
    "qwen2_moe": {"intermediate_size": 5632, "num_key_value_heads": 16,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3": {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"intermediate_size": 6144, "num_key_value_heads": 4, "moe_intermediate_size": 768},
    "qwen3_next": {"intermediate_size": 5632, "num_key_value_heads": 2, "head_dim": 256,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "qwen3_5_text": {"intermediate_size": 12288, "num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "gemma": {"intermediate_size": 24576, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256},
    "phi": {"intermediate_size": 8192},
    "phi3": {"intermediate_size": 8192},
    "phimoe": {"intermediate_size": 6400, "num_key_value_heads": 8},
    "gpt_neox": {"intermediate_size": 24576},
    "opt": {"intermediate_size": 3072},
    "olmo": {"intermediate_size": 11008},
    "olmo2": {"intermediate_size": 11008},
    "olmo3": {"intermediate_size": 11008},
    "olmoe": {"intermediate_size": 2048},
    "granite": {"intermediate_size": 11008},
    "granitemoe": {"intermediate_size": 11008},
    "granitemoeshared": {"intermediate_size": 11008},
    "cohere": {"intermediate_size": 22528},
    "cohere2": {"intermediate_size": 22528},
    "deepseek_v2": {"intermediate_size": 11008,
        "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0, "q_lora_rank": 1536},
    "deepseek_v3": {"intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536},
    "kimi_k2": {"intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536},
    "glm": {"intermediate_size": 13696, "num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"intermediate_size": 13696, "num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"intermediate_size": 10944, "num_key_value_heads": 8,
        "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"intermediate_size": 2880, "num_key_value_heads": 8, "head_dim": 64},
    "minimax": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "minimax_m2": {"intermediate_size": 1536, "num_key_value_heads": 8, "head_dim": 128},
    "nemotron": {"intermediate_size": 24576},
    "starcoder2": {"intermediate_size": 12288, "num_key_value_heads": 2},
    "stablelm": {"intermediate_size": 6912, "num_key_value_heads": 32},
    "bert": {"intermediate_size": 3072},
    "roberta": {"intermediate_size": 3072},
    "vit": {"intermediate_size": 3072},
}  # fmt: skip

# Types of another name: a text model inside one of several parts, or one whose classes are those of another.
SAME_AS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
}

# Fields that are read.
READ = re.compile(
    r"""
    model_type | text_config | llm_config | language_config | thinker_config
    | num_hidden_layers | hidden_size | num_attention_heads | num_key_value_heads | head_dim
    | intermediate_size | vocab_size | tie_word_embeddings | sliding_window | use_sliding_window | layer_types
    | max_window_layers | _sliding_window_pattern | sliding_window_pattern | max_position_embeddings | num_experts
    | num_experts_per_tok | moe_intermediate_size | n_shared_experts | shared_expert_intermediate_size
    | shared_intermediate_size | first_k_dense_replace | decoder_sparse_step | mlp_only_layers | moe_layer_freq
    | q_lora_rank | kv_lora_rank | qk_nope_head_dim | qk_rope_head_dim | v_head_dim | linear_num_key_heads
    | linear_key_head_dim | linear_num_value_heads | linear_value_head_dim | linear_conv_kernel_dim | attention_bias
    | attention_out_bias | mlp_bias | qkv_bias | use_qkv_bias | use_bias | enable_bias | bias | lm_head_bias
    | use_qk_norm | qk_layernorm | multi_query | new_decoder_architecture | parallel_attn | num_ln_in_parallel_attn
    | expansion_ratio | attn_config | type_vocab_size | image_size | patch_size | num_channels | num_labels | id2label
    | word_embed_proj_dim | do_layer_norm_before | attn_pdrop | resid_pdrop | embd_pdrop | attention_dropout
    | hidden_dropout_prob | attention_probs_dropout_prob | num_nextn_predict_layers | num_mtp_modules
    | mtp_num_hidden_layers | quantization_config | vision_config | full_attention_interval | attn_output_gate
    | intermediate_size_mlp | interleave_moe_layer_step | moe_layers | attention_chunk_size | no_rope_layers
    | no_rope_layer_interval
    """,
    re.VERBOSE,
)

# Fields that change neither bytes nor the time of a step: ids of tokens, starting values, scales, what a trainer logs.
SILENT = re.compile(
    r"""
    .*_token_ids? | .*_token_index | .*_token | id2label | label2id | architectures | auto_map | (torch_)?dtype
    | _?name_or_path | transformers_version | .*_version | model_name | finetuning_task | task_specific_params
    | .*init(ializer)?(_.*)? | .*_std | .*eps(ilon)? | .*_scale | .*scaling(_factor)? | .*_multiplier | .*_factor
    | .*alpha
    | rope.* | .*rope.* | rotary.* | partial_rotary.* | .*alibi.* | position_embedding_type | .*max_position_embeddings
    | initial_context_length | mrope.* | use_mrope | seq_length | model_max_length | max_length | .*interleave
    | use_cache | output_.* | return_dict.* | is_encoder_decoder | is_decoder | add_cross_attention | use_return_dict
    | pruned_heads | torchscript | problem_type | chunk_size_feed_forward | tokenizer_class | prefix | language
    | .*dropout(_p|_prob)? | .*_pdrop | layerdrop | summary_.* | .*_loss_coef | .*_loss_alpha | seq_aux | .*_jitter.*
    | norm_topk_prob | scoring_func | topk_method | n_group | topk_group | router_.* | routed_.* | use_routing_bias
    | hidden_act(ivation)? | activation(_function|_type)? | swiglu_limit | .*softcapping | query_pre_attn_scalar
    | scale_attn_.* | reorder_and_upcast_attn | .*_in_fp32 | .*fp32.* | .*bf16.* | slow_but_exact | pretraining_tp
    | qk_head_dim | ep_size | norm_type | use_flash_attn.* | .*flash.* | attn_implementation | _attn_implementation.*
    | gradient_checkpointing | apply_residual_connection_post_layernorm | use_parallel_residual | residual_dropout
    | no_rope_.* | logit_.* | logits_.* | tokenizer.* | verbose | no_bias | layer_norm_elementwise_affine
    | learned_pos_emb | init_device | embedding_fraction | cache_implementation | n_special | predict_special_tokens
    | attn_logit_.* | use_bidirectional_attention | clip_qkv | qkv_bias | pooler_.* | encoder_stride | block_size
    | boi_.* | eoi_.* | mm_tokens_per_image | layer_switch | order_of_interleaved_layers | use_embedding_sharing
    | use_gated_activation | use_parallel_.* | mlp_type | .*_fusion | skip_bias_add.* | sliding_window_size
    | attn_temperature_tuning | floor_scale | for_llm_compressor | postnorm | shared_moe_mode | full_attn_mod
    | use_mtp | qk_norm_type | head_dim_.* | max_batch_size | .*_checkpointing | unk_.* | rms_norm | use_sdpa
    """,
    re.VERBOSE,
)

# Fields that are not modelled, each with the assumption made instead.
ASSUMED: Mapping[str, str] = {
    **dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "mtp_transformer_layers"),
        "layers that predict further tokens are left out, as transformers leaves them out",
    ),
    "quantization_config": "weights are counted in 16 bits; finetune=qlora counts frozen ones in 4",
    "vision_config": "the text model alone is counted; what sees images stays out",
}
