"""SSDs of a host: states and weights that live there, by hand; one link for all devices; what does not fit or exist."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.replicas import host_bytes, ssd_bytes
from rpbench.cost.footprint.sizes import LayerSize, ModelBytes
from rpbench.cost.hardware.device import Ssd, ssds_named
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic, Traffic
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.places import files_of
from rpbench.registry import entry
from rpbench.run.assemble import assemble
from rpbench.run.recording import run
from rpbench.run.scheduled import memory_of
from rpbench.sim.graph import build_graph
from rpbench.sim.metrics import step_time
from rpbench.sim.shared_links import simulate_charged

LAYERS, PARAMETERS = 4, 1000  # of each layer; embedding and head have none
LAYER = LayerSize(2 * PARAMETERS, 2 * PARAMETERS, 12 * PARAMETERS, 10)
NONE = LayerSize(0, 0, 0)
SIZES = ModelBytes((LAYER,) * LAYERS, NONE, NONE, boundary=10, logits=0, logits_chunk=0)
SSD = Ssd("slow", 1e6, read_bytes_per_s=200.0, write_bytes_per_s=100.0, endurance_bytes=1e9)


def lowered(name: str, ranks: int, microbatches: int, ssd: str, steps: int = 4) -> Schedule:
    found = entry(name)
    order = found.build(Shape(ranks, LAYERS, microbatches, num_steps=steps), ssd=ssd)
    order = order.with_partition(symmetric((1,) * LAYERS))
    return found.lower(order, prefetch=1, **(found.options | {"ssd": ssd}))


def step_s(schedule: Schedule, ssd: Ssd = SSD) -> float:
    """Seconds from step to step where nothing but SSDs takes time worth naming."""
    machine = Machine("x", schedule.shape.num_ranks, host_to_device_bytes_per_s=1e12, ssd=ssd, host_bytes_per_s=1e12)
    times = LayerTimes([1e-6] * LAYERS, [0.0] * LAYERS, [1e-6] * LAYERS)
    traffic = Traffic(SIZES, machine, optimizer=OptimizerTraffic(28.0, 28.0, 1e12))
    graph = build_graph(schedule)
    return float(step_time(graph, simulate_charged(graph, traffic.charged(schedule, times.table(schedule.partition)))))


@pytest.mark.parametrize("name", ["zero_infinity", "greedysnake"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_takes_the_bytes_of_the_states_over_the_pace_of_the_ssds(name, ranks):
    """4,000 parameters: 48,000 bytes read at 200 a second and written at 100, by one device or by two together."""
    assert step_s(lowered(name, ranks, 2, "optimizer")) == pytest.approx(48_000 / 200 + 48_000 / 100, rel=1e-3)


@pytest.mark.parametrize(("name", "loads"), [("zero_infinity", 2 * 3), ("greedysnake", 2)])
def test_weights_on_ssds_are_read_for_every_visit_and_written_once(name, loads):
    """ZeRO-Infinity reads 8,000 bytes forth and back for each of 3 microbatches, GreedySnake for all of them."""
    reads, writes = 48_000 + loads * 8_000, 48_000 + 8_000
    assert step_s(lowered(name, 1, 3, "all")) == pytest.approx(reads / 200 + writes / 100, rel=1e-3)


def test_ssds_that_are_fast_change_nothing():
    fast = replace(SSD, read_bytes_per_s=1e15, write_bytes_per_s=1e15)
    plain = step_s(lowered("zero_infinity", 2, 2, "none"))
    assert step_s(lowered("zero_infinity", 2, 2, "all"), fast) == pytest.approx(plain, rel=1e-9)
    assert step_s(lowered("zero_infinity", 2, 2, "none")) < 1e-3


@pytest.mark.parametrize("name", ["zero_infinity", "greedysnake"])
def test_what_lives_on_ssds_leaves_the_hosts_memory(name):
    """Of 12,000 bytes a layer, and 2,000 of weights, one layer for each of two devices is on its way."""
    at_home = host_bytes(lowered(name, 2, 2, "none"), SIZES)
    assert host_bytes(lowered(name, 2, 2, "optimizer"), SIZES) == at_home - (LAYERS - 2) * 12_000
    assert host_bytes(lowered(name, 2, 2, "all"), SIZES) == at_home - (LAYERS - 2) * 14_000
    assert ssd_bytes("O", SIZES) == (48_000, 48_000)
    assert ssd_bytes("OP", SIZES) == (56_000, 56_000)
    assert ssd_bytes("", SIZES) == (0, 0)


def test_devices_hold_the_same_bytes():
    found = {ssd: classes_of(lowered("zero_infinity", 2, 2, ssd), SIZES, [1, 1]) for ssd in ("none", "all")}
    assert found["none"] == found["all"]


def test_days_until_the_writes_are_used_up():
    """10^9 bytes at 1,000 in 8.64 seconds: a million times 8.64 seconds are 100 days."""
    assert SSD.days(1000, 8.64) == pytest.approx(100.0)
    assert replace(SSD, endurance_bytes=None).days(1000, 1.0) is None


def test_several_have_all_figures_several_times():
    one, four = ssds_named("samsung_990_pro_4tb"), ssds_named("4x_samsung_990_pro_4tb")
    assert (one.bytes, one.read_bytes_per_s, one.write_bytes_per_s) == (4e12, 7.45e9, 6.9e9)  # as in conf/ssd/
    assert four.seconds(4.0, 8.0) == pytest.approx(one.seconds(1.0, 2.0))
    assert (four.bytes, four.endurance_bytes) == (16e12, 9.6e15)
    with pytest.raises(ValueError, match="unknown ssd 'samsung_990'; did you mean samsung_990_pro_4tb"):
        ssds_named("samsung_990")


def test_a_schedule_says_it_in_its_text():
    schedule = lowered("zero_infinity", 1, 1, "all", steps=1)
    assert " on_ssd=OP " in to_text(schedule)
    assert from_text(to_text(schedule)) == schedule
    with pytest.raises(ScheduleError, match="on_ssd=X"):
        replace(schedule, on_ssd="X")


# --- runs -----------------------------------------------------------------------------------------------------

RUN = ("schedule=zero_infinity", "model=llama31_8b", "cluster=8x_rtx4090", "cost=analytic", "num_microbatches=8")


def test_too_much_for_the_ssds_is_infeasible_with_its_bytes(tmp_path):
    """8.03 billion parameters: 12 bytes of state each are 96.4 GB."""
    small = tmp_path / "ssd"
    small.mkdir()
    text = "name: small\nbytes: 50.0e+9\nread_bytes_per_s: 1.0e+9\nwrite_bytes_per_s: 1.0e+9\n"
    (small / "small.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RPBENCH_PATH", str(tmp_path))
        found = assemble(load([*RUN, "cluster.ssd=small", "schedule.ssd=optimizer", "charge=bytes"]))
    assert memory_of(found)[1].startswith("small holds 50.0 GB and is to hold 96.4 GB")


def test_too_much_for_the_host_is_infeasible_with_its_bytes(rpbench):
    """It was `ok` with any host: RoundPipe keeps weights and states there, 1F1B nothing."""
    words = ("model=qwen3_1p7b", "cost=published", "cluster=8x_rtx4090", "cluster.host_memory_bytes=2_000_000_000")
    _, (row,), _ = rpbench("schedule=roundpipe", *words)
    needed = f"the host needs {row['host_memory_bytes'] / 1e9:.1f} GB and has 2.0 GB"
    assert (row["status"], row["tokens_per_s"], row["reason"][: len(needed)]) == ("infeasible", None, needed)
    _, (answer,), _ = rpbench("plan", "schedule=roundpipe", *words)
    assert (answer["best"], answer["plans"][0]["reason"][:20]) == (None, needed[:20])
    assert rpbench("schedule=1f1b", *words)[1][0]["status"] == "ok"


def test_a_tied_matrix_lives_on_ssds_once(tmp_path):
    """Llama-3.2-1B: 12 bytes a parameter, but for 2,048 of its last norm; four devices have a matrix in transfer."""
    words = [RUN[0], "model=llama32_1b", *RUN[2:], "num_devices=4", "cluster.ssd=2x_samsung_990_pro_4tb"]
    plain, moved = (
        run(load([*words, f"schedule.ssd={ssd}", f"results_dir={tmp_path}"]))[0] for ssd in ("none", "optimizer")
    )
    state, matrix = 12 * (1_235_814_400 - 2048), 12 * 128_256 * 2048
    assert (moved["ssd_bytes"], moved["ssd_written_bytes"]) == (state, state)
    assert plain["host_memory_bytes"] - moved["host_memory_bytes"] == state - 4 * matrix


def test_ssds_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"cluster=8x_rtx4090 has none: name them, as in cluster\.ssd="):
        assemble(load([*RUN, "schedule.ssd=optimizer"]))
    with pytest.raises(ValueError, match=r"schedule\.ssd=weights: what lives on SSDs, one of none, optimizer, all"):
        assemble(load([*RUN, "schedule.ssd=weights"]))
    with pytest.raises(ConfigError, match="backend=virtual keeps in the host's memory"):
        assemble(
            load([*RUN[:1], "model=tiny_gpt", "backend=virtual", "cluster.ssd=samsung_990_pro_4tb", "schedule.ssd=all"])
        )


def test_without_ssds_a_request_is_what_it_was():
    """What a run measures, and so the name of its record, says nothing of SSDs."""
    found = load(RUN).subject
    assert "ssd" not in found["cluster"]
    assert "ssd" not in found["schedule"]
    assert load([*RUN, "cluster.ssd=samsung_990_pro_4tb"]).subject["cluster"]["ssd"]["bytes"] == 4e12


# --- other people's runs ---------------------------------------------------------------------------------------

MEASURED = Path(__file__).parents[2] / "analysis" / "published" / "measured" / "lohan_rtx4090.csv"


def test_runs_that_wait_for_their_ssds_take_as_long_as_measured():
    """LoHan's 13 B on one device with one SSD and two, batches of 32 to 64; no constant is fitted to them.

    Layers go over the whole batch once forth and once back, as in GreedySnake. The source gives FLOP/s and does not say
    what it counts: 8 a parameter and token, as where everything is recomputed.
    """
    with MEASURED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["figure"] == "10b" and row["ssds"] in ("1", "2")]
    assert len(rows) == 6
    for row in rows:
        batch = int(row["global_batch"])
        shape = ("model=transformer", "++model.num_layers=40", "++model.hidden=5120", "++model.heads=40")
        size = ("++model.vocab=50257", "++model.seq_len=1024", f"num_microbatches={batch // 8}", "num_devices=1")
        machine = ("cluster=8x_rtx4090", f"cluster.ssd={row['ssds']}x_intel_p5510_3840gb", "schedule.ssd=all")
        run = ("schedule=greedysnake", "cost=analytic", "charge=bytes", "num_steps=3", "chunks_per_device=40")
        found = assemble(load([*shape, *size, *machine, *run, "workload.microbatch_sequences=8"]))
        timeline = simulate_charged(found.graph, found.costs)
        measured_s = 8 * float(row["params"]) * batch * 1024 / (1e12 * float(row["tflops_total"]))
        assert step_time(found.graph, timeline) / timeline.units_per_second == pytest.approx(measured_s, rel=0.12)


PCIE4_X4 = 16e9 * 4 * 128 / 130 / 8  # bytes a second one way: transfers, lanes, line code, bits


@pytest.mark.parametrize("path", files_of("ssd"), ids=lambda path: path.stem)
def test_a_drive_is_no_faster_than_its_link_and_names_no_source_that_was_not_read(path):
    drive = ssds_named(path.stem)
    assert drive.write_bytes_per_s <= drive.read_bytes_per_s <= PCIE4_X4
    assert 0.2 < drive.endurance_bytes / drive.bytes / (5 * 365) < 3.1  # drive writes a day of five years
    told = yaml.safe_load(path.read_text())["declared"]
    for name in ("read_bytes_per_s", "write_bytes_per_s", "endurance_bytes"):
        assert told[name]["origin"] == "assumed" or "not read" not in told[name]["source"], name
        assert told[name]["within"] >= 0.1, name
