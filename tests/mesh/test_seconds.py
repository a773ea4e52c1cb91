"""Seconds of layers and steps: closed forms, what sizes do to products, what placement does to collectives."""

from dataclasses import replace
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.cost.hardware.machine import machine
from rpbench.mesh.data_parallel import gathered_layer
from rpbench.mesh.job import StageSeconds, stage_seconds
from rpbench.mesh.layers.collectives import exchange_s, gather_s, reduce_s, ring_pass_s
from rpbench.mesh.layers.layer_seconds import Seconds, _element_bytes, alignment, efficiency, filled
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.placement import Group
from rpbench.mesh.plan_search.closed_forms import _group
from rpbench.mesh.software import PRIORS
from rpbench.mesh.step import pipeline_terms, step_terms
from rpbench.workload.architecture import architecture
from tests.mesh.jobs import job

ALONE = Sharing("none")


def test_a_gather_moves_all_but_its_own_part_and_a_sum_twice_that():
    group = Group(8, 8, 100e9, 10e9, 0.0)
    assert gather_s(8e9, group) == pytest.approx(7e9 / 100e9)
    assert reduce_s(8e9, group) == pytest.approx(14e9 / 100e9)
    assert gather_s(8e9, group._replace(size=1)) == 0.0


def test_hops_grow_with_the_logarithm_beyond_a_node():
    near, far = (gather_s(0.0, Group(size, 8, 100e9, 10e9, 1.0)) for size in (8, 64))
    assert far - near == pytest.approx(2 * log2(8))


def test_an_exchange_across_nodes_waits_for_what_leaves_the_node():
    """16 members, 8 a node: half of the bytes leave, over a card of 10 GB/s."""
    group = Group(16, 8, 100e9, 10e9, 0.0)
    assert exchange_s(2e9, group) == pytest.approx(1e9 / 10e9)
    assert exchange_s(2e9, group, copies_outside=0.25) == pytest.approx(0.25e9 / 10e9)


def test_a_ring_pass_takes_every_block_but_its_own():
    assert ring_pass_s(1e9, Group(4, 4, 100e9, 10e9, 0.0)) == pytest.approx(0.03)


def test_one_wave_that_is_half_empty_takes_as_long_as_a_full_one():
    """108 units: 54 tiles of 128 x 256 fill half of them; with a shallow product nothing is split."""
    full, half = filled(128 * 108, 256, 512, 108), filled(128 * 54, 256, 512, 108)
    assert full == pytest.approx(1.0)
    assert half < 0.94  # smaller tiles, which run slower, fill the rest


@pytest.mark.parametrize("size, rate", [(1792, 1.0), (1800, 0.86), (1801, 0.4), (7200, 0.97)])
def test_alignment_goes_by_powers_of_two(size, rate):
    """h = 14400 on 8 devices leaves 1800, 14336 leaves 1792: NVIDIA's guide to matrix products."""
    assert alignment(size) == rate


def test_one_token_less_takes_no_longer():
    """The gradient of a weight sums over tokens, which lie in no row of a matrix (the guide: rows alone have to be
    aligned).
    """
    even, odd = (replace(job(Mesh()), seq_len=length).layers_s[0] for length in (4096, 4095))
    assert 0.999 * even.weight_grad < odd.weight_grad < even.weight_grad


@given(st.integers(1, 8192), st.integers(8, 8192), st.integers(8, 8192))
def test_no_product_beats_the_rate(m, n, k):
    assert 0 < efficiency(m, n, k, 132, 100.0, 80.0) < 1


def test_work_is_conserved_when_tensor_parallelism_cuts_it():
    """FLOPs of the matrices: shards of products add up to the whole."""
    own = architecture("llama3_8b")
    for t in (1, 2, 4, 8):
        cut = sum((i // t if ci else i) * (o // t if co else o) * t for i, o, ci, co in own.attention_maps())
        assert cut == sum(i * o for i, o, _, _ in own.attention_maps())


def test_even_stages_without_hops_take_m_plus_p_minus_1_of_them():
    terms = pipeline_terms(job(Mesh(pipeline=4, sharing=ALONE)), StageSeconds((1.0,) * 4, (2.0,) * 4, (0.0,) * 4))
    assert terms["work"] + terms["bubble"] == pytest.approx((8 + 4 - 1) * (1 + 2))


def test_one_chunk_of_an_interleaved_pipeline_is_1f1b():
    mesh = Mesh(pipeline=4, sharing=ALONE)
    plain, looped = (step_terms(job(mesh, schedule=name)) for name in ("1f1b", "interleaved_1f1b"))
    assert plain["work"] + plain["bubble"] == pytest.approx(looped["work"] + looped["bubble"])


def test_chunks_shrink_the_bubble():
    """(p - 1) / v of a rank's forward and backward (Narayanan et al., SC'21, section 2.2.2)."""
    found = job(Mesh(pipeline=4, sharing=ALONE), schedule="interleaved_1f1b", chunks=2)
    terms = pipeline_terms(found, StageSeconds((0.5,) * 8, (1.0,) * 8, (0.0,) * 8))
    assert terms["work"] == pytest.approx(8 * 3.0)
    assert terms["bubble"] == pytest.approx(3 / 2 * 3.0)


def test_fully_sharded_on_one_device_is_plain_training():
    plain, sharded = (step_terms(job(Mesh(sharing=Sharing(what)))) for what in ("none", "parameters"))
    assert plain == sharded


@pytest.mark.parametrize("what", ["none", "optimizer", "parameters"])
def test_faster_cards_never_slow_a_step(what):
    mesh = Mesh(data=8, tensor=4, sequence_parallel=True, sharing=Sharing(what))
    slow = job(mesh)
    fast = replace(slow, machine=replace(slow.machine, inter_bytes_per_s=2 * slow.machine.inter_bytes_per_s))
    assert sum(step_terms(fast).values()) <= sum(step_terms(slow).values())


@pytest.mark.parametrize("what", ["none", "optimizer", "parameters"])
def test_a_mesh_inside_a_node_does_not_depend_on_the_cards(what):
    found = job(Mesh(data=2, tensor=4, sharing=Sharing(what)))
    other = replace(found, machine=replace(found.machine, inter_bytes_per_s=1e9))
    assert step_terms(found) == step_terms(other)


def test_a_tensor_group_across_nodes_is_much_slower():
    inside, across = (sum(step_terms(job(Mesh(tensor=t), on="a100_800gbps")).values()) * t for t in (8, 16))
    assert across > 1.7 * inside


def test_experts_outside_a_node_cost_their_dispatch():
    own = replace(architecture("qwen3_30b_a3b"), num_layers=4)
    inside, across = (sum(step_terms(job(Mesh(data=64, expert=e), own=own)).values()) for e in (8, 64))
    assert across > inside


def test_a_head_belongs_to_the_last_stage():
    seconds = stage_seconds(job(Mesh(pipeline=4, sharing=ALONE)))
    assert seconds.forward[3] > 1.3 * seconds.forward[2]


def test_recomputation_runs_the_forward_again():
    plain, full = (job(Mesh(tensor=2), recompute=how) for how in ("none", "full"))
    (kind,) = plain.kinds
    assert plain.kinds[kind].recompute == 0.0
    assert full.kinds[kind].recompute == pytest.approx(full.kinds[kind].forward_all)


def test_recomputing_by_operator_runs_a_part_of_the_forward_again():
    some, full = (job(Mesh(tensor=2), recompute=how) for how in ("per_op", "full"))
    (kind,) = some.kinds
    assert 0.0 < some.kinds[kind].recompute < full.kinds[kind].recompute


def test_the_way_back_to_the_input_takes_longer_than_the_way_forth():
    """The same products, 2.5 times attention's and 1.6 times the element-wise work."""
    found = job(Mesh())
    (kind,) = found.kinds
    assert found.kinds[kind].input_grad > found.kinds[kind].forward


def test_element_wise_bytes_of_a_plain_layer_are_counted_by_hand():
    """16 bits: `passes` over the hidden state; two inner values in, one out and both kept of a gated product."""
    found = job(Mesh())
    (kind,), own, tokens = found.kinds, found.architecture, found.microbatch_tokens
    assert tokens == 4096
    expected = 2.0 * tokens * (own.hidden * found.software.passes + 5 * own.inner)
    assert _element_bytes(found, kind) == pytest.approx(expected)


def test_no_prior_is_vaguer_than_a_factor_of_three():
    assert all(0 < prior.log_sd <= 1.0 and prior.value > 0 for prior in PRIORS.values())
    assert PRIORS["tokens"].value >= 1, "no less than a token"


def test_heads_a_pipeline_and_a_mesh_are_checked_against_the_model():
    with pytest.raises(ValueError, match="make at most 8 stages"):
        job(Mesh(pipeline=16))
    with pytest.raises(ValueError, match="take at most 2 chunks"):
        job(Mesh(pipeline=4), chunks=3)


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_that_were_dropped_are_gathered_again_on_the_way_back(reshard):
    """FSDP's FULL_SHARD gathers twice and SHARD_GRAD_OP once; nothing is computed here, so nothing hides it."""
    mesh = Mesh(data=8, sharing=Sharing("parameters", reshard=reshard))
    found = gathered_layer(job(mesh), Seconds(0.0, 0.0, 0.0), 1e6)
    assert found.forward == found.gather > 0
    assert found.backward == pytest.approx(found.scatter + (found.gather if reshard else 0.0))


@pytest.mark.parametrize("size, hops", [(2, 1), (8, 7), (16, 7 + 2), (64, 7 + 6)])
def test_a_ring_has_a_hop_less_than_devices_and_a_tree_two_for_every_doubling_of_nodes(size, hops):
    nodes_of_8 = machine("dgx_h100").with_devices(64)
    _, latency = _group(nodes_of_8, job(Mesh(data=64)).software, np.array([float(size)]), np.array([1.0]))
    each = nodes_of_8.intra_latency_s if size <= 8 else nodes_of_8.inter_latency_s
    assert latency[0] == pytest.approx(hops * each)
