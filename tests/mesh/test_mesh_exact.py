"""Exact: today's schedules and simulator under a mesh; closed forms against them; data parallelism as actions."""

from dataclasses import replace
from fractions import Fraction

import pytest

from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape, from_text, to_text
from rpbench.mesh.data_parallel import reduced
from rpbench.mesh.exact import exact_terms, makespan_s, mesh_times, problem_of
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.ordered_step import _copies, simulate_step
from rpbench.mesh.parameters import held_by_stage
from rpbench.mesh.step import pipeline_terms, stages_of_step
from rpbench.mesh.wrapping import under_mesh
from rpbench.passes.offload import shard
from rpbench.registry import entries
from rpbench.sim.graph import build_graph
from rpbench.workload.architecture import architecture
from tests.mesh.jobs import job

ONES = LayerTimes([0.1, 0.2] * 4, [0.1] * 8, [0.3] * 8, 0.5, 0.7, hop=0.01)


def stepped(found):
    """A step of a job's own cut, simulated with what its replicas exchange."""
    problem, cut = problem_of(found), symmetric(found.cut)
    return simulate_step(found, problem.order(cut), problem.costs(cut), counts_layers=True)


def test_a_mesh_of_ones_gives_todays_times_to_the_last_bit():
    assert under_mesh(ONES, job(Mesh(sharing=Sharing("none")))) is ONES
    assert under_mesh(ONES, job(Mesh(data=4, pipeline=2))) is ONES  # those stand outside of layers


def test_tensor_parallelism_shortens_todays_times_by_less_than_its_size():
    found = under_mesh(ONES, job(Mesh(tensor=4, sequence_parallel=True)))
    assert all(0.25 < new / old < 0.7 for new, old in zip(found.forward, ONES.forward, strict=True))
    assert found.hop == ONES.hop


def test_times_of_another_model_are_refused():
    with pytest.raises(ValueError, match="times of 1 layers for a model of 8"):
        under_mesh(LayerTimes([0.1], [0.1], [0.3]), job(Mesh(tensor=2)))


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_closed_forms_meet_the_simulator(name, chunks):
    found = job(Mesh(pipeline=4, sharing=Sharing("none")), schedule=name, chunks=chunks, num_microbatches=16)
    closed = sum(pipeline_terms(found, stages_of_step(found)).values())
    assert closed == pytest.approx(makespan_s(found), rel=0.03)


def test_a_split_backward_shortens_the_step():
    plain, split = (
        makespan_s(job(Mesh(pipeline=4, sharing=Sharing("none")), schedule=name)) for name in ("1f1b", "zb_h1")
    )
    assert split < plain


def test_layer_times_hold_what_the_mesh_takes():
    found = job(Mesh(pipeline=2, tensor=2, sharing=Sharing("none")))
    times = mesh_times(found)
    layer = found.kinds[found.architecture.layers[0]]
    assert times.forward[0] == pytest.approx(layer.forward_all)
    assert times.hop == found.hop_s > 0


@pytest.mark.parametrize("what", ["none", "optimizer", "parameters"])
def test_data_parallelism_stands_on_lane_net_and_never_shortens_a_step(what):
    found = job(Mesh(data=8, pipeline=4, sharing=Sharing(what)))
    step = stepped(found)
    end = max(step.timeline.end)
    own = reduced(found, held_by_stage(found, 0))
    assert makespan_s(found) <= end <= makespan_s(found) + 20 * (own.gradients + own.parameters)
    assert {lane for row in step.sharded.schedule.rows for lane, _ in row} == {"compute", "net"}


def test_gradients_of_early_stages_hide_behind_the_last_microbatch():
    found = job(Mesh(data=8, pipeline=4, sharing=Sharing("none")))
    step = stepped(found)
    schedule, costs = step.sharded.schedule, step.costs
    reduces = [action for row in schedule.lanes for action in row["net"] if action.kind is Kind.REDUCE_GRAD]
    assert len(reduces) == 4
    assert max(step.timeline.end) - makespan_s(found) == pytest.approx(
        max(float(costs.transfer_time(cargo)) for cargo in Analysis(schedule).cargo.values()), rel=0.2
    )


def test_devices_outside_the_schedule_count_as_replicas():
    order = entries()["1f1b"].build(Shape(2, 2, 4))
    outside = replace(order, shape=replace(order.shape, outer_replicas=4))
    analysis = Analysis(shard(outside, parameters="step", gradients="step"))
    shares = {cargo.share for cargo in analysis.cargo.values()}
    assert shares == {Fraction(3, 4)}


def test_replicas_inside_and_outside_multiply():
    order = entries()["data_parallel"].build(Shape(2, 4, 4))
    outside = replace(order, shape=replace(order.shape, outer_replicas=4))
    analysis = Analysis(shard(outside, parameters=None, gradients="step"))
    assert set(analysis.moves.replicas.values()) == {8}


def test_a_shape_with_replicas_outside_survives_its_text():
    order = entries()["1f1b"].build(Shape(2, 2, 2, outer_replicas=3))
    assert "outer_replicas=3" in to_text(order)
    assert from_text(to_text(order)) == order


def _built(found, shape):
    try:
        return found.build(shape)
    except ValueError:
        return None


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_schedule_takes_replicas_outside(name):
    found = entries()[name]
    shapes = (
        [Shape(4, 3, 8, 4, fused=True)]
        if found.separate_cuts
        else [Shape(p, p * v, 8) for p in (4, 2) for v in (1, 2, found.chunks or 2)]
    )
    schedule = next(filter(None, (_built(found, shape) for shape in shapes)))
    outside = replace(schedule, shape=replace(schedule.shape, outer_replicas=4))
    graph = build_graph(shard(outside, parameters=None, gradients="step"))
    assert graph.num_actions > build_graph(schedule).num_actions


def test_exact_terms_keep_what_is_not_the_pipeline():
    found = job(Mesh(data=2, pipeline=4), own=replace(architecture("llama3_8b"), num_layers=8))
    assert {"pipeline", "data", "optimizer"} <= set(exact_terms(found))


@pytest.mark.parametrize(
    "name, ranks, stages, copies",
    [
        ("1f1b", 4, 4, 1),
        ("interleaved_1f1b", 2, 4, 1),
        ("chimera", 4, 4, 2),
        ("data_parallel", 4, 1, 4),
        ("mobius", 2, 4, 1),
    ],
)
def test_ranks_that_hold_a_stage_are_counted_where_weights_stay(name, ranks, stages, copies):
    """Chimera's two pipelines hold every stage twice; Mobius streams its weights, and nobody holds them."""
    assert _copies(entries()[name].build(Shape(ranks, stages, 2 * ranks))) == copies
