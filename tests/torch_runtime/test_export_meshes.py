"""What files of a mesh say beside its sizes, what a framework cannot run of it, and who runs its row of an advice."""

import tomllib
from dataclasses import replace

import pytest
import yaml

from rpbench.advice.rows import HERE, mesh_runs_in, runs_in
from rpbench.cli import dispatch
from rpbench.cost.hardware.machine import machine
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.software import DEFAULT, software
from rpbench.workload.architecture import architecture

DENSE = ("schedule=1f1b", "model=llama31_8b", "cluster=dgx_h100", "num_devices=16", "num_microbatches=4")
EXPERTS = ("schedule=1f1b", "model=qwen3_30b_a3b", "cluster=dgx_h100", "num_devices=16", "num_microbatches=4")


def shown(capsys, form, plan, *words, status=0):
    """What is printed; with a status the error."""
    assert dispatch(["show", *plan, *words, f"format={form}"]) == status
    out, err = capsys.readouterr()
    return err if status else out


@pytest.mark.parametrize(
    "words, replicas, shards, reshard",
    [
        (["mesh.data=16", "mesh.shard=none"], 16, 1, "never"),
        (["mesh.data=16", "mesh.shard=parameters"], 1, 16, "always"),
        (["mesh.data=16", "mesh.shard=parameters", "mesh.reshard=false"], 1, 16, "never"),
        (["mesh.data=16", "mesh.shard=parameters", "mesh.shard_group=8"], 2, 8, "always"),
        (["mesh.data=8", "mesh.context=2", "mesh.shard=gradients", "mesh.shard_group=8"], 2, 4, "never"),
    ],
)
def test_groups_that_share_are_in_the_files(words, replicas, shards, reshard, capsys):
    found = tomllib.loads(shown(capsys, "torchtitan", DENSE, *words))["parallelism"]
    told = (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"])
    assert (*told, found["fsdp_reshard_after_forward"]) == (replicas, shards, reshard)
    if "mesh.shard=none" in words:
        return
    of_accelerate = yaml.safe_load(shown(capsys, "fsdp2", DENSE, *words))
    assert (of_accelerate["num_processes"], of_accelerate["num_machines"]) == (16, 2)
    assert of_accelerate["fsdp_config"]["fsdp_reshard_after_forward"] is (reshard == "always")
    sizes = of_accelerate.get("parallelism_config", {})
    assert sizes.get("parallelism_config_dp_replicate_size", 1) == replicas
    assert sizes.get("parallelism_config_dp_shard_size", 16) == shards
    if "mesh.reshard=false" not in words:
        option = f"--num-distributed-optimizer-instances {replicas}"
        assert (option in shown(capsys, "megatron_layout", DENSE, *words)) == (replicas > 1)


def test_other_orders_of_axes_are_refused_and_other_precisions_told(capsys):
    words = ["mesh.data=8", "mesh.tensor=2", "mesh.order=[data,tensor,context,pipeline]"]
    said = shown(capsys, "torchtitan", DENSE, *words, status=2)
    assert "mesh.order=data,tensor,context,pipeline: with format=torchtitan it is tensor, context, data" in said
    assert "the plan multiplies in fp8" in shown(capsys, "megatron_layout", DENSE, "mesh.data=16", "mesh.precision=fp8")
    group = ["mesh.data=4", "mesh.context=4", "mesh.shard_group=2"]
    assert "take a multiple of 4" in shown(capsys, "megatron_layout", DENSE, *group, status=2)


@pytest.mark.parametrize("form, least", [("torchtitan", 16), ("megatron_layout", 8), ("fsdp2", 8)])
def test_halves_of_a_sequence_are_cut_evenly(form, least, capsys):
    """torchtitan: over context and tensor shards each; the others: over context, and what a device has over shards."""
    words = ["mesh.data=2", "mesh.context=4", "mesh.tensor=2", "mesh.sequence_parallel=true", "mesh.shard=parameters"]
    said = shown(capsys, form, DENSE, *words, f"++model.seq_len={4096 + least // 2}", status=2)
    assert f"seq_len={4096 + least // 2} with context=4" in said
    assert f"take a multiple of {least}" in said
    assert shown(capsys, form, DENSE, *words, f"++model.seq_len={4096 + least}")


@pytest.mark.parametrize(
    "words, why",
    [
        (["mesh.data=2", "mesh.tensor=8", "mesh.shard=parameters"], "tensor=8 of 4 heads of keys"),
        (["mesh.data=16", "mesh.expert=8", "mesh.shard=none"], "expert=8 on 1 devices that share parameters"),
        (["mesh.data=8", "mesh.tensor=2", "mesh.shard=parameters"], "take mesh.expert_tensor=2"),
        (["mesh.data=8", "mesh.tensor=2", "mesh.expert=2", "mesh.expert_tensor=2"], "take mesh.expert_tensor=1"),
        (["mesh.data=8", "mesh.tensor=2", "mesh.expert=4", "mesh.shard=parameters"], ""),
        (["mesh.data=2", "mesh.tensor=2", "mesh.context=4", "mesh.expert=8", "mesh.shard=none"], ""),
    ],
)
def test_torchtitans_file_is_of_layers_that_it_cuts(words, why, capsys):
    said = shown(capsys, "torchtitan", EXPERTS, *words, status=2 if why else 0)
    assert why in said
    sizes = {name: int(value) for name, _, value in (word[5:].partition("=") for word in words) if name != "shard"}
    sharing = next((word[11:] for word in words if word.startswith("mesh.shard=")), "parameters")
    mesh = Mesh(**sizes, sharing=Sharing(sharing))
    job = Job(architecture("qwen3_30b_a3b"), machine("dgx_h100").with_devices(16), mesh, software(DEFAULT), 4096)
    assert ("torchtitan" in mesh_runs_in(job)) == (not why)


def test_megatron_runs_combined_1f1b_where_it_pairs_passes():
    """Where experts are dealt over devices, and no layer runs again."""
    assert runs_in("combined_1f1b") == (HERE,)
    mesh = Mesh(data=4, pipeline=4, expert=4)
    more = {"num_microbatches": 8, "schedule": "combined_1f1b", "chunks": 2}
    job = Job(
        architecture("qwen3_30b_a3b"), machine("dgx_h100").with_devices(16), mesh, software(DEFAULT), 4096, **more
    )
    assert mesh_runs_in(job) == ("Megatron",)
    assert mesh_runs_in(replace(job, recompute="fitting", kept=tuple(range(48)))) == ("Megatron",)
    for other in ({"recompute": "full"}, {"recompute": "fitting"}, {"mesh": replace(mesh, expert=1)}):
        assert mesh_runs_in(replace(job, **other)) == (HERE,)


@pytest.mark.parametrize("words", [["mesh.data=16"], ["mesh.data=4", "mesh.context=2", "mesh.tensor=2"]])
def test_accelerate_reads_its_sizes(words, capsys, tmp_path, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "fsdp2.yaml"
    path.write_text(shown(capsys, "fsdp2", DENSE, *words, "mesh.shard=parameters", "recompute=all"))
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, *_ = launch._validate_launch_command(args)
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, str(value))
    plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    assert (args.num_processes, args.num_machines, plugin.fsdp_version) == (16, 2, 2)
    assert plugin.reshard_after_forward is plugin.activation_checkpointing is True
    assert sizes.total_size == (16 if len(words) > 1 else 1)  # without a mesh all processes share
