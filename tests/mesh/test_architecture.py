"""Architectures: parameters against published counts, configurations of Hugging Face, fields that are refused."""

import re

import pytest

from rpbench.config.loading import load
from rpbench.config.mesh import refuse_frozen
from rpbench.cost.hardware.device import names
from rpbench.run.recording import run
from rpbench.workload.architecture import OLD_SPELLINGS, Architecture, architecture
from rpbench.workload.counts import mean_keys
from rpbench.workload.huggingface import from_config

# Parameters as the models' own pages print them.
PRINTED = {
    "llama3_8b": 8.03e9,
    "llama3_70b": 70.6e9,
    "llama31_405b": 405.9e9,
    "qwen3_235b_a22b": 235e9,
    "gpt_oss_120b": 116.8e9,
    "deepseek_v3": 671e9,
    "deepseek_v2": 236e9,
    "mixtral_8x22b": 141e9,
    "bloom_176b": 176.2e9,
}

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "moe_layer_freq": 1,
}


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_that_are_printed(name):
    assert architecture(name).total_parameters == pytest.approx(PRINTED[name], rel=0.004)


@pytest.mark.parametrize("config, name", [(LLAMA, "llama3_8b"), (DEEPSEEK, "deepseek_v3")])
def test_a_configuration_of_hugging_face_is_the_same_architecture(config, name):
    found, known = from_config(config), architecture(name)
    norms = 0 if known.latent is None else 61 * (1536 + 512)  # of the latents, which the shipped file leaves out
    assert found.total_parameters == known.total_parameters + norms
    assert found.flops_per_token(4096) == known.flops_per_token(4096)


@pytest.mark.parametrize("kind, act", [("llama", "gelu"), ("mistral", "relu"), ("qwen3", "gelu_new")])
def test_all_but_gpt_multiply_by_a_gate_whatever_the_activation(kind, act):
    """`LlamaMLP` of transformers has gate_proj, up_proj and down_proj; `hidden_act` only names the function."""
    gated, other = (from_config({**LLAMA, "model_type": kind, "hidden_act": name}) for name in ("silu", act))
    assert other.total_parameters == gated.total_parameters


def test_a_gpt_that_does_not_name_its_activation_has_no_gate():
    """124 million parameters, says the card of GPT-2; its class has gelu_new as the usual activation."""
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert from_config({"model_type": "gpt2", **sizes}).total_parameters == pytest.approx(124.4e6, rel=1e-3)


@pytest.mark.parametrize("kind, windows", [("qwen2", [None, None, 8, 8]), ("qwen3_moe", [8] * 4), ("mixtral", [8] * 4)])
def test_windows_are_in_the_layers_that_the_type_has_them_in(kind, windows):
    """Qwen2's `max_window_layers` first layers see all keys."""
    own = {"num_hidden_layers": 4, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    assert [layer.window for layer in from_config({**LLAMA, "model_type": kind, **own}).layers] == windows


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: a whole number from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: a whole number from 1"),
        ({"hidden_size": 4096.5}, "hidden_size=4096.5: a whole number"),
        ({"hidden_size": True}, "hidden_size=True: a whole number"),
        ({"vocab_size": "128256"}, "vocab_size='128256': a whole number"),
        ({"hidden_size": 10**30}, "hidden_size=10+: a whole number from 1 to 1,000,000,000"),
        ({"intermediate_size": -1}, "intermediate_size=-1: a whole number"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types has 1 kinds; one for each of the 32"),
    ],
)
def test_a_size_that_is_no_size_is_refused_and_never_rounded(change, rule):
    with pytest.raises(ValueError, match=rule):
        from_config({**LLAMA, **change})


def test_windows_take_turns_over_the_layers():
    model = Architecture("m", 4, 64, 4, 100, 2, gated=False, tied=True, windows=(8, None))
    assert [layer.window for layer in model.layers] == [8, None, 8, None]


def test_frozen_layers_are_refused_under_a_mesh():
    with pytest.raises(ValueError, match="frozen layers under a mesh are not modelled"):
        refuse_frozen(Architecture("m", 4, 64, 4, 100, frozen_layers=2))


@pytest.mark.parametrize(
    "keys, rule",
    [
        ({"experts": {"total": 4, "active": 2}}, "model.experts has no inner; it takes total, active, inner"),
        ({"experts": {"total": 4, "active": 2, "inner": 8, "size": 1}}, "key of model.experts 'size'"),
        ({"windows": 128}, r"model.windows=128: a list in turn over the layers, such as \[128,null\]"),
        ({"windows": [0]}, "model.windows has 0: a window is a whole number"),
    ],
)
def test_parts_that_cannot_be_are_refused(keys, rule):
    with pytest.raises(ValueError, match=rule):
        Architecture("m", 4, 64, 4, 100, **keys)


@pytest.mark.parametrize("old, new", OLD_SPELLINGS.items())
def test_an_old_spelling_is_told_the_new_one(old, new):
    with pytest.raises(ValueError, match=re.escape(f"'{old}' is spelled {new} now")):
        load(["model=tiny_gpt", f"model.{old}=2"])
    with pytest.raises(ValueError, match=re.escape(f"'{old}' is spelled {new} now")):
        load(["model=tiny_gpt", f"+model.{old}=2"])


def test_the_old_group_is_told_the_new_one():
    with pytest.raises(ValueError, match="architecture= is spelled model= now"):
        load(["architecture=llama3_8b"])


@pytest.mark.parametrize("name", PRINTED)
def test_the_mean_layer_adds_up_to_the_whole(name):
    own = architecture(name)
    ends = own.embedding_parameters + own.hidden + (0 if own.tied else own.vocab * own.hidden)
    assert own.num_layers * own.layer_parameters + ends == pytest.approx(own.total_parameters, abs=own.num_layers)
    both_ways = 3 * (own.forward_flops(1, "causal") + own.num_layers * own.router_forward_flops(1))
    assert both_ways == pytest.approx(own.flops_per_token(own.seq_len), rel=1e-12)


def test_keys_under_a_mask_and_a_window():
    assert mean_keys(4, None) == 2.5
    assert mean_keys(4, 2) == (1 + 2 + 2 + 2) / 4


def test_dense_layers_stand_before_those_with_experts():
    layers = architecture("deepseek_v3").layers
    assert [layer.routed for layer in layers[:4]] == [False, False, False, True]


def test_flops_of_a_plain_model_follow_the_textbook():
    """6 x weights and causal attention: 96 L h^2 / 16 = 72 h^2 a layer, and 6 h (s + 1) of attention both ways."""
    own = Architecture("gpt", 2, 64, 4, 100, gated=False)
    attention = 2 * 12 * 64 * (33 / 2)  # two layers, 12 h keys
    assert own.flops_per_token(32) == 2 * 72 * 64**2 + attention + 6 * 100 * 64


@pytest.mark.parametrize("name", [name for name in names("model") if name not in ("abstract", "qwen3_235b_lora")])
def test_a_shipped_model_runs_on_one_host_and_under_a_mesh(name, tmp_path):
    asked = ["schedule=1f1b", f"model={name}", "cost=analytic", "num_microbatches=4", f"results_dir={tmp_path}"]
    (plain,) = run(load([*asked, "cluster=8x_h100", "num_devices=2"]))
    (under,) = run(load([*asked, "cluster=dgx_h100", "mesh.pipeline=2", "mesh.data=2"]))
    for found in (plain, under):
        assert found["status"] == "ok" or " needs " in str(found["reason"])  # the largest need more devices than two
        assert max(found["peak_memory_bytes"]) > 0
