"""`explain`: parts by hand, exactness, one changed setting in one cause, pairs of published runs, what is refused."""

import csv
import json
from dataclasses import replace
from functools import cache
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.explained import pairs as published
from analysis.explained.rows import case_of_row, side_of
from analysis.predictions.clusters import fit
from analysis.predictions.clusters.case import rows_of
from analysis.predictions.compare import case_of
from rpbench.cli import dispatch
from rpbench.config.loading import load
from rpbench.cost.hardware.machine import machine
from rpbench.explain.predicted import case_causes, job_causes, side_of_job, with_settings
from rpbench.explain.side import CAUSES, COMPUTATION, Rate, Side, Work, counted_flops, number_of
from rpbench.explain.split import explain
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Mesh
from rpbench.mesh.software import declared_software
from rpbench.mesh.step import step_terms
from rpbench.predict import SYSTEMS, predict
from rpbench.records import record
from rpbench.run.recording import run
from rpbench.workload.architecture import Architecture, architecture

# --- the split -------------------------------------------------------------------------------------------------


def side(seconds=None, *, work=None, rate=None, **causes):
    named = {name.replace("_", " "): value for name, value in causes.items()}
    return Side("it", seconds or sum(named.values()), "given", named, "predicted", work=work, rate=rate)


def test_a_cause_of_one_side_alone_is_the_difference():
    found = explain(side(computation=3.0, recomputation=1.0), side(computation=3.0))
    assert found.parts == {"recomputation": pytest.approx(log(4 / 3))}


def test_two_causes_by_hand():
    # P: 4 and 1, so L = 3 / ln 4; transfers 2 / L; computation L(2, 1) / L x ln 2 with L(2, 1) = 1 / ln 2.
    found = explain(side(computation=2.0, transfers=2.0), side(computation=1.0))
    assert found.parts["transfers"] == pytest.approx(2 * log(4) / 3)
    assert found.parts[COMPUTATION] == pytest.approx(log(4) / 3)
    assert found.total == pytest.approx(log(4))


def test_a_common_error_explains_nothing():
    """Both numbers 10 % above their predictions: no rest."""
    assert explain(side(4.4, computation=4.0), side(2.2, computation=2.0)).rest == pytest.approx(0.0)


def test_what_is_a_multiple_of_computation_grows_with_it():
    """Twice the FLOPs with as much recomputation: shape alone."""
    small = side(computation=3.0, recomputation=1.0, bubble=0.5, work=Work(1e9, 1e12))
    large = side(computation=6.0, recomputation=2.0, bubble=1.0, work=Work(2e9, 1e12))
    assert explain(small, large).parts == {"shape": pytest.approx(-log(2))}


seconds = st.floats(0.0, 10.0)
sides = st.builds(
    lambda number, first, flops, peak, gain, rest: Side(
        "it",
        number,
        "given",
        {COMPUTATION: first, **rest},
        "predicted",
        work=Work(flops, peak, gain),
        rate=Rate(1.3 * flops, 2 * peak),
    ),
    st.floats(0.1, 10.0),
    st.floats(0.1, 10.0),
    st.floats(1e8, 1e12),
    st.floats(1e13, 1e15),
    st.floats(1.0, 2.0),
    st.dictionaries(st.sampled_from([name for name in CAUSES if name not in ("shape", COMPUTATION)]), seconds),
)


@given(a=sides, b=sides, metric=st.sampled_from(["pace", "tflops", "mfu"]))
def test_parts_and_rest_add_up_and_turn_with_the_sides(a, b, metric):
    there, back = explain(a, b, metric), explain(b, a, metric)
    assert sum(there.parts.values()) + there.rest == pytest.approx(there.total, abs=1e-7)
    assert there.total == pytest.approx(-back.total)
    for name, part in there.parts.items():
        assert part == pytest.approx(-back.parts.get(name, 0.0), abs=1e-7)


def test_a_rate_is_explained_by_its_convention_and_its_peak():
    """One run, counted twice: 4/3 of the FLOPs over half the peak."""
    own = side(computation=2.0, work=Work(3e9, 1e12), rate=Rate(3e9, 1e12))
    theirs = replace(own, rate=Rate(4e9, 0.5e12))
    assert explain(own, theirs, "mfu").parts == {
        "FLOP convention": pytest.approx(log(4 / 3)),
        "peak definition": pytest.approx(log(2)),
    }
    assert explain(own, theirs, "tflops").total == pytest.approx(log(4 / 3))


# --- causes of a run -------------------------------------------------------------------------------------------


# A framework whose steps cost nothing beside their computation, transfers and collectives.
BARE = declared_software("megatron_core").with_constants({"microbatch_s": 1e-12, "step_s": 1e-12, "jitter": 1e-12})


def small_job(mesh, devices_per_node=8, **options):
    own = replace(architecture("llama3_8b"), num_layers=8, vocab=1024)
    nodes = replace(machine("dgx_h100"), devices_per_node=devices_per_node, domain=0)
    return Job(own, nodes.with_devices(mesh.num_devices), mesh, BARE, 4096, num_microbatches=8, **options)


def test_causes_add_up_to_the_predicted_step_of_every_given_run():
    known = [case.job for case in fit.given(fit.SETS) if case.job is not None]
    assert len(known) > 400
    for job in known:
        causes = job_causes(job)
        assert sum(causes.values()) == pytest.approx(sum(step_terms(job).values()), rel=1e-12)
        assert min(causes.values()) >= -1e-12


@cache
def causes_of_system(name):
    return case_causes(case_of(name, "8x_rtx4090", "qwen3_1p7b"))


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_causes_add_up_to_the_predicted_step_of_every_system(system):
    case = case_of(system, "8x_rtx4090", "qwen3_1p7b")
    found = predict(case, with_interval=False)
    causes = causes_of_system(system)
    assert sum(causes.values()) == pytest.approx(sum(found.terms.values()), rel=1e-9)
    assert set(causes) <= set(CAUSES)
    assert causes["recomputation"] > 0


@pytest.mark.parametrize(
    "mesh, typed, cause",
    [
        (Mesh(pipeline=4), {"recompute": "full"}, "recomputation"),
        (Mesh(data=8), {"precision": "fp8"}, "dtype"),
        (Mesh(pipeline=4), {"num_microbatches": "64"}, "bubble"),
        (Mesh(pipeline=4), {"machine": "dgx_b200"}, "device"),
        (Mesh(tensor=2), {"tensor": "8"}, "collectives"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_one_setting_is_one_cause(mesh, typed, cause):
    """What a setting changes stands in its cause, beside it at most a quarter; and turned back, it is gone."""
    job = small_job(mesh, devices_per_node=2 if cause == "collectives" else 8)
    found = explain(side_of_job(job, None, "it"), side_of_job(with_settings(job, typed), None, "it"))
    assert found.rest == pytest.approx(0.0, abs=1e-12)
    assert abs(found.parts[cause]) >= 0.75 * sum(map(abs, found.parts.values()))


def test_an_uneven_cut_is_partition():
    """Four stages of two layers against one of five: the busiest has 2.5 times the mean."""
    even = small_job(Mesh(pipeline=4))
    found = explain(side_of_job(even, None, "even"), side_of_job(replace(even, cut=(1, 1, 1, 5)), None, "uneven"))
    assert found.parts["partition"] < -0.6
    assert abs(found.parts["partition"]) > 0.75 * sum(map(abs, found.parts.values()))


def test_asynchronous_steps_are_late_updates():
    found = [causes_of_system(name) for name in ("roundpipe-sync", "roundpipe")]
    assert "late updates" not in found[0]
    assert found[1]["late updates"] < 0


# --- published runs --------------------------------------------------------------------------------------------

# Of all pairs of `analysis/explained/pairs.csv`, committed before anything was computed, those that miss the bar.
MISSED = {
    ("internevo:44", "internevo:33"): 0.106,
    ("torchtitan:2", "torchtitan:3"): 0.126,
    ("torchtitan:1", "torchtitan:3"): 0.144,
    ("bloom_a100_topologies:35", "bloom_a100_topologies:36"): 0.122,
    ("bloom_a100_topologies:13", "bloom_a100_topologies:33"): 0.176,
    ("vtrain_multi:33", "vtrain_multi:41"): 0.201,
    ("vtrain_multi:34", "vtrain_multi:39"): 0.456,
    ("megatron_bridge:260", "megatron_bridge:277"): 1.157,
    ("throughput:roundpipe-sync/qwen3-1.7b", "throughput:roundpipe/qwen3-1.7b"): 0.237,
    ("throughput:roundpipe-sync/qwen3-32b", "throughput:roundpipe/qwen3-32b"): 0.152,
    ("throughput:megatron-pp/llama-3.1-8b", "throughput:roundpipe/llama-3.1-8b"): 0.259,
}
PAIRS = published.pairs()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.a} {pair.b}")
def test_a_tenth_of_a_published_difference_is_left_at_most(pair):
    found = published.explained(pair)
    assert sum(found.parts.values()) + found.rest == pytest.approx(found.total)
    share = found.unexplained
    if (pair.a, pair.b) in MISSED:
        assert share == pytest.approx(MISSED[pair.a, pair.b], abs=0.005)
    else:
        assert share <= published.BAR


def test_twelve_pairs_and_more_meet_the_bar_of_other_peoples_runs_and_of_the_paper():
    met = [pair for pair in PAIRS if (pair.a, pair.b) not in MISSED]
    assert len(met) >= 12
    assert len({pair.a.partition(":")[0] for pair in met}) >= 6
    assert sum(pair.a.startswith("throughput:") for pair in met) >= 4


def test_what_is_written_down_is_what_comes_out():
    with (published.FOLDER / "explained.csv").open(newline="") as file:
        written = {(row["a"], row["b"]): row for row in csv.DictReader(file)}
    assert list(written) == [(pair.a, pair.b) for pair in PAIRS]
    for pair, shares in MISSED.items():
        assert float(written[pair]["unexplained"]) == pytest.approx(shares, abs=0.005)
    unseen = [float(row["held_out"]) for row in written.values() if row["held_out"]]
    assert sum(share <= published.BAR for share in unseen) >= 12  # with constants that have not seen these runs


@pytest.mark.parametrize(
    "name, row",
    [
        ("llm_foundry_fsdp", "96"),
        ("llm_foundry_fsdp", "98"),
        ("llm_foundry_fsdp", "39"),
        ("bloom_a100_topologies", "93"),
        ("bloom_a100_topologies", "126"),
    ],
)
def test_printed_rates_are_counted_as_their_tables_count(name, row):
    """The printed rate of a row follows from its time with its table's convention, to 2 %."""
    found, case = side_of(f"{name}:{row}"), case_of_row(name, row)
    counted = found.rate.flops / found.seconds
    column, unit = ("mfu_pct", found.rate.peak / 100) if name == "llm_foundry_fsdp" else ("tflops_reported", 1e12)
    printed = next(float(each[column]) for each in rows_of("measured", name) if each["id"] == case.id)
    assert counted / unit == pytest.approx(printed, rel=0.02)


def test_conventions_by_hand():
    """L = 2, h = 4, one head of 4, MLP of 16 without gate, 8 words, s = 6."""
    own = Architecture("hand", 2, 4, 1, 8, gated=False)
    layer = 4 * 4 * 4 + 2 * 4 * 16
    assert counted_flops(own, 6, "causal") == 2 * (6 * layer + 6 * (4 + 4) * 3.5) + 6 * 8 * 4
    assert counted_flops(own, 6, "palm") - counted_flops(own, 6, "6n") == 12 * 2 * 4 * 6
    assert counted_flops(own, 6, "megatron") == pytest.approx(72 * 2 * 16 * (1 + 6 / 24 + 8 / (12 * 2 * 4)))
    assert counted_flops(own, 6, "megatron_recompute") == pytest.approx(96 * 2 * 16 * (1 + 6 / 24 + 8 / (16 * 2 * 4)))


# --- records ---------------------------------------------------------------------------------------------------

SIMPLE = ("cost=constant", "cost.recompute_ms=1", "model=tiny_gpt", "num_devices=4", "num_microbatches=8")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def recorded(results):
    @cache
    def make(*words):
        return run(load([*words, f"results_dir={results}"]))[0]["run_id"]

    return make


@pytest.fixture
def ask(capsys, results):
    def answer(*words, status=0):
        assert dispatch(("explain", *words, f"results_dir={results}")) == status
        out, err = capsys.readouterr()
        if status:
            assert out == ""
            return err
        return json.loads(out), err

    return answer


def causes(answer):
    return {row["cause"]: row["log"] for row in answer["causes"]}


def test_slots_of_microbatches_are_no_tokens_a_second(recorded, ask):
    few, many = (recorded("schedule=1f1b", "num_devices=2", f"num_microbatches={number}") for number in (2, 4))
    answer, table = ask(few, many)
    assert answer["metric_is"] == "microbatches/slot of a device"
    assert table.startswith("B over A, microbatches/slot of a device: ")


def test_recomputation_of_a_record(recorded, ask):
    """F, I and W of one slot each and R of another: 4 slots of work against 3, the bubble the same multiple of it."""
    kept = recorded("schedule=1f1b", "recompute=none", *SIMPLE)
    answer, table = ask(recorded("schedule=1f1b", *SIMPLE), kept)
    assert answer["ratio"] == pytest.approx(4 / 3)
    assert causes(answer) == {"recomputation": pytest.approx(log(4 / 3))}
    assert answer["unexplained"]["log"] == pytest.approx(0.0, abs=1e-9)
    assert "recomputation" in table
    assert "unexplained" in table


def test_a_deeper_pipeline_is_bubble(recorded, ask):
    """(p - 1) / m of the work: 3 / 8 against 3 / 32, recomputation aside."""
    few, many = recorded("schedule=1f1b", *SIMPLE), recorded("schedule=1f1b", *SIMPLE, "num_microbatches=32")
    answer, _ = ask(few, many)
    assert causes(answer) == {"bubble": pytest.approx(log((1 + 3 / 8) / (1 + 3 / 32)))}


MESHED = (
    *("model=llama3_8b", "cluster=dgx_h100", "num_devices=8", "mesh.tensor=2", "mesh.data=2", "num_microbatches=8"),
    *("workload.microbatch_sequences=1", "cost=analytic"),
)


def test_records_of_meshes_are_explained_by_the_terms_of_their_steps(recorded, ask, results):
    first, second = recorded("schedule=1f1b", *MESHED), recorded("schedule=zb_v", *MESHED)
    answer, _ = ask(first, second)
    rows = [record.read(results / name) for name in (first, second)]
    assert answer["ratio"] == pytest.approx(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"])
    assert answer["unexplained"]["log"] == pytest.approx(0.0, abs=1e-9)
    each = rows[0]["tokens_per_step"] / 8
    seconds = {row["cause"]: row["a_seconds"] * each for row in answer["causes"] if row["a_seconds"] is not None}
    busy = rows[0]["busy_s"]
    assert seconds["bubble"] == pytest.approx(rows[0]["terms_s"]["bubble"])
    assert seconds["partition"] == pytest.approx(max(busy) - sum(busy) / len(busy))
    typed, _ = ask(first, f"tokens_per_s={rows[1]['tokens_per_s']}", "schedule=zb_v")
    assert causes(typed) == pytest.approx(causes(answer))
    assert typed["ratio"] == pytest.approx(answer["ratio"])


def test_the_precision_of_kernels_is_that_of_their_software(recorded, ask):
    """Products of megatron_core sum in fp32, on one host as under a mesh; those of eager software in 16 bits."""
    words = ("schedule=1f1b", "model=qwen3_1p7b", "cluster=8x_rtx4090", "num_devices=4", "cost=analytic")
    host, eager = recorded(*words), recorded(*words, "software=roundpipe")
    mesh = recorded(*words, "mesh.pipeline=4", "mesh.shard=optimizer")
    answer, _ = ask(host, mesh)
    assert answer["ratio"] == pytest.approx(1.0, rel=1e-3)
    assert "dtype" not in causes(answer)
    assert causes(ask(host, eager)[0])["dtype"] > 0.1


def test_late_updates_of_a_record(recorded, ask):
    words = ("schedule=roundpipe", *SIMPLE, "num_steps=4")
    answer, _ = ask(recorded(*words), recorded(*words, "schedule.asynchronous=true"))
    assert causes(answer) == {"late updates": pytest.approx(answer["log_ratio"])}
    assert answer["log_ratio"] > 0


def test_what_other_load_took_of_a_measured_run_is_the_rest(recorded, ask, results):
    """A replay of 1.6 s whose devices compute 1.2, 1, 1 and 0.8 s, on the clock of a free machine and of a busy one."""
    plain = record.read(results / recorded("schedule=1f1b", *SIMPLE))
    replay = {"evidence": "measured", "replay_makespan_s": 1.6, "replay_busy_s": [1.2, 1.0, 1.0, 0.8]}
    for name, measured_s in (("d" * 16, 1.6), ("e" * 16, 2.0)):
        row = plain | replay | {"run_id": name, "makespan_s": measured_s, "step_time_s": measured_s}
        del row["surroundings"]
        record.write(results / name, row)
    busy, _ = ask("d" * 16, "e" * 16)
    assert busy["causes"] == []
    assert busy["unexplained"]["factor"] == pytest.approx(0.8)
    devices = 4 / plain["tokens_per_step"]
    assert busy["a"]["predicted_device_seconds"] == pytest.approx(1.6 * devices)
    against, _ = ask(plain["run_id"], "d" * 16)
    seconds = {row["cause"]: row["b_seconds"] for row in against["causes"]}
    assert seconds["partition"] == pytest.approx(0.2 * devices)
    assert seconds["bubble"] == pytest.approx(0.4 * devices)
    assert "recomputation" not in seconds  # both recompute a quarter of their work


def test_a_late_schedule_without_a_prompt_one_says_so(recorded, ask):
    flushed = recorded("schedule=1f1b", *SIMPLE)
    answer, _ = ask(flushed, recorded("schedule=pipedream", *SIMPLE))
    assert any("late" in note for note in answer["b"]["notes"])


def test_a_typed_number_stands_for_a_record_with_other_settings(recorded, ask):
    """The pace that the simulator gives the other run leaves no rest."""
    name = recorded("schedule=1f1b", *SIMPLE)
    other = recorded("schedule=1f1b", *SIMPLE, "num_microbatches=32")
    known, _ = ask(name, other)
    pace = 4 / known["b"]["device_seconds"]
    answer, _ = ask(name, f"tokens_per_s={pace}", "num_microbatches=32")
    assert causes(answer) == pytest.approx(causes(known))
    assert answer["unexplained"]["log"] == pytest.approx(0.0, abs=1e-9)
    assert answer["b"]["evidence"] == "given"


def test_a_typed_utilization_is_read_with_its_convention(ask):
    """A row's own printed utilization, typed in, is the row."""
    answer, _ = ask("table=llm_foundry_fsdp:96", "mfu=0.6423", "flops=palm")
    assert answer["metric"] == "mfu"
    assert answer["ratio"] == pytest.approx(1.0, abs=0.005)
    assert set(causes(answer)) == set()


def test_rows_of_tables_on_the_command_line(ask):
    answer, table = ask("table=vocab_stage_times:1", "table=vocab_stage_times:2")
    assert answer["ratio"] == pytest.approx(11722.2 / 7599.2)
    assert {row["cause"]: row["evidence"] for row in answer["causes"]} == {
        "partition": "predicted",
        "bubble": "predicted",
    }
    assert answer["a"]["evidence"] == "published"
    total = sum(row["log"] for row in answer["causes"]) + answer["unexplained"]["log"]
    assert exp(total) == pytest.approx(answer["ratio"])
    assert "partition" in table


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "two numbers"),
        (("table=vocab_stage_times:1",), "second number is missing"),
        (("nosuchrun", "table=vocab_stage_times:1"), "nearest"),
        (("table=vocab_stage_times:1", "12345"), "tokens_per_s=12345"),
        (("table=vocab_stage_times:1", "table=vocab_stage_times:2", "recompute=none"), "unknown key 'recompute'"),
        (("table=vocab_stage_times:1", "recompute=none"), "type one with its unit"),
        (("table=vocab_stage_times:1", "tokens_per_s=5", "mfu=0.5"), "2 numbers"),
        (("table=vocab_stage_times:1", "tokens_per_s=5", "tokens_per_s=6"), "tokens_per_s= is given twice"),
        (("table=vocab_stage_times:1", "tokens_per_s=-5"), "above 0"),
        (("table=vocab_stage_times:1", "tokens_per_s=fast"), "above 0"),
        (("table=vocab_stage_times:1", "mfu=45"), "write 0.45"),
        (("table=vocab_stage_times:1", "mfu=0.45", "flops=plam"), "palm"),
        (("table=vocab_stage_times:1", "tokens_per_s=5", "recomput=none"), "recompute"),
        (("table=vocab_stage_times:1", "tokens_per_s=5", "tensor=5"), "mesh.tensor=5 of 24 heads"),
        (("table=vocab_stage_times:1", "tokens_per_s=5", "pipeline=0"), "at least 1"),
        (("table=vocab_stage_times:1", "tokens_per_s="), "key=value"),
        (("table=vocab_stage_time:1", "table=vocab_stage_times:2"), "vocab_stage_times"),
        (("table=vocab_stage_times:999", "table=vocab_stage_times:2"), "unknown row"),
        (("table=bloom_a100_topologies:98", "table=bloom_a100_topologies:13"), "ran out of memory"),
        (("table=megatron_ci_golden:291", "table=bloom_a100_topologies:13"), "no time"),
        (("table=throughput:fsdp/qwen3-32b", "table=throughput:roundpipe/qwen3-32b"), "OOM"),
        (("table=throughput:fsdp-offload/qwen3-1.7b", "table=throughput:roundpipe/qwen3-1.7b"), "not modelled"),
        (("table=throughput:roundpipe/qwen3-1.7b", "tokens_per_s=5"), "beside a run"),
        (("table=vocab_stage_times:1", "table=vocab_stage_times:2", "metric=speed"), "unknown metric"),
    ],
)
def test_what_cannot_be_is_answered(words, said, ask):
    answered = ask(*words, status=2)
    assert said in answered
    assert answered.startswith("rpbench: ")
    assert "Traceback" not in answered


def test_a_run_of_another_kind_is_refused(recorded, ask):
    with_tokens, without = recorded("schedule=1f1b", *SIMPLE), recorded("schedule=1f1b", "num_devices=4")
    assert "microbatch" in ask(with_tokens, without, status=2)
    in_slots = Side("slots", 1.0, "simulated", {COMPUTATION: 1.0}, "simulated", clock="slots")
    with pytest.raises(ValueError, match="clock of the first is s, of the second slots; take costs in seconds"):
        explain(side(computation=1.0), in_slots)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"status": "failed", "reason": "it broke"}, "failed, it broke"),
        ({"status": "infeasible", "reason": "it needs 33 GB"}, "infeasible, it needs 33 GB"),
        ({"mode": "roofline"}, "mode=roofline"),
        ({"mode": "import", "evidence": "measured elsewhere"}, "type its number"),
    ],
)
def test_a_run_without_a_step_is_refused(fields, said, recorded, ask, results):
    name = recorded("schedule=1f1b", *SIMPLE)
    other = record.read(results / name) | {"run_id": "f" * 16, **fields}
    del other["surroundings"]
    record.write(results / other["run_id"], other)
    assert said in ask(other["run_id"], name, status=2)


def test_numbers_are_in_the_units_of_their_names():
    for words, expected in (
        ({"tokens_per_s": "100"}, 8 / 100),
        ({"tokens_per_s_per_device": "100"}, 1 / 100),
        ({"step_time_s": "2"}, 8 * 2 / 1000),
        ({"tflops_per_device": "2"}, 3e9 / 2e12),
        ({"mfu": "0.5"}, 3e9 / 0.5e12),
    ):
        number, settings = number_of({**words, "recompute": "none"})
        assert number.device_seconds(8, 1000, Rate(3e9, 1e12)) == pytest.approx(expected)
        assert settings == {"recompute": "none"}
