"""The committed predictions: what the code computes, refits, targets."""

import csv
from math import prod

import pytest
from spared import slow

from analysis.predictions import compare, holdout, score, tables
from analysis.predictions.__main__ import main
from analysis.predictions.compare import (
    Cell,
    case_of,
    declared_basis,
    published_value,
    throughput_cells,
)
from rpbench.predict import predict
from rpbench.predict.prediction import longest_sequence


@pytest.mark.parametrize("every", [4, slow(1)])
def test_committed_throughputs_are_what_the_code_computes(every):
    rows = {(row["system"], row["platform"], row["model"]): row for row in tables.read("throughput")}
    published = [(cell.system, cell.cluster, cell.model) for cell in throughput_cells(*tables.PLATFORMS)]
    cross = [("roundpipe", cluster, name) for cluster in tables.CROSS_PLATFORMS for name in tables.CROSS_MODELS]
    assert len(published) == 80
    assert len(rows) == 80 + len(cross) == 88
    for system, cluster, model in (published + cross)[::every]:
        found = predict(case_of(system, cluster, model), with_interval=False)
        if cluster in tables.CROSS_PLATFORMS and found.status != "ok":
            continue  # it ran, as its settings say: the row has the pace that it would have with room enough
        row = rows[system, {**tables.PLATFORMS, **tables.CROSS_PLATFORMS}[cluster], found.case.model.published_name]
        assert row["status"] == found.status
        assert row["tokens_per_s"] == ("" if found.tokens_per_s is None else f"{found.tokens_per_s:.2f}")


@pytest.mark.slow
def test_committed_errors_of_experts_are_what_the_code_computes():
    assert holdout.expert_rows() == tables.read("experts_holdout")


def test_committed_intervals_are_what_the_code_computes():
    for row in tables.read("throughput"):
        if row["system"] == "megatron-tp" and row["status"] == "ok":
            cluster = next(name for name, known in tables.PLATFORMS.items() if known == row["platform"])
            model = next(name for name, known in tables.PUBLISHED_MODELS.items() if known == row["model"])
            found = predict(case_of("megatron-tp", cluster, model))
            assert [row["tokens_per_s_low"], row["tokens_per_s_high"]] == [f"{found.low:.2f}", f"{found.high:.2f}"]


def test_committed_lengths_are_what_the_code_computes():
    rows = [row for row in tables.read("max_seq_len") if row["system"] != "roundpipe" or row["model"] == "qwen3-1.7b"]
    for row in rows:
        cluster = next(name for name, known in tables.PLATFORMS.items() if known == row["platform"])
        model = next(name for name, known in tables.PUBLISHED_MODELS.items() if known == row["model"])
        assert int(row["max_seq_len_tokens"] or 0) == longest_sequence(case_of(row["system"], cluster, model))


def test_committed_costs_and_sequence_lengths_are_what_the_code_computes():
    assert tables.as_csv(tables.cost_efficiency(tables.read("throughput"))) == _text("cost_efficiency")
    assert [row["seq_len_tokens"] for row in tables.read("seqlen_sensitivity")] == [str(2**n) for n in range(9, 17)]


def _text(name):
    return (tables.FOLDER / f"{name}.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["throughput", "max_seq_len"])
def test_tables_have_the_names_of_the_published_ones(name):
    with (tables.FOLDER.parent / "published" / f"{name}.csv").open(newline="") as source:
        published = list(csv.DictReader(source))
    ours = tables.read(name)
    assert set(published[0]) & {"system", "platform", "num_gpus", "model", "status", "tokens_per_s"} <= set(ours[0])
    for key in ("system", "platform", "model", "status"):
        assert {row[key] for row in published} - {"fsdp-offload"} <= {row[key] for row in ours}


def test_scaling_ends_where_throughput_stands():
    whole = {
        (r["platform"], r["model"]): r["tokens_per_s"]
        for r in tables.read("throughput")
        if r["system"] == "roundpipe" and r["platform"] in tables.PLATFORMS.values()
    }
    scaled = tables.read("scaling")
    assert sorted({row["num_gpus"] for row in scaled}) == [str(num) for num in range(1, 9)]
    assert {(r["platform"], r["model"]): r["tokens_per_s"] for r in scaled if r["num_gpus"] == "8"} == whole


def test_corrections_are_the_published_timings_over_the_count():
    basis = declared_basis()
    for name, value in holdout.corrections(basis).items():
        assert basis.values[name] == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    "name, cluster",
    [
        ("host_bytes_per_s", compare.KNOWN),
        ("collective_bytes_per_s", compare.KNOWN),
        ("tensor_logit_bytes", compare.KNOWN),
        ("deepspeed_gradient_bytes", "8x_a800"),
        pytest.param("expert_pass_s", compare.KNOWN, marks=pytest.mark.slow),
        pytest.param("matmul_efficiency", "8x_a800", marks=pytest.mark.slow),
        pytest.param("host_bytes_per_s", "8x_a800", marks=pytest.mark.slow),
    ],
)
def test_fitted_constants_are_what_their_fit_gives(name, cluster):
    basis = declared_basis(cluster)
    cells = [compare.cell_of(key) for key in basis.declared[name].cells]
    assert holdout.fit(name, cells, basis) == pytest.approx(basis.values[name], rel=0.02)


def test_a_fit_meets_its_cell():
    basis = declared_basis()
    cell = Cell("throughput", "fsdp", "llama31_8b")
    value = holdout.fit("collective_bytes_per_s", [cell], basis)
    off = compare.error(cell, compare.with_values(basis, {"collective_bytes_per_s": value}))
    assert abs(off) < 0.01


def test_bars_are_measured_on_the_committed_tables(monkeypatch):
    cell = Cell("throughput", "roundpipe", "qwen3_1p7b")
    off = score.errors("throughput", ["roundpipe"])[cell]
    assert off == pytest.approx(compare.error(cell), abs=1e-6)
    assert f"qwen3_1p7b {off:+.1%}" in score.targets()[0].measured
    rows = tables.read("throughput")
    for row in rows:
        if (row["system"], row["platform"], row["model"]) == ("roundpipe", "8x-rtx4090-24gb", "qwen3-1.7b"):
            row["tokens_per_s"] = "1.0"
    monkeypatch.setattr(score, "read", lambda name: rows)
    assert (
        not score.errors("throughput", ["roundpipe"], ["qwen3_1p7b"])[Cell("throughput", "roundpipe", "qwen3_1p7b")]
        > -0.9
    )


def test_every_published_verdict_is_predicted():
    verdicts = next(target for target in score.targets() if "verdict" in target.name)
    assert verdicts.held
    assert verdicts.measured.startswith("40 of 40")


def test_a_miss_is_explained_by_what_would_close_it():
    miss = compare.explain(Cell("throughput", "mobius", "qwen3_32b"))
    assert miss.error > compare.LIMIT
    lever = next(lever for lever in miss.levers if lever.constant == "host_bytes_per_s")
    basis = declared_basis().scaled(lever.constant, lever.factor)
    assert abs(compare.error(miss.cell, basis)) < miss.error / 3
    assert compare.explain(Cell("throughput", "roundpipe", "llama31_8b")) is None


def test_what_is_left_out_of_a_fit_leaves_no_trace(monkeypatch):
    told = next(known for known in holdout.KNOWN_BY if known.name == "collective_bytes_per_s")
    monkeypatch.setattr(holdout, "KNOWN_BY", (told,))
    left = holdout.without(lambda cell: cell.system == "megatron-tp")
    assert left.untold == ()
    assert left.bases[compare.KNOWN]["collective_bytes_per_s"] != declared_basis()["collective_bytes_per_s"]
    assert left.bases[holdout.A800]["collective_bytes_per_s"] == 160e9  # a figure of its own
    nothing = holdout.without(lambda cell: True)
    assert nothing.untold == ("collective_bytes_per_s (8x_rtx4090)",)
    assert nothing.bases[compare.KNOWN]["collective_bytes_per_s"] == told.prior


def test_corrections_are_left_out_with_their_model(monkeypatch):
    monkeypatch.setattr(holdout, "KNOWN_BY", ())
    left = holdout.without(lambda cell: False, "llama31_8b").bases[compare.KNOWN]
    own, others = "llama_3p1_8b_forward_correction", ("qwen3_1p7b", "qwen3_32b")
    mean = prod(declared_basis()[f"{other}_forward_correction"] for other in others) ** (1 / 2)
    assert left[own] == pytest.approx(mean)
    assert left.declared[own].origin == "assumed"
    assert left.declared[own].within > 3 * declared_basis().declared[own].within
    assert left["qwen3_32b_forward_correction"] == declared_basis()["qwen3_32b_forward_correction"]
    alone = holdout.without(lambda cell: False, "gpt_oss_20b").bases[compare.KNOWN]
    assert alone["gpt_oss_20b_forward_correction"] == declared_basis()["qwen3_235b_lora_forward_correction"]


def test_every_system_is_held_out_on_both_machines_and_a_platform_on_its_own():
    rows = tables.read("holdout")
    assert {row["held_out"] for row in rows} == {"model", "system", "platform"}
    assert {row["platform"] for row in rows if row["held_out"] == "platform"} == {"8x-a800-80gb-sxm"}
    priors = {row["name"]: row["kept_constants"] for row in rows if row["held_out"] == "system"}
    assert priors["roundpipe"] == "expert_pass_s (8x_rtx4090), matmul_efficiency (8x_a800)"
    assert priors["roundpipe-sync"] == "host_bytes_per_s (8x_rtx4090), host_bytes_per_s (8x_a800)"


@pytest.mark.parametrize("axis", ["model", "system", "platform"])
def test_intervals_hold_what_they_are_meant_to_out_of_sample(axis):
    inside, known = score.held_out_coverage(axis)
    assert 0.8 * known < inside <= known


@pytest.mark.slow
def test_a_fit_of_steps_is_the_middle_of_what_meets_its_cell():
    basis, cell = declared_basis("8x_a800"), Cell("max_seq_len", "roundpipe", "gpt_oss_20b", "8x_a800")
    value = holdout.fit("kept_dispatch_bytes", [cell], basis)
    assert basis["kept_dispatch_bytes"] == pytest.approx(value, rel=0.02)
    assert compare.error(cell, compare.with_values(basis, {"kept_dispatch_bytes": value})) == 0


def test_unknown_cells_have_no_value():
    assert published_value(Cell("throughput", "nobody", "llama31_8b")) == ("not stated", None)
    with pytest.raises(ValueError, match="cannot be fitted on"):
        compare.log_error(Cell("throughput", "zero-2", "llama31_8b"), declared_basis())


@pytest.mark.parametrize("words", [("score", "--out", "elsewhere"), ("refit", "--sealed")])
def test_options_of_other_verbs_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "leave it out" in capsys.readouterr().err
