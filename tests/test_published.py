"""The published tables are complete, carry their sources, and agree with each other."""

import csv
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[1] / "analysis" / "published"
TABLES = sorted(path.stem for path in PUBLISHED.glob("*.csv"))
MODELS = ["qwen3-1.7b", "llama-3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-lora"]
SCHEDULERS = ["1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "roundpipe"]


def rows(table: str) -> list[dict[str, str]]:
    with open(PUBLISHED / f"{table}.csv", newline="") as lines:
        return list(csv.DictReader(lines))


def by(table: str, *columns: str) -> dict:
    """Rows of a table by the values of these columns, which have to identify them."""
    found = {tuple(row[column] for column in columns): row for row in rows(table)}
    assert len(found) == len(rows(table))
    return found


def cells() -> list:
    return [pytest.param(row, id=f"{row['scheduler']}-{row['model']}") for row in rows("bubble")]


def as_printed(value: float, text: str) -> str:
    """The value with as many decimals as the published text has."""
    return f"{value:.{len(text.partition('.')[2])}f}"


@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_whole_and_has_a_source(table: str) -> None:
    assert rows(table)
    for row in rows(table):
        assert None not in row, row  # a cell too many
        assert None not in row.values(), row  # a cell too few
        assert row["source"].strip(), row


def test_the_readme_describes_every_table() -> None:
    text = (PUBLISHED / "README.md").read_text()
    described = [line.split("|")[1].strip().removesuffix(".csv") for line in text.splitlines() if ".csv |" in line]
    assert sorted(described) == TABLES


def test_there_is_a_cell_for_every_scheduler_and_model() -> None:
    assert set(by("bubble", "scheduler", "model")) == {(s, m) for s in SCHEDULERS for m in MODELS}


@pytest.mark.parametrize("cell", cells())
def test_bubble_is_ratio_times_device_time(cell: dict[str, str]) -> None:
    device_ms = int(cell["num_gpus"]) * float(cell["makespan_ms"])
    for part in ("bubble", "fill", "switch", "drain", "intra"):
        ratio = float(cell[f"{part}_ratio_percent"]) / 100
        name = "bubble_time_gpu_ms" if part == "bubble" else f"{part}_time_gpu_ms"
        assert float(cell[name]) == pytest.approx(ratio * device_ms, abs=0.5e-6 * device_ms + 1e-3), part
    exposed = float(cell["comm_exposed_ratio_percent"]) / 100 * device_ms
    assert float(cell["comm_exposed_ms"]) == pytest.approx(exposed, abs=0.5e-6 * device_ms + 1e-3)


@pytest.mark.parametrize("cell", cells())
def test_parts_sum_to_the_bubble(cell: dict[str, str]) -> None:
    parts = [float(cell[f"{part}_time_gpu_ms"]) for part in ("fill", "switch", "drain", "intra")]
    assert sum(parts) == pytest.approx(float(cell["bubble_time_gpu_ms"]), abs=2.5e-4)  # five roundings of 0.5e-4


@pytest.mark.parametrize("cell", cells())
def test_busy_time_and_events_follow_from_the_layer_timings(cell: dict[str, str]) -> None:
    """Every cell does the same work: each layer forward, recomputed and backward, and the head."""
    timing = by("layer_timings", "model")[cell["model"],]
    num_layers, num_microbatches = int(timing["layers"]), int(cell["num_microbatches"])
    layer_ms = 2 * float(timing["fwd_ms_per_layer"]) + float(timing["bwd_ms_per_layer"])
    head_ms = float(timing["lmhead_fwd_ms"]) + float(timing["lmhead_bwd_ms"])
    busy_ms = int(cell["num_gpus"]) * float(cell["makespan_ms"]) - float(cell["bubble_time_gpu_ms"])
    assert busy_ms == pytest.approx(num_microbatches * (num_layers * layer_ms + head_ms), abs=1e-3)
    assert int(cell["layer_events"]) == num_microbatches * (3 * num_layers + 2)


@pytest.mark.parametrize("cell", cells())
def test_communication_is_a_whole_number_of_hops(cell: dict[str, str]) -> None:
    timing = by("layer_timings", "model")[cell["model"],]
    assert float(cell["comm_per_hop_ms"]) == float(timing["comm_ms"])
    hops = float(cell["comm_total_ms"]) / float(cell["comm_per_hop_ms"])
    assert hops == pytest.approx(round(hops))
    assert round(hops) % int(cell["num_microbatches"]) == 0


def test_partitions_cover_the_layers() -> None:
    num_layers = {model: int(row["layers"]) for (model,), row in by("layer_timings", "model").items()}
    for row in rows("partitions"):
        layers = [int(count) for count in row["layers_per_stage"].split("-")]
        assert sum(layers) == int(row["num_layers"]) == num_layers[row["model"]], row
        assert len(layers) == int(row["num_stages"]), row
        assert min(layers) >= 0


def test_there_is_a_partition_for_every_cell() -> None:
    directions = by("partitions", "scheduler", "model", "direction")
    shared = {(s, m, "forward_and_backward") for s in SCHEDULERS[:-1] for m in MODELS}
    apart = {("roundpipe", m, direction) for m in MODELS for direction in ("forward", "backward")}
    assert set(directions) == shared | apart
    for scheduler, model, _ in shared:
        num_stages = int(directions[scheduler, model, "forward_and_backward"]["num_stages"])
        assert num_stages == 8 if scheduler in ("1f1b", "gpipe") else num_stages % 8 == 0
    for model in MODELS:  # the stage of the head comes first and holds no layer
        assert directions["roundpipe", model, "backward"]["layers_per_stage"].startswith("0-")


def test_models_timings_and_lengths_tell_the_same() -> None:
    models = by("models", "model")
    for (model,), timing in by("layer_timings", "model").items():
        assert timing["layers"] == models[model,]["layers"]
        assert float(timing["comm_ms"]) == int(models[model,]["hidden_size"]) / 1280
    for row in rows("max_seq_len"):
        assert (row["status"] == "ok") == (row["max_seq_len_published_k"] != ""), row
        if row["max_seq_len_run_script_tokens"]:
            assert int(row["max_seq_len_run_script_tokens"]) == 1024 * int(row["max_seq_len_published_k"]), row


def test_only_finished_runs_have_a_throughput() -> None:
    for row in rows("throughput"):
        assert row["status"] in ("ok", "OOM", "N/A")
        assert (row["status"] == "ok") == (row["tokens_per_s"] != ""), row


def test_settings_of_roundpipe_share_out_the_global_batch() -> None:
    ours = [row for row in rows("run_settings") if row["system"].startswith("roundpipe")]
    assert ours
    for row in ours:
        calls, microbatches = int(row["grad_accum_steps"]), int(row["microbatches_per_call"])
        sequences = calls * microbatches * float(row["micro_batch_sequences"])
        assert sequences == pytest.approx(int(row["global_batch_sequences"]), rel=1e-4), row


@pytest.mark.parametrize("model", MODELS)
def test_headline_ratios_follow_from_the_throughput(model: str) -> None:
    row = by("headline", "model")[model,]
    measured = {
        line["system"]: float(line["tokens_per_s"])
        for line in rows("throughput")
        if line["model"] == model and line["status"] == "ok"
    }
    ours, synchronous = measured.pop("roundpipe"), measured.pop("roundpipe-sync")
    assert as_printed(ours / synchronous, row["async_over_sync_gain"]) == row["async_over_sync_gain"]
    if not measured:
        assert row["best_baseline"] == row["speedup_over_best_baseline"] == ""
        return
    best = max(measured, key=lambda system: measured[system])
    assert best == row["best_baseline"]
    assert as_printed(ours / measured[best], row["speedup_over_best_baseline"]) == row["speedup_over_best_baseline"]


@pytest.mark.parametrize("model", MODELS)
def test_headline_predictions_follow_from_the_bubbles(model: str) -> None:
    """16 microbatches of 4 sequences a makespan; asynchronous: the same work with the labelled bubble."""
    row = by("headline", "model")[model,]
    cell = by("bubble", "scheduler", "model")["roundpipe", model]
    num_tokens = 16 * 4 * 2048
    makespan_s = float(cell["makespan_ms"]) / 1e3
    work_s = makespan_s * (1 - float(cell["bubble_ratio_percent"]) / 100)
    label = (float(cell["switch_ratio_percent"]) + float(cell["intra_ratio_percent"])) / 100
    asynchronous = num_tokens / (work_s / (1 - label)) / 1e3
    assert as_printed(asynchronous, row["predicted_async_ktokens_per_s"]) == row["predicted_async_ktokens_per_s"]
    if row["predicted_sync_ktokens_per_s"]:
        synchronous = num_tokens / makespan_s / 1e3
        assert as_printed(synchronous, row["predicted_sync_ktokens_per_s"]) == row["predicted_sync_ktokens_per_s"]


def test_async_bars_relabel_the_synchronous_cell() -> None:
    table = by("async_bubble", "model", "num_microbatches_per_call")
    assert len(table) == 25
    for (model, call), row in table.items():
        assert row["kind"] == ("published" if call == "artifact label" else "simulated")
        if row["kind"] == "published":
            cell = by("bubble", "scheduler", "model")["roundpipe", model]
            label = float(cell["switch_ratio_percent"]) + float(cell["intra_ratio_percent"])
            assert as_printed(label, row["bubble_percent"]) == row["bubble_percent"]


def test_longer_calls_never_have_a_larger_bubble() -> None:
    table = by("async_bubble", "model", "num_microbatches_per_call")
    for model in MODELS:
        percents = [float(table[model, calls]["bubble_percent"]) for calls in ("8", "9", "10", "16")]
        assert percents == sorted(percents, reverse=True)


def test_the_planner_differs_from_the_simulated_cuts_where_the_discrepancies_say() -> None:
    plans = by("planner", "model", "memory_cap")
    cuts = by("partitions", "scheduler", "model", "direction")
    stages = {model: cuts["roundpipe", model, "forward"]["num_stages"] for model in MODELS}
    differing = {model for model in MODELS if plans[model, "none"]["forward_stages"] != stages[model]}
    assert differing == {"gpt-oss-20b", "qwen3-32b"}
    for model in MODELS:
        free, capped = plans[model, "none"], plans[model, "24 GB card"]
        assert int(capped["forward_stages"]) >= int(free["forward_stages"])
        assert free["backward_stages"] == cuts["roundpipe", model, "backward"]["num_stages"]


def test_discrepancies_quote_the_other_tables() -> None:
    items = {key: row for (key,), row in by("discrepancies", "id").items()}
    throughput, lengths = by("throughput", "system", "model"), by("max_seq_len", "system", "model")
    figure2, plans = by("figure2", "model"), by("planner", "model", "memory_cap")
    bubbles = by("bubble", "scheduler", "model")
    hops = float(bubbles["roundpipe", "qwen3-235b-lora"]["comm_total_ms"]) / 3.2
    cuts = by("partitions", "scheduler", "model", "direction")
    num_checked = 0
    for key, row in items.items():
        model, pair = row["model"], (row["published_value"], row["other_value"])
        if key.startswith("fsdp_offload_throughput"):
            expected = tuple(throughput[system, model]["tokens_per_s"] for system in ("fsdp", "fsdp-offload"))
        elif key.startswith("fsdp_offload_max"):
            expected = tuple(lengths[system, model]["max_seq_len_published_k"] for system in ("fsdp", "fsdp-offload"))
        elif key.startswith("attention_flops_recompute"):
            expected = (figure2[model,]["recompute_ms"], figure2[model,]["recompute_corrected_ms"])
        elif key.startswith("attention_flops_ratio"):
            expected = (figure2[model,]["ratio"], figure2[model,]["ratio_corrected"])
        elif key.startswith("planner_forward_stages"):
            cap = "24 GB card" if model == "qwen3-235b-lora" else "none"
            published = cuts["roundpipe", model, "forward"]["num_stages"]
            expected = (published, plans[model, cap]["forward_stages"])
        elif key.startswith("untuned"):
            scheduler = next(s for s in ("interleaved_1f1b", "1f1b", "roundpipe") if s in key).replace("_", "-")
            published = as_printed(float(bubbles[scheduler, model]["bubble_ratio_percent"]), row["published_value"])
            assert float(row["other_value"]) < float(row["published_value"])
            expected = (published, row["other_value"])
        elif key == "hops_counted_twice_235b":
            expected = (as_printed(hops, "0"), str(round(hops) - 1328))
        else:
            continue
        assert pair == expected, key
        num_checked += 1
    assert num_checked == len(items) - 3  # LoRA alpha, Python version and the peak stand in no other table
