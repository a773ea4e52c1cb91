"""One machine, one answer: a pipeline asked for as a cluster, as a mesh, and as a mesh whose other axes are 1."""

from dataclasses import replace

import pytest

from rpbench.config.request import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.ir.action import Kind
from rpbench.run.assemble import assemble
from rpbench.run.mesh_run import prepare
from rpbench.run.request_to_records import run
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


def test_a_pipeline_takes_as_long_as_a_mesh_whose_other_axes_are_1(tmp_path):
    """The same optimizer, the same seconds beside it and the same weights; boundary tensors are sent, not hops."""
    request = load([*ASKED, *SPELLINGS[1], f"results_dir={tmp_path}"])
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
