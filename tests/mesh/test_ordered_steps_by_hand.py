"""What the seconds of an ordered step are made of, what links reach, and kinds of values, by hand."""

from dataclasses import replace

import pytest

from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.cost.hardware.machine import Machine
from rpbench.ir.partition import symmetric
from rpbench.mesh.exact import exact_terms, mesh_times, problem_of
from rpbench.mesh.job import Job
from rpbench.mesh.layer_bytes import layer_bytes, sizes_of
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.ordered_step import simulate_step
from rpbench.mesh.parameters import held_by_stage
from rpbench.mesh.placement import reached, with_collectives
from rpbench.mesh.software import software_of
from rpbench.workload.counts import Experts, Layer
from tests.mesh.without_quirks import COMPUTES, MOVES, NEVER, OWN, PLAIN, RING, TOKENS, plain_machine, setting

ONE = ("microbatch_s", "step_s", "optimizer_bytes", "jitter", "beside", "broadcast_s", "hop_s")
FREE = replace(PLAIN, split_penalty=1.0, gradients_beside=False, parameters_beside=False).with_constants(
    dict.fromkeys(ONE, NEVER)
)
EIGHT = replace(OWN, num_layers=8)
NONE = Sharing("none")


def job(mesh, *, device=COMPUTES, software=FREE, **options):
    return Job(EIGHT, plain_machine(mesh.num_devices, device), mesh, software, TOKENS, num_microbatches=8, **options)


def stepped(found):
    problem, cut = problem_of(found), symmetric(found.cut)
    return simulate_step(found, problem.order(cut), problem.costs(cut), counts_layers=True)


@pytest.mark.parametrize("schedule, recompute", [("1f1b", "none"), ("1f1b", "full"), ("zb_h1", "none")])
def test_work_of_the_busiest_rank_is_made_of_kernels_collectives_and_what_is_made_again(schedule, recompute):
    """In proportion to the seconds of all layers and the head; halves of a backward take longer, nothing else does."""
    known = replace(FREE, split_penalty=1.5)
    found = job(Mesh(pipeline=4, tensor=2, sharing=NONE), software=known, schedule=schedule, recompute=recompute)
    terms, penalty = stepped(found).terms, 1.5 if schedule == "zb_h1" else 1.0
    layers = [found.kinds[kind] for kind in EIGHT.layers] + [found.head]
    kernels = sum(each.forward + penalty * (each.input_grad + each.weight_grad) for each in layers)
    collectives = sum(each.forward_exposed + each.backward_exposed for each in layers)
    again = sum(each.recompute for each in layers)
    assert terms["collectives"] / terms["kernels"] == pytest.approx(collectives / kernels)
    assert terms["recompute"] / terms["kernels"] == pytest.approx(again / kernels)
    assert terms["host"] == pytest.approx(0)
    assert (again > 0) == (recompute == "full")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_an_even_step_without_hops_is_m_stages_of_work_and_p_minus_1_of_bubble(schedule):
    """Layers of a pipeline of four, with the head's seconds on top of the last one's."""
    found = job(Mesh(pipeline=4, sharing=NONE), schedule=schedule)
    terms, layer, head = stepped(found).terms, found.kinds[EIGHT.layers[0]], found.head
    stage, top = 2 * (layer.forward_all + layer.backward_all), head.forward_all + head.backward_all
    work = terms["kernels"] + terms["recompute"] + terms["collectives"] + terms["host"]
    assert work == pytest.approx(8 * (stage + top))
    assert terms["bubble"] == pytest.approx(3 * stage, rel=1e-6)


def test_what_every_rank_loses_with_a_microbatch_is_spread_over_its_layers_both_ways():
    known = FREE.with_constants({"microbatch_s": 1.0})
    lost, plain = (job(Mesh(pipeline=4, sharing=NONE), software=each) for each in (known, FREE))
    more = [a - b for a, b in zip(mesh_times(lost).forward, mesh_times(plain).forward, strict=True)]
    assert more == pytest.approx([1 * 4 / (2 * 8)] * 8)
    assert stepped(lost).terms["host"] > 0


@pytest.mark.parametrize("schedule, blocks", [("1f1b", True), ("zb_h1", False)])
def test_transfers_that_block_add_their_way_through_all_stages_to_the_layers(schedule, blocks):
    mesh, known = Mesh(pipeline=4, sharing=NONE), replace(FREE, blocking_hops=True)
    slow, free = (job(mesh, software=each, schedule=schedule) for each in (known, FREE))
    more = sum(mesh_times(slow).forward) - sum(mesh_times(free).forward)
    assert more == pytest.approx(3 * slow.hop_s if blocks else 0.0)


@pytest.mark.parametrize("pipeline, data", [(1, 32), (4, 8)])
def test_the_loss_of_nodes_is_a_share_of_all_else_simulated_or_not(pipeline, data):
    """Four nodes: two doublings."""
    known = FREE.with_constants({"jitter": 0.1, "step_s": 1.0})
    found = job(Mesh(data, pipeline, sharing=NONE), software=known)
    for terms in (exact_terms(found), stepped(found).terms):
        rest = sum(value for name, value in terms.items() if name != "jitter")
        assert terms["jitter"] == pytest.approx(0.2 * rest)


def test_gradients_that_nothing_hides_follow_the_step():
    """Of the stage with most parameters, over the ring of its replicas."""
    found = job(Mesh(2, 4, sharing=NONE), device=MOVES)
    most = max(held_by_stage(found, stage).dense for stage in range(4))
    assert stepped(found).terms["data"] == pytest.approx(2 * 4 * most / 2 / RING, rel=1e-6)
    shared = job(Mesh(2, 4, sharing=Sharing("optimizer")), device=MOVES)
    assert stepped(shared).terms["data"] == pytest.approx((4 + 2) * most / 2 / RING, rel=1e-6)
    assert exact_terms(shared)["data"] == pytest.approx(stepped(shared).terms["data"])


def test_replicas_without_a_pipeline_have_the_terms_of_the_closed_form():
    found = job(Mesh(4, sharing=NONE), device=MOVES)
    count = held_by_stage(found, 0).dense
    assert stepped(found).terms["data"] == pytest.approx(2 * 4 * count * 3 / 4 / RING)


def test_replicas_all_of_whose_experts_are_different_exchange_what_is_dense():
    own = replace(EIGHT, experts=Experts(total=4, active=2, inner=512))
    mesh = Mesh(4, expert=4, sharing=NONE)
    found = Job(own, plain_machine(4, MOVES), mesh, FREE, TOKENS, num_microbatches=8)
    dense = held_by_stage(found, 0).dense
    assert stepped(found).terms["data"] == pytest.approx(2 * 4 * dense * 3 / 4 / RING)


# --- links and software ----------------------------------------------------------------------------------------


def test_links_are_reached_by_a_share_of_their_figures_and_in_full_where_they_were_measured():
    half = PLAIN.with_constants({"intra": 0.5, "inter": 0.25})
    two = replace(plain_machine(16), collective_bytes_per_s=None, intra_bytes_per_s=80.0, inter_bytes_per_s=40.0)
    assert reached(two, half) == (40, 10)
    assert reached(replace(two, collective_bytes_per_s=70.0), half) == (70, 10)
    alone = replace(two, num_devices=8)
    assert reached(alone, half) == (40, 10)
    assert reached(replace(alone, inter_bytes_per_s=None), half) == (40, 40)  # nothing is further away
    assert reached(replace(two, intra_bytes_per_s=None), half).intra_bytes_per_s == COMPUTES.link_bytes_per_s / 2
    with pytest.raises(ValueError, match="has no inter_bytes_per_s"):
        reached(replace(two, inter_bytes_per_s=None), half)


def test_only_what_is_not_known_of_collectives_is_filled_in():
    half = PLAIN.with_constants({"intra": 0.5})
    bare = replace(plain_machine(8), collective_bytes_per_s=None, intra_bytes_per_s=80.0)
    assert with_collectives(bare, half).collective_bytes_per_s == 40
    given = replace(bare, collective_bytes_per_s=70.0)
    assert with_collectives(given, half) is given
    assert with_collectives(bare, replace(half, kernels="eager")) is bare
    unknown = Machine("unknown")
    assert with_collectives(unknown, half) is unknown


@pytest.mark.parametrize(
    "key, good, wrong",
    [
        ("passes", 0, -1), ("passes", 2.5, "many"), ("gradient_bytes", 2, 0), ("gradient_bytes", 4, 2.5),
        ("zigzag", True, 1), ("source", "a page", 3), ("constants", {}, 1), ("loss_bytes", 1, True),
    ],
)  # fmt: skip
def test_a_trait_has_the_kind_of_its_usual_value(key, good, wrong):
    assert getattr(software_of({"name": "own", key: good}), key) is not None
    with pytest.raises(ValueError, match=rf"software\.{key}="):
        software_of({"name": "own", key: wrong})


# --- sizes of a model as a software has them -------------------------------------------------------------------


def test_eager_kernels_keep_every_tensor_of_their_operators():
    """More than fused ones: norms keep their input in 32 bits and their product in 16."""
    tiled = setting()
    numbers = dict.fromkeys(("kept_norm_bytes", "kept_gate_bytes"), 1000.0)
    eager = setting(software=replace(PLAIN, kernels="eager", numbers={**numbers, "working_gate_bytes": 0.0}))
    norms = 2 * (1000 + 2) * 1024
    cut = 2 * 2 * (1024 + 512) + 1000 * 4096
    assert layer_bytes(eager, Layer(False, None)) == pytest.approx(TOKENS * (norms + cut))
    assert layer_bytes(tiled, Layer(False, None)) == pytest.approx(
        2 * TOKENS * (4 * 1024 + 1024 + 1024 + 1024 + 3 * 4096)
    )


def test_sizes_of_a_host_are_those_of_its_software():
    """Rows of the vocabulary are padded to 256; gradients add up in 32 bits, and are summed as the software does."""
    known = replace(PLAIN, accumulate_bytes=4, gradient_bytes=2, logit_bytes=6.0)
    own = replace(OWN, vocab=31999)
    found = sizes_of(setting(own, software=known), TOKENS)
    assert isinstance(found, ModelBytes)
    assert found.embedding.weights == 2 * 32000 * 1024
    assert (found.summed_bytes, found.reduced_bytes) == (4, 2)
    assert found.logits == 6 * TOKENS * 32000
    assert found.working == 8 * TOKENS * 1024
    assert found.logits_until_weights == pytest.approx(2 / 6)
    assert [layer.inputs for layer in found.layers] == [2 * TOKENS * 1024] * 2
    frozen = sizes_of(setting(replace(own, frozen_layers=1), software=known), TOKENS)
    assert [layer.inputs > 0 for layer in frozen.layers] == [False, True]
