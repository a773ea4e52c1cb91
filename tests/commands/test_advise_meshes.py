"""`advise` on nodes, and compositions on one host: which rows there are, and that their commands say the same."""

import io
import json
import shlex
from dataclasses import replace

import pytest
from small_machines import EIGHT_LAYERS, NODES, SMALL, TWO_L40S

from rpbench.advice.causes import CAUSES
from rpbench.advice.machine_figures import described
from rpbench.advice.rows import EXPORTS
from rpbench.advice.what_if import mesh_points
from rpbench.cli import dispatch
from rpbench.commands.advising.advise import advise_on, plan_meshes
from rpbench.commands.advising.advise_meshes import NO_MESH, advise_nodes, levers_of_mesh
from rpbench.commands.advising.advise_table import label
from rpbench.cost.hardware.machine import machine
from rpbench.ir.partition import divisors
from rpbench.mesh.exact import exact
from rpbench.mesh.plan_search.closed_forms import Question
from rpbench.mesh.plan_search.plans import SCHEDULES, Space
from rpbench.mesh.plan_search.search import ORDERS, Candidates, in_other_orders
from rpbench.mesh.software import software
from rpbench.places import CONF
from rpbench.workload.architecture import architecture


@pytest.fixture(scope="module")
def told():
    """What people read of `over_nodes`."""
    return io.StringIO()


@pytest.fixture(scope="module")
def over_nodes(told):
    """The answer for eight devices on two nodes."""
    return advise_on([*EIGHT_LAYERS, *NODES], told)


def test_over_nodes_what_fits_nowhere_is_a_verdict_with_the_smallest_change(capsys):
    asked = ("model=llama3_70b", "cluster=dgx_h100", "seq_len=4096", "sequences_per_step=16")
    assert dispatch(("plan", "mesh=search", *asked, "num_devices=4")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ranking"] == []
    assert answer["change"]["num_devices"] == 16
    assert "fits on 16 devices" in answer["smallest_change"]
    for count, fits in ((8, False), (16, True)):
        assert dispatch(("plan", "mesh=search", *asked, f"num_devices={count}")) == 0
        assert bool(json.loads(capsys.readouterr().out)["ranking"]) is fits


def test_on_one_host_the_smallest_change_counts_compositions():
    """With whole layers on each of four devices 1F1B lacks 2.6 GB more."""
    words = ["num_layers=4", "hidden=2048", "heads=8", "vocab=8000", "seq_len=4096", "schedules=1f1b", "seconds=1"]
    words += ["gpu=rtx4090", "num_devices=4"]
    (change,) = advise_on([*words, "device_memory_bytes=2.2e9"], io.StringIO())["change"]
    for part, fits in ((1.0, True), (0.97, False)):
        enough = 2_200_000_000 + round(part * change["lacks_bytes"])
        assert bool(advise_on([*words, f"device_memory_bytes={enough}"], io.StringIO())["ranking"]) is fits


def test_a_search_over_meshes_refuses_devices_that_differ(tmp_path, capsys):
    """It searched as if all were as fast as the fastest."""
    text = (CONF / "cluster" / "8x_rtx4090.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("device_speeds: null", "device_speeds: [1,1,1,1,1,1,1,0.5]"))
    words = (f"cluster={tmp_path / 'mine.yaml'}", "model=llama32_1b", "sequences_per_step=64")
    assert dispatch(("plan", "mesh=search", *words)) == 2
    assert "under a mesh, whose devices are alike" in capsys.readouterr().err


def test_over_nodes_meshes_are_ranked(over_nodes):
    paces = [row["tokens_per_s"] for row in over_nodes["ranking"]]
    assert paces == sorted(paces, reverse=True)
    for row in over_nodes["ranking"]:
        options = row["options"]
        assert options["data"] * options["pipeline"] * options["tensor"] * options["context"] == 8
        assert sum(row["why"].values()) == pytest.approx(over_nodes["tokens_per_step"] / row["tokens_per_s"])


def test_methods_without_a_pipeline_are_named_alike_on_one_host_and_over_nodes(over_nodes):
    nodes = over_nodes["ranking"]
    assert len({label(row) for row in nodes}) == len(nodes)  # each once
    alone = {row["options"]["shares"]: row["schedule"] for row in nodes if row["options"]["pipeline"] == 1}
    names = {"none": "data_parallel", "optimizer": "zero_1", "gradients": "zero_2", "parameters": "zero_3"}
    assert alone
    assert alone.items() <= names.items()
    host = advise_on([*SMALL[:-1], "schedules=fsdp,ddp", *TWO_L40S, "seconds=1"], io.StringIO())["ranking"]
    assert {row["schedule"] for row in host} == {"zero_3", "data_parallel"}


@pytest.mark.parametrize("name", ["data_parallel", "zero_1", "zero_2", "zero_3", "1f1b", "gpipe", "zb_v"])
def test_a_method_that_is_asked_for_over_nodes_has_its_own_rows_alone(name, over_nodes):
    """In a list and in a comparison; its best row is that of the whole ranking."""
    best = next(row for row in over_nodes["ranking"] if row["schedule"] == name)
    only = advise_on([*EIGHT_LAYERS, *NODES, f"schedules={name}"], io.StringIO())
    assert {row["schedule"] for row in only["ranking"]} == {name}
    assert only["left_out"] == {}
    assert only["ranking"][0]["tokens_per_s"] >= best["tokens_per_s"]
    other = "interleaved_1f1b"
    answer = advise_on([*EIGHT_LAYERS, *NODES, f"compare={other},{name}"], io.StringIO())
    assert sorted(row["schedule"] for row in answer["ranking"]) == sorted([other, name])
    assert answer["comparison"]["b"]["label"].startswith(name)
    for row in answer["ranking"]:
        assert (row["options"]["pipeline"] > 1) is not row["schedule"].startswith(("zero", "data"))


def test_limits_over_nodes_are_those_of_each_method():
    answer = advise_on([*EIGHT_LAYERS, *NODES, "max_seq_len=yes"], io.StringIO())
    found = {row["schedule"]: row["command"] for row in answer["limits"]}
    assert {"1f1b", "gpipe", "data_parallel", "zero_1", "zero_2", "zero_3"} <= found.keys()
    for name, command in found.items():
        assert command is None or ("mesh.pipeline=" in command) is not name.startswith(("zero", "data", "megatron"))


@pytest.mark.parametrize("words", [("gpu=rtx4090", "num_devices=4"), ("cluster=gb200_nvl72", "num_devices=8")])
def test_a_limit_of_replicas_is_none_of_shards_alone(words):
    """Without replicas nothing is summed: such a mesh holds more tokens, and is megatron_tp."""
    asked = ("num_layers=4", "hidden=512", "heads=8", "vocab=8000", *words, "max_seq_len=yes")
    answer = advise_on([*asked, "schedules=data_parallel,megatron_tp"], io.StringIO())
    found = {row["schedule"]: row["command"] for row in answer["limits"]}
    assert "mesh.data=" in found["data_parallel"]
    assert "mesh.data=" not in found["megatron_tp"]


def test_the_smallest_change_of_replicas_is_none_of_shards_alone():
    words = ["num_layers=4", "hidden=2048", "heads=8", "vocab=8000", "seconds=1", "gpu=rtx4090", "num_devices=4"]
    words += ["schedules=data_parallel"]
    (change,) = advise_on([*words, "device_memory_bytes=1.5e9"], io.StringIO())["change"]
    for part, fits in ((1.0, True), (0.97, False)):
        enough = 1_500_000_000 + round(part * change["lacks_bytes"])
        assert bool(advise_on([*words, f"device_memory_bytes={enough}"], io.StringIO())["ranking"]) is fits


def test_one_host_has_zero_1_beside_others():
    words = [*SMALL[:-1], *TWO_L40S, "seconds=1"]
    found = advise_on([*words, "schedules=zero_1,zero_2"], io.StringIO())["ranking"]
    assert {row["schedule"] for row in found} == {"zero_1", "zero_2"}
    for asked in ("zero_1", "zero_1 max_seq_len=yes"):
        with pytest.raises(ValueError, match="schedules=zero_1: one host has it beside others only"):
            advise_on([*words, *f"schedules={asked}".split()], io.StringIO())


def test_rows_of_nodes_and_of_one_host_have_the_same_fields(over_nodes, two_cards):
    assert two_cards.keys() - over_nodes.keys() == set()
    for row in over_nodes["ranking"]:
        assert row.keys() == two_cards["ranking"][0].keys()
        assert {"microbatch_sequences", "recompute", "chunks_per_device", "partition"} <= row["options"].keys()
        assert sum(row["memory"].values()) == row["peak_memory_bytes"]
        assert 0 < row["mfu"] < 1
        assert row["tokens_per_day"] == 86_400 * row["tokens_per_s"]
        assert (row["export"] is None) == (row["runs_in"] == ["here only"])


def test_a_mesh_is_run_and_exported_by_its_own_commands(over_nodes, rpbench, capsys):
    for row in over_nodes["ranking"][:3]:
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"], record["num_devices"]) == (0, "ok", 8)
        assert record["tokens_per_step"] == over_nodes["tokens_per_step"]
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-6)
        capsys.readouterr()
        assert dispatch(shlex.split(row["export"])[3:]) == 0
        assert str(row["options"]["microbatch_sequences"]) in capsys.readouterr().out


def test_a_better_machine_brings_an_order_without_a_closed_form_what_it_brings_its_plan():
    """Faster links: the very plan, timed with them; more memory: nothing less than the plan has."""
    own, on = replace(architecture("llama3_8b"), num_layers=8), machine("dgx_h100").with_devices(8)
    asked, space = Question(own, on, software("megatron_core"), 2048, 32), Space(schedules=("zb_h1",), shared=("none",))
    (first,) = in_other_orders(Candidates(asked, space).best_of_each(), ["zb_v"])
    levers = {lever["name"]: lever for lever in levers_of_mesh(asked, space, first)}
    fast = replace(on, intra_bytes_per_s=2 * on.device.link_bytes_per_s)
    step_s = sum(exact(replace(first.job, machine=fast))[1].values())
    assert levers["links inside nodes twice as fast"]["tokens_per_s"] >= first.job.tokens / step_s
    assert levers["twice the device memory"]["tokens_per_s"] >= 8 * first.tokens_per_s_per_device
    assert min(lever["gain"] for lever in levers.values()) >= 0


def test_an_order_without_a_closed_form_gets_a_microbatch_of_its_own():
    """Of one sequence on the mesh of another order; larger ones are tried as long as they are faster."""
    own, on = replace(architecture("llama3_8b"), num_layers=8), machine("dgx_h100").with_devices(8)
    asked = Question(own, on, software("megatron_core"), 2048, 32)
    found = Candidates(asked, Space(schedules=("zb_h1",), sequences=(1,), shared=("none",))).best_of_each()
    (first,) = in_other_orders(found, ["zb_v"])
    sequences, tried = first.job.sequences * first.job.num_microbatches, dict[int, float]()
    for size in divisors(sequences)[:-2]:
        job = replace(first.job, sequences=size, num_microbatches=sequences // size)
        tried[size] = sum(exact(job)[1].values())
    assert {each.job.sequences for each in found} == {1}
    assert min(tried, key=lambda size: tried[size]) == first.job.sequences > 1


def test_an_order_without_a_closed_form_gets_chunks_of_its_own():
    own, on = replace(architecture("llama32_1b"), seq_len=512), machine("8x_rtx3090").with_devices(4)
    asked = Question(own, on, software("megatron_core"), 512, 16)
    found = Candidates(asked, Space(schedules=("1f1b",), shared=("optimizer",))).best_of_each()
    (best,) = in_other_orders(found, ["interleaved_zb"])
    assert {each.job.chunks for each in found} == {1}
    assert best.job.chunks > 2
    for chunks in (best.job.chunks - 1, best.job.chunks + 1):
        step_s = sum(exact(replace(best.job, chunks=chunks, cut=(), kept=()))[1].values())
        assert step_s > 0.99 * best.step_time_s, chunks  # of even cuts


def test_orders_without_a_closed_form_are_run_by_their_commands(over_nodes, rpbench):
    """In a V and in turn: pace and memory are those of the order that runs, whose times decide it."""
    rows = [row for row in over_nodes["ranking"] if row["schedule"] in ORDERS]
    assert {row["schedule"] for row in rows} == set(ORDERS) - over_nodes["left_out"].keys()
    assert {row["schedule"] for row in rows} >= {"zb_v", "interleaved_zb"}
    for row in rows:
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"]) == (0, "ok")
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-9)
        assert max(record["peak_memory_bytes"]) == row["peak_memory_bytes"]
        assert sum(row["why"].values()) == pytest.approx(over_nodes["tokens_per_step"] / row["tokens_per_s"])


def test_the_page_has_a_mesh_of_such_an_order_as_its_row_has_it():
    own, on = replace(architecture("llama3_8b"), num_layers=8), machine("dgx_h100").with_devices(8)
    asked = Question(own, on, software("megatron_core"), 2048, 32)
    (row,) = in_other_orders(Candidates(asked, Space(schedules=("zb_h1",))).best_of_each(), ["zb_v"])
    points = mesh_points(row.job, {8: on}, lambda: False)
    (at,) = [each for each in points if (each.microbatch_sequences, each.recompute) == (row.job.sequences, "none")]
    assert at.step_time_s == row.step_time_s
    assert (at.peak_memory_bytes, at.fits) == (round(sum(row.memory.values())), True)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "gpipe"])
def test_a_pipeline_of_a_search_over_meshes_is_run_by_its_command(name, rpbench):
    """With replicas, and alone: a tied matrix is summed over the first and the last stage in both."""
    words = ["model=llama32_1b", "cluster=8x_rtx4090", "seq_len=1024", "sequences_per_step=32"]
    found = plan_meshes([*words, f"schedules={name}"])["ranking"]
    rows = [row for row in found if row["options"]["pipeline"] > 1]
    rows = [next(row for row in rows if (row["options"]["data"] > 1) is wide) for wide in (True, False)]
    for row in rows:
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"]) == (0, "ok")
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-6)
        assert max(record["peak_memory_bytes"]) == row["peak_memory_bytes"]
        assert record["terms_s"]["tied"] > 0


def test_every_order_of_a_search_over_meshes_has_a_row_or_the_reason_why_not(over_nodes, told):
    there = {row["schedule"] for row in over_nodes["ranking"] if row["options"]["pipeline"] > 1}
    assert there | over_nodes["left_out"].keys() == {*SCHEDULES, *ORDERS}
    assert {"1f1b", "gpipe", "zb_h1", "zb_v"} <= there
    assert {"data_parallel", "zero_1", "zero_2", "zero_3"} <= {row["schedule"] for row in over_nodes["ranking"]}
    assert "are searched on one node" in told.getvalue()
    with pytest.raises(ValueError, match="none of the schedules that are asked for"):
        advise_on([*EIGHT_LAYERS, *NODES, "schedules=zb_v", "runs_in=DeepSpeed"], io.StringIO())
    alone = [word for word in NODES if word != "batch=16"]
    few = advise_on([*EIGHT_LAYERS, *alone, "batch=2", "schedules=zb_h1,1f1b"], io.StringIO())
    assert few["left_out"] == {"zb_h1": NO_MESH}  # its pipelines take two microbatches a rank


@pytest.mark.parametrize("experts", [(), ("experts.total=8", "experts.active=2", "experts.inner=512")])
@pytest.mark.parametrize("name", ["torchtitan", "FSDP2", "Megatron", "DeepSpeed"])
def test_meshes_are_restricted_to_what_runs_in_a_framework(name, experts):
    answer = advise_on([*EIGHT_LAYERS, *experts, *NODES, f"runs_in={name}"], io.StringIO())
    assert answer["ranking"]
    for row in answer["ranking"]:
        assert name in row["runs_in"]
        assert row["export"].endswith(f" format={EXPORTS[name]}")


def test_megatron_runs_combined_1f1b_where_experts_are_dealt_over_devices():
    words = [*EIGHT_LAYERS, *NODES, "schedules=combined_1f1b"]
    experts = ["experts.total=8", "experts.active=2", "experts.inner=512"]
    plain = advise_on([*words, *experts], io.StringIO())["ranking"][0]
    (found, *_) = advise_on([*words, *experts, "runs_in=Megatron"], io.StringIO())["ranking"]
    assert (plain["runs_in"], found["runs_in"]) == (["here only"], ["Megatron"])  # the fastest mesh has whole experts
    assert found["options"]["expert"] > plain["options"]["expert"] == 1
    assert found["tokens_per_s"] < plain["tokens_per_s"]
    dense = advise_on([*words, "runs_in=Megatron"], io.StringIO())
    assert (dense["ranking"], dense["left_out"]["combined_1f1b"]) == ([], f"{NO_MESH}, and that Megatron runs")


@pytest.mark.parametrize(
    "count, words",
    [(2, ("num_layers=2", "schedules=1f1b,zero_3", "batch=2")), (8, ("num_layers=8", "schedules=gpipe", "batch=1"))],
)
def test_one_host_has_one_answer_however_it_is_asked_for(count, words):
    whole = () if count == 8 else (f"num_devices={count}",)
    ways = [("gpu=h100_sxm", f"num_devices={count}"), ("cluster=8x_h100", *whole)]
    ways.append(("cluster=dgx_h100", f"num_devices={count}"))
    sizes = ("hidden=512", "heads=8", "vocab=8000", "seq_len=512")
    answers = [advise_on([*sizes, *words, *way, "seconds=60"], io.StringIO()) for way in ways]
    for answer in answers:
        for row in answer["ranking"]:
            del row["command"], row["export"], row["export_note"]  # they name the machine as it was asked for
        assert answer["ranking"] == answers[0]["ranking"]
        assert answer["levers"] == answers[0]["levers"]
    meshes = ["data" in row["options"] for row in answers[0]["ranking"]]
    assert sorted(meshes) == ([False, False] if count == 2 else [False, True])


def test_compositions_stand_beside_the_contenders_of_one_host(rpbench):
    """Each as its command runs it, its causes those of one host; no mesh that a search over meshes finds is faster."""
    words = ("num_layers=8", "hidden=2048", "heads=16", "vocab=32000", "seq_len=512", "batch=16")
    machine = ("gpu=h100_sxm", "num_devices=4")
    answer = advise_on([*words, *machine, "schedules=megatron_tp,1f1b,zero_3", "seconds=20"], io.StringIO())
    rows = answer["ranking"]
    meshes = [row for row in rows if "data" in row["options"]]
    assert {row["schedule"] for row in meshes} == {"megatron_tp", "1f1b", "zero_3"}
    assert [row["schedule"] for row in rows].count("megatron_tp") == 1  # of two ways to shard layers the faster
    assert rows == sorted(rows, key=lambda row: -row["tokens_per_s"])
    assert (rows[0]["ratio_reach"], min(row["ratio_reach"] for row in rows[1:]) > 1) == (1, True)
    for row in meshes:
        assert set(row["why"]) == set(CAUSES)
        assert row["why"]["optimizer"] > 0.02  # what Megatron spends once a step is part of it, as on one host
        assert sum(row["why"].values()) == pytest.approx(answer["tokens_per_step"] / row["tokens_per_s"])
        assert row["tokens_per_s_low"] < row["tokens_per_s"] < row["tokens_per_s_high"]
        _, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-6)
    found = plan_meshes([*words, *machine, "schedules=1f1b"])["ranking"]
    assert rows[0]["tokens_per_s"] >= 0.98 * max(row["tokens_per_s"] for row in found)


def test_slices_that_sequences_have_not_are_not_offered(rpbench):
    """Neither by a contender of one host, nor by a composition: each row's command runs."""
    words = ("num_layers=2", "hidden=384", "heads=6", "vocab=1000", "seq_len=511", "batch=4")
    answer = advise_on(
        [*words, "gpu=h100_sxm", "num_devices=2", "schedules=megatron_tp,1f1b", "seconds=5"], io.StringIO()
    )
    (row,) = (row for row in answer["ranking"] if row["schedule"] == "megatron_tp")
    assert row["options"]["sequence_parallel"] is False
    assert rpbench(*shlex.split(row["command"])[3:])[1][0]["status"] == "ok"


@pytest.mark.parametrize(
    "words, why",
    [
        (("lengths=[512,512,128,64]",), "are alike"),
        (("frozen_layers=1", "batch=4"), "frozen layers under a mesh are not modelled"),
        (("schedules=looped_bfs", "runs_in=torchtitan", "batch=4"), "none of the schedules"),
    ],
)
def test_why_there_are_no_compositions_is_told(words, why):
    sizes = ("num_layers=4", "hidden=512", "heads=8", "vocab=8000", "seq_len=512", "schedules=1f1b")
    asked = {word.partition("=")[0]: word for word in (*sizes, *words)}
    answer = advise_on([*asked.values(), "gpu=h100_sxm", "num_devices=2", "seconds=5"], io.StringIO())
    assert why in answer["left_out"]["meshes"]
    assert answer["ranking"]
    assert not any("data" in row["options"] for row in answer["ranking"])


def test_memory_of_a_device_counts_over_nodes_too():
    """A figure that is given is never a figure that is ignored."""
    given = {"num_devices": "16", "device_memory_bytes": "8e9", "host_memory_bytes": "1e12"}
    found = described("l40s", given)
    assert found.machine.num_nodes == 2
    assert found.machine.device.memory_bytes == 8_000_000_000
    assert set(found.unused) == {"host_memory_bytes"}
    assert set(described("l40s", {"num_devices": "4", "inter_bytes_per_s": "1e9"}).unused) == {"inter_bytes_per_s"}


def test_an_order_that_fits_nowhere_is_told_beside_one_that_does():
    """Eight layers fit on eight ranks of a device, and ZB-V has two stages on each."""
    own = replace(architecture("llama3_8b"), num_layers=8)
    on = replace(machine("dgx_h100").with_devices(16), device_memory_bytes=17 * 10**9)
    space = Space(schedules=("1f1b",), shared=("none",), max_tensor=1, recomputes=("full",))
    given = {"seq_len": 1024, "global_batch": 16, "space": space, "others": ("zb_v",), "framework": None, "words": ()}
    assert advise_nodes(own, on, names=None, **given)["left_out"] == {"zb_v": NO_MESH}
    answer = advise_nodes(own, on, names=("zb_v",), **given)
    assert (answer["ranking"], answer["left_out"], answer["levers"]) == ([], {"zb_v": NO_MESH}, [])
    assert answer["smallest_change"] == f"zb_v: {NO_MESH}"
