"""What exports refuse or tell: orders that DeepSpeed does not run, methods that would be written as data parallelism,
experts that a file cannot deal, and options that a framework has in another way."""

import json
from types import SimpleNamespace

import pytest
from torch_cases import schedule_near

from rpbench.advice.rows import runs_in
from rpbench.cli import dispatch
from rpbench.ir.schedule import ScheduleError
from rpbench.registry import entries
from rpbench.torch_runtime.formats.export import Given, export
from rpbench.torch_runtime.formats.frameworks import numbers_of

# Not in the list of what runs there by this name: 1F1B's own order, Mario's with recomputation, and Megatron's shards.
AS_WELL = {"adaptive_1f1b", "mario", "megatron_tp"}


def takes(name, form):
    try:
        export(schedule_near(name, 4, 8), form, Given(lambda: None))
    except ScheduleError:
        return False
    return True


def test_deepspeeds_files_are_of_orders_that_it_runs():
    taken = {name for name in entries() if takes(name, "deepspeed")}
    assert taken == {name for name in entries() if "DeepSpeed" in runs_in(name)} | AS_WELL
    assert not takes("zb_v", "deepspeed_parts")


@pytest.mark.parametrize("form", ["torchtitan", "megatron_layout", "deepspeed"])
@pytest.mark.parametrize("name", ["cyclic_dp", "weipipe", "tawpipe", "acco"])
def test_other_methods_of_replicas_are_not_written_as_plain_ones(name, form):
    with pytest.raises(ScheduleError, match=f"schedule={name}: format={form} would make plain data parallelism"):
        export(schedule_near(name, 4, 8), form, Given(lambda: None))


def test_a_refusal_names_a_schedule_and_a_form(capsys):
    words = ["show", "model=tiny_gpt", "num_devices=2", "num_microbatches=4", "format=deepspeed"]
    assert dispatch([*words, "schedule=zb_v"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "run 1F1B alone" in err
    assert "take schedule=1f1b with format=deepspeed" in err
    assert dispatch([*words, "schedule=1f1b", "recompute=none", "num_steps=1"]) == 0


EXPERTS = ("schedule=1f1b", "model=mixtral_8x7b", "cluster=dgx_h100", "num_devices=8", "num_microbatches=4")
DEALT = ("mesh.data=2", "mesh.tensor=4", "mesh.sequence_parallel=true", "mesh.expert=8", "mesh.shard=parameters")


@pytest.mark.parametrize(
    "form, whose", [("deepspeed", "DeepSpeed deals experts in"), ("fsdp2", "accelerate's FSDP2 deals no")]
)
def test_a_file_that_cannot_deal_experts_is_not_written_without_them(form, whose, capsys):
    assert dispatch(["show", *EXPERTS, *DEALT, f"format={form}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"expert=8: {whose}" in err
    assert "take format=megatron_layout" in err


def test_megatron_is_told_that_experts_are_whole_where_other_matrices_are_cut(capsys):
    """Without a word it cuts them as the others, into four: 32 devices for eight experts, where there are eight."""
    assert dispatch(["show", *EXPERTS, *DEALT, "format=megatron_layout"]) == 0
    assert "--expert-tensor-parallel-size 1\n" in capsys.readouterr().out
    for words in (["mesh.data=8", "mesh.expert=8"], ["model=llama3_8b", "mesh.data=2", "mesh.tensor=4"]):
        assert dispatch(["show", *EXPERTS, *words, "format=megatron_layout"]) == 0
        assert "--expert-tensor" not in capsys.readouterr().out


def test_options_of_superoffload_that_deepspeed_has_in_another_way_are_told():
    order = schedule_near("superoffload", 2, 4)
    options = {"speculate": True, "device_stages": 1, "gather_each_visit": False}
    found = json.loads(export(order, "deepspeed", Given(lambda: None, plan=numbers_of(order, options))))
    assert [note.partition(";")[0] for note in found["rpbench"]["notes"]] == [
        "the devices step the first 1 stages",
        "weights are gathered once a step",
    ]


@pytest.mark.parametrize(
    "name, stage", [("zero_offload", 2), ("zenflow", 2), ("zero_infinity", 3), ("superoffload", 3)]
)
def test_what_one_device_keeps_on_the_host_is_in_the_file(name, stage):
    order = schedule_near(name, 1, 4)
    options = entries()[name].options
    found = json.loads(export(order, "deepspeed", Given(lambda: None, plan=numbers_of(order, options))))
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (stage, "cpu")
    assert ("offload_param" in zero) == (name == "zero_infinity")
    assert found["train_batch_size"] == 4


def of_plan(name, options, **known):
    order = schedule_near(name, 2, 4)
    return json.loads(export(order, "deepspeed", Given(lambda: None, plan=numbers_of(order, options, **known))))


@pytest.mark.parametrize(
    "ssd, devices", [("none", ("cpu", "cpu")), ("optimizer", ("nvme", "cpu")), ("all", ("nvme", "nvme"))]
)
def test_what_lives_on_ssds_is_written_with_a_path(ssd, devices):
    found = of_plan("zero_infinity", {"ssd": ssd})
    zero = found["zero_optimization"]
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == devices
    assert all(("nvme_path" in each) == (each["device"] == "nvme") for each in zero.values() if isinstance(each, dict))
    assert ("nvme_path is the folder of your SSDs" in found["rpbench"]["notes"]) == (ssd != "none")


@pytest.mark.parametrize(
    "name, each, stage, told", [("zero_2", False, 1, 0), ("zero_2", True, 2, 0), ("zero_3", False, 3, 1)]
)
def test_gradients_scattered_once_a_step_are_zero_1_or_told(name, each, stage, told):
    """DeepSpeed's stages 2 and 3 scatter them after every backward, its stage 1 once a step."""
    found = of_plan(name, {"reduce_each_microbatch": each})
    assert found["zero_optimization"]["stage"] == stage
    assert len(found["rpbench"]["notes"]) == told


def test_exchanges_beside_computation_are_asked_for_or_told():
    """DeepSpeed has them at ZeRO-3 alone if nothing is said, and never in pipelines or without ZeRO."""
    for name in ("zero_2", "zero_3"):
        for beside in (True, False):
            assert of_plan(name, {}, gradients_beside=beside)["zero_optimization"]["overlap_comm"] is beside
    for name, known in (("1f1b", {"data": 2, "shared": "optimizer", "recompute": "none"}), ("data_parallel", {})):
        found = of_plan(name, {}, **known)
        assert "overlap_comm" not in found["zero_optimization"]
        assert "DeepSpeed after it here" in str(found["rpbench"]["notes"])
    assert of_plan("1f1b", {})["rpbench"]["notes"] == []


def test_what_deepspeed_has_no_words_for_is_refused_or_told():
    with pytest.raises(ScheduleError, match="DeepSpeed has no delayed update; take"):
        of_plan("zero_offload", {"delayed_update": True})
    for known in ({"shard_group": 1}, {"reshard": False}):
        with pytest.raises(ValueError, match="DeepSpeed's ZeRO shares among all replicas and drops what it gathers"):
            of_plan("zero_3", {}, **known)
    assert "update_interval counts microbatches" in str(of_plan("zenflow", entries()["zenflow"].options))


@pytest.mark.parametrize("ssd", ["none", "optimizer", "all"])
def test_deepspeeds_own_config_takes_ssds(ssd, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)  # no process group is open here
    world = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    zero = config.DeepSpeedConfig(of_plan("zero_infinity", {"ssd": ssd}), mpu=world).zero_config
    assert (zero.offload_optimizer.nvme_path is None) is (ssd == "none")
    assert (zero.offload_param.nvme_path is None) is (ssd != "all")


def test_deepspeeds_own_config_takes_tensor_shards(monkeypatch):
    """Without a pipeline it is not told which devices are replicas, and counts all of them."""
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 8)
    found = config.DeepSpeedConfig(of_plan("zero_3", {}, tensor=4, sequences=3))
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (3, 2)
    assert found.tensor_parallel_config.autotp_size == 4


@pytest.mark.parametrize(
    "name, allowed, told", [("zero_3", True, False), ("data_parallel", False, False), ("zero_offload", False, True)]
)
def test_moments_in_8_bits_need_leave_and_have_none_on_the_host(name, allowed, told, capsys):
    """DeepSpeed refuses bitsandbytes' optimizer under ZeRO without a word, and takes only its own on the host."""
    words = ["model=llama3_8b", "++model.optimizer_bits=8", "num_devices=2", "num_microbatches=4", "cluster=8x_h100"]
    assert dispatch(["show", f"schedule={name}", *words, "cost=analytic", "format=deepspeed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.get("zero_allow_untested_optimizer", False) is allowed
    assert ("steps with its own Adam" in str(found["rpbench"]["notes"])) is told
