"""mode=predict and analytic costs as requests: records and refusals."""

import pytest

from rpbench.config.loading import load
from rpbench.records.describe import describe
from rpbench.run.recording import run

PAPER = ["cost=analytic", "mode=predict"]


def test_a_prediction_is_a_record(tmp_path):
    asked = [*PAPER, "schedule=roundpipe", "model=llama31_8b", "cluster=8x_a800", f"results_dir={tmp_path}"]
    (row,) = run(load(asked))
    assert (row["status"], row["evidence"], row["system"]) == ("ok", "predicted", "roundpipe")
    assert row["tokens_per_s_low"] < row["tokens_per_s"] < row["tokens_per_s_high"]
    assert row["step_time_s"] == pytest.approx(sum(row["step_terms_s"].values()))
    assert row["peak_memory_bytes"][0] == round(sum(row["device_bytes_by_class"].values()))
    assert "tokens/s (" in describe(row)


def test_what_does_not_fit_is_a_result(tmp_path):
    asked = [*PAPER, "mode.system=zero-2", "model=qwen3_32b", "cluster=8x_rtx4090", f"results_dir={tmp_path}"]
    (row,) = run(load(asked))
    assert row["status"] == "oom"
    assert "weights on a device" in row["reason"]


def test_analytic_costs_serve_any_schedule(tmp_path):
    asked = ["cost=analytic", "schedule=zb_h1", "model=qwen3_1p7b", "cluster=8x_h100", f"results_dir={tmp_path}"]
    (row,) = run(load(asked))
    assert row["evidence"] == "predicted"
    assert row["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=llama31_8b", "cluster=local"], "cluster=local has no"),
        (["model=abstract", "cluster=8x_a800"], "needs a model with a shape"),
        (["model=llama31_8b", "cluster=8x_a800", "mode.system=fsdb"], "did you mean fsdp"),
        (["model=llama31_8b", "cluster=8x_a800", "schedule=zb_v", "mode.system=fsdp"], "which runs zero_3: leave one"),
        (["model=llama31_8b", "cluster=8x_a800", "cluster.device_speeds=[1,1,1,1,1,1,1,0.5]"], "devices are alike"),
        (["model=llama31_8b", "cluster=8x_a800", "schedule=zb_h1"], "no system of the published tables"),
        (["model=llama31_8b", "cluster=8x_a800", "cost=unit"], "set cost=analytic"),
        (["model=llama31_8b", "cluster=8x_a800", "backend=cpu"], "mode=predict has no backend"),
        (["model=llama31_8b", "cluster=8x_a800", "num_devices=16"], "has 8"),
        (["model=llama31_8b", "cluster=8x_a800", "mode.sequences=4"], "give both"),
        (["model=llama31_8b", "cluster=8x_a800", "model.seq_len=0"], r"model\.seq_len=0"),
        (["model=llama31_8b", "cluster=8x_a800", "model.seq_len=200000"], "positions for 131072 tokens"),
        (["model=llama31_8b", "cluster=8x_a800", "model.key_value_heads=5"], "does not divide"),
        (["model=gpt_oss_20b", "cluster=8x_a800", "model.experts.active=64"], "cannot visit more experts"),
        (["model=llama31_8b", "cluster=8x_a800", "model.vocab=0"], r"model\.vocab=0"),
        (["model=llama31_8b", "cluster=8x_a800", "cluster.gpu=null"], "has no matmul_flops_per_s"),
        (["model=llama31_8b", "cluster=8x_a800", "cluster.host_memory_bytes=null"], "has no host_memory_bytes"),
        (["model=llama31_8b", "cluster=8x_a800", "cluster.device_memory_bytes=24GB"], "a whole number of at least 1"),
        (["model=gpt_oss_20b", "cluster=8x_a800", "+cost.constants.loop_share=0"], "a share of a core"),
        (
            ["model=gpt_oss_20b", "cluster=8x_a800", "software=roundpipe", "software.numbers.loop_share=0"],
            "share of a core",
        ),
        (["model=gpt_oss_20b", "cost.constants.loop_share=0"], "is a number of a software now"),
        (["model=llama31_8b", "cluster=8x_a800", "cluster.copy_bytes_per_s=21GB"], r"cluster\.copy_bytes_per_s='21GB'"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_written(tmp_path, overrides, said):
    chosen = [item for item in PAPER if item.partition("=")[0] not in {each.partition("=")[0] for each in overrides}]
    if not any(item.startswith("schedule=") for item in overrides):
        chosen.append("schedule=roundpipe")
    with pytest.raises(ValueError, match=said):
        run(load([*chosen, *overrides, f"results_dir={tmp_path}"]))
    assert not any(tmp_path.iterdir())
