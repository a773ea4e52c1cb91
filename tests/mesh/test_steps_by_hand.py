"""Steps of a mesh on links without latency, by hand: sums of gradients, pipelines of given stages, a tied matrix."""

from dataclasses import replace
from math import log2

import pytest

from rpbench.mesh import software as of_software
from rpbench.mesh.data_parallel import Reduced, beside_computation, gathered_layer, reduced
from rpbench.mesh.job import Job, StageSeconds, stage_seconds
from rpbench.mesh.layer_bytes import input_bytes, layer_bytes, logits_bytes, working_bytes
from rpbench.mesh.layers.adapters import Adapters
from rpbench.mesh.layers.layer_seconds import Seconds
from rpbench.mesh.layers.layer_times import lost_s, tied_s
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.memory import bytes_of_ranks, kept_bytes, working_set_bytes
from rpbench.mesh.parameters import Held, held, trained
from rpbench.mesh.plan_search.search import Prediction
from rpbench.mesh.step import pipeline_terms, step_terms
from rpbench.workload.counts import Experts, Latent, Layer
from tests.mesh.without_quirks import BANDWIDTH, CARD, COMPUTES, MOVES, NEVER, OWN, PLAIN, RING, TOKENS, plain_machine

ONE = ("microbatch_s", "step_s", "optimizer_bytes", "jitter", "beside", "broadcast_s", "hop_s")
FREE = PLAIN.with_constants(dict.fromkeys(ONE, NEVER))
EIGHT = replace(OWN, num_layers=8)
DENSE = Layer(False, None)
LAYER = 1024 * 2048 + 1024 * 1024 + 1024 * 8192 + 4096 * 1024 + 2 * 1024  # matrices and two norms
MATRIX = 32000 * 1024


def job(mesh, *, own=EIGHT, device=COMPUTES, software=FREE, **options):
    where = plain_machine(mesh.num_devices, device)
    return Job(own, where, mesh, software, TOKENS, **{"num_microbatches": 8, **options})


def shared(what, data=4, **options):
    return Mesh(data, sharing=Sharing(what, options.pop("group", 0), options.pop("reshard", True)), **options)


# --- what replicas exchange ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what, gradients, parameters", [("none", 2, 0), ("optimizer", 1, 1), ("gradients", 1, 1)])
def test_replicas_sum_in_32_bits_and_gather_in_16(what, gradients, parameters):
    found = reduced(job(shared(what)), Held(1e9, 0.0, 0.0))
    assert found == pytest.approx((gradients * 4e9 * 3 / 4 / RING, parameters * 2e9 * 3 / 4 / RING))
    assert reduced(job(Mesh(sharing=Sharing(what))), Held(1e9, 0.0, 0.0)) == (0, 0)


def test_some_frameworks_sum_whole_gradients_before_they_gather():
    known = replace(FREE, reduce_volumes=3)
    found = reduced(job(shared("optimizer"), software=known), Held(1e9, 0.0, 0.0))
    assert found == pytest.approx((2 * 4e9 * 3 / 4 / RING, 2e9 * 3 / 4 / RING))


def test_hybrid_sharding_sums_over_all_replicas_and_gathers_in_its_group():
    """16 replicas on two nodes of eight, in groups of two."""
    found = reduced(job(shared("optimizer", 16, group=2)), Held(1e9, 0.0, 0.0))
    assert found == pytest.approx((2 * 4e9 * 15 / 16 / RING, 2e9 / 2 / RING))


def test_experts_are_summed_by_those_who_have_them():
    own = replace(EIGHT, experts=Experts(total=4, active=2, inner=512))
    mesh = Mesh(8, expert=4, sharing=Sharing("none"))
    assert reduced(job(mesh, own=own), Held(0.0, 1e9, 0.0)).gradients == pytest.approx(2 * 4e9 / 2 / RING)
    assert reduced(job(replace(mesh, expert=2), own=own), Held(0.0, 1e9, 0.0)).gradients == pytest.approx(
        2 * 4e9 * 3 / 4 / RING
    )
    both = reduced(job(mesh, own=own), Held(1e9, 1e9, 0.0)).gradients
    assert both == pytest.approx(2 * 4e9 * (7 / 8 + 1 / 2) / RING)


def test_what_runs_beside_computation_leaves_six_hundredths_and_what_is_longer():
    found = job(shared("optimizer"))
    assert beside_computation(found, Reduced(10.0, 5.0), 100.0, 100.0) == pytest.approx((0.6, 0.3))
    assert beside_computation(found, Reduced(10.0, 5.0), 4.0, 3.0) == pytest.approx((7.0, 1.0))
    apart = job(shared("optimizer"), software=replace(FREE, gradients_beside=False, parameters_beside=False))
    assert beside_computation(apart, Reduced(10.0, 5.0), 100.0, 100.0) == (10, 5)
    slowed = job(shared("optimizer"), software=FREE.with_constants({"beside": 0.1}))
    assert beside_computation(slowed, Reduced(10.0, 5.0), 4.0, 3.0) == pytest.approx((7.3, 1.4))


def test_sums_after_every_backward_hide_behind_the_next_forward_too():
    """Four sums of 10 s behind four backwards of 3 s and three forwards of 4 s; only the last one has a tail."""
    found = job(shared("gradients"))
    assert beside_computation(found, Reduced(10.0, 0.0), 4.0, 3.0, 4).gradients == pytest.approx(40 - 12 - 12)
    assert beside_computation(found, Reduced(10.0, 0.0), 50.0, 50.0, 4).gradients == pytest.approx(0.06 * 10)


def test_gathered_layers_take_the_longer_of_computing_and_moving():
    compute, found = Seconds(3.0, 2.0, 2.0, recompute=1.0), job(shared("parameters"))
    quick = gathered_layer(found, compute, 1e6)
    assert (quick.forward, quick.backward) == pytest.approx((3.0, 5.0))
    slow = gathered_layer(found, compute, 1e12)
    assert slow.forward == pytest.approx(2e12 * 3 / 4 / RING)
    assert slow.backward == pytest.approx((2e12 + 4e12) * 3 / 4 / RING)
    frozen = gathered_layer(job(shared("parameters"), adapters=Adapters(8)), compute, 1e12)
    assert frozen.backward == pytest.approx(frozen.gather)
    slowed = gathered_layer(job(shared("parameters"), software=FREE.with_constants({"beside": 0.1})), compute, 1e6)
    assert (slowed.forward, slowed.backward) == pytest.approx((3.3, 5.5))


def test_hybrid_sharding_of_parameters_sums_its_shards_over_the_other_groups():
    found = gathered_layer(job(shared("parameters", 16, group=4)), Seconds(0.0, 0.0, 0.0), 1e9)
    assert found.gather == pytest.approx(2e9 * 3 / 4 / RING)
    assert found.scatter == pytest.approx(4e9 * 3 / 4 / RING + 2 * 1e9 * 15 / 16 / RING)


@pytest.mark.parametrize("tied", [False, True])
def test_the_root_unit_is_gathered_for_every_microbatch_and_its_gradients_summed_once(tied):
    terms = step_terms(job(shared("parameters"), own=replace(EIGHT, tied=tied)))
    root = MATRIX * (1 if tied else 2) * 3 / 4 / RING
    assert terms["data"] == pytest.approx((4 + 8 * 2) * root)


# --- a pipeline of given stages --------------------------------------------------------------------------------


def stages(*forward, back=2.0, again=0.0):
    return StageSeconds(forward, tuple(back * each for each in forward), tuple(again * each for each in forward))


def test_the_busiest_rank_works_and_every_other_one_fills_once():
    found = pipeline_terms(job(Mesh(pipeline=4, sharing=Sharing("none"))), stages(1.0, 2.0, 1.0, 1.0, again=1.0))
    assert (found["work"], found["bubble"]) == pytest.approx((8 * 8, 3 * 4))
    alone = pipeline_terms(job(Mesh(sharing=Sharing("none"))), stages(1.0))
    assert alone == pytest.approx({"work": 8 * 3})


@pytest.mark.parametrize("microbatches, rounds", [(8, 8), (6, 8)])
def test_an_interleaved_step_is_made_of_whole_rounds(microbatches, rounds):
    """Of rounds that are not full half is waited for: a rank still has the other direction to run."""
    options = {"schedule": "interleaved_1f1b", "chunks": 2, "num_microbatches": microbatches}
    found = pipeline_terms(job(Mesh(pipeline=4, sharing=Sharing("none")), **options), stages(*(1.0,) * 8))
    assert found["work"] == pytest.approx(microbatches * 6)
    assert found["bubble"] == pytest.approx(3 / 2 * 6 + (rounds - microbatches) * 6 / 2)


def test_a_first_microbatch_passes_all_links_and_orders_that_wait_pass_one_each_way_with_each():
    mesh, none = Mesh(pipeline=4, sharing=Sharing("none")), stages(0.0, 0.0, 0.0, 0.0)
    for name, times in (("1f1b", 6 + 16), ("gpipe", 6 + 16), ("zb_h1", 6)):
        found = job(mesh, schedule=name)
        assert pipeline_terms(found, none)["hops"] == pytest.approx(times * found.hop_s)
    looped = {"schedule": "interleaved_1f1b", "chunks": 2}
    for blocking, times in ((False, 6), (True, 6 + 2 * 2 * 8)):
        found = job(mesh, software=replace(FREE, blocking_hops=blocking), **looped)
        assert pipeline_terms(found, stages(*(0.0,) * 8))["hops"] == pytest.approx(times * found.hop_s)


def test_every_microbatch_costs_a_rank_what_software_loses():
    known = FREE.with_constants({"microbatch_s": 2.0})
    found = pipeline_terms(job(Mesh(pipeline=4, sharing=Sharing("none")), software=known), stages(*(1.0,) * 4))
    assert found["work"] + found["bubble"] == pytest.approx((8 + 3) * (3 + 2))
    layer_way = lost_s(job(Mesh(pipeline=4, sharing=Sharing("none")), software=known))
    assert layer_way * 2 * 8 == pytest.approx(4 * 2.0)  # all layers, both ways: once on each rank


def test_stages_are_sums_of_their_layers_and_the_ends():
    """The embedding is looked up first, 8 bytes a value; the head is in the last stage."""
    found = job(Mesh(pipeline=4, sharing=Sharing("none")), device=MOVES, cut=(1, 3, 3, 1), recompute="full")
    layer, seconds = found.kinds[found.architecture.layers[0]], stage_seconds(found)
    assert seconds.forward[1] == pytest.approx(3 * layer.forward_all)
    assert seconds.backward[1] == pytest.approx(3 * layer.backward_all)
    assert seconds.recompute == pytest.approx((layer.recompute, *(3 * layer.recompute,) * 2, layer.recompute))
    assert seconds.forward[0] - layer.forward_all == pytest.approx(8 * TOKENS * 1024 / BANDWIDTH)
    assert seconds.forward[3] - layer.forward_all == pytest.approx(found.head.forward_all)
    assert seconds.backward[3] - layer.backward_all == pytest.approx(found.head.backward_all)
    assert seconds.both(1) == pytest.approx(3 * (layer.forward_all + layer.backward_all + layer.recompute))


# --- beside them -----------------------------------------------------------------------------------------------


def test_two_ends_sum_the_gradients_of_their_one_matrix():
    """An all-reduce between two devices passes its bytes once over the link that joins the first and the last stage."""
    tied, none = replace(EIGHT, tied=True), Sharing("none")
    found = job(Mesh(4, 4, sharing=none), own=tied)
    assert tied_s(found) == pytest.approx(4 * MATRIX / CARD)
    assert step_terms(found)["tied"] == tied_s(found)
    assert tied_s(job(Mesh(pipeline=2, sharing=none), own=tied)) == pytest.approx(4 * MATRIX / RING)
    for other in (
        job(Mesh(4, 4, sharing=none)),
        job(Mesh(16, sharing=none), own=tied),
        job(Mesh(4, 4, sharing=none), own=tied, adapters=Adapters(8)),
    ):
        assert tied_s(other) == 0


@pytest.mark.parametrize("what, parts", [("none", 1), ("optimizer", 4)])
def test_the_optimizer_of_the_rank_with_most_parameters_counts(what, parts):
    known = FREE.with_constants({"optimizer_bytes": 30.0})
    found = step_terms(job(Mesh(4, 4, sharing=Sharing(what)), software=known, device=MOVES, cut=(3, 1, 1, 3)))
    assert found["optimizer"] == pytest.approx(30 * (3 * LAYER + MATRIX) / parts / BANDWIDTH, rel=1e-3)
    learns = 3 * 8 * sum(k + n for k, n in ((1024, 2048), (1024, 1024), (1024, 8192), (4096, 1024)))
    adapters = job(
        Mesh(4, 4, sharing=Sharing(what)), software=known, device=MOVES, cut=(3, 1, 1, 3), adapters=Adapters(8)
    )
    assert step_terms(adapters)["optimizer"] == pytest.approx(30 * learns / parts / BANDWIDTH)


def test_a_step_loses_its_fixed_time_and_a_share_for_each_doubling_of_nodes():
    known = FREE.with_constants({"step_s": 3.0, "jitter": 0.1})
    for data, doublings in ((8, 0), (32, 2)):
        terms = step_terms(job(shared("none", data), software=known))
        assert terms["fixed"] == 3
        rest = sum(value for name, value in terms.items() if name != "jitter")
        assert terms.get("jitter", 0.0) == pytest.approx(0.1 * log2(2**doublings) * rest)
    broadcasts = FREE.with_constants({"broadcast_s": 5.0, "hop_s": 7.0})
    assert step_terms(job(shared("optimizer", 32), software=broadcasts))["fixed"] == pytest.approx(5 + 3 * 7)
    assert step_terms(job(shared("none", 32), software=broadcasts))["fixed"] == pytest.approx(0.0)


def test_a_prediction_counts_tokens_of_all_devices_in_the_step():
    run = job(Mesh(4, 2, sharing=Sharing("none")), sequences=2)
    found = Prediction(run, step_terms(run), {})
    assert found.step_time_s == sum(found.terms.values())
    assert found.tokens_per_s_per_device == pytest.approx(2 * 8 * 4 * TOKENS / found.step_time_s / 8)


def test_what_was_fitted_for_a_framework_is_what_its_rows_say():
    lines = [line.split(",") for line in (of_software.CONF / "software" / "constants.csv").read_text().splitlines()]
    place = lines[0].index("software"), lines[0].index("constant"), lines[0].index("value")
    for name in {line[place[0]] for line in lines[1:]}:
        own = {line[place[1]]: float(line[place[2]]) for line in lines if line[place[0]] == name}
        assert of_software.fitted(name) == own
    assert of_software.fitted("nobody") == {}


# --- bytes -----------------------------------------------------------------------------------------------------


def test_parameters_of_ranks_are_counted_matrix_by_matrix():
    found = job(Mesh(pipeline=4, sharing=Sharing("none")), cut=(1, 3, 3, 1))
    counts = [held(found, rank).dense for rank in range(4)]
    assert counts == [LAYER + MATRIX, 3 * LAYER, 3 * LAYER, LAYER + MATRIX]
    tied = job(Mesh(sharing=Sharing("none")), own=replace(EIGHT, tied=True))
    assert held(tied, 0).dense == 8 * LAYER + MATRIX
    looped = job(Mesh(pipeline=2, sharing=Sharing("none")), cut=(1, 2, 4, 1), schedule="interleaved_1f1b", chunks=2)
    assert [held(looped, rank).dense for rank in (0, 1)] == [5 * LAYER + MATRIX, 3 * LAYER + MATRIX]
    learned = job(Mesh(sharing=Sharing("none")), own=replace(EIGHT, learned_positions=2048))
    assert held(learned, 0).dense == 8 * LAYER + 2 * MATRIX + 2048 * 1024


@pytest.mark.parametrize("expert, expert_tensor", [(1, 1), (4, 1), (2, 2)])
def test_experts_are_dealt_to_devices_and_cut_among_shards(expert, expert_tensor):
    own = replace(EIGHT, experts=Experts(total=8, active=2, inner=512))
    mesh = Mesh(2, 1, 2, expert=expert, expert_tensor=expert_tensor, sharing=Sharing("none"))
    found = held(job(mesh, own=own), 0)
    experts = 8 * 3 * 1024 * 512 / (expert * expert_tensor)
    assert found.experts == pytest.approx(8 * experts)
    attention = 1024 * 2048 + 1024 * 1024 + 1024 * 8 + 2 * 1024
    assert found.largest == pytest.approx(attention / 2 + experts)


def test_adapters_alone_learn():
    found = job(Mesh(sharing=Sharing("none")), adapters=Adapters(8, mlp=False))
    each = 8 * (1024 + 2048 + 1024 + 1024)
    assert trained(found, 0) == Held(8 * each, 0.0, each)
    classes = bytes_of_ranks(found)[0]
    assert classes["gradients"] == 4 * 8 * each
    assert classes["optimizer state"] == 12 * 8 * each
    assert classes["weights"] == pytest.approx(2 * (8 * LAYER + 2 * MATRIX + 8 * each))


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_that_a_pipeline_gathers_once_a_step_are_there_twice_over(reshard):
    """Whole 16-bit weights and whole sums of gradients beside the shards, where they are not dropped again."""
    mesh = shared("parameters", pipeline=2, reshard=reshard)
    found, count = bytes_of_ranks(job(mesh))[1], 4 * LAYER + MATRIX
    assert found["weights"] == pytest.approx(2 * count / 4 + (0 if reshard else 2 * count), rel=1e-3)
    assert found["gradients"] == pytest.approx(4 * count / (4 if reshard else 1), rel=1e-3)
    assert found["optimizer state"] == pytest.approx(12 * count / 4, rel=1e-3)


@pytest.mark.parametrize("tensor, sequence_parallel", [(1, False), (4, False), (4, True)])
def test_activations_are_counted_tensor_by_tensor(tensor, sequence_parallel):
    """16 bits: inputs of norms and blocks, queries, keys, values and output, three of the gated product's values."""
    setting = job(Mesh(tensor=tensor, sequence_parallel=sequence_parallel, sharing=Sharing("none")))
    whole, cut = 4 * 1024, 1024 + 2 * 512 + 1024 + 3 * 4096
    spread = tensor if sequence_parallel else 1
    assert layer_bytes(setting, DENSE) == pytest.approx(2 * TOKENS * (whole / spread + cut / tensor))
    assert input_bytes(setting) == pytest.approx(2 * TOKENS * 1024 / spread)
    assert working_bytes(setting) == pytest.approx(8 * TOKENS * 1024)
    assert logits_bytes(setting) == pytest.approx(8 * TOKENS * (32000 if tensor == 1 else 32768 / 4))


def test_experts_keep_what_comes_in_and_goes_out_for_every_visit():
    own = replace(OWN, experts=Experts(total=8, active=2, inner=512, shared_inner=256))
    setting = job(Mesh(), own=own, cut=(2,))
    attention = 4 * 1024 + 1024 + 2 * 512 + 1024
    visits = 2 * (3 * 512 + 2 * 1024) + 3 * 256
    assert layer_bytes(setting, Layer(True, None)) == pytest.approx(2 * TOKENS * (attention + visits))


def test_latent_attention_keeps_its_narrow_queries_and_keys_and_full_heads_of_keys():
    latent = Latent(query_rank=64, key_value_rank=32, plain_dim=128, rotary_dim=16, value_dim=128)
    setting = job(Mesh(), own=replace(OWN, latent=latent), cut=(2,))
    heads = 2 * 8 * (128 + 16 + 128)
    narrow = 2 * (64 + 32 + 16)
    assert layer_bytes(setting, DENSE) == pytest.approx(2 * TOKENS * (4 * 1024 + narrow + heads + 3 * 4096))


@pytest.mark.parametrize("dropout, each", [(0.0, 2), (0.1, 5)])
def test_unfused_attention_keeps_its_scores(dropout, each):
    """Softmax in 16 bits, and with dropout its mask and what it leaves (Korthikanti et al., 5 a s^2 b)."""
    own, known = replace(OWN, dropout=dropout), replace(FREE, attention="unfused")
    found = {how: job(Mesh(), own=own, cut=(2,), software=known, recompute=how) for how in ("none", "selective")}
    kept, again = (layer_bytes(one, DENSE) for one in found.values())
    assert kept - again == pytest.approx(each * 8 * TOKENS**2)
    assert kept_bytes(found["none"], DENSE) == kept
    assert kept_bytes(replace(found["none"], recompute="per_op"), DENSE) == pytest.approx(kept / 2)
    whole = replace(found["none"], recompute="full")
    assert kept_bytes(whole, DENSE) == 2 * TOKENS * 1024
    assert working_set_bytes(whole) == pytest.approx(8 * TOKENS * 1024 + kept)
    assert working_set_bytes(found["none"]) == pytest.approx(8 * TOKENS * 1024)
