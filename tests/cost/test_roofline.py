"""The closed forms of figures 2, 3, 5 and 14 against their published values, to the digits given there."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.cost import roofline
from rpbench.workload.architecture import Architecture, architecture
from rpbench.workload.counts import Convention

ROOT = Path(__file__).parents[2]
NAMES = ["qwen3_1p7b", "llama31_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"]
MODELS = {str(model.published_name): model for model in map(architecture, NAMES)}
NUM_TOKENS = 4 * 2048  # figure 2: four sequences
FLOPS_PER_S, LINK_BYTES_PER_S = 330e12, 32e9  # figure 2: RTX 4090, PCIe 4.0


def rows(table: str) -> list[dict[str, str]]:
    with open(ROOT / "analysis" / "published" / f"{table}.csv", newline="") as lines:
        return list(csv.DictReader(lines))


def by_model(table: str) -> list:
    return [pytest.param(row, id=row["model"]) for row in rows(table)]


def as_printed(value: float, text: str) -> str:
    """The value with as many decimals as the published text has."""
    return f"{value:.{len(text.partition('.')[2])}f}"


def test_every_published_model_is_here() -> None:
    assert set(MODELS) == {row["model"] for row in rows("models")}


@pytest.mark.parametrize("row", by_model("figure2"))
def test_figure_2(row: dict[str, str]) -> None:
    model = MODELS[row["model"]]
    recompute_s = roofline.recompute_time_s(model, NUM_TOKENS, FLOPS_PER_S)
    reload_s = roofline.reload_time_s(model, NUM_TOKENS, LINK_BYTES_PER_S)
    assert as_printed(1e3 * recompute_s, row["recompute_ms"]) == row["recompute_ms"]
    assert as_printed(1e3 * reload_s, row["reload_ms"]) == row["reload_ms"]
    assert as_printed(reload_s / recompute_s, row["ratio"]) == row["ratio"]


@pytest.mark.parametrize("row", by_model("figure2"))
def test_figure_2_with_corrected_attention(row: dict[str, str]) -> None:
    model = MODELS[row["model"]]
    recompute_s = roofline.recompute_time_s(model, NUM_TOKENS, FLOPS_PER_S, "corrected")
    if not row["recompute_corrected_ms"]:
        assert recompute_s == roofline.recompute_time_s(model, NUM_TOKENS, FLOPS_PER_S, "artifact")
        return
    reload_s = roofline.reload_time_s(model, NUM_TOKENS, LINK_BYTES_PER_S)
    assert as_printed(1e3 * recompute_s, row["recompute_corrected_ms"]) == row["recompute_corrected_ms"]
    assert as_printed(reload_s / recompute_s, row["ratio_corrected"]) == row["ratio_corrected"]


@pytest.mark.parametrize("row", by_model("figure3"))
def test_figure_3(row: dict[str, str]) -> None:
    percent = 100 * roofline.ideal_bubble_fraction(MODELS[row["model"]].num_layers, 8, 16)
    assert as_printed(percent, row["ideal_bubble_percent"]) == row["ideal_bubble_percent"]


@pytest.mark.parametrize("row", by_model("figure5"))
def test_figure_5(row: dict[str, str]) -> None:
    model = MODELS[row["model"]]
    at_batch_1 = row["operational_intensity_batch1_flop_per_byte"]
    assert as_printed(roofline.operational_intensity(model, 1), at_batch_1) == at_batch_1
    thresholds = {
        line["applies_to"]: line["value"] for line in rows("hardware") if line["item"] == "roofline_threshold"
    }
    assert len(thresholds) == 4
    for gpu, threshold in thresholds.items():
        smallest = roofline.smallest_compute_bound_batch(model, float(threshold))
        assert str(smallest) == row[f"smallest_batch_{gpu}"], gpu


@pytest.mark.parametrize("row", by_model("headline"))
def test_achieved_flop_rate(row: dict[str, str]) -> None:
    measured = {(line["system"], line["model"]): line["tokens_per_s"] for line in rows("throughput")}
    tokens_per_s = float(measured["roundpipe", row["model"]])
    forwards, num_devices = 3, 8  # a backward is two; the artifact counts no recomputation, and LoRA as full training
    achieved = tokens_per_s * forwards * MODELS[row["model"]].forward_flops(1, "artifact") / num_devices
    assert as_printed(achieved / 1e12, row["achieved_tflops_per_gpu"]) == row["achieved_tflops_per_gpu"]
    assert as_printed(100 * achieved / FLOPS_PER_S, row["percent_of_peak"]) == row["percent_of_peak"]


@given(num_layers=st.integers(1, 100), num_devices=st.integers(1, 16), num_microbatches=st.integers(1, 64))
def test_ideal_bubble_is_the_one_of_1f1b_with_a_layer_a_chunk(
    num_layers: int, num_devices: int, num_microbatches: int
) -> None:
    bubble = roofline.ideal_bubble_fraction(num_layers * num_devices, num_devices, num_microbatches)
    chunks = num_layers
    assert bubble == pytest.approx((num_devices - 1) / (chunks * num_microbatches + num_devices - 1))
    assert roofline.ideal_bubble_fraction(num_layers, 1, num_microbatches) == 0


@given(
    model=st.sampled_from(list(MODELS.values())),
    convention=st.sampled_from(["artifact", "corrected", "causal"]),
    threshold=st.floats(1, 20_000),
)
def test_smallest_batch_is_the_first_above_the_threshold(
    model: Architecture, convention: Convention, threshold: float
) -> None:
    smallest = roofline.smallest_compute_bound_batch(model, threshold, convention)
    if smallest is None:
        assert roofline.operational_intensity(model, 10**9, convention) <= threshold
        return
    assert roofline.operational_intensity(model, smallest, convention) > threshold * (1 - 1e-12)
    if smallest > 1:
        assert roofline.operational_intensity(model, smallest - 1, convention) <= threshold * (1 + 1e-12)


@given(model=st.sampled_from(list(MODELS.values())), batch=st.integers(1, 1000))
def test_intensity_grows_with_the_batch(model: Architecture, batch: int) -> None:
    assert roofline.operational_intensity(model, batch + 1) > roofline.operational_intensity(model, batch)


def test_corrected_intensity_uploads_every_parameter() -> None:
    model = MODELS["gpt-oss-20b"]
    num_flops = model.layer_forward_flops(2048, "corrected") + 2 * 2048 * 2880 * 32
    num_bytes = 2 * 823_186_976 + 2 * 2048 * 2880
    assert roofline.operational_intensity(model, 1, "corrected") == pytest.approx(num_flops / num_bytes)


def test_no_batch_reaches_a_threshold_above_the_limit() -> None:
    assert roofline.smallest_compute_bound_batch(MODELS["qwen3-1.7b"], 1e6) is None


def test_cost_of_a_billion_tokens() -> None:
    # One dollar an hour at a million tokens an hour: a thousand hours.
    assert roofline.cost_usd_per_billion_tokens(1.0, 1e6 / 3600) == pytest.approx(1000)
    # RoundPipe, Qwen3-1.7B on 8 x RTX 4090 at 2.32 USD an hour: 1e9 tokens take 4.2463 h.
    assert roofline.cost_usd_per_billion_tokens(2.32, 65416.83) == pytest.approx(2.32 * 4.2463, rel=1e-4)
