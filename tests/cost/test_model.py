"""Parameters, FLOPs and bytes of the models, against the published counts and against plain algebra."""

import csv
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.workload.architecture import Architecture, model_keys

ROOT = Path(__file__).parents[2]
NAMES = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]


def load(name: str, **changes: Any) -> Architecture:
    return Architecture(**{**read(name), **changes})


def read(name: str) -> dict[str, Any]:
    return model_keys(ROOT / "conf" / "model" / f"{name}.yaml")


def published(model: Architecture) -> dict[str, str]:
    with open(ROOT / "analysis" / "published" / "models.csv", newline="") as lines:
        return next(row for row in csv.DictReader(lines) if row["model"] == model.published_name)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_match_the_published_counts(name: str) -> None:
    model = load(name)
    row = published(model)
    assert f"{model.total_parameters / 1e9:.4f}" == row["params_total_billion_computed"]
    assert f"{model.layer_parameters / 1e6:.3f}" == row["params_per_layer_million_computed"]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("qwen3_1p7b", 1_720_574_976),
        ("llama31_8b", 8_030_261_248),
        ("gpt_oss_20b", 20_914_757_184),
        ("qwen3_32b", 32_762_123_264),
        ("qwen3_235b_lora", 235_093_634_560),
    ],
)
def test_parameters_match_the_public_checkpoints_to_the_last_one(name: str, total: int) -> None:
    assert load(name).total_parameters == total


@pytest.mark.parametrize("name", NAMES)
def test_configs_agree_with_the_published_shapes(name: str) -> None:
    model = load(name)
    row = published(model)
    assert [str(n) for n in (model.num_layers, model.hidden, model.heads, model.key_value_heads, model.head_dim)] == [
        row[column] for column in ("layers", "hidden_size", "attention_heads", "kv_heads", "head_dim")
    ]
    assert [
        str(n)
        for n in (
            model.experts.inner if model.experts else model.inner,
            model.experts.total if model.experts else 1,
            model.experts.active if model.experts else 1,
            model.vocab,
        )
    ] == [row[column] for column in ("intermediate_size", "experts_total", "experts_active", "vocab_size")]
    assert model.tied == (row["tied_embedding"] == "yes")
    assert row["training_mode"].startswith(model.training_mode)
    assert model.qk_norm == ("qk-norm" in row["attention_note"])
    assert (bool(model.windows)) == ("sliding-window" in row["attention_note"])


@pytest.mark.parametrize("name", [*NAMES, "transformer"])
def test_configs_are_named_after_their_file_and_can_set_the_sequence_length(name: str) -> None:
    assert {"name", "seq_len"} <= set(read(name)) <= {field.name for field in fields(Architecture)}
    assert load(name).name == name


def test_adapters_of_the_235b_model_hold_6_62_billion_parameters() -> None:
    model = load("qwen3_235b_lora")
    assert f"{model.trainable_parameters / 1e9:.2f}" == "6.62"
    assert "6.62 B" in published(model)["training_mode"]


@pytest.mark.parametrize("name", ["qwen3_1p7b", "gpt_oss_20b"])
def test_full_training_trains_everything(name: str) -> None:
    model = load(name)
    assert model.trainable_parameters == model.total_parameters
    assert model.trainable_layer_parameters == model.layer_parameters


def test_a_shared_output_matrix_counts_once() -> None:
    shared = load("qwen3_1p7b")
    apart = replace(shared, tied=False)
    assert apart.total_parameters - shared.total_parameters == 151_936 * 2048
    assert apart.head_parameters == shared.head_parameters  # the last stage holds it either way


@given(
    hidden=st.integers(1, 64).map(lambda n: 64 * n),
    seq_len=st.integers(1, 4096),
    num_tokens=st.integers(1, 10_000),
)
def test_plain_transformer_matches_the_textbook(hidden: int, seq_len: int, num_tokens: int) -> None:
    """12 h^2 weights, and s b h (24 h + 4 s) FLOPs a layer: zero-bubble paper (arXiv 2401.10241), table 1."""
    model = load("transformer", hidden=hidden, seq_len=seq_len)
    assert model.layer_parameters == 12 * hidden**2 + 2 * hidden
    for convention in ("artifact", "corrected"):
        flops = model.layer_forward_flops(num_tokens, convention)
        assert flops == num_tokens * hidden * (24 * hidden + 4 * seq_len)


def test_conventions_agree_when_the_heads_add_up_to_hidden() -> None:
    model = load("llama31_8b")
    assert model.layer_forward_flops(8192, "artifact") == model.layer_forward_flops(8192, "corrected")
    assert model.layer_activation_bytes(8192, "artifact") == model.layer_activation_bytes(8192, "corrected")


def test_activations_of_wide_heads() -> None:
    """GPT-OSS: 4 x 2,880 of the stream, 2 x 4,096 and 2 x 512 of the heads, 3 x 2,880 of each expert."""
    model = load("gpt_oss_20b")
    assert model.layer_activation_bytes(1, "corrected") == 2 * (11_520 + 8_192 + 1_024 + 34_560)
    assert model.layer_activation_bytes(10, "artifact") == 10 * 2 * 18.25 * 2_880


@given(seq_len=st.integers(1, 300), window=st.none() | st.integers(1, 300), num_layers=st.integers(1, 7))
def test_causal_keys_equal_a_count_one_by_one(seq_len: int, window: int | None, num_layers: int) -> None:
    model = load("transformer", seq_len=seq_len, windows=(window, None), num_layers=num_layers)
    seen = [
        min(position, window) if window is not None and layer % 2 == 0 else position
        for layer in range(num_layers)
        for position in range(1, seq_len + 1)
    ]
    assert model.keys_per_query("causal") == pytest.approx(sum(seen) / len(seen))
    assert model.keys_per_query("corrected") == seq_len


def test_forward_flops_are_those_of_its_parts() -> None:
    model = load("qwen3_235b_lora")
    parts = 94 * model.layer_forward_flops(2048) + model.head_forward_flops(2048)
    assert model.forward_flops(2048) == parts
    assert model.router_forward_flops(2048) == 2 * 2048 * 4096 * 128
    assert load("qwen3_32b").router_forward_flops(2048) == 0


def test_a_hop_of_the_artifact_moves_the_boundary_at_20_mib_per_ms() -> None:
    with open(ROOT / "analysis" / "published" / "layer_timings.csv", newline="") as lines:
        rows = {row["model"]: row for row in csv.DictReader(lines)}
    for name in NAMES:
        model = load(name)
        row = rows[str(model.published_name)]
        num_tokens = int(row["microbatch_sequences"]) * int(row["seq_len_tokens"])
        assert model.boundary_bytes(num_tokens) / (20 * 2**20) == pytest.approx(float(row["comm_ms"]))


def test_sizes_that_are_left_out_follow_from_the_others() -> None:
    model = load("transformer", hidden=512, heads=8)
    assert (model.key_value_heads, model.head_dim, model.inner) == (8, 64, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "model.num_layers=0: .*at least 1"),
        ({"hidden": -64}, "model.hidden=-64: .*at least 1"),
        ({"hidden": 64.5}, "model.hidden=64.5: .*whole number"),
        ({"vocab": None}, "model.vocab=None"),
        ({"key_value_heads": 0}, "model.key_value_heads=0: .*null to leave it out"),
        ({"heads": 33}, "model.heads=33 does not divide model.hidden=4096; give .* model.head_dim"),
        (
            {"key_value_heads": 5},
            "model.key_value_heads=5 does not divide .*try model.key_value_heads=32",
        ),
        ({"experts": {"total": 1, "active": 2, "inner": 8}}, "model.experts.active=2: .*model.experts.total=1"),
        ({"training_mode": "frozen"}, "model.training_mode='frozen' is unknown; choose full, lora or qlora"),
        ({"training_mode": "lora"}, "lora needs a rank"),
        ({"lora_rank": 8}, "full takes none"),
        ({"training_mode": "lora", "lora_rank": 1025, "key_value_heads": 8}, "k_proj is 1024 wide; take at most 1024"),
        ({"family": "gtp"}, "model.family='gtp' is unknown; choose one of gpt, llama, qwen3, gpt_oss"),
        ({"rope_theta": 1}, "model.rope_theta=1: a finite number above 1"),
        ({"rope_theta": float("inf")}, "model.rope_theta=inf: a finite number above 1"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0: a finite number above 0"),
        ({"norm_eps": float("nan")}, "model.norm_eps=nan: a finite number above 0"),
        ({"dropout": 1.0}, "model.dropout=1.0: a share of at least 0 and below 1"),
        ({"dropout": "0.1"}, "model.dropout='0.1': a share"),
        ({"dropout": True}, "model.dropout=True: a share"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("transformer", **changes)
