"""Meshes and the bandwidth their groups see: worked examples, and what is refused with a way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.config.loading import load
from rpbench.cost.hardware.device import device as gpu
from rpbench.cost.hardware.device import names
from rpbench.cost.hardware.machine import Machine, machine
from rpbench.mesh.layers.layer_seconds import Setting
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.placement import Links, group_of, hop_bytes_per_s
from rpbench.mesh.software import declared_software
from rpbench.run.assemble import assemble
from rpbench.run.mesh_run import prepare
from rpbench.workload.architecture import architecture
from rpbench.workload.counts import Experts

NODES_OF_EIGHT = Machine(
    "dgx", 32, gpu=gpu("a100_sxm4_80gb"), devices_per_node=8, intra_bytes_per_s=300e9, inter_bytes_per_s=25e9
)
WHOLE = Links(300e9, 25e9)
ALL_OF_IT = declared_software("megatron_core").with_constants({"intra": 1.0, "inter": 1.0})


def setting(mesh, where=NODES_OF_EIGHT):
    return Setting(architecture("llama3_8b"), where, mesh, ALL_OF_IT, 4096)


@pytest.mark.parametrize("tensor, bandwidth", [(4, 50e9), (8, 25e9)])
def test_a_data_group_beside_tensor_groups_sees_the_cards_of_its_members_in_a_node(tensor, bandwidth):
    """8 devices with a card of 25 GB/s each: 2 members a node see 50 GB/s, one sees 25."""
    mesh = Mesh(data=32 // tensor, tensor=tensor)
    assert setting(mesh).group(mesh.data, mesh.stride("data")).bytes_per_s == bandwidth


@pytest.mark.parametrize(
    "data, context, tensor, here", [(2, 4, 1, 8), (4, 4, 1, 8), (4, 2, 4, 2), (8, 1, 4, 2), (1, 4, 2, 4)]
)
def test_replicas_stand_as_far_apart_as_tensor_groups_are_wide(data, context, tensor, here):
    """Data and context together hold the same parameters: data x context devices, one beside each tensor group."""
    group = setting(Mesh(data=data, context=context, tensor=tensor)).replica_group()
    assert (group.size, group.here) == (data * context, here)


def test_a_tensor_group_beyond_a_node_falls_off_a_cliff():
    inside, beyond = (group_of(size, 1, NODES_OF_EIGHT, WHOLE) for size in (8, 16))
    assert inside.bytes_per_s == 300e9
    assert beyond.bytes_per_s == 200e9  # 8 members a node x 25 GB/s, shared by nobody else


@given(st.integers(1, 8), st.floats(1e9, 1e12))
def test_a_group_inside_a_node_never_depends_on_the_cards(size, cards):
    assert group_of(size, 1, NODES_OF_EIGHT, Links(300e9, cards)) == group_of(
        size, 1, NODES_OF_EIGHT, Links(300e9, cards)
    )._replace(outside_bytes_per_s=cards)
    assert group_of(size, 1, NODES_OF_EIGHT, Links(300e9, cards)).bytes_per_s == 300e9


@given(st.integers(2, 32), st.sampled_from([1, 2, 4, 8, 16]), st.floats(1e9, 1e11))
def test_faster_cards_never_slow_a_group(size, stride, cards):
    slow, fast = (group_of(size, stride, NODES_OF_EIGHT, Links(300e9, pace)) for pace in (cards, 2 * cards))
    assert fast.bytes_per_s >= slow.bytes_per_s


@pytest.mark.parametrize(
    "sizes, rule",
    [
        ({"tensor": 0}, "whole number of at least 1"),
        ({"order": ("tensor", "tensor", "data", "pipeline")}, "names tensor twice"),
        ({"order": ("tensor", "data", "pipeline")}, "each of data, pipeline, tensor, context once"),
        ({"sequence_parallel": True}, "take sequence_parallel=false or tensor > 1"),
        ({"data": 4, "expert": 3}, "expert may be one of 1, 2, 4"),
        ({"data": 6, "sharing": Sharing("optimizer", 4)}, "take one of 1, 2, 3, 6"),
    ],
)
def test_a_mesh_that_cannot_be_says_what_can(sizes, rule):
    with pytest.raises(ValueError, match=rule):
        Mesh(**sizes)


def test_a_mesh_that_does_not_multiply_to_the_devices_names_the_size_that_does():
    with pytest.raises(ValueError, match=r"= 16 devices, the cluster has 32; take data=8"):
        Mesh(data=4, tensor=4).check_devices(32)


def test_more_tensor_shards_than_heads_are_refused_with_the_divisors():
    with pytest.raises(ValueError, match=r"more tensor shards than heads; take one of 1, 2, 4, 8$"):
        Mesh(tensor=16).check_model(8, 8, 1, 32)


@pytest.mark.parametrize("cost", ["unit", "analytic"])
@pytest.mark.parametrize(
    "words, rule",
    [
        (
            ("num_devices=2", "++model.training_mode=qlora", "++model.lora_rank=8"),
            r"tensor shards on num_devices=2 with training_mode=qlora: blocks of 4 bits are not cut; take .*=lora",
        ),
        (("num_devices=3",), r"tensor shards on num_devices=3 of 32 heads: .* take one of 1, 2, 4, 8, 16, 32"),
        (("num_devices=4", "model.key_value_heads=32", "model.heads=96"), ""),
        (("num_devices=3", "model.heads=96", "model.key_value_heads=2"), "2 heads of keys can be neither cut nor"),
        (("num_devices=4", "schedule.sequence_parallel=true", "model.seq_len=1022"), "take model.seq_len=1020 or 1024"),
        (("num_devices=4", "model.seq_len=1022"), ""),
    ],
)
def test_a_schedule_of_tensor_shards_is_held_to_the_rule_of_a_mesh(words, rule, cost):
    """The simulator needs no tensors that divide, and frameworks do."""
    request = load(["schedule=megatron_tp", "model=llama32_1b", "cluster=8x_rtx4090", f"cost={cost}", *words])
    if not rule:
        assert assemble(request).schedule.shape.tensor_parallel
        return
    with pytest.raises(ValueError, match=rule):
        assemble(request)


def test_layers_without_a_model_have_no_heads_to_divide():
    assert assemble(load(["schedule=megatron_tp", "num_devices=3"])).model is None


def test_slices_of_sequences_must_divide_under_a_mesh_too():
    words = ["model=llama3_8b", "cluster=dgx_h100", "num_devices=8", "mesh.tensor=2", "mesh.sequence_parallel=true"]
    with pytest.raises(ValueError, match=r"take model.seq_len=1022 or 1024, or mesh.sequence_parallel=false"):
        prepare(load([*words, "mesh.data=4", "model.seq_len=1023"]))


def test_expert_groups_must_divide_the_experts():
    with pytest.raises(ValueError, match=r"mesh.expert=8 does not divide 12 experts; take one of 1, 2, 3, 4, 6, 12"):
        Mesh(data=8, expert=8).check_model(8, 8, 12, 32)


@pytest.mark.parametrize(
    "sizes, inside",
    [
        ({"pipeline": 8}, True),
        ({"pipeline": 4, "tensor": 2}, True),
        ({"pipeline": 2, "data": 4}, True),
        ({"pipeline": 16}, False),
        ({"pipeline": 8, "tensor": 2}, False),
    ],
)
def test_the_ends_of_a_pipeline_in_one_node_are_joined_by_its_links(sizes, inside):
    """Eight devices a node: a sum over both ends goes at the pace of the links inside, or at a card's."""
    mesh = Mesh(**sizes)
    found = setting(mesh, NODES_OF_EIGHT.with_devices(mesh.num_devices)).ends_group()
    assert (found.size, found.bytes_per_s) == (2, 300e9 if inside else 25e9)


def test_a_tensor_goes_to_the_next_stage_over_the_host_where_devices_have_no_link():
    """RTX 4090: down and up at 20.97 GB/s, not at the pace of a ring of eight that do so at once."""
    alone, joined, links = machine("8x_rtx4090"), machine("8x_h100"), Links(2.6e9, 2.6e9)
    assert hop_bytes_per_s(alone, links, inside=True) == pytest.approx(20.97e9 / 2)
    assert hop_bytes_per_s(joined, Links(300e9, 40e9), inside=True) == 300e9
    assert hop_bytes_per_s(joined, Links(300e9, 40e9), inside=False) == 40e9


def test_a_link_of_bandwidth_0_is_refused():
    with pytest.raises(ValueError, match="a link of bandwidth 0 never ends"):
        Machine("m", 8, gpu=gpu("a100_sxm4_80gb"), intra_bytes_per_s=0, inter_bytes_per_s=25e9)


@pytest.mark.parametrize(
    "written, name",
    [
        ("L40S", "l40s"),
        ("RTX 4090", "rtx4090"),
        ("rtx-5090", "rtx5090"),
        ("H200", "h200_sxm"),
        ("A100 PCIe 80GB", "a100_pcie_80gb"),
    ],
)
def test_a_gpu_is_found_as_one_writes_its_name(written, name):
    assert gpu(written).name == name


def test_a_name_that_several_gpus_have_or_none_is_answered_with_names():
    with pytest.raises(
        ValueError, match=r"gpu=a100_sxm: there are 2 of them; say which: a100_sxm4_40gb, a100_sxm4_80gb"
    ):
        gpu("a100_sxm")
    with pytest.raises(ValueError, match=r"unknown gpu 'rtx4070'; did you mean rtx40"):
        gpu("rtx4070")


def test_a_token_cannot_visit_more_experts_than_there_are():
    with pytest.raises(ValueError, match=r"cannot visit more experts than model\.experts\.total=4"):
        Experts(4, 5, 128)


def test_twenty_gpus_and_ten_machines_are_known_and_every_figure_has_a_source():
    assert len(names("gpu")) >= 20
    for name in names("gpu"):
        found = gpu(name)
        numbers = {
            key for key, value in vars(found).items() if isinstance(value, int | float) and type(value) is not bool
        }
        numbers -= {"sustained_8"} if found.flops_8 is None else set()
        numbers -= {"sustained_4"} if found.flops_4 is None else set()
        assert numbers <= set(found.declared), name
        assert found.attention_rate("flash3") > 0
    nodes = [name for name in names("cluster") if machine(name).num_nodes > 1]
    assert len(nodes) >= 10
    for name in nodes:
        assert {"intra_bytes_per_s", "inter_bytes_per_s", "domain"} <= set(machine(name).declared), name
