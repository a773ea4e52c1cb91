"""`advise`: the promised fields, what the figures of a machine and a config.json become, and what is refused."""

import io
import json
import re
import shlex
from dataclasses import replace

import pytest
from small_machines import FOUR_L40S, SMALL, TWO_L40S

from rpbench.advice.levers import LINKS
from rpbench.advice.machine_figures import described
from rpbench.advice.model_source import architecture_of, config_path, context_in, model_of_sizes
from rpbench.cli import dispatch
from rpbench.commands.advising import advise
from rpbench.commands.advising.advise import advise_on
from rpbench.commands.advising.advise_questions import spelled_machine, spelled_model
from rpbench.config.loading import load
from rpbench.cost.hardware.machine import machine
from rpbench.places import CONF
from rpbench.workload.architecture import Architecture, architecture
from rpbench.workload.counts import Experts

# Sizes of Llama-3.2-3B, from its public configuration.
LLAMA_3B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "Llama-3.2-3B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3B))
    return folder


def test_a_config_is_counted_as_its_card_says(config):
    """3.21 billion parameters, says the model's card."""
    model = architecture_of(config / "config.json")
    assert model.total_parameters == pytest.approx(3.21e9, rel=2e-3)
    assert (model.name, model.family, model.tied) == ("llama_3_2_3b", "llama", True)


def test_sizes_on_the_command_line_are_the_same_model_as_its_config(config):
    sizes = {"num_layers": 28, "hidden": 3072, "heads": 24, "key_value_heads": 8, "inner": 8192, "vocab": 128256}
    typed = model_of_sizes({key: str(value) for key, value in sizes.items()} | {"tied": "true"})
    assert replace(typed, name="llama_3_2_3b") == architecture_of(config / "config.json")
    plain = {"num_layers": "2", "hidden": "64", "heads": "2", "vocab": "100"}
    assert model_of_sizes(plain | {"gated": "false"}).family == "gpt"
    assert model_of_sizes(plain | {"family": "qwen3"}).family == "qwen3"


def test_what_is_not_said_of_a_machine_is_named():
    found = described("l40s", {"num_devices": "4", "host_link_bytes_per_s": "32e9"})
    assert found.machine.num_devices == 4
    assert found.machine.device_memory_bytes == 48_305_799_168  # the 46,068 MiB that it shows
    assert found.machine.host_to_device_bytes_per_s == 32e9
    assert found.machine.num_nodes == 1
    assert set(found.assumed) == {"host_bytes_per_s", "intra_bytes_per_s", "host_memory_bytes"}


def test_several_nodes_are_a_machine_of_nodes():
    found = described("h100_sxm5_80gb", {"num_devices": "32", "devices_per_node": "8", "inter_bytes_per_s": "50e9"})
    nodes = found.machine
    assert (nodes.num_nodes, nodes.node_devices, nodes.inter_bytes_per_s) == (4, 8, 50e9)


def test_advice_is_json_on_stdout_and_a_table_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(advise, "usable_cores", lambda: 2)
    assert dispatch(("advise", *SMALL, "gpu=l40s", "num_devices=2")) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[-1])
    promised = {"schedule", "options", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "peak_memory_bytes"}
    promised |= {"host_memory_bytes", "memory", "mfu", "gap", "runs_in", "staleness_steps", "why", "command", "export"}
    assert promised <= answer["ranking"][0].keys()
    for row in answer["ranking"]:
        assert sum(row["memory"].values()) == row["peak_memory_bytes"]
        assert 0 < row["mfu"] < 1
        assert row["gap"] >= 0
        assert row["searched_to_the_end"] == (row["gap"] <= 0.01)
    assert answer["parameters"]["all"] == answer["parameters"]["active"] == answer["parameters"]["trained"]
    assert {"ranking", "does_not_fit", "levers", "assumed"} <= answer.keys()
    assert {row["schedule"] for row in answer["ranking"]} == {"1f1b", "gpipe"}
    assert "tokens/s" in err
    assert "assumed host_memory_bytes: no limit" in err


def test_who_trains_on_older_weights_has_a_list_of_its_own_or_joins(capsys):
    words = [*(word for word in SMALL if not word.startswith("schedules=")), "schedules=1f1b,pipedream_2bw"]
    apart, joined = (advise_on([*words, *TWO_L40S, late], io.StringIO()) for late in ("late=no", "late=yes"))
    assert {row["schedule"] for row in apart["ranking"]} == {"1f1b"}
    assert {row["schedule"] for row in apart["ranking_late"]} == {"pipedream_2bw"}
    assert {row["schedule"] for row in joined["ranking"]} == {"1f1b", "pipedream_2bw"}
    assert joined["ranking_late"] == []
    assert all(row["command"].startswith("python -m rpbench") for row in apart["ranking_late"])
    with pytest.raises(ValueError, match="late=maybe: one of yes, no"):
        advise_on([*words, *TWO_L40S, "late=maybe"], io.StringIO())


@pytest.mark.parametrize("layers, devices", [(4, 2), (2, 4)])
def test_the_commands_of_its_first_rows_run_and_say_the_same(layers, devices, rpbench):
    """Where there are fewer layers than devices some only pass tensors on."""
    words = [*SMALL[1:-1], f"num_layers={layers}", "gpu=l40s", f"num_devices={devices}", "seconds=1"]
    answer = advise_on([*words, "schedules=1f1b,gpipe,zb_v,zero_3"], io.StringIO())
    assert {row["schedule"] for row in answer["ranking"]} >= {"1f1b", "gpipe", "zero_3"}
    for row in answer["ranking"]:
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"]) == (0, "ok")
        assert record["schedule"] == row["schedule"] or "data" in row["options"]
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"])
        assert max(record["peak_memory_bytes"]) == pytest.approx(row["peak_memory_bytes"], rel=1e-6)


def test_faster_links_shorten_the_sum_of_a_tied_matrix(rpbench):
    words = [*SMALL[:-1], "tied=true", "vocab=100000", "gpu=rtx4090", "num_devices=2", "schedules=1f1b", "seconds=1"]
    answer = advise_on([word for word in words if word != "vocab=8000"], io.StringIO())
    row, found = answer["ranking"][0], {each["name"]: each["tokens_per_s"] for each in answer["levers"]}
    assert row["why"]["collectives"] > row["why"]["optimizer"]
    known = machine("2x_rtx4090")
    fast = [f"++cluster.{name}={2 * getattr(known, name)}" for name in LINKS if getattr(known, name) is not None]
    _, (record,), _ = rpbench(*shlex.split(row["command"])[3:], *fast)
    assert found["links twice as fast"] == pytest.approx(record["tokens_per_s"], rel=1e-3)


def test_a_command_names_a_model_that_is_shipped_and_what_is_other_about_it():
    words = [
        "model=qwen25_7b",
        "finetune=lora",
        "lora_rank=8",
        "lora_targets=q_proj,v_proj",
        "schedules=1f1b",
        "seconds=1",
    ]
    (row,) = advise_on([*words, *TWO_L40S], io.StringIO())["ranking"]
    given = shlex.split(row["command"])[4:]
    sizes = ["++model.training_mode=lora", "++model.lora_rank=8", "++model.lora_targets=[q_proj,v_proj]"]
    assert given[0] == "model=qwen25_7b"
    assert sorted(word for word in given if "model." in word) == sorted([*sizes, "++model.seq_len=2048"])


@pytest.mark.parametrize(
    "words",
    [
        ("model=llama32_1b", *TWO_L40S, "schedules=1f1b", "batch=4", "seq_len=512"),
        ("model=llama32_1b", "cluster=4x_h100", "schedules=1f1b", "batch=4", "seq_len=512"),
        ("model=llama32_1b", "gpu=l40s", "num_devices=4", "devices_per_node=2", "batch=8", "seq_len=512"),
    ],
)
def test_a_command_sets_every_key_once_and_none_that_is_as_usual(words, rpbench):
    answer = advise_on([*words, *(["seconds=1"] if "schedules=1f1b" in words else [])], io.StringIO())
    row = answer["ranking"][0]
    given = shlex.split(row["command"])[3:]
    keys = [word.lstrip("+").partition("=")[0] for word in given]
    assert len(keys) == len(set(keys))
    changed = ["++model.seq_len=512", *(["++cluster.devices_per_node=2"] if "devices_per_node=2" in words else [])]
    assert [word for word in given if word.startswith("++")] == changed
    status, (record,), _ = rpbench(*given)
    assert (status, record["status"]) == (0, "ok")
    assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=0.05)  # of all steps


def test_a_command_runs_where_the_folder_of_a_config_has_the_name_of_its_model(tmp_path, monkeypatch):
    (tmp_path / "qwen3_1p7b").mkdir()
    (tmp_path / "qwen3_1p7b" / "config.json").write_text(json.dumps(LLAMA_3B | {"num_hidden_layers": 4}))
    monkeypatch.chdir(tmp_path)
    (row,) = advise_on(["model=qwen3_1p7b", *TWO_L40S, "schedules=1f1b", "seconds=1"], io.StringIO())["ranking"]
    found = load(shlex.split(row["command"])[3:]).model
    assert (found.num_layers, found.vocab) == (4, 128256)


@pytest.mark.parametrize("name", ["gpt_oss_20b", "deepseek_v3", "mpt_7b"])
def test_a_model_is_the_same_when_it_is_spelled_key_by_key(name):
    assert load(shlex.split(spelled_model(architecture(name)))).model == architecture(name)


def test_a_head_that_is_as_the_usual_one_by_chance_is_spelled():
    # 64 heads share 32 pairs of keys and values, as many as model=transformer has heads.
    wide = Architecture("wide", 4, 4096, 64, 50_304, key_value_heads=32, gated=False, tied=True, seq_len=1024)
    assert load(shlex.split(spelled_model(wide))).model == wide


@pytest.mark.parametrize("figure", ["intra_bytes_per_s", "host_link_bytes_per_s", "host_memory_bytes"])
@pytest.mark.parametrize("gpu", ["rtx3090", "h100_sxm5_80gb", "t4"])
def test_a_machine_is_the_same_when_it_is_spelled_key_by_key(gpu, figure):
    """What was measured on the usual machine, such as the rate of collectives, is unknown with another link."""
    given = described(gpu, {"num_devices": "8", figure: "12e9"}).machine
    found = load(shlex.split(spelled_machine(given))).cluster
    alike = {"declared": {}, "devices_per_node": None}  # where numbers come from is not spelled; one host has all
    assert replace(found, **alike) == replace(given, **alike)


def test_rows_are_restricted_to_what_runs_in_a_framework():
    words = [*SMALL[:-1], "schedules=1f1b,gpipe,zb_h1,pipedream_2bw", *TWO_L40S]
    for asked in (["runs_in=Megatron"], ["--runs-in", "megatron"]):
        answer = advise_on([*words, *asked], io.StringIO())
        assert [row["schedule"] for row in answer["ranking"]] == ["1f1b"]
        assert answer["ranking"][0]["runs_in"] == ["torchtitan", "Megatron", "DeepSpeed"]
        assert answer["ranking"][0]["export"].endswith(" format=megatron_layout")  # not for the first that runs it
        assert answer["ranking_late"] == []
    with pytest.raises(ValueError, match="unknown runs_in 'megaton'"):
        advise_on([*words, "runs_in=megaton"], io.StringIO())
    with pytest.raises(ValueError, match="none of the schedules that are asked for runs there"):
        advise_on([*SMALL, *TWO_L40S, "runs_in=FSDP2"], io.StringIO())


def test_late_rows_say_what_their_convergence_cost_in_our_study():
    words = [*SMALL[:-1], "schedules=1f1b,pipedream_2bw", *TWO_L40S]
    answer = advise_on(words, io.StringIO())
    (late,) = answer["ranking_late"]
    assert late["convergence"]["final_loss"] > late["convergence"]["final_loss_synchronous"]
    assert late["convergence"]["seeds_at_goal"] == 0
    assert answer["ranking"][0]["convergence"] is None


def test_an_export_is_what_a_framework_reads(two_cards, capsys):
    row = next(row for row in two_cards["ranking"] if row["schedule"] == "1f1b")
    assert dispatch(shlex.split(row["export"])[3:]) == 0
    written = capsys.readouterr()
    assert "pipeline_parallel_schedule_csv" in written.out
    assert "without effect" not in written.err


@pytest.mark.parametrize(
    "words, why",
    [
        (("training_mode=qlora", "lora_rank=8"), "weights in 4 bits, which the modules of this project cannot build"),
        (("training_mode=lora", "lora_rank=8"), ""),
    ],
)
def test_a_file_that_cannot_be_written_is_no_export(words, why):
    """The plan of RoundPipe's library says what the host's allocator takes, for which the model is built."""
    told = io.StringIO()
    sizes = ("num_layers=4", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "batch=4")
    (row,) = advise_on([*sizes, *words, "schedules=roundpipe", *TWO_L40S], told)["ranking"]
    if why:
        assert row["export"] is None
        assert why in row["export_note"]
        assert f"({row['export_note'][:60]}" in told.getvalue()
    else:
        assert (dispatch(shlex.split(row["export"])[3:]), row["export_note"]) == (0, None)


def test_what_fits_nowhere_says_the_smallest_change():
    words = io.StringIO()
    answer = advise_on([*SMALL, *TWO_L40S, "device_memory_bytes=1.01e9"], words)
    assert answer["ranking"] == []
    assert "more memory of each device" in answer["smallest_change"]
    assert answer["smallest_change"][:60] in words.getvalue()


def test_the_memory_that_is_said_to_be_lacking_is_enough():
    words, memory = (*SMALL, *TWO_L40S), 1_010_000_000
    (more,) = advise_on([*words, f"device_memory_bytes={memory}"], io.StringIO())["change"]
    enough = memory + more["lacks_bytes"]
    answer = advise_on([*words, f"device_memory_bytes={enough}"], io.StringIO())
    assert more["schedule"] in {row["schedule"] for row in answer["ranking"]}
    assert not advise_on([*words, f"device_memory_bytes={enough - 120_000_000}"], io.StringIO())["ranking"]


def test_the_hosts_memory_that_is_said_to_be_lacking_is_enough():
    words = ["num_layers=3", *SMALL[1:-1], "gpu=rtx4090", "num_devices=2", "batch=2", "schedules=roundpipe"]
    memory = 100_000_000
    (more,) = advise_on([*words, f"host_memory_bytes={memory}"], io.StringIO())["change"]
    assert more["kind"] == "host_memory_bytes"
    enough = memory + more["lacks_bytes"]
    assert advise_on([*words, f"host_memory_bytes={enough}"], io.StringIO())["ranking"]
    assert not advise_on([*words, f"host_memory_bytes={enough - 25_000_000}"], io.StringIO())["ranking"]


def test_where_no_one_memory_is_enough_it_says_how_much_of_both():
    words = ["num_layers=3", *SMALL[1:-1], "gpu=rtx4090", "num_devices=2", "batch=2", "schedules=roundpipe"]
    few = {"device_memory_bytes": 850_000_000, "host_memory_bytes": 100_000_000}
    answer = advise_on([*words, *(f"{name}={size}" for name, size in few.items())], io.StringIO())
    row = answer["does_not_fit"][0]  # of those with timely and with late updates
    assert answer["change"] == []
    assert re.search(r"roundpipe lacks 0\.\d GB a device and 0\.\d GB of the host's memory", answer["smallest_change"])
    more = (f"{name}={size + row[name.replace('memory', 'lacks')]}" for name, size in few.items())
    assert advise_on([*words, *more], io.StringIO())["ranking"]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"num_attention_heads": None}, "config.json has no num_attention_heads"),
        ({"num_attention_heads": 25, "head_dim": None}, "does not divide"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"max_position_embeddings": 1024, "seq_len": "asked"}, "seq_len=2048: "),
        ({"hidden_size": 10**30}, "a whole number from 1 to 1,000,000,000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': true or false, without quotes"),
        ({"mlp_bias": "no"}, "mlp_bias='no': true or false"),
        ({"attn_pdrop": "a"}, "attn_pdrop='a': a number of at least 0 and below 1"),
        ({"finetune": "lora", "lora_rank": 9_999_999}, "k_proj is 1024 wide; take at most 1024"),
    ],
)
def test_a_config_that_is_not_modelled_says_which_field(change, expected, config, capsys):
    words = ["seq_len=2048"] if change.pop("seq_len", None) else []
    words += [f"{key}={change.pop(key)}" for key in ("finetune", "lora_rank") if key in change]
    (config / "config.json").write_text(json.dumps(LLAMA_3B | change))
    assert dispatch(("advise", f"model={config}", *FOUR_L40S, *words)) == 2
    assert expected in capsys.readouterr().err


def test_experts_and_latent_attention_are_answered_on_one_host(capsys):
    words = ("experts.total=8", "experts.active=2", "experts.inner=512", "windows=[128,null]")
    sizes = ("num_layers=8", "hidden=1024", "heads=8", "vocab=32000", *words)
    assert dispatch(("advise", *sizes, *FOUR_L40S, "schedules=1f1b,zb_h1", "seconds=1")) == 0
    command = json.loads(capsys.readouterr().out)["ranking"][0]["command"]
    assert "++model.experts.total=8" in command
    assert "'++model.windows=[128,null]'" in command
    words = shlex.split(command.removeprefix("python -m rpbench "))
    assert load(words).model.experts == Experts(8, 2, 512)
    assert dispatch(("advise", "model=deepseek_v2", "cluster=8x_h100", "schedules=1f1b", "seconds=1")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq_len"] == 2048
    assert found["ranking"] or found["does_not_fit"]


def test_brackets_without_end_are_no_traceback(config, capsys):
    (config / "config.json").write_text("[" * 100_000)
    assert dispatch(("advise", f"model={config}", *FOUR_L40S)) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_a_model_has_no_longer_sequences_than_positions(config):
    """GPT-2 has a row of a table for each of 1,024 positions; the usual 2,048 tokens would be another model."""
    (config / "config.json").write_text(json.dumps(LLAMA_3B | {"max_position_embeddings": 1024}))
    assert context_in(config / "config.json") == 1024
    answer = advise_on([f"model={config}", *FOUR_L40S, "devices_per_node=2"], io.StringIO())
    assert (answer["seq_len"], answer["tokens_per_step"]) == (1024, 4 * 8 * 1024)


def test_a_name_in_the_local_cache_is_a_model(tmp_path, monkeypatch):
    """As huggingface_hub lays it out: the file is a link into `blobs`."""
    folder = tmp_path / "models--meta-llama--Llama-3.2-3B"
    for part in ("refs", "blobs", "snapshots/0f1e"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text("0f1e")
    (folder / "blobs" / "ab12").write_text(json.dumps(LLAMA_3B))
    (folder / "snapshots" / "0f1e" / "config.json").symlink_to("../../blobs/ab12")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    path = config_path("meta-llama/Llama-3.2-3B")
    assert path is not None
    assert architecture_of(path).name == "llama_3_2_3b"
    assert config_path("meta-llama/Llama-3.2-1B") is None
    assert config_path("../x") is None


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it answers where nobody knows a home
    assert config_path("meta-llama/Llama-3.2-1B") is None


def test_a_config_of_too_many_layers_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3B | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match=r"config.json: num_hidden_layers=1000000000: at most 1,000"):
        architecture_of(path)


def test_a_cluster_with_a_slow_device_and_an_odd_name_is_in_the_command(rpbench, tmp_path):
    slow = (CONF / "cluster" / "8x_rtx4090.yaml").read_text().replace("device_speeds: null", "")
    lines = [line for line in slow.splitlines() if not line.startswith(("name:", "device_speeds:", "num_devices:"))]
    path = tmp_path / "slow.yaml"
    path.write_text("\n".join(['name: "a b, (1)"', "num_devices: 2", "device_speeds: [1, 0.5]", *lines]))
    answer = advise_on([*SMALL[:-1], "schedules=1f1b", f"cluster={path}"], io.StringIO())
    row = answer["ranking"][0]
    _, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
    assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-9)


def test_a_truncated_config_is_named(config, capsys):
    (config / "config.json").write_text(json.dumps(LLAMA_3B)[:-20])
    assert dispatch(("advise", f"model={config}/config.json", *FOUR_L40S)) == 2
    assert "no complete JSON" in capsys.readouterr().err


def test_what_cannot_be_compared_is_named():
    words = [*SMALL[:-1], *TWO_L40S, "compare=1f1b,zb_h1", "runs_in=torchtitan"]
    answer = advise_on(words, people := io.StringIO())
    assert answer["comparison"] is None
    assert "zb_h1: no plan that runs in torchtitan and fits" in " ".join(people.getvalue().split())


def test_what_cannot_be_built_is_compared_with_nothing_and_told_why():
    """It was said to fit nowhere."""
    advise_on([*SMALL[:-1], *TWO_L40S, "compare=1f1b,zero_3", "batch=3"], people := io.StringIO())
    said = " ".join(people.getvalue().split())
    assert "compare=1f1b,zero_3: zero_3: zero_3 deals 3 microbatches to 2 replicas" in said
    assert "no plan that runs" not in said


def test_a_part_of_devices_of_two_kinds_is_the_fastest(tmp_path):
    lines = (CONF / "cluster" / "8x_rtx4090.yaml").read_text().splitlines()
    lines = [line for line in lines if not line.startswith(("name:", "device_speeds:", "num_devices:"))]
    path = tmp_path / "two.yaml"
    path.write_text("\n".join(["name: two_kinds", "num_devices: 3", "device_speeds: [0.5, 1, 0.75]", *lines]))
    answer = advise_on([*SMALL[:-1], "schedules=1f1b", f"cluster={path}", "fewest_devices=yes"], io.StringIO())
    assert answer["fewest_devices"] == 1
    assert re.search(r"cluster\.device_speeds=\[1(\.0)?\]", answer["ranking"][0]["command"])


def test_a_cluster_of_ones_own_is_a_file(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("num_devices: 2\nbandwidth: 3\n")
    assert dispatch(("advise", *SMALL, f"cluster={path}")) == 2
    assert "unknown key of cluster 'bandwidth'" in capsys.readouterr().err


def test_all_figures_that_a_cluster_lacks_are_named_at_once(tmp_path, capsys):
    path = tmp_path / "bare.yaml"
    path.write_text("name: bare\nnum_devices: 2\nmemory_bytes_per_s: 1e12\nmatmul_flops_per_s: 165e12\n")
    assert dispatch(("advise", *SMALL, f"cluster={path}")) == 2
    err = capsys.readouterr().err
    for name in ("wide_matmul_flops_per_s", "attention_efficiency", "memory_efficiency", "host_bytes_per_s"):
        assert f"{name}: " in err
    assert "memory_bytes_per_s: " not in err
