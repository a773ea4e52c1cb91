"""Files of `config.json` in the spellings of many families, and values in unusual shapes: read, or named."""

import json
from pathlib import Path

import pytest

from rpbench.workload.huggingface import assumed, from_config

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))
LLAMA, QWEN = CONFIGS["llama-3.1-8b"], CONFIGS["qwen2.5-7b"]
# Published files, cut down to what is a size: the parameters on their cards in billions, experts that a token visits.
PUBLISHED = [
    ("chatglm", 6.244, 0, {
        "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32, "ffn_hidden_size": 13696, "kv_channels": 128,
        "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 65024, "add_qkv_bias": True,
        "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True,
    }),
    ("dbrx", 131.6, 4, {
        "d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }),
    ("hunyuan_v1_moe", 80.39, 8, {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attention_head_dim": 128, "intermediate_size": 3072, "moe_intermediate_size": [3072] * 32, "num_experts": 64,
        "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "kv_lora_rank": None, "tie_word_embeddings": True,
        "vocab_size": 128167, "use_qk_norm": True,
    }),
    ("ernie4_5_moe", 21.83, 6, {
        "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1, "vocab_size": 103424,
    }),
    ("qwen", 7.721, 0, {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 22016,
        "kv_channels": 128, "no_bias": True, "vocab_size": 151936,
    }),
    ("glm4_moe_lite", 29.94, 4, {
        "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20, "vocab_size": 154880,
        "mlp_layer_types": ["dense"] + 46 * ["sparse"],
    }),
    ("deberta-v2", 0.1845, 0, {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256, "share_att_key": True,
        "position_biased_input": False, "type_vocab_size": 0, "vocab_size": 128100,
    }),
]  # fmt: skip


@pytest.mark.parametrize("kind, billions, active, fields", PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_a_published_file_in_its_own_spelling_is_counted(kind, billions, active, fields):
    config = {"model_type": kind, **fields}
    found = from_config(config)
    assert found.total_parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert (found.experts.active if found.experts else 0) == active
    assert all(said.startswith("attention to all") for said in assumed(config))


@pytest.mark.parametrize("given, plain", [
    ({"hidden_size": 4096.0, "num_hidden_layers": 32.0}, {}),
    ({"num_key_value_heads": [8] * 32}, {}),
    ({"kv_lora_rank": None, "q_lora_rank": None, "v_head_dim": None}, {}),
    ({"layer_types": ["attention"] * 32}, {"layer_types": ["full_attention"] * 32}),
    ({"layer_types": ["local"] * 32, "window_size": 64}, {"layer_types": ["sliding_attention"] * 32,
                                                          "sliding_window": 64}),
])  # fmt: skip
def test_a_value_in_another_shape_is_the_same(given, plain):
    assert from_config({**LLAMA, **given}) == from_config({**LLAMA, **plain})
    assert assumed({**LLAMA, **given}) == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_name_of_a_class_tells_the_type_where_a_file_has_no_other(name):
    """All but the two whose classes have another name than their types."""
    alone = {field: value for field, value in CONFIGS[name].items() if field != "model_type"}
    if name in ("kimi-k2", "vit-large"):
        alone["architectures"] = {"kimi-k2": ["DeepseekV3ForCausalLM"], "vit-large": ["ViTForImageClassification"]}[
            name
        ]
    assert from_config(alone).total_parameters == from_config(CONFIGS[name]).total_parameters
    assert assumed(alone) == assumed(CONFIGS[name])


@pytest.mark.parametrize("name, kind", [
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"), ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    ("GPTNeoXForCausalLM", "gpt_neox"), ("DebertaV2ForMaskedLM", "deberta-v2"), ("XLMRobertaModel", "xlm-roberta"),
    ("QWenLMHeadModel", "qwen"), ("RWForCausalLM", "None"),
])  # fmt: skip
def test_a_class_is_of_the_type_that_it_is_named_after(name, kind):
    sizes = {field: value for field, value in QWEN.items() if field not in ("model_type", "architectures")}
    sizes |= {"type_vocab_size": 2}
    text = {"model_type": "a_wrapper", "text_config": {**sizes, "architectures": [name]}}
    counted = from_config({**sizes, "model_type": kind}).total_parameters
    assert from_config({**sizes, "architectures": [name]}).total_parameters == counted
    assert from_config(text).total_parameters == counted


def test_a_head_that_is_not_over_the_vocabulary_is_named():
    said = assumed({**LLAMA, "architectures": ["LlamaForSequenceClassification"]})
    assert said == (
        "architectures has ForSequenceClassification: counted with an output matrix over the vocabulary instead",
    )
    assert len(assumed({**CONFIGS["vit-large"], "architectures": ["ViTForImageClassification"]})) == 1


def test_fields_of_mamba_say_nothing_where_all_layers_are_attention():
    config = {**LLAMA, "model_type": "granitemoehybrid", "mamba_d_state": 128, "num_local_experts": 0}
    assert assumed({**config, "layer_types": ["attention"] * 32}) == ()
    assert len(assumed({**config, "layer_types": ["attention", "mamba"] * 16})) == 2


def test_key_heads_are_no_size_of_latent_attention():
    latent = CONFIGS["deepseek-v2-lite"]
    assert from_config({**latent, "num_key_value_heads": 5}) == from_config(latent)


@pytest.mark.parametrize("outer, inner, tied", [
    (True, False, True), (False, True, False), (None, True, True), (True, None, True), (None, None, False),
])  # fmt: skip
def test_the_wrapper_says_whether_its_output_matrix_is_shared(outer, inner, tied):
    wrapped = {"model_type": "llava", "text_config": {**QWEN, "tie_word_embeddings": inner}}
    assert from_config({**wrapped, "tie_word_embeddings": outer}).tied is tied


def test_of_a_wrapper_the_text_model_alone_is_said_to_be_counted():
    parts = {"audio_config": {"layers": 3}, "downsample_ratio": 0.5, "image_seq_length": 256}
    wrapped = {"model_type": "internvl", "_name_or_path": "mine", "text_config": {**QWEN, "_name_or_path": "./a/b"}}
    assert assumed({**wrapped, **parts}) == ("audio_config: the text model alone is counted",)
    assert from_config(wrapped).name == "mine"


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text"])
def test_a_model_that_sees_has_the_text_model_of_its_family(kind):
    seeing = {**QWEN, "model_type": kind}
    assert from_config(seeing).total_parameters == from_config(QWEN).total_parameters
    assert assumed(seeing) == ()


@pytest.mark.parametrize("fields, dense", [
    ({"first_k_dense_replace": 2}, [0, 1]),
    ({"num_dense_layers": 1}, [0]),
    ({"decoder_sparse_step": 2}, [0, 2, 4]),
    ({"moe_layer_freq": 2}, [1, 3, 5]),
    ({"moe_layer_freq": [0, 1, 1, 1, 1, 0]}, [0, 5]),
    ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse"]}, [0, 1]),
    ({"moe_layer_start_index": 1, "moe_layer_end_index": 4}, [0, 5]),
    ({"moe_layer_end_index": -1, "moe_layer_interval": 1}, []),
    ({"expert_layer_period": 2, "expert_layer_offset": 1}, [0, 2, 4]),
    ({"mlp_only_layers": [3]}, [3]),
])  # fmt: skip
def test_layers_without_experts_are_those_that_the_file_names(fields, dense):
    config = {**CONFIGS["mixtral-8x7b"], "num_hidden_layers": 6, **fields}
    assert from_config(config).num_dense_layers == len(dense)
    wherever = "layers without experts are counted as the first ones, wherever they stand"
    assert (wherever in assumed(config)) == (dense != [*range(len(dense))])


@pytest.mark.parametrize("switch, values", [
    ({"attention_bias": True}, 2 * 4096 + 2 * 1024),
    ({"use_qkv_bias": True}, 4096 + 2 * 1024),
    ({"mlp_bias": True}, 2 * 14336 + 4096),
    ({"use_qk_norm": True}, 2 * 128),
])  # fmt: skip
def test_an_unknown_family_has_what_its_fields_switch_on(switch, values):
    unknown = {**LLAMA, "model_type": "yi_of_tomorrow"}
    found = from_config({**unknown, **switch}).total_parameters
    assert found - from_config(unknown).total_parameters == 32 * values


def test_what_is_not_modelled_is_named_in_full():
    config = {**LLAMA, "layer_types": ["mamba", "conv"] * 16, "is_encoder_decoder": True}
    said = " ".join(assumed(config))
    assert "layer_types has 'conv', 'mamba', not modelled: counted as full_attention" in said
    assert "is_encoder_decoder: one stack" in said
    other = {**LLAMA, "model_type": "yi_of_tomorrow", "intermediate_size": None}
    assert "config.json has no intermediate_size: counted as 4 times hidden_size" in assumed(other)
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    assert not any("intermediate_size" in said for said in assumed({**other, **routed}))
    del other["tie_word_embeddings"]
    assert from_config(other).tied
    assert "config.json has no tie_word_embeddings: counted as true" in " ".join(assumed(other))


def test_a_model_without_attention_is_refused_by_its_name():
    mamba = {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}
    with pytest.raises(ValueError, match="no num_attention_heads: model_type='mamba' is no transformer, or"):
        from_config(mamba)
    with pytest.raises(ValueError, match=r"config\.json has no num_attention_heads: add it in this spelling"):
        from_config({**mamba, "model_type": "gpt2"})
