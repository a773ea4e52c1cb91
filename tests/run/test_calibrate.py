"""calibrate: the cluster file it writes, what is predicted with that, and what it refuses before it measures."""

import json
import math
from dataclasses import fields, replace
from functools import cache, partial

import numpy as np
import pytest
from omegaconf import OmegaConf

from rpbench.cli import dispatch
from rpbench.commands import calibrate
from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.collective_rates import COLLECTIVES
from rpbench.cost.hardware.declared import declarations
from rpbench.cost.hardware.machine import NUMBERS, Machine
from rpbench.cost.hardware.measured import CALIBRATED, PARTS
from rpbench.engine.measure import calibration
from rpbench.engine.measure.calibration import ON_CORES, Calibration, Rates, Sizes
from rpbench.engine.stream_order.machine import Machine as Accelerators
from rpbench.engine.stream_order.recorder import MachineStream
from rpbench.mesh.layers.engine_kernels import counted
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.run import cluster_file
from rpbench.run.cluster_file import cluster_of, layers_of, to_text
from rpbench.run.recording import run
from rpbench.torch_runtime.processes import ranks
from rpbench.torch_runtime.processes.diagnosis import RunFailed

RATES = Rates(1e11, 9e10, 4e10, 2e10, 9e9, 8e9, 7e9, 4e10, 12.0)
FACTOR = {"layer": 2e-4, "products": 1.5, "traffic": 6.0, "weights": 3.0}  # of a made-up machine


@cache
def cost():
    return load(["cost=analytic"]).cost


def made_up():
    """A calibration of a machine all of whose parts have these factors, so that they can be found again."""
    bare = Machine(
        "bare",
        matmul_flops_per_s=1e11,
        wide_matmul_flops_per_s=9e10,
        attention_efficiency=4 / 9,
        matmul_efficiency=1.0,
        memory_bytes_per_s=2e10,
        memory_efficiency=1.0,
        host_bytes_per_s=4e10,
        measured={"half_rate_width": 12.0},
    )
    basis = make_basis(bare, cost().constants, cost().declared)
    probes = []
    for probe in ON_CORES:
        counts = counted(eager_kernels(setting_of(probe.model, probe.num_tokens, basis)))
        times = {part: sum(FACTOR[term] * counts[part][term] for term in PARTS[part]) for part in PARTS}
        probes.append((probe, times))
    return Calibration(RATES, probes, (0.8, 0.5), 0.25)


@pytest.fixture
def measured(monkeypatch):
    """What there was to measure, each time."""
    asked = []

    def cores(num_devices, tell, **_):
        asked.append(num_devices)
        tell("a made-up machine")
        return made_up()

    monkeypatch.setattr(calibration, "calibrate_cores", cores)
    return asked


def test_the_factors_of_the_machine_are_found_again():
    cluster = cluster_of("mine", made_up(), {"num_devices": 2})
    assert set(cluster.measured) == set(CALIBRATED)
    assert cluster.measured["half_rate_width"] == 12.0
    assert cluster.measured["engine_input_grad_share"] == 0.8
    for name, value in cluster.measured.items():
        term = name.removesuffix("_s").rpartition("_")[2]
        if term in FACTOR:
            assert value == pytest.approx(FACTOR[term], rel=1e-3), name
    assert cluster.launch_s == pytest.approx(2e-4, rel=1e-3)


def test_a_layer_is_predicted_from_all_others():
    """On a machine whose factors are alike everywhere exactly; one that is slower than they say is so by as much."""
    found, slow = made_up(), 3
    layers = layers_of(found, {"num_devices": 2})
    assert [(each["hidden"], each["vocab"], each["num_tokens"]) for each in layers] == [
        (probe.model.hidden, probe.model.vocab, probe.num_tokens) for probe in ON_CORES
    ]
    assert all(each["predicted_s"] == pytest.approx(each["seconds"], rel=1e-6) for each in layers)
    assert all(set(each["seconds"]) == set(PARTS) for each in layers)
    found.probes[slow][1]["forward"] *= 2
    layer = layers_of(found, {"num_devices": 2})[slow]
    assert layer["seconds"]["forward"] == pytest.approx(2 * layer["predicted_s"]["forward"], rel=1e-6)


def test_factors_are_as_sure_as_they_predict_the_other_probes():
    """They had 5 % on any machine, where probes do not fit each other too; the smallest has launches alone."""
    found = made_up()
    found.probes[0][1]["backward"] *= 13
    found.probes[3][1]["forward"] *= 3
    within = {name: row["within"] for name, row in cluster_of("mine", found, {"num_devices": 2}).declared.items()}
    off = [abs(math.log(each["predicted_s"]["forward"] / each["seconds"]["forward"]))
           for each in layers_of(found, {"num_devices": 2})[1:]]  # fmt: skip
    assert within["engine_forward_products"] == pytest.approx(np.quantile(off, 0.9) / 1.645, abs=1e-4)
    assert within["engine_forward_products"] > 0.2
    assert within["engine_step_weights"] == within["memory_bytes_per_s"] == 0.05
    assert within["engine_backward_layer_s"] < math.log(13) / 1.645


def test_the_file_is_the_cluster(tmp_path):
    cluster = cluster_of("mine", made_up(), {"num_devices": 2})
    path = tmp_path / "mine.yaml"
    path.write_text(to_text(cluster, "python -m rpbench calibrate", 0.25))
    config = OmegaConf.to_container(OmegaConf.load(path))
    of_nodes = {"gpu", "domain", "intra_latency_s", "inter_latency_s"}
    assert set(config) == {field.name for field in fields(Machine)} - of_nodes
    read = Machine(**config)
    for name in NUMBERS:
        value = getattr(cluster, name)
        assert getattr(read, name) == (value if value is None else pytest.approx(value, rel=1e-6)), name
    assert read.measured == pytest.approx(cluster.measured, rel=1e-6)
    origins = declarations(read.declared)
    assert set(origins) == {name for name in NUMBERS if config[name] is not None} | set(CALIBRATED)
    assert {each.origin for each in origins.values()} == {"measured"}
    assert "0.25 cores busy" in path.read_text().splitlines()[1]


def test_from_calibrating_to_predicting(tmp_path, capsys, measured):
    """The road of the README with a made-up machine: calibrate, then any schedule on that cluster."""
    assert dispatch(["calibrate", "name=mine", "num_devices=1", f"out={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["cluster"], said["path"], said["num_devices"]) == ("mine", str(tmp_path / "mine.yaml"), 1)
    assert measured == [1]
    assert "measuring a made-up machine" in err
    assert "other programs kept 0.25 cores busy meanwhile: run it again on a quiet machine" in err
    rows = {}
    for name in ("1f1b", "roundpipe", "zb_h1"):
        asked = ["cost=analytic", f"schedule={name}", "model=mid_gpt", "num_devices=2", "num_microbatches=4"]
        request = load([*asked, "num_steps=2", f"results_dir={tmp_path / 'r'}"])
        written = OmegaConf.to_container(OmegaConf.load(said["path"])) | {"num_devices": 2}
        mine = replace(request, cluster=Machine(**written), subject={**request.subject, "cluster": written})
        (rows[name],) = run(mine)
    assert {(row["evidence"], row["cluster"]) for row in rows.values()} == {("predicted", "mine")}
    # All the work of two steps, the optimizer's among it, within the time of two devices.
    basis = make_basis(cluster_of("mine", made_up(), {}), cost().constants, cost().declared)
    times = times_of(setting_of(load(["model=mid_gpt"]).model, 256, basis, "engine"))
    once = times.head_forward + times.head_backward + sum((*times.forward, *times.recompute, *times.backward))
    assert rows["roundpipe"]["makespan_s"] > (2 * 4 * once) / 2
    assert rows["1f1b"]["makespan_s"] > (2 * 4 * (once - sum(times.recompute))) / 2


def test_a_calibrated_machine_that_lacks_a_figure_is_refused(tmp_path):
    cluster = cluster_of("mine", made_up(), {"num_devices": 2})
    asked = ["cost=analytic", "schedule=1f1b", "model=mid_gpt", "num_devices=2", f"results_dir={tmp_path}"]
    request = load(asked)
    text = OmegaConf.create(to_text(cluster, "x", None).replace("engine_head_forward_products", "# gone"))
    written = OmegaConf.to_container(text)
    with pytest.raises(ValueError, match=r"cluster=mine has no measured\.engine_head_forward_products.*calibrate"):
        run(replace(request, cluster=Machine(**written)))
    written["measured"]["engine_hed_forward_products"] = 1.0
    with pytest.raises(ValueError, match="unknown constant 'engine_hed_forward_products'"):
        Machine(**written)
    assert not list(tmp_path.iterdir())


def test_its_own_file_is_replaced_and_stands_until_then(tmp_path, monkeypatch, measured):
    calibrate.calibrate(["name=here", f"out={tmp_path}"])
    before = (tmp_path / "here.yaml").read_text()
    monkeypatch.setattr(cluster_file, "to_text", lambda *_: "name: here\n")
    calibrate.calibrate(["name=here", f"out={tmp_path}"])
    assert (tmp_path / "here.yaml").read_text() == "name: here\n" != before
    (tmp_path / "here.yaml").write_text(before)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate_cores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(["name=here", f"out={tmp_path}"])
    assert [path.name for path in tmp_path.iterdir()] == ["here.yaml"]
    assert (tmp_path / "here.yaml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["colour=red"], "calibrate takes name=NAME, .* not 'colour'"),
        (["now"], "not 'now'"),
        (["name="], "name= has no value"),
        (["name=a b"], "name='a b': letters"),
        (["name=8x_mine"], "a letter first"),
        (["name=dgx_h100"], "was not written by calibrate; take another name"),
        (["device=tpu"], "device=tpu: one of cpu, accelerator"),
        (["dry=1"], "dry=1: accelerators are made up with device=accelerator alone"),
        (["device=accelerator", "dry=none"], "dry=none: how many accelerators to make up"),
        (["device=accelerator", "dry=2", "ranks=3"], "ranks=3: at most one for each of the 2 devices"),
        (["num_devices=0"], "num_devices=0: a whole number from 1 to"),
        (["num_devices=1000000"], "num_devices=1000000: a whole number from 1 to"),
        (["num_devices=two"], "num_devices=two: a whole number"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_measured(arguments, said, measured, tmp_path):
    chosen = arguments if arguments[0] == "name=dgx_h100" else [*arguments, f"out={tmp_path}"]
    with pytest.raises(ValueError, match=said):
        calibrate.calibrate(chosen)
    assert measured == []
    assert not list(tmp_path.iterdir())


def test_a_name_of_another_file_is_refused_where_cluster_looks_for_both(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("RPBENCH_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster/dgx_h100\.yaml has this name; take another, so that"):
        calibrate.calibrate(["name=dgx_h100"])
    assert measured == []
    calibrate.calibrate(["name=here"])
    calibrate.calibrate(["name=here"])
    assert [path.name for path in (tmp_path / "cluster").iterdir()] == ["here.yaml"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, measured):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no folder that can be written"):
        calibrate.calibrate([f"out={tmp_path / 'file'}"])
    assert measured == []


def test_gpus_are_counted_and_not_asked_for(tmp_path, monkeypatch):
    with Accelerators(3), pytest.raises(ConfigError, match="num_devices=2: with device=accelerator they are counted"):
        calibrate.calibrate(["device=accelerator", "num_devices=2", f"out={tmp_path}"])


def test_accelerators_become_a_cluster_with_their_links_and_memory(tmp_path, monkeypatch, capsys):
    small = {"probes": calibration.DRY, "halved": calibration.HALVED_DRY, "sizes": Sizes(64, 2**14)}
    measure = partial(calibration.calibrate_accelerators, **small)
    monkeypatch.setattr(calibration, "calibrate_accelerators", measure)
    monkeypatch.setattr(ranks, "Ranks", Answering)
    with Accelerators(2, memory_bytes=2**32):
        assert dispatch(["calibrate", "device=cuda", "name=mine", "ranks=2", f"out={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    said, read = json.loads(out), Machine(**OmegaConf.to_container(OmegaConf.load(tmp_path / "mine.yaml")))
    assert (read.num_devices, read.device_memory_bytes) == (2, 2**32)
    assert read.intra_bytes_per_s == pytest.approx(said["intra_bytes_per_s"], rel=1e-6)
    assert said["collectives"]["all_gather"]["bytes_per_s"] == pytest.approx(1e9)
    assert "device=cuda is now called device=accelerator" in err


def test_a_dry_calibration_says_so_and_writes_nothing(tmp_path, capsys, monkeypatch):
    assert dispatch(["calibrate", "device=accelerator", "dry=2", f"out={tmp_path}"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["evidence"], said["order_findings"], said["num_devices"]) == ("dry", [], 2)
    assert said["order_num_entries"] > 10_000
    assert not [key for key in said if key.endswith("per_s")]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(MachineStream, "wait_stream", lambda self, stream: None)  # streams of copies begin too early
    assert dispatch(["calibrate", "device=accelerator", "dry=1", f"out={tmp_path}"]) == 1
    assert "WAW" in "".join(json.loads(capsys.readouterr().out)["order_findings"])


# --- collectives between ranks -------------------------------------------------------------------------------


class Answering:
    """Ranks of a made-up machine: 1 GB/s on the wire, 100 us; or ranks that fail."""

    error: Exception | None = None

    def __init__(self, num_ranks, stall_s):
        self.num_ranks, self.stall_s = num_ranks, stall_s

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def time_collectives(self, request):
        if self.error is not None:
            raise self.error
        sizes = (2**12, 2**18, 2**24)
        found = {
            name: {str(size): [1e-4 + (2 if name == "all_reduce" else 1) * size / 2 / 1e9] * 3 for size in sizes}
            for name in COLLECTIVES
        }
        return {"backend": "gloo", "seconds": found}


def test_collectives_of_ranks_go_from_the_measurement_to_meshes_on_that_cluster(
    tmp_path, capsys, measured, monkeypatch
):
    monkeypatch.setattr(ranks, "Ranks", Answering)
    assert dispatch(["calibrate", "name=mine", "num_devices=2", "ranks=2", f"out={tmp_path}"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["collectives"]["all_gather"]["bytes_per_s"] == pytest.approx(1e9)
    origins = declarations(OmegaConf.to_container(OmegaConf.load(said["path"]))["declared"])
    assert {origins[name].origin for name in COLLECTIVES} == {"measured"}
    small = ("num_layers=4", "hidden=128", "heads=4", "vocab=512", "seq_len=128", "sequences_per_step=4")
    assert dispatch(["plan", "mesh=search", f"cluster={said['path']}", *small]) == 0
    fast = json.loads(capsys.readouterr().out)
    text = (tmp_path / "mine.yaml").read_text()
    assert "bytes_per_s: 1.000000e+09" in text
    slow = tmp_path / "slow.yaml"
    slow.write_text(text.replace("1.000000e+09", "1.000000e+06"))
    assert dispatch(["plan", "mesh=search", f"cluster={slow}", *small]) == 0
    slower = json.loads(capsys.readouterr().out)
    assert fast["ranking"][0]["tokens_per_s"] > slower["ranking"][0]["tokens_per_s"]
    replicas = [
        max(row["tokens_per_s"] for row in each["ranking"] if "mesh.data=2" in row["command"])
        for each in (fast, slower)
    ]
    assert replicas[0] > 1.5 * replicas[1], "sums of replicas take what was measured"


def test_ranks_that_fail_are_a_message_and_nothing_is_written(tmp_path, capsys, measured, monkeypatch):
    monkeypatch.setattr(ranks, "Ranks", Answering)
    monkeypatch.setattr(Answering, "error", RunFailed("rank 1 hangs", 1, "hung"))
    assert dispatch(["calibrate", "name=mine", "num_devices=2", "ranks=2", f"out={tmp_path}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "rank 1 hangs" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count, rule", [("1", "at least 2"), ("two", "a whole number"), ("3", "at most one for each")])
def test_ranks_that_cannot_be_are_refused_before_anything_is_measured(count, rule, tmp_path, measured, capsys):
    assert dispatch(["calibrate", "name=mine", "num_devices=2", f"ranks={count}", f"out={tmp_path}"]) == 2
    assert rule in capsys.readouterr().err
    assert measured == []


def test_without_measured_collectives_a_mesh_says_how_to_get_them(tmp_path, capsys, measured):
    assert dispatch(["calibrate", "name=mine", "num_devices=2", f"out={tmp_path}"]) == 0
    assert dispatch(["plan", "mesh=search", f"cluster={tmp_path / 'mine.yaml'}", "model=mid_gpt"]) == 2
    assert "rpbench calibrate ranks=2" in capsys.readouterr().err


def test_a_file_is_no_folder_to_write_into(tmp_path):
    with pytest.raises(ConfigError, match=r"here.yaml: it takes a folder"):
        calibrate.calibrate([f"out={tmp_path / 'here.yaml'}"])
    assert not list(tmp_path.iterdir())
