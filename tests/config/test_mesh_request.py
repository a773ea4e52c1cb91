"""Requests with a mesh: one of ones changes nothing, every schedule runs, what cannot be is refused with a way out."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from spared import spared

from rpbench.config.choices import ConfigError
from rpbench.config.composing import Composer
from rpbench.config.configuration import MeshConfig, composed, register
from rpbench.config.loading import load, request_of
from rpbench.config.mesh import mesh_of
from rpbench.config.request import ScheduleChoice
from rpbench.ir.partition import symmetric
from rpbench.mesh.exact import problem_of
from rpbench.mesh.memory import bytes_of_ranks
from rpbench.places import with_dirs
from rpbench.records import provenance, record
from rpbench.registry import entries
from rpbench.run.mesh_run import job_of, prepare
from rpbench.run.recording import identity, run
from rpbench.run.scheduled import assembled_of
from rpbench.sim.longest_path import simulate

CONSTANT = ("model=llama31_8b", "cost=constant", "cost.hop_ms=0.3", "cost.head_share=0.1", "num_microbatches=12")
# One of each kind: stages dealt in turn or in a V, copies of stages, orders by times, shared heads, streamed weights,
# weights that change with every microbatch, methods that move what they hold.
KINDS = ("1f1b", "zb_v", "chimera", "zb_auto", "vocab_parallel", "roundpipe", "pipedream", "mobius")
PIPELINES = [name for name, own in entries().items() if not (own.whole_microbatches or own.tensor_parallel)]
ON_NODES = ("model=llama3_8b", "cluster=dgx_h100", "workload.microbatch_sequences=1")


def fields_of(*overrides):
    """What a run finds, without writing it."""
    return prepare(load(overrides)).carry_out().fields


@pytest.mark.parametrize(
    "name, cluster",
    [("1f1b", "local"), *((name, "dgx_h100") for name in ("interleaved_1f1b", "zb_v", "roundpipe", "pipedream"))],
)
def test_a_mesh_of_ones_gives_the_times_of_a_run_without_one_to_the_last_bit(name, cluster, tmp_path):
    asked = [f"schedule={name}", "num_devices=4", *CONSTANT, f"results_dir={tmp_path}"]
    (plain,) = run(load(asked))
    (under,) = run(load([*asked, f"cluster={cluster}", "mesh.data=1", "mesh.tensor=1"]))
    for key in ("makespan_s", "step_time_s", "busy_s", "idle_s", "comm_total_s", "comm_exposed_s"):
        assert under[key] == plain[key], key
    assert under["run_id"] != plain["run_id"]
    assert under["mesh"]["pipeline"] == 4
    assert "mesh" not in plain
    assert "mesh" not in plain["config"]


def test_the_identity_of_a_run_without_a_mesh_has_none(monkeypatch):
    """Names of runs as they were before there were meshes, with the code they were made by taken out."""
    monkeypatch.setattr(provenance, "code_version", lambda: "same")
    found = identity(load(["schedule=gpipe", "num_devices=2"]))
    assert "mesh" not in found["subject"]
    assert set(found) == {"subject", "choices", "code_version", "versions", "environment"}
    under = identity(load(["schedule=gpipe", "num_devices=2", "mesh.data=1"]))
    assert record.run_id(under) != record.run_id(found)


@cache
def on_sixteen():
    return load([*ON_NODES, "mesh.data=2", "mesh.tensor=2", "num_devices=16", "num_microbatches=12"])


@pytest.mark.parametrize("name", spared(sorted(PIPELINES), KINDS.__contains__))
def test_every_pipeline_runs_under_a_mesh(name):
    entry = entries()[name]
    found = prepare(replace(on_sixteen(), schedule=ScheduleChoice(name, entry, entry.options))).carry_out().fields
    assert found["evidence"] == "predicted"
    assert sum(found["terms_s"].values()) == pytest.approx(found["step_time_s"], rel=1e-12)
    assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(found["tokens_per_step"], rel=1e-12)
    assert len(found["peak_memory_bytes"]) == 4
    assert found["terms_s"]["data"] > 0
    assert found["terms_s"]["collectives"] > 0


@pytest.mark.parametrize("sizes", [("mesh.pipeline=1", "mesh.data=8", "mesh.shard=parameters"), ("mesh.data=2",)])
@pytest.mark.parametrize("name", sorted(entries().keys() - set(PIPELINES)))
def test_what_is_no_pipeline_is_no_order_of_a_mesh(name, sizes):
    """ZeRO-3 as eight replicas of one rank ended with an IndexError, and as four ranks its gathers took no time."""
    with pytest.raises(ConfigError, match=rf"schedule={name} under a mesh: .* 1f1b .*, or leave the mesh out"):
        load([*ON_NODES, f"schedule={name}", "num_devices=8", *sizes])
    assert load([*ON_NODES, f"schedule={name}", "num_devices=8"]).mesh is None


@pytest.mark.parametrize("name", ["interleaved_1f1b", "mobius"])
def test_several_stages_on_one_rank_take_what_one_takes(name):
    words = (*ON_NODES, "mesh.pipeline=1", "mesh.data=8", "mesh.shard=parameters", "num_microbatches=2")
    one, several = (fields_of(f"schedule={each}", *words) for each in ("1f1b", name))
    assert several["step_time_s"] == pytest.approx(one["step_time_s"], rel=1e-12)


def test_the_step_is_that_of_the_simulated_pipeline_and_what_stands_beside_it():
    asked = ("schedule=interleaved_1f1b", *ON_NODES, "num_devices=16", "mesh.tensor=4", "mesh.pipeline=4")
    request, terms = load(asked), fields_of(*asked)["terms_s"]
    job = job_of(request)
    inside = ("kernels", "recompute", "collectives", "host", "bubble", "hops")
    assert terms["data"] == 0
    chunked = replace(job, chunks=2, cut=())
    problem, cut = problem_of(chunked), symmetric(chunked.cut)
    alone_s = max(simulate(problem.order(cut), problem.costs(cut)).end)
    assert sum(terms[name] for name in inside) == pytest.approx(alone_s, rel=1e-12)


@pytest.mark.parametrize("shard, recompute", [("none", "all"), ("optimizer", "none"), ("parameters", "none")])
def test_memory_of_an_order_is_that_of_searches(shard, recompute):
    asked = (
        "schedule=1f1b", *ON_NODES, "num_devices=32", "mesh.tensor=2", "mesh.data=4", "mesh.sequence_parallel=true",
        f"mesh.shard={shard}", f"recompute={recompute}",
    )  # fmt: skip
    request, found = load(asked), fields_of(*asked)
    job = job_of(request)
    assert found["peak_memory_bytes"] == pytest.approx([sum(own.values()) for own in bytes_of_ranks(job)], rel=1e-6)


def test_the_head_of_a_v_stands_on_the_first_rank():
    found = fields_of("schedule=zb_v", *ON_NODES, "mesh.tensor=2", "num_devices=8", "recompute=none")
    assert found["fullest_rank"] == 0
    assert found["memory_bytes"]["activations"] > 0  # logits are among them


@pytest.mark.parametrize("name", ["gpipe", "zb_v"])  # the order of the second depends on times
def test_a_run_that_does_not_fit_says_so_and_the_way_out_and_gives_no_pace(name):
    sizes = ("model=llama3_70b", "cluster=dgx_h100", "num_devices=16", "mesh.data=2")
    found = fields_of(f"schedule={name}", *sizes)
    assert (found["status"], found["verdict"]) == ("infeasible", "oom")
    assert found["tokens_per_s"] is None
    needed, room, lacks = map(float, re.findall(r"([\d.]+) GB", found["reason"])[:3])
    assert lacks == pytest.approx(needed - room, abs=0.2)
    assert found["reason"].endswith(f"; it {found['smallest_change']['text']}")


def test_a_schedule_is_shown_without_a_mesh():
    with pytest.raises(ValueError, match="set num_devices=4"):
        assembled_of(load([*ON_NODES, "mesh.pipeline=4", "mesh.data=2"]))


def test_overlap_and_faster_links_never_slow_a_step():
    asked = ("schedule=looped_bfs", *ON_NODES, "mesh.data=4", "mesh.tensor=2", "num_devices=32", "mesh.shard=none")
    plain = fields_of(*asked)
    alone = fields_of(*asked, "mesh.overlap.gradients=false")
    faster = fields_of(*asked, "cluster.inter_bytes_per_s=100e9")
    assert plain["terms_s"]["data"] < alone["terms_s"]["data"]
    assert faster["step_time_s"] < plain["step_time_s"]
    assert fields_of(*asked, "mesh.overlap.tensor=0.9")["step_time_s"] < plain["step_time_s"]


@pytest.mark.parametrize(
    "keys, num_devices, said",
    [
        ({"data": 3, "tensor": 2}, 16, "multiples of 6; the nearest are 12 and 18"),
        ({"data": 4, "tensor": 8}, 16, "the nearest is 32"),
        ({"data": 3, "pipeline": 2}, 16, "= 6 devices, the cluster has 16"),
        ({"data": 2}, None, "give mesh.pipeline=, or num_devices="),
        ({"data": 0}, 8, "mesh.data=0: a size is a whole number of at least 1"),
        ({"pipeline": 4, "data": 2, "expert": 3}, None, "does not divide the 2 devices"),
        ({"pipeline": 4, "sequence_parallel": True}, None, "mesh.tensor=1"),
        ({"pipeline": 4, "shard": "zero"}, None, "one of none, optimizer"),
        ({"pipeline": 4, "data": 4, "shard_group": 3}, None, "take one of 1, 2, 4"),
        ({"pipeline": 4, "order": ["tensor", "data"]}, None, "each of data, pipeline"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(keys, num_devices, said):
    with pytest.raises(ConfigError, match=said):
        mesh_of(MeshConfig(**keys), num_devices)


@pytest.mark.parametrize(
    "words, said",
    [
        (("mesh.pipeline=4", "mesh.order=[tensor,tensor,data,pipeline]"), "names tensor twice"),
        (("mesh.tensor=64", "mesh.pipeline=1"), "more tensor shards than heads"),
        (("mesh.pipeline=4", "cluster.inter_bytes_per_s=0"), "bandwidth 0 never ends"),
        (("mesh.pipeline=4", "cluster.gpu=a100"), "a100_sxm4_80gb"),
        (("mesh.pipeline=4", "mesh.data=3"), "take 8 or 16"),
        (("mesh.pipeline=4", "software=megatron"), "megatron_core"),
        (("mesh.pipeline=4", "mesh.framework=megatron_core"), "is now software=megatron_core"),
        (("software=megatron", "cost=analytic"), "did you mean"),
        (("model=llama31_8b", "software=megatron_core", "cost=constant"), "leave one of both out"),
        (("mesh.pipeline=4", "mesh.precision=int8"), "bf16"),
        (("mesh.pipeline=4", "mesh.overlap.tensor=2"), "a share, from 0"),
        (("mesh.pipeline=4", "cost=unit"), "its slots are no seconds"),
        (("mesh.data=2", "charge=bytes"), "leave charge out"),
        (("mesh.data=2", "cost=analytic", "cost.split_penalty=1.1"), r"cost\.split_penalty=1\.1 under a mesh"),
        (("mesh.data=2", "offload=all"), "nothing is moved to hosts"),
        (("mesh.data=2", "recompute=except_last"), "one of all, none"),
        (("mesh.data=2", "tuning_budget=200"), "plan mesh=search"),
        (("mesh.pipeline=4", "mode=roofline"), "plan mesh=search"),
        (("mesh.pipeline=4", "backend=virtual"), "backend.data_parallel=2"),
        (("mesh.pipeline=40",), "40"),
        (("mesh.data=2", f"cluster.device_speeds=[0.5{',1' * 7}]"), "devices are alike"),
        (("mesh.dta=2",), r"did you mean mesh\.data\? Keys: data, pipeline"),
        (("+mesh.overlap.tensr=1",), r"did you mean mesh\.overlap\.tensor"),
        (("+checkpoint.safe_to=x",), r"did you mean checkpoint\.save_to"),
        (("+workload.foo=3",), r"unknown key 'workload\.foo'.* Known: workload\.name"),
        (("+schedule.foo=3",), r"unknown option of schedule 1f1b 'foo'\. Known: none$"),
        (("~cost",), r"^cost\.name: it needs a value"),
        (("model=abstract", "+model.hidden=64"), r"^model\.hidden with model=abstract, which has no shape"),
        (("mesh.order=tensor",), r"^mesh\.order=tensor: a list, in brackets"),
        (("mode=torch_duel", "mode.schedules=zb_v"), r"^mode\.schedules=zb_v: a list, in brackets"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(words, said):
    with pytest.raises(ValueError, match=said):
        prepare(load([*ON_NODES, *words]))


@pytest.mark.parametrize(
    "lines, said",
    [
        ("", "software has no name"),
        ("name: ../x", "a name is no path"),
        ("name: x\nconstants: 7", "software.constants=7: names with their values"),
        ("name: x\nconstants: {matmul: a}", "constants are above 0"),
        ("name: x\npasses: many", "software.passes='many': a number of at least 0"),
        ("name: x\npad_vocab: 0", "software.pad_vocab=0: a whole number of at least 1"),
        ("name: x\nzigzag: 7", "true or false"),
    ],
)
def test_a_stranger_s_software_file_is_refused_by_what_is_wrong_in_it(lines, said, tmp_path):
    (tmp_path / "software").mkdir()
    (tmp_path / "software" / "bent.yaml").write_text(lines)
    with with_dirs([f"--config-dir={tmp_path}"]), pytest.raises(ValueError, match=said):
        load([*ON_NODES, "mesh.pipeline=4", "software=bent"])


def test_devices_that_nobody_knows_take_a_pipeline_only():
    with pytest.raises(ValueError, match="no measured collectives"):
        load(["model=llama31_8b", "cluster=local", "cost=constant", "num_devices=8", "mesh.data=2"])


def test_a_machine_is_named_where_a_cluster_is_misspelt():
    with pytest.raises(ValueError, match="dgx_h100"):
        load(["cluster=dgx_h10", "mesh.pipeline=4"])


PACE = {"num_ranks": 2, "bytes_per_s": 2e9, "latency_s": 0.0}
CALIBRATED = {
    "name": "mine",
    "num_devices": 4,
    "host_memory_bytes": 900_000_000_000,
    "matmul_flops_per_s": 1e11,
    "wide_matmul_flops_per_s": 9e10,
    "matmul_efficiency": 1.0,
    "attention_efficiency": 0.5,
    "memory_bytes_per_s": 2e10,
    "memory_efficiency": 1.0,
    "copy_bytes_per_s": 7e9,
    "collectives": {
        name: PACE | {"bytes_per_s_low": 2e9, "bytes_per_s_high": 2e9, "latency_s_low": 0.0, "latency_s_high": 0.0}
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    },
}


def test_a_calibrated_cluster_scales_the_costs_of_one_device(tmp_path, monkeypatch):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(json.dumps(CALIBRATED))
    monkeypatch.setenv("RPBENCH_PATH", str(tmp_path))
    asked = ["cluster=mine", "model=tiny_gpt", "cost=constant", "num_devices=4"]
    found = fields_of(*asked, "mesh.data=2", "recompute=none")
    assert found["evidence"] == "simulated"
    assert set(found["terms_s"]) == {"work", "bubble", "hops", "data"}
    assert found["terms_s"]["data"] > 0
    with pytest.raises(ValueError, match="take cost=analytic"):
        load([*asked[:2], "cost=unit", "num_devices=4", "mesh.data=2"])


def test_a_model_whose_architecture_has_its_name_stays_a_model():
    """Also where Hydra has been told of a sweep over models, and where parts are kept."""
    register(["model=gpt_oss_20b,qwen3_32b"])
    for compose in (Composer().compose, composed):
        request = request_of(compose(["experiment=steady_state", "model=gpt_oss_20b"]))
        assert request.model.published_name == "gpt-oss-20b"
