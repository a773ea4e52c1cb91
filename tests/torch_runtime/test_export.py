"""Exports: each form against its own rules, by hand, and against its consumer's parser where that is installed."""

import json
import tomllib
import types

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch_cases import TWO_WAY, schedule_near

from rpbench.cli import dispatch
from rpbench.cost.constant import unit_times
from rpbench.ir.partition import filled, parse, symmetric
from rpbench.ir.schedule import ScheduleError, Shape, from_text
from rpbench.registry import entries
from rpbench.sim.longest_path import simulate
from rpbench.torch_runtime.formats.deepspeed import deepspeed_parts
from rpbench.torch_runtime.formats.export import FLAVORS, FORMS, Given, export, model_notes
from rpbench.torch_runtime.formats.frameworks import NAMES, module_names_per_stage, numbers_of, table_lines
from rpbench.torch_runtime.formats.tables import from_csv
from rpbench.workload.architecture import architecture


def times_of(schedule):
    costs = unit_times(16).table(schedule.partition)
    return lambda: simulate(schedule, costs)


def exported(name, form, num_ranks=2):
    schedule = schedule_near(name, num_ranks, 4)
    return schedule, export(schedule, form, Given(times_of(schedule)))


def test_every_form_has_a_text():
    for form in FORMS:
        _, text = exported({"fsdp2": "zero_3", "roundpipe": "roundpipe"}.get(form, "1f1b"), form)
        assert text
    with pytest.raises(ValueError, match="format=svg: one of text, torch_csv, chrome_trace"):
        exported("1f1b", "svg")


def test_text_and_csv_are_read_back():
    schedule, text = exported("zb_v", "text")
    assert from_text(text) == schedule
    schedule, text = exported("zb_v", "torch_csv")
    assert from_csv(text).rows == schedule.rows


@pytest.mark.parametrize("name", TWO_WAY)
def test_what_a_table_cannot_hold_is_refused(name):
    with pytest.raises(ScheduleError, match="a table has one rank for each stage"):
        exported(name, "torch_csv")


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "chimera"])
def test_a_chrome_trace_is_in_order(name):
    """No two slices of a lane overlap, and each forward ends before its backward begins."""
    schedule, text = exported(name, "chrome_trace")
    events = json.loads(text)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == schedule.num_actions
    lanes = {}
    for event in slices:
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))
    of = {(e["args"]["kind"], e["args"]["stage"], e["args"]["microbatch"]): e for e in slices}
    for (kind, stage, microbatch), event in of.items():
        if kind in ("B", "I"):
            forward = of["F", stage, microbatch]
            assert forward["ts"] + forward["dur"] <= event["ts"] + 1e-6


# --- partitions ---


def test_modules_of_each_stage_by_hand():
    assert module_names_per_stage(symmetric((1, 2)), NAMES["torchtitan"]) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "norm", "lm_head"],
    ]
    assert module_names_per_stage(
        symmetric((1, 1)), NAMES["automodel"]
    ) == [  # rotary tables are made once, for all layers
        ["model.embed_tokens", "model.layers.0", "model.rotary_emb"],
        ["model.layers.1", "model.norm", "lm_head", "model.rotary_emb"],
    ]
    with pytest.raises(ValueError, match="stage 1 holds no module"):
        module_names_per_stage(symmetric((1, 0, 2)), NAMES["torchtitan"])


def test_deepspeeds_boundaries_by_hand():
    """Seven layers in three stages, and an entry of the layer list before and behind them."""
    assert deepspeed_parts(symmetric((2, 3, 2))) == [0, 3, 6, 9]


@pytest.mark.parametrize(
    "name, placed",
    [("1f1b", "1F1B"), ("zb_h1", "1F1B"), ("interleaved_zb", "Interleaved1F1B"), ("v_half", "ZBVZeroBubble")],
)
def test_torchtitan_places_stages_by_a_name(name, placed):
    schedule, text = exported(name, "torchtitan")
    options = tomllib.loads(text)["parallelism"]
    assert options["pipeline_parallel_schedule"] == placed
    assert options["pipeline_parallel_schedule_csv"] == "schedule.csv"
    assert len(options["module_fqns_per_model_part"]) == schedule.shape.num_stages
    assert "pp_schedule_csv" in text
    assert "compare them with model.named_modules()" in text


def test_torchtitans_own_config_takes_the_options():
    configs = pytest.importorskip("torchtitan.config.configs")
    sections = tomllib.loads(exported("zb_v", "torchtitan")[1])
    found = configs.ParallelismConfig(**sections["parallelism"])
    assert found.pipeline_parallel_schedule_csv == "schedule.csv"
    assert configs.TrainingConfig(**sections["training"]).local_batch_size == 4


def test_a_stage_without_modules_is_refused_with_the_cut_beside_it():
    """A stage in the middle holds nothing: it gets a layer, of those below first."""
    with pytest.raises(ValueError, match=r"stage 2 holds no module.*'partition=\"1-2-1-2\"'"):
        module_names_per_stage(parse("1-3-0-2"), NAMES["torchtitan"])
    assert list(filled((1, 3, 0, 2))) == [(1, 2, 1, 2), (1, 3, 1, 1)]
    assert list(filled((0, 2, 2, 0))) == [(0, 2, 2, 0)]  # its ends hold the embedding and the head
    assert list(filled((0, 1, 0, 1))) == [(0, 1, 1, 0)]
    assert list(filled((0, 1, 0, 0))) == []  # a layer too few


def test_torchtitans_own_config_takes_a_stage_of_the_head_alone():
    configs = pytest.importorskip("torchtitan.config.configs")
    parts = module_names_per_stage(parse("2-3-1-0"), NAMES["torchtitan"])
    assert parts[-1] == ["norm", "lm_head"]
    assert configs.ParallelismConfig(module_fqns_per_model_part=parts).module_fqns_per_model_part == parts


def of_automodel(text):
    """AutoModel's options, which stand as comments behind torchtitan's."""
    lines = text.partition("# --- automodel\n")[2].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))


def test_automodels_options_fit_together():
    schedule, text = exported("interleaved_1f1b", "torchtitan")
    options = of_automodel(text)
    assert options["pp_size"] == schedule.shape.num_ranks
    assert options["pp_schedule"] == "Interleaved1F1B"
    assert options["pp_batch_size"] // options["pp_microbatch_size"] == schedule.shape.num_microbatches
    assert len(options["module_fqns_per_model_part"]) == schedule.shape.num_stages


def test_automodels_own_config_takes_the_options():
    config = pytest.importorskip("nemo_automodel.components.distributed.pipelining.config")
    options = of_automodel(exported("zb_v", "torchtitan")[1])
    del options["pp_size"]  # of its mesh
    found = config.PipelineConfig(**options).to_dict()
    assert {key: found[key] for key in options} == options


def test_deepspeeds_own_module_runs_the_layers_between_the_boundaries():
    """A subclass that sets `parts` is how DeepSpeed takes them; it then says itself which layers are a stage's."""
    pipe = pytest.importorskip("deepspeed.pipe")
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology").PipeModelDataParallelTopology(3, 1, 1)
    parts = deepspeed_parts(symmetric((2, 3, 2)))

    class Cut(pipe.PipelineModule):
        def __init__(self, rank):
            self._topo, self.parts, self._num_layers = topology, parts, parts[-1]
            self.num_stages, self.stage_id, self._local_start, self._local_stop = 3, rank, 0, None
            self._set_bounds(start=self.parts[rank], stop=self.parts[rank + 1])

    found = [Cut(rank) for rank in range(3)]
    assert [range(own._local_start, own._local_stop) for own in found] == [range(3), range(3, 6), range(6, 9)]
    assert [found[0].stage_owner(layer) for layer in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# --- the numbers of a plan ---------------------------------------------------------------------------------------

RECOMPUTED = ("none", "selective", "full")


@st.composite
def plans(draw):
    """A schedule of a few ranks and the numbers of a plan around it."""
    ranks, microbatches = draw(st.sampled_from([2, 4])), draw(st.sampled_from([4, 8]))
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "zero_2", "zero_3", "data_parallel"]))
    known = {"sequences": draw(st.integers(1, 9)), "seq_len": draw(st.integers(2, 99))}
    known["recompute"] = draw(st.sampled_from(RECOMPUTED))
    if name not in ("zero_2", "zero_3", "data_parallel"):
        known |= {"data": draw(st.integers(1, 5)), "shared": draw(st.sampled_from(["none", "optimizer"]))}
    if known.get("data") != 1:
        known["tensor"] = draw(st.integers(1, 3))
        known["sequence_parallel"] = known["tensor"] > 1
    schedule = schedule_near(name, ranks, microbatches)
    return schedule, numbers_of(schedule, **known)


def of_arguments(text):
    """Megatron's arguments by name, what stands in comments left out."""
    lines = [line.removeprefix("--").partition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: int(value) if value.isdigit() else value or True for name, _, value in lines}


@given(plans())
def test_every_number_of_a_plan_is_in_torchtitans_file(case):
    schedule, plan = case
    found = tomllib.loads(export(schedule, "torchtitan", Given(lambda: None, plan=plan)))
    training, parallel = found["training"], found["parallelism"]
    assert (training["seq_len"], training["global_batch_size"]) == (plan.seq_len, plan.global_batch)
    assert parallel["pipeline_parallel_degree"] == plan.pipeline
    assert parallel["tensor_parallel_degree"] == plan.tensor
    replicas = parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"]
    assert replicas == plan.data
    assert (parallel["data_parallel_shard_degree"] > 1) == (plan.shared != "none" and plan.data > 1)
    if plan.pipeline > 1:
        assert parallel["pipeline_parallel_microbatch_size"] == plan.sequences
        assert training["local_batch_size"] == plan.sequences * plan.num_microbatches
    else:
        assert training["local_batch_size"] == plan.sequences
    assert found["activation_checkpoint"]["mode"] == plan.recompute


@given(plans())
def test_every_number_of_a_plan_is_in_megatrons_arguments(case):
    schedule, plan = case
    found = of_arguments(export(schedule, "megatron_layout", Given(lambda: None, plan=plan)))
    assert (found["seq-length"], found["micro-batch-size"]) == (plan.seq_len, plan.sequences)
    assert found["global-batch-size"] == plan.sequences * plan.num_microbatches * plan.data
    assert found["tensor-model-parallel-size"] == plan.tensor
    assert found.get("pipeline-model-parallel-size", 1) == plan.pipeline
    assert found.get("recompute-granularity", "none") == plan.recompute
    assert found["bf16"] is True
    assert ("use-distributed-optimizer" in found) == (plan.shared != "none")
    shares = plan.shared in ("gradients", "parameters")
    assert ("use-megatron-fsdp" in found) == (found.get("ckpt-format") == "fsdp_dtensor") == shares
    assert found["num-layers"] == schedule.partition.num_layers


@given(plans().filter(lambda case: case[0].name not in ("gpipe", "interleaved_1f1b")))
def test_every_number_of_a_plan_is_in_deepspeeds_file(case):
    schedule, plan = case
    found = json.loads(export(schedule, "deepspeed", Given(lambda: None, plan=plan)))
    assert found["train_micro_batch_size_per_gpu"] == plan.sequences
    assert found["gradient_accumulation_steps"] == plan.num_microbatches
    alone = plan.tensor > 1 == plan.pipeline  # it would compare the batch with all devices
    assert found.get("train_batch_size") == (None if alone else plan.global_batch)
    assert (
        found["zero_optimization"]["stage"] == {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[plan.shared]
    )
    assert found.get("pipeline", {"stages": 1})["stages"] == plan.pipeline
    assert found.get("tensor_parallel", {"autotp_size": 1})["autotp_size"] == plan.tensor
    assert (found["rpbench"]["seq_len"], found["rpbench"]["recompute"]) == (plan.seq_len, plan.recompute)
    if plan.pipeline > 1:
        assert found["pipeline"]["parts"] == deepspeed_parts(schedule.partition)
        assert (found["pipeline"]["activation_checkpoint_interval"] == 0) == (plan.recompute == "none")


@given(plans())
def test_every_number_of_a_plan_is_in_accelerates_file(case):
    schedule, plan = case
    if plan.shared not in ("gradients", "parameters"):
        with pytest.raises(ValueError, match="format=fsdp2 writes plans whose replicas share"):
            export(schedule, "fsdp2", Given(lambda: None, plan=plan))
        return
    text = export(schedule, "fsdp2", Given(lambda: None, plan=plan))
    keys = [line[2:] for line in text.splitlines() if line.startswith("#") and " " not in line[2:].partition(":")[0]]
    told = yaml.safe_load("\n".join(keys))
    assert told == {
        "per_device_train_batch_size": plan.sequences,
        "gradient_accumulation_steps": plan.num_microbatches,
        "max_length": plan.seq_len,
        **({"gradient_accumulation_kwargs": {"sync_each_batch": True}} if plan.num_microbatches > 1 else {}),
    }
    found = yaml.safe_load(text)
    assert found["num_processes"] == plan.data * plan.tensor
    assert found["fsdp_config"]["fsdp_reshard_after_forward"] is (plan.shared == "parameters")
    assert found["fsdp_config"]["fsdp_activation_checkpointing"] is (plan.recompute != "none")
    assert (
        found.get("parallelism_config", {"parallelism_config_tp_size": 1})["parallelism_config_tp_size"] == plan.tensor
    )


def test_a_microbatch_of_the_command_line_is_that_of_the_file(capsys):
    words = ["schedule=1f1b", "model=tiny_gpt", "num_devices=2", "num_microbatches=6", "recompute=none"]
    assert dispatch(["show", *words, "workload.microbatch_sequences=3", "format=torchtitan"]) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 3
    assert found["training"]["local_batch_size"] == 18
    assert found["activation_checkpoint"]["mode"] == "none"
    mesh = ["cluster=dgx_h100", "num_devices=16", "model=llama3_8b", "mesh.data=4", "mesh.tensor=2"]
    mesh += ["mesh.sequence_parallel=true", "mesh.shard=optimizer", "workload.microbatch_sequences=2"]
    assert dispatch(["show", "schedule=1f1b", "num_microbatches=6", *mesh, "format=megatron_layout"]) == 0
    found = of_arguments(capsys.readouterr().out)
    assert (found["micro-batch-size"], found["global-batch-size"]) == (2, 48)
    assert (found["tensor-model-parallel-size"], found["pipeline-model-parallel-size"]) == (2, 2)
    assert found["sequence-parallel"] is found["use-distributed-optimizer"] is True


@pytest.mark.parametrize("mesh", [[], ["mesh.pipeline=8", "mesh.data=1", "mesh.shard=none"]])
def test_where_some_layers_are_recomputed_megatron_gets_one_number_and_the_others_recompute_all(mesh, capsys):
    plan = ["schedule=1f1b", "model=llama31_8b", "cluster=a100_40gb_roce", "cost=analytic", "num_devices=8", *mesh]
    plan += ["num_microbatches=32", "workload.microbatch_sequences=2", "partition=4-4-4-4-4-5-5-2"]
    for word, again, most in (("fitting", "1-0-0-0-0-0-0-0", 1), ("all", "", 1), ("none", "", None)):
        assert dispatch(["show", *plan, f"recompute={word}", "format=megatron_layout"]) == 0
        found = of_arguments(told := capsys.readouterr().out)
        assert found.get("recompute-num-layers") == most
        assert found.get("recompute-method") == {"fitting": "block", "all": "uniform"}.get(word)
        assert (f"recomputes {again} layers of its stages" in told) == (word == "fitting")
        assert dispatch(["show", *plan, f"recompute={word}", "format=torchtitan"]) == 0
        assert f'mode = "{"none" if word == "none" else "full"}"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, notes",
    [
        (
            ["training_mode=lora", "lora_rank=16"],
            ["adapters learn, not the model", "LoraConfig(r=16, target_modules='all-linear')"],
        ),
        (
            ["training_mode=lora", "lora_rank=16", "lora_targets=[attention]"],
            ["LoraConfig(r=16, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'])"],
        ),
        (
            ["training_mode=qlora", "lora_rank=8", "lora_targets=[q_proj]"],
            ["LoraConfig(r=8, target_modules=['q_proj'])", "in 4 bits"],
        ),
        (["frozen_layers=2", "optimizer_bits=8"], ["the first 2 layers are frozen", "AdamW8bit"]),
    ],
)
@pytest.mark.parametrize("form", ["torchtitan", "megatron_layout", "deepspeed"])
def test_files_say_what_else_a_script_has_to_do_where_not_all_of_a_model_learns(words, notes, form, capsys):
    model = ["model=llama3_8b", *(f"++model.{word}" for word in words), "num_devices=4", "num_microbatches=8"]
    assert dispatch(["show", "schedule=1f1b", "cost=analytic", "cluster=8x_h100", *model, f"format={form}"]) == 0
    told = capsys.readouterr().out
    assert all(note in told for note in notes)


# --- the same, read by the frameworks' own parsers, where they are installed ------------------------------------------

PLANNED = {"sequences": 3, "seq_len": 64, "recompute": "full"}


def written(name, form, **known):
    schedule = schedule_near(name, 2, 4)
    plan = numbers_of(schedule, **(PLANNED | known))
    return plan, export(schedule, form, Given(lambda: None, plan=plan))


def test_torchtitan_takes_the_words_on_its_own_command_line():
    manager = pytest.importorskip("torchtitan.config.manager")
    pytest.importorskip("torchtitan.models.llama3.config_registry")
    for name, known in (("1f1b", {"data": 2, "tensor": 2}), ("zero_3", {})):
        plan, text = written(name, "torchtitan", **known)
        sections = tomllib.loads(text)
        words = ["--module", "llama3", "--config", "llama3_debugmodel"]
        for section in ("training", "parallelism"):
            for key, value in sections[section].items():
                if isinstance(value, bool):
                    words.append(f"--{section}.{'' if value else 'no-'}{key}")
                elif not isinstance(value, list):
                    words.append(f"--{section}.{key}={value}")
        words.append(f"activation-checkpoint:{sections['activation_checkpoint']['mode']}")
        found = manager.ConfigManager().parse_args(words)
        assert found.training.seq_len == 64
        assert found.training.global_batch_size == plan.global_batch
        assert found.parallelism.tensor_parallel_degree == plan.tensor
        if plan.pipeline > 1:
            size = found.parallelism.pipeline_parallel_microbatch_size
            assert found.training.local_batch_size // size == plan.num_microbatches
        assert "FullAC" in type(found.activation_checkpoint).__qualname__


@pytest.mark.parametrize(
    "name, expected",
    [
        ("qwen3_1p7b", ["--module qwen3 --config qwen3_1_7b, with norms of queries and keys", "refuses a head tied"]),
        ("llama31_8b", ["--module llama3 --config llama3_8b, without norms"]),
        ("llama3_70b", ["--module llama3 --config llama3_70b"]),
        ("llama32_3b", ["--module llama3, without norms", "add a function for the flavour 3B", "refuses a head tied"]),
        ("llama2_7b", ["--module llama3, without norms", "add a function for 32 layers of 4096"]),
        ("qwen25_7b", ["lack parts of qwen25_7b"]),  # biases of queries, keys and values
        ("mixtral_8x7b", ["lack parts of mixtral_8x7b"]),
    ],
)
def test_torchtitan_is_told_which_of_its_models_a_plan_is_for(name, expected):
    told = "\n".join(model_notes(architecture(name), pipeline=True))
    assert all(words in told for words in expected)
    assert ("tied" in told) is architecture(name).tied
    assert "tied" not in "\n".join(model_notes(architecture(name), pipeline=False))


def test_the_flavors_are_torchtitans():
    for module, flavors in FLAVORS.items():
        theirs = pytest.importorskip(f"torchtitan.models.{module}")
        starts = pytest.importorskip(f"torchtitan.models.{module}.config_registry")
        for each in flavors:
            found = theirs.model_registry(each.name).model
            attention = found.layers[0].attention
            assert (len(found.layers), found.dim, found.vocab_size) == (each.num_layers, each.hidden, each.vocab)
            assert (attention.n_heads, attention.n_kv_heads) == (each.heads, each.key_value_heads)
            assert not each.config or callable(getattr(starts, each.config))


def test_megatron_core_counts_the_microbatches_of_a_plan():
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    parallel = pytest.importorskip("megatron.core.model_parallel_config")
    plan, text = written("1f1b", "megatron_layout", data=2, tensor=2, sequence_parallel=True)
    found = of_arguments(text)
    fixed = calculator.ConstantNumMicroBatchesCalculator(
        found["global-batch-size"], found["micro-batch-size"], plan.data, False, 0
    )
    assert fixed.get() == plan.num_microbatches
    sizes = {name: found[name.replace("_", "-")] for name in ("tensor_model_parallel_size", "sequence_parallel")}
    config = parallel.ModelParallelConfig(
        **sizes, pipeline_model_parallel_size=found["pipeline-model-parallel-size"], pipeline_dtype="bf16"
    )
    assert (config.pipeline_model_parallel_size, config.tensor_model_parallel_size) == (2, 2)


@pytest.mark.parametrize("name", ["zero_2", "zero_3", "zero_infinity", "1f1b", "superoffload"])
def test_deepspeeds_own_config_takes_the_file(name, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)  # no process group is open here
    plan, text = written(name, "deepspeed")
    given, world = json.loads(text), types.SimpleNamespace(get_data_parallel_world_size=lambda: plan.data)
    found = config.DeepSpeedConfig(given, mpu=world)
    assert found.train_batch_size == plan.global_batch
    assert found.train_micro_batch_size_per_gpu == plan.sequences
    assert found.gradient_accumulation_steps == plan.num_microbatches
    assert int(found.zero_config.stage) == given["zero_optimization"]["stage"]
    assert (found.zero_config.offload_optimizer is not None) == bool(plan.on_host)
    assert found.pipeline["stages"] == (plan.pipeline if plan.pipeline > 1 else "auto")


def test_accelerates_own_config_takes_the_file(tmp_path):
    config = pytest.importorskip("accelerate.commands.config.config_args")
    plan, text = written("zero_3", "fsdp2")
    (tmp_path / "fsdp2.yaml").write_text(text)
    found = config.load_config_from_file(str(tmp_path / "fsdp2.yaml"))
    assert found.num_processes == plan.data
    assert found.distributed_type == "FSDP"
    assert found.fsdp_config["fsdp_version"] == 2


def test_waves_have_no_name_there():
    wave = entries()["hanayo"].build(Shape(2, 8, 8))
    with pytest.raises(
        ScheduleError, match=r"torchtitan places stages one a rank, in loops or in a V .* rank 0: 0,3,4,7"
    ):
        table_lines(wave, "rows.csv")
    with pytest.raises(ValueError, match="framework=nemo: one of torchtitan, automodel"):
        table_lines(wave, "rows.csv", "nemo")


def test_partitions_need_a_model():
    bare = entries()["1f1b"].build(Shape(2, 2, 4))
    for form in ("megatron_layout", "deepspeed_parts", "roundpipe"):
        with pytest.raises(ValueError, match="writes a partition, and this schedule has none"):
            export(bare, form, Given(lambda: None))
    assert "module_fqns_per_model_part has as many lists" in export(bare, "torchtitan", Given(lambda: None))
