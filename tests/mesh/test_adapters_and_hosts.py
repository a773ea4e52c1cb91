"""Adapters beside frozen weights, hosts beside devices, nodes of a token's experts: what their definitions demand."""

from dataclasses import replace
from itertools import combinations
from statistics import mean

import pytest

from rpbench.cost.hardware.machine import machine
from rpbench.ir.partition import split_evenly
from rpbench.mesh.data_parallel import exchanged
from rpbench.mesh.job import Job
from rpbench.mesh.layers.adapters import Adapters
from rpbench.mesh.layers.layer_seconds import Seconds, _distinct_nodes
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.memory import bytes_of_ranks
from rpbench.mesh.parameters import adapter_parameters, bits_of_weights
from rpbench.mesh.placement import Group
from rpbench.mesh.software import declared_software
from rpbench.mesh.step import step_terms
from rpbench.workload.architecture import architecture
from rpbench.workload.counts import Experts

BARE = declared_software("megatron_core")


def job(own, mesh, **options):
    cluster = machine("dgx_h100").with_devices(mesh.num_devices)
    return Job(own, cluster, mesh, options.pop("software", BARE), 4096, num_microbatches=4, **options)


def test_frozen_weights_have_neither_gradients_nor_states_nor_reductions():
    """Llama-3 8B with rank 16 on attention: 16 (4096 + 6144 + 4096 + 4096) parameters a layer learn."""
    whole = job(architecture("llama3_8b"), Mesh(16, sharing=Sharing("none")))
    lora = replace(whole, adapters=Adapters(16, mlp=False))
    learns = 32 * 16 * (4096 + 6144 + 4096 + 4096)
    found = bytes_of_ranks(lora)[0]
    assert found["gradients"] == pytest.approx(4 * learns)
    assert found["optimizer state"] == pytest.approx(12 * learns)
    assert found["weights"] == pytest.approx(bytes_of_ranks(whole)[0]["weights"] + 2 * learns)
    assert step_terms(lora)["data"] < 0.02 * step_terms(whole)["data"]
    assert step_terms(lora)["optimizer"] < 0.02 * step_terms(whole)["optimizer"]


def test_an_architecture_has_its_adapters_beside_maps_that_are_not_fused():
    """Llama-3 8B, rank 16 on queries, values and the MLP's way out, cut over 2 devices, by hand.

    Queries have (4096 + 4096 / 2), values (4096 + 1024 / 2), the way out (14336 / 2 + 4096).
    """
    own = replace(architecture("llama3_8b"), training_mode="lora", lora_rank=16)
    some = replace(own, lora_targets=("q_proj", "v_proj", "down_proj"))
    found = bytes_of_ranks(job(some, Mesh(1, tensor=2, sharing=Sharing("none"))))[0]
    assert found["gradients"] == pytest.approx(4 * 32 * 16 * (4096 + 2048 + 4096 + 512 + 7168 + 4096))
    whole = bytes_of_ranks(job(own, Mesh(1, sharing=Sharing("none"))))[0]
    assert whole["optimizer state"] == pytest.approx(12 * own.trainable_parameters)


def test_weights_in_four_bits_are_as_small_under_a_mesh():
    """Maps of layers in 4.127 bits; norms, embedding and head in 16: two of 128,256 rows."""
    own = replace(architecture("llama3_8b"), training_mode="qlora", lora_rank=16)
    plain = Mesh(1, sharing=Sharing("none"))
    weights = bytes_of_ranks(job(own, plain))[0]["weights"]
    ends = 2 * 2 * 128_256 * 4096
    assert weights == pytest.approx(32 * own.layer_weight_bytes + ends + 2 * own.trainable_parameters, rel=1e-6)
    assert (
        weights < 0.4 * bytes_of_ranks(job(architecture("llama3_8b"), Mesh(1, sharing=Sharing("none"))))[0]["weights"]
    )


@pytest.mark.parametrize("what, owned", [("none", 1), ("optimizer", 4), ("parameters", 4)])
def test_moments_of_8_bits_are_half_of_the_state_of_all_but_the_embedding(what, owned):
    """4 + 2 (1 + 4 / 2048) bytes of layers and head for 12; of the traffic, twice what they save is gone."""
    own = architecture("llama3_8b")
    plain, small = (
        job(each, Mesh(4, sharing=Sharing(what, reshard=True))) for each in (own, replace(own, optimizer_bits=8))
    )
    embedding = 128_256 * 4096
    others = own.total_parameters - embedding
    found = {each: bytes_of_ranks(each)[0] for each in (plain, small)}
    less = found[plain]["optimizer state"] - found[small]["optimizer state"]
    assert less == pytest.approx(others * (8 - 2 - 8 / 2048) / owned, rel=1e-6)
    assert found[plain]["weights"] == found[small]["weights"]
    moved = plain.software.constants["optimizer_bytes"]
    part = (moved - 2 * (8 - 2 - 8 / 2048)) / moved
    shares = [step_terms(each)["optimizer"] / step_terms(plain)["optimizer"] for each in (plain, small)]
    assert shares == pytest.approx([1, (embedding + part * others) / (embedding + others)], rel=1e-3)


def test_weights_in_four_bits_are_not_cut_under_a_mesh():
    own = replace(architecture("llama3_8b"), training_mode="qlora", lora_rank=16)
    with pytest.raises(ValueError, match=r"blocks of 4 bits are not cut; take mesh\.tensor=1"):
        job(own, Mesh(2, tensor=2))


@pytest.mark.parametrize("pipeline", [1, 2])
def test_weights_in_four_bits_are_gathered_in_four(pipeline):
    """As FSDP and ZeRO-3 do; `zero_3` of one host was ranked, and a mesh refused it. The ends have 16 bits."""
    mesh = Mesh(4 * pipeline, pipeline=pipeline, sharing=Sharing("parameters"))
    own = replace(architecture("llama3_8b"), training_mode="lora", lora_rank=16)
    wide, small = (job(each, mesh) for each in (own, replace(own, training_mode="qlora")))
    bits = bits_of_weights(small)
    assert 4.127 / 16 < bits < 0.26
    held, less = (bytes_of_ranks(each)[0]["gathered weights"] for each in (wide, small))
    assert less == pytest.approx(bits * held)
    (whole, *_), (part, *_) = (exchanged(each, split_evenly(32, pipeline)) for each in (wide, small))
    (ends, *_) = exchanged(wide, [0] * pipeline)
    assert part.parameters - ends.parameters == pytest.approx(bits * (whole.parameters - ends.parameters), rel=1e-2)
    assert step_terms(small)["data"] <= step_terms(wide)["data"]


@pytest.mark.parametrize("devices", [2, 4])
def test_adapters_of_experts_are_dealt_with_them(devices):
    own = replace(architecture("mixtral_8x7b"), training_mode="lora", lora_rank=8)
    (layer,) = set(own.layers)
    alone, dealt = (adapter_parameters(job(own, Mesh(n, expert=n)), layer) for n in (1, devices))
    assert dealt == (alone[0], alone[1] / devices)
    assert sum(alone) == own.trainable_layer_parameters


def test_adapters_save_a_third_of_the_products_and_cost_traffic_that_grows_with_their_maps():
    whole = job(architecture("llama3_8b"), Mesh(8))
    (layer,) = whole.kinds
    plain = whole.kinds[layer]
    some, more = (replace(whole, adapters=Adapters(16, mlp=mlp)).kinds[layer] for mlp in (False, True))
    assert plain.forward < some.forward < more.forward
    assert 0.0 < some.weight_grad < more.weight_grad < 0.3 * plain.weight_grad
    assert some.forward_all + some.backward_all < plain.forward_all + plain.backward_all
    twice = replace(whole, adapters=Adapters(32, mlp=False)).kinds[layer]
    assert twice == some  # products as narrow as a rank wait for memory alone


def test_the_larger_of_host_and_device_decides():
    device, host = Seconds(3.0, 2.0, 2.0), Seconds(3.0, 2.0, 2.0, host=3.5)
    assert (device.forward_all, device.backward_all, device.waits) == (3.0, 4.0, 0.0)
    assert (host.forward_all, host.backward_all, host.waits) == (3.5, 4.0, 0.5)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_nodes_of_a_token_are_those_expected_over_all_choices(active):
    """Eight experts on four nodes of two, every choice once."""
    nodes = mean(len({expert // 2 for expert in choice}) for choice in combinations(range(8), active))
    group = Group(4, 1, 1.0, 1.0, 0.0)
    assert _distinct_nodes(Experts(8, active, 16), group) == pytest.approx(nodes)
    assert _distinct_nodes(Experts(8, active, 16, node_limit=1), group) == 1


def test_owners_that_broadcast_wait_for_every_further_node_and_not_inside_one():
    own = architecture("llama3_8b")
    slow = BARE.with_constants({"broadcast_s": 1.0, "hop_s": 0.1})
    fixed = {
        devices: step_terms(job(own, Mesh(devices), software=slow))["fixed"] - BARE.constants["step_s"]
        for devices in (8, 16, 64)
    }
    assert fixed[8] == pytest.approx(0.0)
    assert fixed[16] == pytest.approx(1.0 + 0.1)
    assert fixed[64] == pytest.approx(1.0 + 7 * 0.1)
