"""Adapters: which maps have one, what they weigh by PEFT's formula, and frozen weights in 4 bits."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rpbench.advice.model_source import architecture_of, model_of_sizes, trained
from rpbench.commands.advising.advise import advise_on
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.models.build import build_layer
from rpbench.workload.architecture import Architecture, architecture
from rpbench.workload.huggingface import from_config

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))
# PEFT prints r * (inputs + outputs) of every target, by hand for Llama-3.1-8B: 32 layers, hidden 4096, keys 1024.
Q, K, OUT, UP = 4096 + 4096, 4096 + 1024, 4096 + 4096, 4096 + 14336
TARGETS = {
    "q_proj,v_proj": Q + K,
    "attention": Q + 2 * K + OUT,
    "mlp": 3 * UP,
    "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]": Q + 2 * K + OUT + 3 * UP,
    "all": Q + 2 * K + OUT + 3 * UP,
}


@pytest.mark.parametrize("targets, widths", TARGETS.items())
@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_adapters_weigh_what_peft_prints(mode, targets, widths):
    asked = {"training_mode": mode, "lora_rank": "8", "lora_targets": targets}
    found = trained(from_config(CONFIGS["llama-3.1-8b"]), asked)
    assert found.trainable_parameters == 32 * 8 * widths
    assert found.total_parameters == from_config(CONFIGS["llama-3.1-8b"]).total_parameters


def test_peft_prints_the_same():
    """3,407,872 trainable parameters: PEFT's own line for Llama-3-8B, rank 8, queries and values."""
    asked = {"training_mode": "lora", "lora_rank": "8", "lora_targets": "q_proj,v_proj"}
    assert trained(architecture("llama3_8b"), asked).trainable_parameters == 3_407_872


# By hand, as PEFT counts them: rank 8 beside every map, with those in one that the family has in one.
FUSED = {
    "phi-3-mini": 32 * ((3072 + 3 * 3072) + (3072 + 3072) + (3072 + 2 * 8192) + (8192 + 3072)),
    "gpt2": 12 * ((768 + 3 * 768) + (768 + 768) + 2 * (768 + 3072)),
    "falcon-7b": 32 * ((4544 + 4544 + 2 * 64) + 2 * 4544 + 2 * (4544 + 4 * 4544)),
    "glm-4-9b": 40 * ((4096 + 4096) * 2 + 2 * (4096 + 256) + (4096 + 2 * 13696) + (13696 + 4096)),
}


@pytest.mark.parametrize("name, widths", FUSED.items())
def test_maps_that_are_one_have_one_adapter(name, widths):
    model = from_config(CONFIGS[name])
    adapted = trained(model, {"training_mode": "lora", "lora_rank": "8"})
    assert adapted.trainable_parameters == 8 * widths
    assert adapted.total_parameters == replace(model, fused=()).total_parameters
    with pytest.raises(ValueError, match=r"unknown name in model\.lora_targets"):
        trained(model, {"training_mode": "lora", "lora_targets": "gate_proj" if "glm" in name else "q_proj"})


def test_sizes_on_the_command_line_say_which_maps_are_one():
    sizes = {"num_layers": "2", "hidden": "64", "heads": "4", "vocab": "100", "inner": "96", "fused": "[qkv_proj]"}
    names = [each.name for each in model_of_sizes(sizes).linear_maps(routed=False)]
    assert names == ["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_only_maps_of_one_input_are_fused():
    with pytest.raises(ValueError, match=r"unknown name in model\.fused 'qkvo_proj'; did you mean qkv_proj"):
        replace(architecture("llama3_8b"), fused=["qkvo_proj"])


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b"])
def test_experts_and_latents_have_targets_of_their_own(name):
    model = from_config(CONFIGS[name])
    target = "kv_b_proj" if model.latent else "down_proj"
    found = trained(model, {"training_mode": "lora", "lora_rank": "4", "lora_targets": target})
    if model.latent:
        widths = model.num_layers * (512 + 16 * (128 + 128))
    else:
        widths = model.num_layers * 128 * (768 + 2048)
    assert found.trainable_parameters == 4 * widths


def test_frozen_maps_of_qlora_take_four_bits_and_all_else_sixteen():
    plain = architecture("llama3_8b")
    frozen = trained(plain, {"training_mode": "qlora", "lora_rank": "16"})
    maps = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert frozen.layer_weight_bytes == round(maps * 4.127 / 8 + 2 * (2 * 4096))
    sizes, before = model_bytes(frozen, 2048), model_bytes(plain, 2048)
    assert sizes.layers[0].weights == frozen.layer_weight_bytes + 2 * frozen.trainable_layer_parameters
    assert sizes.head.weights == before.head.weights  # what makes logits stays in 16 bits
    assert sizes.head.optimizer == 0


def test_a_rank_is_sixteen_where_none_is_given():
    assert trained(architecture("llama3_8b"), {"training_mode": "lora"}).lora_rank == 16


@pytest.mark.parametrize(
    "asked, rule",
    [
        (
            {"training_mode": "lora", "lora_targets": "q_prj"},
            "unknown name in model.lora_targets 'q_prj'; did you mean",
        ),
        ({"lora_targets": "q_proj"}, "model.lora_targets without adapters"),
        ({"training_mode": "dora"}, "choose full, lora or qlora"),
        ({"lora_rank": "8"}, "lora needs a rank, full takes none"),
    ],
)
def test_adapters_that_cannot_be_are_refused(asked, rule):
    with pytest.raises(ValueError, match=rule):
        trained(architecture("llama3_8b"), asked)


@pytest.mark.parametrize("keys", [{"training_mode": "qlora"}, {"training_mode": "lora", "lora_targets": ("q_proj",)}])
def test_what_our_modules_cannot_build_is_simulated_only(keys):
    with pytest.raises(ValueError, match="cannot build"):
        build_layer(Architecture("m", 2, 64, 4, 100, lora_rank=4, **keys), 1, seed=0)


@pytest.mark.parametrize(
    "name, words", [("gemma-3-12b", ["num_devices=4", "finetune=qlora"]), ("deepseek-v2-lite", ["num_devices=1"])]
)
def test_a_configuration_is_answered_with_what_was_assumed(name, words, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    asked = [f"model={folder}", "gpu=a100_sxm4_80gb", *words, "schedules=1f1b,roundpipe", "seconds=1"]
    answer = advise_on(asked, people := io.StringIO())
    assert answer["ranking"] or answer["does_not_fit"]
    for note in answer["notes"]:
        assert f"note: {note}" in people.getvalue()
    assert bool(answer["notes"]) == (name == "gemma-3-12b")
    assert architecture_of(folder / "config.json").name == name.replace("-", "_")
