"""Exact: today's schedules and simulator under a mesh; closed forms against them; data parallelism as actions."""

from dataclasses import replace
from fractions import Fraction

import pytest

from rpbench.config.loading import load
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape, from_text, to_text
from rpbench.mesh.data_parallel import reduced
from rpbench.mesh.exact import exact_terms, mesh_times, problem_of, under_mesh
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.ordered_step import _copies, layered, simulate_step
from rpbench.mesh.parameters import held, held_by_stage
from rpbench.mesh.step import pipeline_terms, stages_of_step, step_terms
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import shard
from rpbench.registry import entries
from rpbench.run.assemble import assemble
from rpbench.run.mesh_run import job_of, prepare
from rpbench.sim.graph import build_graph
from rpbench.sim.metrics import step_time
from rpbench.sim.shared_links import simulate_charged
from rpbench.workload.architecture import architecture
from tests.mesh.jobs import job, makespan_s

ONES = LayerTimes([0.1, 0.2] * 4, [0.1] * 8, [0.3] * 8, 0.5, 0.7, hop=0.01)


def stepped(found, *, counts_layers=True):
    """A step of a job's own cut, simulated with what its replicas exchange."""
    problem, cut = problem_of(found), symmetric(found.cut)
    return simulate_step(found, problem.order(cut), problem.costs(cut), counts_layers=counts_layers)


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


@pytest.mark.parametrize("what, volumes", [("none", 2.0), ("optimizer", 1.5)])
def test_what_replicas_exchange_follows_an_order_whose_weights_change_with_every_microbatch(what, volumes):
    """PipeDream: a ring of four sums gradients of 4 bytes in two rounds; or in one, and gathers weights of 2 bytes."""
    found = job(Mesh(data=4, pipeline=4, sharing=Sharing(what)), schedule="pipedream")
    step = stepped(found)
    assert step.sharded is step.graph
    parameters = 2 * found.architecture.layer_parameters + found.architecture.embedding_parameters
    ring_s = volumes * 3 / 4 * 4 * parameters / found.machine.intra_bytes_per_s
    assert ring_s < step.terms["data"] < 1.5 * ring_s, "the links give a part of what they are sold for"


def test_replicas_inside_an_order_are_summed_where_layers_are_counted():
    """Chimera holds every stage twice: four ranks of given seconds are as they were, without a mesh."""
    found = job(Mesh(pipeline=4, sharing=Sharing("none")), schedule="chimera")
    given, counted = stepped(found, counts_layers=False), stepped(found)
    assert given.sharded is given.graph
    assert given.terms["data"] == 0 < counted.terms["data"]
    assert {lane for row in counted.sharded.schedule.rows for lane, _ in row} == {"compute", "net"}


def test_gradients_of_early_stages_hide_behind_the_last_microbatch():
    found = job(Mesh(data=8, pipeline=4, sharing=Sharing("none")))
    step = stepped(found)
    schedule, costs = step.sharded.schedule, step.costs
    reduces = [action for row in schedule.lanes for action in row["net"] if action.kind is Kind.REDUCE_GRAD]
    assert len(reduces) == 4
    assert max(step.timeline.end) - makespan_s(found) == pytest.approx(
        max(float(costs.transfer_time(payload)) for payload in Analysis(schedule).payload.values()), rel=0.2
    )


def test_devices_outside_the_schedule_count_as_replicas():
    order = entries()["1f1b"].build(Shape(2, 2, 4))
    outside = replace(order, shape=replace(order.shape, outer_replicas=4))
    analysis = Analysis(shard(outside, parameters="step", gradients="step"))
    shares = {payload.share for payload in analysis.payload.values()}
    assert shares == {Fraction(3, 4)}


def test_weights_of_a_step_are_gathered_as_it_begins_even_before_the_last_ends():
    """PipeDream-2BW: forwards of the second step come before the last backwards of the first."""
    order = add_steps(entries()["pipedream_2bw"].build(Shape(2, 2, 4, num_steps=2)))
    outside = replace(order, shape=replace(order.shape, outer_replicas=2))
    sharded = shard(outside, parameters="step", gradients="step")
    check(sharded)
    assert [" ".join(map(str, row["net"])) for row in sharded.lanes] == [
        "0UNSHARD@0 0UNSHARD@0 0REDUCE_GRAD 0RESHARD 0REDUCE_GRAD 0RESHARD",
        "1UNSHARD@0 1REDUCE_GRAD 1RESHARD 1UNSHARD@0 1REDUCE_GRAD 1RESHARD",
    ]


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


# --- one question, two ways to ask it --------------------------------------------------------------------------

HOST = (
    "model=llama31_8b",
    "model.vocab=32000",
    "cluster=8x_h100_sxm5_80gb",
    "cost=analytic",
    "workload.microbatch_sequences=2",
)
NODES = ("++cluster.devices_per_node=4", "++cluster.inter_bytes_per_s=450.0e9")
REPLICAS = ("schedule=1f1b", "num_devices=8", "num_microbatches=4", "mesh.data=8")


def mesh_step_s(*words: str) -> float:
    return float(prepare(load([*HOST, *REPLICAS, *words])).carry_out().fields["step_time_s"])


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_nodes_with_the_links_of_a_host_are_a_host(shard, recompute):
    words = (f"mesh.shard={shard}", f"recompute={recompute}")
    assert mesh_step_s(*words, *NODES) == pytest.approx(mesh_step_s(*words), rel=1e-3)
    slower = (NODES[0], "++cluster.inter_bytes_per_s=25.0e9")
    assert mesh_step_s(*words, *slower) > 1.0099 * mesh_step_s(*words)  # the slower of two nodes


@pytest.mark.parametrize(("name", "shard"), [("zero_2", "gradients"), ("zero_3", "parameters")])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_replicas_as_a_schedule_and_as_a_mesh_take_the_same(name, shard, recompute):
    """The same actions, of eight devices and of one that eight do: among eight, stages are gathered beside steps."""
    words = (f"schedule={name}", "num_devices=8", "num_microbatches=32", "num_steps=3", "charge=bytes")
    found = assemble(load([*HOST, *words, f"recompute={recompute}", "chunks_per_device=4"]))
    timeline = simulate_charged(found.graph, found.costs)
    here_s = float(step_time(found.graph, timeline)) / timeline.units_per_second
    assert here_s == pytest.approx(mesh_step_s(f"mesh.shard={shard}", f"recompute={recompute}"), rel=3e-3)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_a_plain_run_of_replicas_takes_what_their_search_says(shard):
    request = load([*HOST, *REPLICAS, f"mesh.shard={shard}", "recompute=none"])
    assert mesh_step_s(f"mesh.shard={shard}", "recompute=none") == pytest.approx(
        sum(exact_terms(job_of(request)).values()), rel=1e-12
    )


def test_one_rank_of_shards_takes_what_its_search_says():
    """No replicas: a closed form would also look up tokens, for which no simulated stage has a time."""
    words = ("schedule=1f1b", "model=mixtral_8x7b", "cluster=8x_mi300x", "num_devices=8", "num_microbatches=2")
    request = load([*words, "mesh.tensor=8", "mesh.expert=8", "mesh.sequence_parallel=true", "mesh.shard=none"])
    found = prepare(request).carry_out().fields["step_time_s"]
    assert found == pytest.approx(sum(exact_terms(job_of(request)).values()), rel=1e-12)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_replicas_that_scatter_layer_by_layer_take_about_what_their_closed_forms_say(shard):
    found = job(Mesh(data=8, sharing=Sharing(shard)))
    closed, simulated = sum(step_terms(found).values()), sum(exact_terms(found).values())
    assert simulated == pytest.approx(closed, rel=0.03)


def test_scattered_layers_take_what_a_device_computes_where_links_take_nothing():
    """A machine whose links are as good as free: the work of all layers, and what runs beside loses its share."""
    found = job(Mesh(data=8, sharing=Sharing("gradients")))
    free = replace(found, machine=replace(found.machine, collective_bytes_per_s=1e18, intra_latency_s=0.0))
    terms = layered(free).terms
    assert terms["work"] == pytest.approx(sum(stages_of_step(free).both(0) for _ in range(8)), rel=0.01)
    assert terms["data"] == pytest.approx(0, abs=1e-6 * terms["work"])


def test_the_last_sum_of_scattered_layers_has_nothing_to_hide_behind():
    """One microbatch, links so slow that they are all the time there is: a gather of all, a sum of all, by hand."""
    found = job(Mesh(data=8, sharing=Sharing("gradients")), num_microbatches=1)
    slow = replace(found, machine=replace(found.machine, collective_bytes_per_s=1e6, intra_latency_s=0.0))
    parameters = held(slow, 0).dense
    ring_s = 7 / 8 * (2 + slow.software.gradient_bytes) * parameters / 1e6
    assert sum(layered(slow).terms.values()) == pytest.approx(ring_s, rel=0.05)
