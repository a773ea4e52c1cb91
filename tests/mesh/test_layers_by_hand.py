"""Seconds of a layer on a device without quirks, by hand: FLOPs over the rate, bytes over the bandwidth, rings."""

from dataclasses import replace
from math import comb, log2

import pytest

from rpbench.mesh.layers.adapters import Adapters
from rpbench.mesh.layers.collectives import exchange_s, gather_s, hops, reduce_s, ring_pass_s
from rpbench.mesh.layers.layer_seconds import filled, head_seconds, layer_seconds
from rpbench.mesh.layers.layer_times import hop_s
from rpbench.mesh.layout import Mesh
from rpbench.mesh.placement import Group
from rpbench.workload.counts import Experts, Layer
from tests.mesh.without_quirks import BANDWIDTH, CARD, COMPUTES, MOVES, OWN, PLAIN, RATE, RING, TOKENS, setting

ATTENDS = replace(COMPUTES, name="attends", flops_16=1e30, attention_flops_per_s={"flash2": RATE})
LINKS = replace(COMPUTES, name="links", flops_16=1e30)
DENSE, ROUTED = Layer(False, None), Layer(True, None)
MOE = replace(OWN, experts=Experts(total=16, active=4, inner=512))
# Fused queries, keys and values; output; gate and up; down.
MAPS = ((1024, 2048), (1024, 1024), (1024, 8192), (4096, 1024))
WEIGHTS = sum(inputs * outputs for inputs, outputs in MAPS)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_products_take_two_flops_a_weight_and_token_each_way(tensor):
    found = layer_seconds(setting(mesh=Mesh(tensor=tensor)), DENSE)
    expected = 2 * TOKENS * WEIGHTS / tensor / RATE
    assert found[:3] == pytest.approx((expected,) * 3)


def test_products_that_wait_for_memory_read_two_matrices_and_write_one():
    """16 bits; the gradient of a weight is read and written where it adds up, in 32 bits."""
    found = layer_seconds(setting(device=MOVES, software=replace(PLAIN, passes=0.0)), DENSE)
    inner = 2 * TOKENS * 5 * OWN.inner  # what the gate's product reads, keeps and writes
    sides = [(2 * TOKENS * k, 2 * k * n, 2 * TOKENS * n) for k, n in MAPS]
    forward = sum(x + w + y for x, w, y in sides)
    assert found.forward == pytest.approx((forward + inner) / BANDWIDTH)
    assert found.input_grad == pytest.approx((forward + 1.6 * inner) / BANDWIDTH)
    assert found.weight_grad == pytest.approx(sum(x + y + 2 * 2 * w for x, w, y in sides) / BANDWIDTH)


@pytest.mark.parametrize("precision, bits", [("bf16", 16), ("fp8", 8), ("nvfp4", 4)])
def test_narrower_numbers_run_at_the_rate_of_their_units(precision, bits):
    device = replace(COMPUTES, flops_8=2 * RATE, sustained_8=1.0, flops_4=4 * RATE, sustained_4=1.0)
    found = layer_seconds(setting(device=device, precision=precision), DENSE)
    assert found.forward == pytest.approx(2 * TOKENS * WEIGHTS / (RATE * 16 / bits))
    head = head_seconds(setting(device=device, precision=precision))  # stays in 16 bits
    assert head.weight_grad == pytest.approx(2 * TOKENS * OWN.hidden * 32000 / RATE)


def test_experts_take_the_products_of_those_a_token_visits_and_the_router_those_of_all():
    """Of 256 experts a token visits 64: then 256 tokens come to each, and fill its tiles."""
    own = replace(OWN, experts=Experts(total=256, active=64, inner=256))
    attention, router, expert = 1024 * 2048 + 1024 * 1024, 1024 * 256, 3 * 1024 * 256
    found = layer_seconds(setting(own), ROUTED)
    assert found[:3] == pytest.approx((2 * TOKENS * (attention + router + 64 * expert) / RATE,) * 3)
    shared = layer_seconds(setting(replace(own, experts=replace(own.experts, shared_inner=2048))), ROUTED)
    beside = 2 * TOKENS * 3 * 1024 * 2048 / RATE
    assert [one - other for one, other in zip(shared[:3], found[:3], strict=True)] == pytest.approx([beside] * 3)
    busiest = layer_seconds(setting(own, software=PLAIN.with_constants({"imbalance": 2.0})), ROUTED)
    assert busiest.forward - found.forward == pytest.approx(2 * TOKENS * 64 * expert / RATE)


@pytest.mark.parametrize("expert", [1, 4])
def test_experts_that_wait_for_memory_read_the_weights_they_have_once(expert):
    mesh = Mesh(data=expert, expert=expert)
    own = replace(MOE, experts=replace(MOE.experts, inner=64))
    some, more = (
        layer_seconds(setting(replace(own, experts=replace(own.experts, total=total)), MOVES, mesh), ROUTED)
        for total in (1024, 2048)
    )
    weights = 1024 * 3 * 1024 * 64 / expert  # of those that are there besides, on one device
    router = 1024 * (1024 + TOKENS)  # its weights and what it gives, for as many more experts
    assert more.forward - some.forward == pytest.approx(2 * (weights + router) / BANDWIDTH, rel=1e-6)
    added = 2 * 4 * weights + 2 * 4 * 1024 * 1024 + 2 * 1024 * TOKENS
    assert more.weight_grad - some.weight_grad == pytest.approx(added / BANDWIDTH, rel=1e-6)


def test_gradients_of_experts_read_what_their_tokens_brought_and_what_comes_back():
    few, many = (
        layer_seconds(setting(replace(MOE, experts=Experts(16, active, 64)), MOVES), ROUTED) for active in (4, 8)
    )
    sides = (1024 + 2 * 64) + (64 + 1024)
    assert many.weight_grad - few.weight_grad == pytest.approx(2 * 4 * TOKENS * sides / BANDWIDTH)


def test_biases_of_experts_are_read_and_written_apart_from_their_products():
    plain, biased = (layer_seconds(setting(replace(MOE, biases=each), MOVES), ROUTED) for each in (False, True))
    assert biased.forward - plain.forward == pytest.approx(2 * 2 * TOKENS * 4 * (2 * 512 + 1024) / BANDWIDTH)


def test_a_dense_layer_beside_others_with_experts_is_that_of_a_dense_model():
    assert layer_seconds(setting(MOE, MOVES), DENSE) == layer_seconds(setting(OWN, MOVES), DENSE)


def test_two_products_of_attention_forward_and_five_back_over_half_of_the_keys():
    """Dao, "FlashAttention-2", ICLR'24: 2.5 times the FLOPs, at 85 % of the rate here; a mask leaves half of the keys.

    Short sequences run slower: at 1000 keys, both halves of the mask counted, at half the rate.
    """
    found = layer_seconds(setting(device=ATTENDS), DENSE)
    keys = (TOKENS + 1) / 2
    forward = 4 * TOKENS * OWN.hidden * keys / (RATE * 2 * keys / (2 * keys + 1000))
    assert found.forward == pytest.approx(forward)
    assert found.input_grad == pytest.approx(2.5 / 0.85 * forward)
    halves = layer_seconds(setting(device=ATTENDS, mesh=Mesh(tensor=2)), DENSE)
    assert halves.forward == pytest.approx(forward / 2)
    window = layer_seconds(setting(device=ATTENDS), Layer(False, 1))  # each query sees itself alone
    assert window.forward == pytest.approx(4 * TOKENS * OWN.hidden / (RATE * 2 / 1002))


def test_unbalanced_context_parallelism_waits_for_the_last_block():
    """Of c blocks in a row the last one sees 2 c / (c + 1) times the mean of keys."""
    dealt, plain = (
        layer_seconds(setting(device=ATTENDS, mesh=Mesh(context=4), software=replace(PLAIN, zigzag=how)), DENSE)
        for how in (True, False)
    )
    assert plain.forward / dealt.forward == pytest.approx(8 / 5)


def test_small_heads_reach_less_of_the_rate():
    wide, small = (
        layer_seconds(setting(replace(OWN, heads=heads, head_dim=dim), ATTENDS), DENSE)
        for heads, dim in ((8, 128), (16, 64))
    )
    assert small.forward == pytest.approx(wide.forward / 0.85)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("further", [0, 2])
def test_the_head_is_a_product_with_the_vocabulary_for_every_token_that_is_predicted(tied, further):
    own = replace(OWN, tied=tied, num_prediction_layers=further)
    found = head_seconds(setting(own))
    each = 2 * TOKENS * OWN.hidden * 32000 / RATE
    assert found[:3] == pytest.approx(((1 + further) * each,) * 3)
    frozen = head_seconds(setting(own, adapters=Adapters(8)))
    assert frozen.weight_grad == 0
    assert frozen.forward == found.forward


@pytest.mark.parametrize("tensor, rows", [(1, 32000), (2, 32256 // 2)])
def test_the_loss_moves_its_bytes_of_every_logit_half_each_way(tensor, rows):
    """Rows are padded to a multiple of 256 on every shard."""
    plain, none = (
        head_seconds(setting(device=MOVES, mesh=Mesh(tensor=tensor), software=replace(PLAIN, loss_bytes=each)))
        for each in (8.0, 0.0)
    )
    half = 0.5 * 8 * TOKENS * rows / BANDWIDTH
    assert plain.forward - none.forward == pytest.approx(half)
    assert plain.input_grad - none.input_grad == pytest.approx(half)
    assert plain.weight_grad == none.weight_grad


# --- what is made again ------------------------------------------------------------------------------------


def test_full_recomputation_is_a_forward_with_its_sums():
    found = layer_seconds(setting(mesh=Mesh(tensor=2), recompute="full"), DENSE)
    assert found.recompute == pytest.approx(found.forward + found.forward_exposed)
    more = replace(PLAIN, recompute=1.5).with_constants({"again": 2.0})
    assert layer_seconds(setting(software=more, recompute="full"), DENSE).recompute == pytest.approx(
        3 * found.forward * 2
    )


def test_recomputing_by_operator_leaves_attention_and_one_of_two_sums():
    found = layer_seconds(setting(device=ATTENDS, mesh=Mesh(tensor=2), recompute="per_op"), DENSE)
    assert found.recompute == pytest.approx(0.5 * found.forward_exposed)
    products = layer_seconds(setting(recompute="per_op"), DENSE)
    assert products.recompute == pytest.approx(0.45 * products.forward)


@pytest.mark.parametrize("attention, again", [("unfused", True), ("flash2", False)])
def test_selective_recomputation_makes_scores_again_where_there_are_any(attention, again):
    """Unfused: two products over all scores, 4 s^2 h FLOPs, of heads that fill 128 of 192 of what they occupy."""
    found = layer_seconds(setting(software=replace(PLAIN, attention=attention), recompute="selective"), DENSE)
    scores = 4 * TOKENS**2 * OWN.hidden / (RATE * 128 / (128 + 64))
    assert found.recompute == pytest.approx(scores if again else 0.0)
    if again:
        assert found.forward == pytest.approx(2 * TOKENS * WEIGHTS / RATE + scores)
        assert found.input_grad == pytest.approx(2 * TOKENS * WEIGHTS / RATE + 2 * scores)


def test_unfused_softmax_passes_over_all_scores_in_sixteen_bits():
    few, many = (
        layer_seconds(setting(device=MOVES, software=replace(PLAIN, attention="unfused", softmax_passes=each)), DENSE)
        for each in (1.0, 4.0)
    )
    scores = 2 * OWN.heads * TOKENS**2 / BANDWIDTH
    assert many.forward - few.forward == pytest.approx(3 * scores)
    assert many.input_grad - few.input_grad == pytest.approx(1.3 * 3 * scores)


# --- collectives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("hidden", [0.0, 0.25])
def test_a_layer_sums_twice_each_way_over_its_tensor_group(sequence_parallel, hidden):
    """Shoeybi et al., arXiv 1909.08053: two all-reduces of the hidden state; Korthikanti et al.: the same volume."""
    mesh, known = Mesh(tensor=4, sequence_parallel=sequence_parallel), replace(PLAIN, hidden_tensor=hidden)
    found = layer_seconds(setting(device=LINKS, mesh=mesh, software=known), DENSE)
    ring = 2 * 3 / 4 * 2 * TOKENS * OWN.hidden / RING
    assert found.forward_exposed == pytest.approx(2 * ring * (1 - hidden))
    assert found.backward_exposed == pytest.approx(2 * ring * (1 - hidden))
    head = head_seconds(setting(device=LINKS, mesh=mesh, software=known))
    assert head.backward_exposed == pytest.approx(ring)  # of what goes back into the layers
    assert layer_seconds(setting(device=LINKS), DENSE).forward_exposed == 0


@pytest.mark.parametrize("tensor, width", [(1, 4), (2, 2), (8, 1)])
def test_keys_and_values_go_around_the_ring_once_and_back_with_their_gradients(tensor, width):
    """A device has so many of the four heads of keys; a head is copied where there are more shards than heads."""
    mesh = Mesh(tensor=tensor, context=2)
    found, none = (layer_seconds(setting(device=LINKS, mesh=each), DENSE) for each in (mesh, Mesh(tensor=tensor)))
    sums = none.forward_exposed / 2  # of half as many tokens
    own = 2 * TOKENS / 2 * width * 2 * 128
    pace = RING if mesh.num_devices <= 8 else min(RING, CARD)
    assert found.forward_exposed - sums == pytest.approx(own / pace)
    assert found.backward_exposed - sums == pytest.approx(2 * own / pace)


def test_a_window_passes_on_what_it_sees():
    whole, half = (
        layer_seconds(setting(device=LINKS, mesh=Mesh(context=4)), Layer(False, window)).forward_exposed
        for window in (None, TOKENS // 8)
    )
    assert half == pytest.approx(whole / 2)  # half of a block of a quarter


def test_the_ring_hides_behind_nine_tenths_of_attention():
    slow = replace(ATTENDS, attention_flops_per_s={"flash2": 1e10})
    found, alone = (layer_seconds(setting(device=each, mesh=Mesh(context=2)), DENSE) for each in (slow, LINKS))
    core = layer_seconds(setting(device=slow, mesh=Mesh(context=2)), DENSE)
    assert found.forward_exposed == max(0.0, alone.forward_exposed - 0.9 * core.forward) == 0.0
    quick = replace(ATTENDS, attention_flops_per_s={"flash2": 1e15})
    found = layer_seconds(setting(device=quick, mesh=Mesh(context=2)), DENSE)
    assert found.forward_exposed == pytest.approx(alone.forward_exposed - 0.9 * found.forward)
    assert found.backward_exposed == pytest.approx(alone.backward_exposed - 0.9 * found.input_grad)


@pytest.mark.parametrize("bytes_each", [1, 2])
def test_tokens_go_to_their_experts_and_come_back(bytes_each):
    """An all-to-all of T k h values each way: 3 of 4 leave the device."""
    known = replace(PLAIN, dispatch_bytes=bytes_each, hidden_expert=0.5)
    found = layer_seconds(setting(MOE, LINKS, Mesh(data=4, expert=4), known), ROUTED)
    values = TOKENS * 4 * OWN.hidden
    assert found.forward_exposed == pytest.approx(0.5 * (bytes_each + 2) * values * 3 / 4 / RING)
    assert found.backward_exposed == found.forward_exposed
    assert layer_seconds(setting(MOE, LINKS, Mesh(data=4)), ROUTED).forward_exposed == 0


def test_a_dispatcher_that_deduplicates_sends_a_token_once_to_a_node():
    """Four of sixteen experts on two nodes: both of them but in C(8, 4) / C(16, 4) of the choices on either one."""
    once, each = (
        layer_seconds(
            setting(MOE, LINKS, Mesh(16, expert=16), replace(PLAIN, deduplicates=how)), ROUTED
        ).forward_exposed
        for how in (True, False)
    )
    assert each == pytest.approx((2 + 2) * TOKENS * 4 * OWN.hidden / 2 / CARD)
    assert once / each == pytest.approx(2 * (1 - comb(8, 4) / comb(16, 4)) / 4)


def test_shards_of_an_expert_gather_its_tokens_and_sum_what_comes_out():
    mesh = Mesh(data=2, tensor=2, expert=2, expert_tensor=2)
    whole = layer_seconds(setting(MOE, LINKS, mesh), ROUTED).forward_exposed
    sums = layer_seconds(setting(MOE, LINKS, Mesh(tensor=2)), ROUTED).forward_exposed
    values = TOKENS / 2 * 4 * OWN.hidden
    sent = 2 * 2 * values / 2 / RING
    joined = 2 * (2 * 2 * values) / 2 / RING
    assert whole - sums == pytest.approx(sent + joined)


def test_a_host_that_deals_tokens_out_takes_its_time_where_experts_are_apart():
    known = PLAIN.with_constants({"dispatch_s": 7.0})
    apart, here = (layer_seconds(setting(MOE, LINKS, mesh, known), ROUTED) for mesh in (Mesh(2, expert=2), Mesh()))
    assert apart.host == apart.forward_all == apart.backward_all == 7.0
    assert apart.waits == pytest.approx(14.0 - sum(apart[:3]) - apart.forward_exposed - apart.backward_exposed)
    assert here.host == 0
    assert layer_seconds(setting(MOE, LINKS, Mesh(2, expert=2), known), DENSE).host == 0


def test_adapters_read_their_input_and_read_and_write_their_output():
    """Two narrow products forward, their gradients back; 16 bits."""
    own, beside = replace(OWN, num_layers=2), Adapters(8)
    with_them, without = (layer_seconds(setting(own, MOVES, adapters=each), DENSE) for each in (beside, None))
    once = 2 * TOKENS * sum(k + 2 * n for k, n in MAPS) / BANDWIDTH
    assert with_them.forward - without.forward == pytest.approx(2 * once)
    assert with_them.input_grad - without.input_grad == pytest.approx(2 * once)
    assert with_them.weight_grad == pytest.approx(once)  # frozen weights have no gradients
    attention = layer_seconds(setting(own, MOVES, adapters=Adapters(8, mlp=False)), DENSE)
    assert attention.weight_grad == pytest.approx(2 * TOKENS * sum(k + 2 * n for k, n in MAPS[:2]) / BANDWIDTH)


def test_kernels_take_at_least_their_launches_and_a_layer_its_waits():
    """14 kernels of a layer with flash2, 12 more of experts; 1.3 times as many back."""
    known = PLAIN.with_constants({"launch_s": 1.0, "layer_s": 100.0})
    for own, layer, num in ((OWN, DENSE, 14), (MOE, ROUTED, 26)):
        found = layer_seconds(setting(own, LINKS, software=known), layer)
        assert found.forward == pytest.approx(num + 100)
        assert found.input_grad == pytest.approx(1.3 * num + 100)


@pytest.mark.parametrize("tensor, sequence_parallel", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("data, pace", [(1, RING), (8, CARD)])
def test_a_boundary_tensor_crosses_one_link_and_is_gathered_where_it_was_cut(data, pace, tensor, sequence_parallel):
    one = setting(mesh=Mesh(data, 2, tensor, sequence_parallel=sequence_parallel))
    sent = 2 * TOKENS * OWN.hidden / tensor
    gathered = 0.0 if sequence_parallel else sent * (tensor - 1) / RING
    assert hop_s(replace(one, sequences=2)) - hop_s(one) == pytest.approx(sent / pace + gathered)  # latency apart
    assert hop_s(setting(mesh=Mesh(tensor=tensor))) == 0


# --- groups ------------------------------------------------------------------------------------------------

NEAR, FAR = Group(4, 4, RING, CARD, 1e-3), Group(16, 4, RING, CARD, 1e-3)


def test_latency_is_seen_once_for_every_hop():
    assert [hops(each) for each in (NEAR, FAR, NEAR._replace(size=1))] == [3, 3 + 2 * log2(4), 0]
    assert gather_s(0.0, NEAR) == pytest.approx(3e-3)
    assert reduce_s(0.0, NEAR) == pytest.approx(6e-3)
    assert ring_pass_s(0.0, NEAR) == pytest.approx(3e-3)
    assert exchange_s(0.0, NEAR) == pytest.approx(1e-3)
    assert exchange_s(0.0, FAR) == pytest.approx(4e-3)  # once for every domain


def test_an_exchange_inside_a_node_sends_all_but_its_own_part():
    assert exchange_s(4e9, NEAR._replace(latency_s=0.0)) == pytest.approx(3e9 / RING)
    assert exchange_s(4e9, NEAR._replace(size=1, here=1)) == 0
    fewer = Group(2, 8, RING, CARD, 0.0)
    assert exchange_s(4e9, fewer) == pytest.approx(2e9 / RING)


def test_blocks_that_leave_a_node_share_its_cards():
    """Four members of a domain pass one block over four cards: a ring is as fast as they are together."""
    assert ring_pass_s(1e9, FAR._replace(latency_s=0.0)) == pytest.approx(15e9 / min(RING, 4 * CARD))
    assert ring_pass_s(1e9, NEAR._replace(size=1)) == 0


@pytest.mark.parametrize("depth, parts", [(1, 1), (2, 2), (4, 4), (40, 16)])
def test_a_deep_product_is_split_over_units_that_would_wait(depth, parts):
    """One tile of 64 x 64 for 16 units: one of them works, or as many as there are parts of 2048 (3 % are lost)."""
    whole, found = filled(64, 64, 2047, 16), filled(64, 64, 2048 * depth, 16)
    assert found / whole == pytest.approx(1 if parts == 1 else 0.97 * parts)


def test_a_wave_that_begins_takes_as_long_as_a_full_one():
    """Five tiles on four units take two waves; a batch of five products is five tiles."""
    assert filled(256, 128 * 4, 512, 4) == filled(256, 128, 512, 4, 4) == 1
    assert filled(256 * 5, 128, 512, 4) == filled(256, 128, 512, 4, 5)
    assert filled(256, 128, 512, 1, 5) == 1
