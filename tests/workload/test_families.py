"""Families of models: parameters as `transformers` builds them, and what a `config.json` says besides sizes."""

import json
from pathlib import Path

import pytest

from rpbench.workload.families import known
from rpbench.workload.huggingface import assumed, context_of, from_config

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))
# Sizes in every spelling of the families; a configuration class takes those that it knows.
SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 24,
    "intermediate_size": 96, "ffn_dim": 96, "vocab_size": 200, "max_position_embeddings": 64, "n_positions": 64,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48,
    "intermediate_size_mlp": 80, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_shared_experts": 2, "num_shared_experts": 2, "moe_num_shared_experts": 2, "moe_num_experts": 8, "moe_k": 2,
    "moe_topk": 2, "dim": 64, "hidden_dim": 96, "moe_layer_end_index": 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BY_OTHER_CLASSES = {"kimi_k2": "deepseek_v3"}
MASKED = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert")
# Text models whose wrapper has the output matrix.
WITHOUT_A_HEAD = {
    "qwen2_vl_text": "Qwen2VLTextModel", "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel", "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel", "glm4v_text": "Glm4vTextModel",
    "glm4v_moe_text": "Glm4vMoeTextModel",
}  # fmt: skip
# Hybrids are counted by their mean layer, in whole values: not to the last parameter.
SLACK = dict.fromkeys(("minimax", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 1e-3)
SLACK |= {"ernie4_5_moe": 1e-3, "apertus": 1e-4}  # numbers of a router's and of an activation's own
# What names classes or weights; nothing of it is a size.
UNREAD = ("quantization_config", "rope_scaling", "architectures", "auto_map", "model_type", "torch_dtype")
SWITCHES = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
    ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "attention_bias": True}),
    ("cohere", {"use_qk_norm": True}),
    ("phi", {"qk_layernorm": True}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    ("stablelm", {"use_qkv_bias": True}),
    ("gpt_neox", {"attention_bias": False}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("falcon", {"new_decoder_architecture": True}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    ("falcon", {"num_ln_in_parallel_attn": 2}),
    ("seed_oss", {"mlp_bias": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"enable_bias": False}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"attention_bias": True}),
    ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
]


def built(kind: str, sizes: dict) -> tuple[int, dict]:
    """Parameters of a model that `transformers` builds without values, and its configuration as it is written."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name = BY_OTHER_CLASSES.get(kind, kind)
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    configuration = transformers.CONFIG_MAPPING[name](**sizes)
    config = {**configuration.to_dict(), "model_type": kind}
    with torch.device("meta"):
        if name in WITHOUT_A_HEAD:
            model, config["tie_word_embeddings"] = getattr(transformers, WITHOUT_A_HEAD[name])(configuration), True
        else:
            auto = dict.fromkeys(MASKED, transformers.AutoModelForMaskedLM)
            auto["vit"] = transformers.AutoModelForImageClassification
            model = auto.get(name, transformers.AutoModelForCausalLM).from_config(configuration)
    return sum(each.numel() for each in model.parameters()), config


def small(kind: str) -> dict:
    """Small sizes of those fields that the type has."""
    transformers = pytest.importorskip("transformers")
    name = BY_OTHER_CLASSES.get(kind, kind)
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    usual = transformers.CONFIG_MAPPING[name]().to_dict()
    found = {field: value for field, value in SMALL.items() if field in usual}
    if kind == "granitemoehybrid":
        found["layer_types"] = ["attention"] * 4
    if "kv_lora_rank" in found:
        found |= {"head_dim": found["qk_rope_head_dim"], "num_key_value_heads": found["num_attention_heads"]}
    return found


@pytest.mark.parametrize("kind", known().families)
def test_a_small_model_has_the_parameters_that_are_built(kind):
    parameters, config = built(kind, small(kind))
    assert from_config(config).total_parameters == pytest.approx(parameters, rel=SLACK.get(kind, 0), abs=0)


@pytest.mark.parametrize(
    "kind, switched", SWITCHES, ids=lambda value: "-".join(value) if isinstance(value, dict) else value
)
def test_what_a_field_switches_is_counted(kind, switched):
    parameters, config = built(kind, {**small(kind), **switched})
    slack = 64 * ("mlp_only_layers" in switched)  # a gate that its dense layer has not
    assert from_config(config).total_parameters == pytest.approx(parameters, abs=slack, rel=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_has_the_parameters_that_are_built(name):
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    kind = config["model_type"]
    taken = {field: value for field, value in config.items() if field not in UNREAD}
    parameters, _ = built(kind, taken)
    counted = from_config(CONFIGS[name]).total_parameters
    assert counted == pytest.approx(parameters, rel=SLACK.get(kind, 0), abs=0)
    assert f"{counted / 1e9:.1f}" == PRINTED[name]


# Billions of parameters on the models' cards, or in the papers behind them.
PRINTED = {
    "gpt2": "0.1", "llama-3.1-8b": "8.0", "qwen2.5-7b": "7.6", "qwen1.5-moe-a2.7b": "14.3", "qwen3-30b-a3b": "30.5",
    "qwen3-next-80b-a3b": "79.7", "mistral-7b": "7.2", "mixtral-8x7b": "46.7", "gemma-7b": "8.5", "gemma-2-9b": "9.2",
    "gemma-3-4b": "3.9", "gemma-3-12b": "11.8", "phi-2": "2.8", "phi-3-mini": "3.8", "phi-4": "14.7",
    "falcon-7b": "6.9",
    "falcon-40b": "41.3", "pythia-6.9b": "6.9", "gpt-j-6b": "6.1", "olmo-2-7b": "7.3", "granite-3.1-8b": "8.2",
    "command-r7b": "8.0", "deepseek-v2-lite": "15.7", "deepseek-v3": "671.0", "glm-4-9b": "9.4",
    "glm-4.5-air": "106.9", "gpt-oss-20b": "20.9", "minimax-m2": "228.7", "kimi-k2": "1026.4", "starcoder2-7b": "7.2",
    "bloom-7b1": "7.1", "opt-6.7b": "6.7", "bert-large": "0.3", "vit-large": "0.3",
}  # fmt: skip

# What is said of the published configurations that have more than is modelled, and of no other.
SAID = {
    "qwen3-next-80b-a3b": ["linear attention is timed as attention to 256 keys"],
    "gemma-3-4b": ["vision_config: the text model alone is counted"],
    "gemma-3-12b": ["vision_config: the text model alone is counted"],
    "deepseek-v3": ["num_nextn_predict_layers: layers that predict", "quantization_config: weights are counted in 16"],
    "glm-4.5-air": ["num_nextn_predict_layers: layers that predict"],
    "gpt-oss-20b": ["quantization_config: weights are counted in 16 bits"],
    "minimax-m2": ["mtp_transformer_layers: layers that predict", "num_mtp_modules: layers that predict"],
    "bert-large": ["attention to all tokens is counted as attention to those before"],
    "vit-large": ["attention to all tokens is counted as attention to those before"],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_that_change_nothing_are_passed_over_and_the_others_named(name):
    said, expected = assumed(CONFIGS[name]), SAID.get(name, [])
    assert len(said) == len(expected)
    for sentence, start in zip(said, expected, strict=True):
        assert sentence.startswith(start)


def test_a_field_that_is_not_modelled_is_named_and_the_answer_goes_on():
    odd = {**CONFIGS["llama-3.1-8b"], "ssm_state_size": 128, "use_mrope": False, "use_hyper_connections": False}
    assert assumed(odd) == ("ssm_state_size=128 of a llama is not modelled: counted as if it were not there",)
    assert from_config(odd) == from_config(CONFIGS["llama-3.1-8b"])


@pytest.mark.parametrize("kind", ["yi_of_tomorrow", None, 7])
def test_an_unknown_family_falls_back_on_its_sizes_with_a_warning(kind):
    unknown = {**CONFIGS["llama-3.1-8b"], "model_type": kind, "architectures": ["OurModel"]}
    assert "is not known: counted by its sizes as a Llama" in assumed(unknown)[0]
    assert from_config(unknown).total_parameters == from_config(CONFIGS["llama-3.1-8b"]).total_parameters


@pytest.mark.parametrize(
    "name, windows",
    [
        ("mistral-7b", [4096, 4096, 4096, 4096, 4096, 4096]),
        ("gemma-2-9b", [4096, None, 4096, None, 4096, None]),
        ("gemma-3-12b", [1024, 1024, 1024, 1024, 1024, None]),
        ("command-r7b", [4096, 4096, 4096, None, 4096, 4096]),
        ("phi-3-mini", [2047] * 6),
        ("gpt-oss-20b", [128, None, 128, None, 128, None]),
        ("qwen2.5-7b", [None] * 6),
        ("qwen3-next-80b-a3b", [256, 256, 256, None, 256, 256]),
    ],
)
def test_layers_see_what_their_type_lets_them_see(name, windows):
    assert [layer.window for layer in from_config(CONFIGS[name]).layers[:6]] == windows


ALL_KINDS_GIVEN = ("dots1", "minimax", "qwen2_moe", "smollm3")


@pytest.mark.parametrize("window", [{}, {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}])
@pytest.mark.parametrize("kind", [kind for kind in known().families if kind not in ALL_KINDS_GIVEN])
def test_kinds_of_layers_that_are_left_out_are_those_of_the_configuration_class(kind, window):
    """All but those whose published files have no windows, or all of their layers' kinds."""
    usual, transformers = small(kind), pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING[BY_OTHER_CLASSES.get(kind, kind)]
    fields = {name: value for name, value in window.items() if name in made().to_dict()}
    config = {**made(**usual, **fields).to_dict(), "model_type": kind}
    given = config.pop("layer_types", None)
    if given is not None:
        assert from_config(config).layers == from_config({**config, "layer_types": given}).layers


@pytest.mark.parametrize(
    "name, theta, eps",
    [("llama-3.1-8b", 5e5, 1e-5), ("qwen2.5-7b", 1e6, 1e-6), ("gpt-oss-20b", 1.5e5, 1e-5), ("gpt2", 1e4, 1e-5)],
)
def test_what_the_modules_compute_with_is_read(name, theta, eps):
    found = from_config(CONFIGS[name])
    assert (found.rope_theta, found.norm_eps) == (theta, eps)


def test_a_rotary_base_may_stand_inside_and_is_no_word():
    odd = {**CONFIGS["llama-3.1-8b"], "rope_theta": None, "rope_parameters": {"rope_theta": 7e5}}
    assert from_config(odd).rope_theta == 7e5
    by_kind = {"full_attention": {"rope_theta": 8e5}, "sliding_attention": {"rope_theta": 1e4}}
    assert from_config({**odd, "rope_parameters": by_kind}).rope_theta == 8e5
    for none in ("default", {"rope_theta": "large"}, {"rope_theta": 0}, {"rope_theta": 10**400}):
        assert from_config({**odd, "rope_parameters": none}).rope_theta == 1e4


def test_an_encoder_of_images_sees_its_patches():
    assert context_of(CONFIGS["vit-large"]) == 14 * 14 + 1


@pytest.mark.parametrize("kind", [kind for kind, family in known().families.items() if family.left_out])
def test_a_size_that_is_left_out_is_that_of_the_configuration_class(kind):
    transformers = pytest.importorskip("transformers")
    name = BY_OTHER_CLASSES.get(kind, kind)
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    usual = transformers.CONFIG_MAPPING[name]().to_dict()
    usual = {known().spellings.get(field, field): value for field, value in usual.items()} | usual
    for field, value in known().families[kind].left_out.items():
        assert usual[field] == value, field


@pytest.mark.parametrize("kind, field", [
    ("mistral", "num_key_value_heads"), ("gemma2", "intermediate_size"), ("qwen3_moe", "moe_intermediate_size"),
    ("gpt_oss", "head_dim"), ("gemma3_text", "num_attention_heads"), ("mistral", "num_attention_heads"),
    ("llama", "hidden_size"), ("qwen2_moe", "num_experts"), ("deepseek_v3", "kv_lora_rank"), ("qwen2", "vocab_size"),
    ("falcon", "multi_query"), ("gpt_bigcode", "multi_query"),
])  # fmt: skip
def test_a_file_without_a_size_is_the_model_that_is_built(kind, field):
    sizes = {**small(kind), "num_attention_heads": 8}
    sizes.pop(field, None)
    parameters, config = built(kind, sizes)
    del config[field]
    assert from_config(config).total_parameters == parameters


def test_a_text_model_of_usual_sizes_is_no_outer_one():
    """LLaVA-1.5's file says of its text model that it is a Llama of 32,064 words: Vicuna's 7 billion."""
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": {}}
    assert from_config(llava).total_parameters == 6_738_939_904


def test_a_null_is_no_size_that_is_left_out():
    dense = {"model_type": "deepseek_v2", **small("deepseek_v2"), "n_routed_experts": None}
    assert from_config(dense).experts is None
    del dense["n_routed_experts"]
    assert from_config(dense).experts.total == 64


@pytest.mark.parametrize("wrapped", [
    lambda inner: {"model_type": "llava", "text_config": inner},
    lambda inner: {"model_type": "internvl_chat", "llm_config": inner},
    lambda inner: {"model_type": "janus", "language_config": inner},
    lambda inner: {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": inner}},
])  # fmt: skip
@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-7b", "deepseek-v2-lite", "gpt-j-6b"])
def test_the_text_model_of_a_wrapper_is_counted(wrapped, name):
    whole = {**wrapped(CONFIGS[name]), "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}}
    assert from_config(whole).total_parameters == from_config(CONFIGS[name]).total_parameters
