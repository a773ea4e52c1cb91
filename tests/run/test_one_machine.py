"""One machine, one answer: a pipeline asked for as a cluster, as a mesh, and as a mesh whose other axes are 1."""

from dataclasses import replace

import pytest

from rpbench.config.loading import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.ir.action import Kind
from rpbench.run.assemble import assemble
from rpbench.run.mesh_run import prepare
from rpbench.run.recording import run
from rpbench.sim.memory import peak_in_flight

ASKED = ("schedule=1f1b", "model=llama31_8b", "num_microbatches=32", "recompute=all", "cost=analytic")
SPELLINGS = (
    ("cluster=8x_h100", "num_devices=8"),
    ("cluster=dgx_h100", "mesh.pipeline=8"),
    ("cluster=dgx_h100", "num_devices=8", "mesh.data=1", "mesh.tensor=1", "mesh.context=1"),
)


def answer(tmp_path, *words):
    (row,) = run(load([*ASKED, *words, f"results_dir={tmp_path}"]))
    return row


@pytest.mark.parametrize("software", ["", "software=roundpipe", "software=torchtitan"])
def test_the_h100_answers_alike_however_it_is_asked_for(software, tmp_path):
    rows = [answer(tmp_path, *words, *filter(None, [software])) for words in SPELLINGS]
    for key in ("tokens_per_s", "makespan_s", "peak_memory_bytes"):
        assert rows[0][key] == rows[1][key] == rows[2][key], key


def test_a_software_is_what_differs(tmp_path):
    paces = {
        name: answer(tmp_path, *SPELLINGS[0], f"software={name}")["tokens_per_s"]
        for name in ("megatron_core", "roundpipe")
    }
    assert answer(tmp_path, *SPELLINGS[0])["tokens_per_s"] == paces["megatron_core"]  # of a run that names none
    assert 1.05 < paces["megatron_core"] / paces["roundpipe"] < 1.2


def test_traits_can_be_overridden(tmp_path):
    words = (*SPELLINGS[0], "software=megatron_core")
    slower = answer(tmp_path, *words, "software.passes=40")["tokens_per_s"]
    assert slower < answer(tmp_path, *words)["tokens_per_s"]


def test_replicas_keep_the_pace_of_their_pipeline(tmp_path):
    """What replicas add are their sums, the optimizer and what a step takes beside; layers take the same."""
    alone = answer(tmp_path, *SPELLINGS[0])["tokens_per_s"]
    both = answer(tmp_path, "cluster=dgx_h100", "mesh.pipeline=8", "mesh.data=2")["tokens_per_s"]
    assert 0.95 < both / (2 * alone) < 1


def test_figures_of_a_machine_count_where_its_devices_are_known(tmp_path):
    slower = answer(tmp_path, *SPELLINGS[0], "cluster.wide_matmul_efficiency=0.35")["tokens_per_s"]
    assert 0.5 < slower / answer(tmp_path, *SPELLINGS[0])["tokens_per_s"] < 0.7


ADAPTERS = ("++model.lora_rank=16", "++model.lora_targets=[q_proj,down_proj]")


@pytest.mark.parametrize("training", [(), ("++model.training_mode=lora", *ADAPTERS)], ids=["full", "lora"])
def test_a_pipeline_takes_as_long_as_a_mesh_whose_other_axes_are_1(training, tmp_path):
    """The same optimizer, the same seconds beside it and the same weights; boundary tensors are sent, not hops."""
    request = load([*ASKED, *SPELLINGS[1], *training, f"results_dir={tmp_path}"])
    (plain,) = run(request)
    meshed = replace(request, mesh=replace(request.mesh, machine=request.cluster.with_devices(8)))
    forced = prepare(meshed).carry_out().fields
    assert plain["step_time_s"] == pytest.approx(forced["step_time_s"], rel=5e-4)
    assembled = assemble(request)
    first, *_ = assembled.costs.work[Kind.STEP]
    assert first.main == pytest.approx(forced["terms_s"]["optimizer"] + forced["terms_s"]["fixed"], rel=1e-12)
    held = classes_of(assembled.schedule, assembled.sizes, peak_in_flight(assembled.graph))[forced["fullest_rank"]]
    for name in ("weights", "optimizer state"):
        assert held[name] == pytest.approx(forced["memory_bytes"][name], rel=1e-5)  # a mesh leaves the last norm out


# --- one host asked both ways: as a schedule of its devices, and as a mesh ---------------------------------------

ROOM = "cluster.device_memory_bytes=1000000000000000"  # for all, so that every pair has a pace
PIPELINES = {"1f1b": 1e-3, "gpipe": 1e-3, "interleaved_1f1b": 2e-3, "zb_v": 7e-3, "zb_h1": 1e-3, "chimera": 8e-3,
             "zb_auto": 1e-3, "seq1f1b": 4e-3, "vocab_parallel": 9e-3, "interlaced": 9e-3, "mario": 2e-3,
             "varuna": 2e-3}  # fmt: skip
SLOW_LINKS = {"chimera": 0.04, "interlaced": 0.04}  # of an RTX 4090, where they differ
REPLICAS = {"data_parallel": "none", "zero_2 schedule.reduce_each_microbatch=false": "optimizer"}
SHARED = {"zero_2": "gradients", "zero_3": "parameters"}


def both(tmp_path, cluster, model, recompute, one, mesh):
    asked = (f"cluster={cluster}", f"model={model}", f"recompute={recompute}", "cost=analytic", ROOM)
    return [run(load([*asked, *words, f"results_dir={tmp_path}"]))[0] for words in (one, mesh)]


def as_replicas(tmp_path, cluster, model, recompute, words, shard):
    name, *options = words.split()
    one = (f"schedule={name}", *options, "num_devices=8", "num_microbatches=32")
    mesh = ("schedule=1f1b", "mesh.data=8", f"mesh.shard={shard}", "num_microbatches=4")
    return both(tmp_path, cluster, model, recompute, one, mesh)


@pytest.mark.parametrize(
    "cluster, model", [("8x_h100", "llama31_8b"), ("8x_h100", "qwen3_1p7b"), ("8x_rtx4090", "qwen3_1p7b")]
)
@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("schedule", PIPELINES)
def test_a_pipeline_and_its_mesh_hold_the_same_bytes_and_keep_the_same_pace(
    cluster, model, recompute, schedule, tmp_path
):
    """Every device, to 1 part in 100,000: a mesh leaves the last norm out. Of the pace there remain what boundary
    tensors and the sums of Chimera's copies wait for each other, on links that a mesh has for each alone, and hops to
    the interlaced head. The ends sum a tied matrix once both have its gradients, late ones (zb_h1, zb_auto) too.
    """
    asked = (f"schedule={schedule}", "num_microbatches=32")
    one, mesh = both(
        tmp_path,
        cluster,
        model,
        recompute,
        (*asked, "num_devices=8"),
        (*asked, "mesh.pipeline=8", "mesh.shard=optimizer"),
    )
    assert one["peak_memory_bytes"] == pytest.approx(mesh["peak_memory_bytes"], rel=1e-5)
    within = (SLOW_LINKS if cluster == "8x_rtx4090" else {}).get(schedule, PIPELINES[schedule])
    assert one["step_time_s"] == pytest.approx(mesh["step_time_s"], rel=within)


@pytest.mark.parametrize("cluster, within", [("8x_h100", 5e-3), ("8x_rtx4090", 0.04)])
@pytest.mark.parametrize("model", ["llama31_8b", "qwen3_1p7b"])
@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("words", REPLICAS)
def test_replicas_and_their_mesh_hold_the_same_bytes(cluster, within, model, recompute, words, tmp_path):
    one, mesh = as_replicas(tmp_path, cluster, model, recompute, words, REPLICAS[words])
    assert max(one["peak_memory_bytes"]) == pytest.approx(max(mesh["peak_memory_bytes"]), rel=1e-5)
    assert one["step_time_s"] == pytest.approx(mesh["step_time_s"], rel=within)


@pytest.mark.parametrize("cluster, within", [("8x_h100", 5e-3), ("8x_rtx4090", 5e-3)])
@pytest.mark.parametrize("model", ["llama31_8b", "qwen3_1p7b"])
@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("words", SHARED)
def test_shards_that_come_and_go_are_layers_on_one_host_and_in_a_mesh(
    cluster, within, model, recompute, words, tmp_path
):
    """Whatever stages a schedule has: of the pace there remain what its stages of several layers hide less."""
    one, mesh = as_replicas(tmp_path, cluster, model, recompute, words, SHARED[words])
    assert max(one["peak_memory_bytes"]) == pytest.approx(max(mesh["peak_memory_bytes"]), rel=1e-5)
    assert one["step_time_s"] == pytest.approx(mesh["step_time_s"], rel=within)


@pytest.mark.parametrize("cluster", ["8x_h100", "8x_rtx4090"])
@pytest.mark.parametrize("model", ["llama31_8b", "qwen3_1p7b"])
@pytest.mark.parametrize("recompute", ["all"])
def test_tensor_shards_and_their_mesh_keep_the_same_pace(cluster, model, recompute, tmp_path):
    """Kernels of shards, sums of which computation hides a part, and steps of all shards; a schedule makes the
    embedding's sum again with its stage, and its norms count as shared.
    """
    one = ("schedule=megatron_tp", "num_devices=8", "num_microbatches=4", "num_steps=3")
    mesh = ("schedule=1f1b", "mesh.tensor=8", "mesh.shard=none", "num_microbatches=4")
    one, mesh = both(tmp_path, cluster, model, recompute, one, mesh)
    assert max(one["peak_memory_bytes"]) == pytest.approx(max(mesh["peak_memory_bytes"]), rel=0.025)
    assert one["step_time_s"] == pytest.approx(mesh["step_time_s"], rel=7e-3)


def test_a_mesh_says_that_activations_which_a_schedule_moves_take_no_time(tmp_path):
    row = answer(tmp_path, "schedule=bpipe", "cluster=8x_h100", "num_devices=8", "mesh.shard=none")
    assert any("activations that bpipe moves" in note for note in row["notes"])
