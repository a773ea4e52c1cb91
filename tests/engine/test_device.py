"""The device backend: no wait is missing in what it issues, by the machine of streams; it trains on real ones."""

import json
import re
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import build
from spared import slow
from stream_replay import Replay
from test_device_accepted import TINY
from test_replicated_training import complete
from training_cases import TINY as SMALL
from training_cases import Run, assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.cli import dispatch
from rpbench.config.choices import BackendConfig, ConfigError
from rpbench.engine.backends import device as backends
from rpbench.engine.backends.device import DeviceBackend, DeviceFailed, OnCurrentDevice, failing
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.stream_order.happens_before import findings
from rpbench.engine.stream_order.machine import Machine
from rpbench.engine.stream_order.mutants import judged
from rpbench.engine.stream_order.trace import Synchronised, Work
from rpbench.engine.training import Settings, Training
from rpbench.ir.action import Kind
from rpbench.ir.checks.residency import stays_on_devices
from rpbench.passes.offload import stream
from rpbench.run.training import on_accelerators as on_accelerators_module
from rpbench.run.training.on_accelerators import check_device

needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine"
)


KEPT = Settings(keep_gradients=True)


def resident(name, devices, microbatches, *, num_steps=2, **options):
    return build(name, devices, microbatches, num_steps=num_steps, steps=True, **options)


def roundpipe(devices, microbatches, *, num_steps=2, **options):
    return stream(build("roundpipe", devices, microbatches, num_steps=num_steps, steps=True, **options))


def issued(schedule, num_accelerators, settings=KEPT, *, workload=None, **machine):
    """What a schedule issues to made-up accelerators, with the run; it has trained as plain training does."""
    workload = workload or workload_of(schedule)
    with Machine(num_accelerators, **machine) as found:
        training, timeline = on_accelerators(schedule, workload, settings)
    training.workload = replace(training.workload, data=workload.data)
    run = Run(training, timeline)
    assert_same(run, reference_of(run))
    return found


def on_accelerators(schedule, workload, settings=KEPT):
    stays = stays_on_devices(schedule)
    with DeviceBackend() as backend:
        on_device = replace(workload, data=OnCurrentDevice(workload.data))
        place_of = backend.accelerator_of if stays else None
        training = Training(on_device, schedule, settings, None, backend.copy, pin_memory=not stays, place_of=place_of)
        timeline = execute(training.program(uneven_costs(schedule), real_time=True), training.handlers, backend)
    return training, timeline


# --- its order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices, accelerators, microbatches", [(3, 2, 3), slow((1, 1, 4)), slow((4, 3, 5))])
def test_nothing_is_missing_in_what_roundpipe_issues(devices, accelerators, microbatches):
    machine = issued(roundpipe(devices, microbatches), accelerators)
    assert not findings(machine.trace)
    assert set(machine.trace.devices.values()) == set(range(min(devices, accelerators)))
    assert all(machine.peak[device] for device in range(min(devices, accelerators)))
    assert machine.peak[0] > machine.held[0]


@pytest.mark.parametrize(
    "name, recompute, devices, accelerators, microbatches",
    [
        ("1f1b", "none", 3, 2, 3),
        slow(("zb_v", "all", 2, 1, 4)),
        slow(("combined_1f1b", "all", 3, 3, 3)),
        slow(("vocab_parallel", "all", 3, 2, 3)),
        slow(("pipe_offload", "none", 3, 2, 6)),
        ("bpipe", "none", 4, 3, 8),
        slow(("pipedream", "all", 3, 2, 3)),
    ],
)
def test_nothing_is_missing_where_stages_stay(name, recompute, devices, accelerators, microbatches):
    schedule = resident(name, devices, microbatches, num_layers=2 * devices)
    machine = issued(schedule, accelerators, replace(KEPT, recompute=recompute))
    assert not findings(machine.trace)
    assert all(machine.peak[device] for device in range(accelerators))


MIXED = [
    ({"clip_norm": 0.05}, torch.float64, {}),
    slow(({}, torch.float16, {"loss_scaling": LossScaling(65536.0)})),
    slow(({}, torch.float16, {"loss_scaling": LossScaling(2.0**60), "clip_norm": 0.1})),  # overflows
]


@pytest.mark.parametrize("replicas", [False, slow(True)])
@pytest.mark.parametrize("words, dtype, more", MIXED)
def test_steps_look_at_the_gradients_of_all_accelerators(words, dtype, more, replicas):
    schedule = complete("zero_2", 2, 2, 2, 2) if replicas else resident("1f1b", 3, 3)
    settings = replace(KEPT, optimizer=OptimizerSettings(**words, **more))
    machine = issued(schedule, 2, settings, workload=workload_of(schedule, dtype=dtype))
    assert not findings(machine.trace)


@pytest.mark.parametrize("name", ["1f1b", slow("data_parallel")])
def test_what_two_stages_share_is_stepped_where_it_is_at_home(name):
    schedule = complete(name, 2, 2, 2, 2) if name == "data_parallel" else resident(name, 3, 3)
    workload = workload_of(schedule, model=replace(SMALL, tied=True))
    assert not findings(issued(schedule, 2, workload=workload).trace)


@pytest.mark.parametrize(
    "name, options",
    [
        slow(("zero_offload", {})),
        ("zero_3", {"offload": True}),
        slow(("zero_infinity", {})),
        slow(("data_parallel", {})),
        ("zero_2", {}),
        slow(("zero_3", {})),
        slow(("acco", {})),
    ],
)
def test_replicas_gather_and_reduce_in_order(name, options):
    assert not findings(issued(complete(name, 3, 3, 1, 2, **options), 2).trace)


# --- what is left out of it is seen --------------------------------------------------------------------------


def without_waits(monkeypatch):
    monkeypatch.setattr(backends._Issue, "_wait", lambda *_: None)


def without_events_on_the_host(monkeypatch):
    monkeypatch.setattr("rpbench.engine.stream_order.recorder.MachineEvent.synchronize", lambda _: None)
    without_synchronising(monkeypatch)


def without_recorded_streams(monkeypatch):
    monkeypatch.setattr("rpbench.engine.stream_order.machine.Faces._record_stream", lambda *_: None)


def without_synchronising(monkeypatch):
    monkeypatch.setattr("rpbench.engine.stream_order.recorder.MachineStream.synchronize", lambda _: None)


def without_pinning(monkeypatch):
    monkeypatch.setattr("rpbench.engine.stream_order.machine.Faces._pinned", lambda _, tensor: tensor)


BROKEN = [
    (without_waits, {"RAW", "WAR"}),
    (without_recorded_streams, {"REUSE"}),
    (without_synchronising, {"REUSE"}),
    (without_events_on_the_host, {"RAW"}),
    (without_pinning, {"BLOCKS"}),
]


@pytest.mark.parametrize("left_out, kinds", BROKEN, ids=lambda found: getattr(found, "__name__", ""))
def test_what_the_backend_leaves_out_is_seen(left_out, kinds, monkeypatch):
    left_out(monkeypatch)
    machine = issued(roundpipe(2, 3), 1)
    assert kinds <= {found.kind for found in findings(machine.trace)}


MUTATED = [
    (1, roundpipe(1, 2, num_steps=1, num_layers=2)),
    (2, roundpipe(2, 2, num_steps=1, num_layers=2)),
    (1, roundpipe(2, 3, num_steps=1, num_layers=2, asynchronous=True)),
    (2, complete("zero_3", 2, 2, 1, 1, offload=True)),
    (1, complete("zero_offload", 2, 2, 1, 1)),
    (2, resident("1f1b", 2, 2, num_steps=1, num_layers=2, chunks=1)),
    (2, complete("zero_2", 2, 2, 1, 1)),
    (2, complete("data_parallel", 2, 2, 1, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("accelerators, schedule", MUTATED, ids=lambda found: getattr(found, "name", found))
def test_every_mutant_of_what_is_issued_is_seen_or_named(accelerators, schedule):
    # data_parallel's sums wait more often than they need: of its mutants 16 % are seen.
    least = 0.15 if schedule.name == "data_parallel" else 0.2
    verdicts = list(judged(issued(schedule, accelerators).trace))
    assert len(verdicts) > 200
    assert {verdict.outcome for verdict in verdicts} <= {"seen", "known", "later", "idle"}
    assert all(verdict.by for verdict in verdicts)
    share = sum(verdict.outcome == "seen" for verdict in verdicts) / len(verdicts)
    assert share > least


def test_a_seed_says_in_which_order_the_lanes_go_on():
    """From the second recording on: the first one of a process makes constants."""

    def recorded(seed):
        trace = issued(complete("data_parallel", 2, 2, 1, 1), 2, seed=seed).trace
        done = filter(is_of_lanes, trace.entries)
        return [(type(each).__name__, each.action, each.place, trace.names[each.thread]) for each in done]

    def is_of_lanes(entry):
        return entry.action != "outside of actions" and not entry.place.startswith("threading.py")

    recorded(0)
    first, again, other = recorded(0), recorded(0), recorded(1)
    assert len(first) > 1000
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


REORDERED = [
    roundpipe(2, 2, num_steps=1, num_layers=3),
    resident("1f1b", 2, 3, num_layers=2, chunks=1),
    complete("zero_2", 2, 2, 1, 1),
    resident("pipe_offload", 2, 4, num_steps=1, num_layers=4),
    complete("zero_offload", 2, 2, 1, 1),
    complete("zero_3", 2, 2, 1, 1, offload=True),
]


@pytest.mark.parametrize("num_orders", [3, slow(50), pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("schedule", REORDERED, ids=lambda schedule: schedule.name)
def test_any_order_that_the_waits_allow_gives_the_same_bits(schedule, num_orders):
    replay = Replay(issued(schedule, 2, keep_calls=True))
    assert replay.num_steps > 1000
    assert not any(replay.differences(seed) for seed in range(num_orders))


# --- what it refuses, and how it ends ------------------------------------------------------------------------


def refused(schedule, **changes):
    model = replace(SMALL, **changes) if changes else None
    check_device(schedule, BackendConfig("device", dry_accelerators=1), model)


def test_stages_that_are_brought_and_others_that_stay_are_refused():
    with pytest.raises(ConfigError, match="brings weights or boundary tensors of some stages"):
        refused(complete("zero_offload", 2, 4, 2, 2, share=0.5))
    for name in ("zero_offload", "zero_infinity", "zero_2", "zero_3", "data_parallel"):
        refused(complete(name, 2, 4, 2, 2))


def test_copies_that_nobody_sums_and_shards_of_what_stages_share_are_refused():
    with pytest.raises(ConfigError, match=r"chimera runs stage 0 on devices \[0, 3\] and has no action that sums"):
        refused(resident("chimera", 4, 8, num_layers=4))
    with pytest.raises(ConfigError, match=r"tied=true is one matrix of two stages, which zero_2 cuts"):
        refused(complete("zero_2", 2, 4, 2, 2), tied=True)
    with pytest.raises(ConfigError, match=r"model.lora_rank freezes weights, and the replicas of data_parallel keep"):
        refused(complete("data_parallel", 2, 4, 2, 2), training_mode="lora", lora_rank=4)


def test_stages_that_stay_on_devices_are_refused():
    with pytest.raises(ConfigError, match="cyclic_dp keeps its stages on devices"):
        refused(complete("cyclic_dp", 2, 2, 2, 2))


def test_steps_that_are_taken_back_are_refused():
    with pytest.raises(ConfigError, match=r"superoffload takes steps back, .* use schedule.speculate=false"):
        refused(complete("superoffload", 2, 4, 2, 2))
    refused(complete("superoffload", 2, 4, 2, 2, speculate=False))
    with pytest.raises(ConfigError, match=r"zenflow steps columns on the devices, .* use schedule=zero_offload"):
        refused(complete("zenflow", 2, 4, 2, 2))


def test_an_action_that_fails_stops_the_run():
    schedule = roundpipe(2, 3)
    training = Training(workload_of(schedule), schedule, Settings())
    handlers = dict(training.handlers) | {Kind.FB: lambda action, number, gate: 1 / 0}
    with Machine(1), DeviceBackend() as backend, pytest.raises(ActionFailed, match="ZeroDivisionError"):
        execute(training.program(uneven_costs(schedule), real_time=True), handlers, backend)


@pytest.mark.parametrize(
    "fault, status, says",
    [
        (
            {"memory_bytes": 30_000},
            "oom",
            "while weights were brought: OutOfMemoryError: privateuseone:0 is out of memory",
        ),
        ({"memory_bytes": 60_000}, "oom", r"0F0 failed on device 0, lane compute: DeviceFailed: OutOfMemoryError"),
        (
            {"lost": {1: 200}},
            "failed",
            r"failed on device 1, lane compute: DeviceFailed: AcceleratorError: .*:1 is lost",
        ),
        (
            {"lost": {0: 1200}},
            "failed",
            r"failed on device 0, lane compute: DeviceFailed: AcceleratorError: .*:0 is lost",
        ),
    ],
)
def test_an_accelerator_that_fails_ends_its_run_with_the_action_and_the_bytes(
    fault, status, says, rpbench, monkeypatch
):
    monkeypatch.setattr(on_accelerators_module, "Machine", partial(Machine, **fault))
    words = ("schedule=1f1b", "model=tiny_gpt", *TINY, "num_devices=2", "num_microbatches=3", "backend=device")
    code, (row,), _ = rpbench(*words, "backend.dry_accelerators=2")
    assert (code, row["status"]) == (int(status == "failed"), status)
    assert re.search(says, row["reason"])
    assert re.search(r"bytes held by accelerator: \d+, \d+(\n|$)", row["reason"])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("device ")]


DRIVER = [
    (torch.AcceleratorError, "CUDA error: an illegal memory access was encountered"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
]


@pytest.mark.parametrize("kind, words", DRIVER)
def test_an_error_of_a_driver_or_its_libraries_ends_the_run_with_the_action_and_the_bytes(
    kind, words, rpbench, monkeypatch
):
    class Broken(Machine):
        def _check_there(self, entry):
            if isinstance(entry, Work) and entry.name == "mm" and entry.action.startswith("1B1 "):
                raise kind(f"{words}\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(on_accelerators_module, "Machine", Broken)
    words_of_run = ("schedule=1f1b", "model=tiny_gpt", *TINY, "num_devices=2", "num_microbatches=3", "backend=device")
    code, (row,), _ = rpbench(*words_of_run, "backend.dry_accelerators=2")
    assert (code, row["status"]) == (1, "failed")
    says = f"1B1 failed on device 1, lane compute: DeviceFailed: {kind.__name__}: {words}; bytes held by accelerator: "
    assert says in row["reason"]
    assert re.search(r"accelerator: [1-9]\d+, [1-9]\d+(\n|$)", row["reason"])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("device ")]


def test_an_error_of_our_own_is_none_of_an_accelerator():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), failing():
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_an_accelerator_that_fails_when_all_is_issued_is_told_as_well():
    schedule, asked = resident("1f1b", 2, 2, num_steps=1), []
    workload = workload_of(schedule)

    def check_there(entry):
        if isinstance(entry, Synchronised) and entry.place.startswith("device.py"):
            asked.append(entry)
            if len(asked) > 1:  # not before the run, but after it
                raise torch.AcceleratorError("device privateuseone:0 is lost")

    with Machine(1) as machine:
        machine._check_there = check_there
        with pytest.raises(DeviceFailed, match=r"when every action had been issued: .* is lost; bytes held"):
            on_accelerators(schedule, workload)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("name", ["device", "cuda"])
def test_without_an_accelerator_the_request_is_refused(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = ("schedule=roundpipe", f"backend={name}", "model=tiny_gpt", "offload=all", "num_devices=2")
    assert dispatch(request) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "backend=device: torch finds no accelerator on this machine; use backend=cpu" in err
    assert "Traceback" not in err
    assert not (tmp_path / "results").exists()


DRY = ("schedule=roundpipe", "model=tiny_gpt", *TINY, "offload=all", "num_devices=2", "num_microbatches=3")


def test_a_dry_run_says_so_and_has_no_pace(rpbench):
    status, (row,), _ = rpbench(*DRY, "backend=cuda", "backend.dry_accelerators=2", "verify=true", "dtype=float64")
    assert (status, row["status"], row["evidence"], row["clock"]) == (0, "ok", "dry", "slots")
    assert row["tokens_per_s"] is None
    assert row["order_findings"] == []
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0
    assert len(row["accelerators"]) == len(row["accelerator_peak_memory_bytes"]) == 2
    assert all(len(row[key]) == 2 for key in row if key.startswith("predicted_") and key.endswith("_bytes"))
    assert any("backend=cuda is now called backend=device" in note for note in row["notes"])


# Device 0 has an embedding (32, 16) and two layers, each of two norms (16,), four matrices (16, 16), one (64, 16) and
# one (16, 64): 6,720 parameters, 64 of them in vectors; its matrices have 48 + 2 x 288 = 624 rows and columns. Device 1
# has a head (32, 16) with a norm in place of the embedding.
STATE = [
    (("optimizer=adamw",), [12 * 6720, 12 * 6736]),
    (("optimizer=sgd",), [4 * 6720, 4 * 6736]),
    (("optimizer=sgd", "optimizer.momentum=0.9"), [8 * 6720, 8 * 6736]),
    (("optimizer=rmsprop",), [8 * 6720, 8 * 6736]),
    (("optimizer=adafactor",), [4 * (6720 + 624 + 64), 4 * (6736 + 624 + 64 + 16)]),
]


@pytest.mark.parametrize("words, num_bytes", [STATE[-1], *map(slow, STATE[:-1])], ids=lambda found: str(found))
def test_the_state_that_is_predicted_is_that_of_the_optimizer_that_runs(words, num_bytes, rpbench):
    tiny = ("schedule=1f1b", "model=tiny_gpt", *TINY, "num_devices=2", "num_microbatches=2", "num_steps=1")
    status, (row,), _ = rpbench(*tiny, "backend=device", "backend.dry_accelerators=2", *words)
    assert (status, row["predicted_optimizer_state_bytes"]) == (0, num_bytes)


def test_check_order_is_a_verb(rpbench):
    status, (found,), _ = rpbench("check-order", *DRY[:1], *TINY, "num_devices=1", "num_microbatches=2", "num_steps=1")
    assert (status, found["num_findings"], found["num_accelerators"]) == (0, 0, 1)
    assert found["num_entries"] > 1000
    json.dumps(found)


@pytest.mark.parametrize(
    "words, says",
    [
        (["accelerators=0"], "accelerators=0: how many the devices share"),
        (["mutants=perhaps"], "mutants=perhaps: yes or no"),
        (["backend=cpu"], "leave backend= and mode= out"),
    ],
)
def test_check_order_refuses_other_words(words, says, rpbench):
    status, rows, err = rpbench("check-order", "schedule=roundpipe", *words)
    assert (status, rows) == (2, [])
    assert says in err


# --- where there is an accelerator ---------------------------------------------------------------------------


@pytest.mark.gpu
@needs_accelerator
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_accelerators_train_as_the_processor_does(devices, asynchronous):
    schedule = roundpipe(devices, 4, num_steps=3, asynchronous=asynchronous)
    training, timeline = on_accelerators(schedule, workload_of(schedule, dtype=torch.float64))
    expected = train(schedule, workload_of(schedule)).training.optimizer.masters
    for place, master in training.optimizer.masters.items():
        torch.testing.assert_close(master, expected[place], rtol=1e-9, atol=1e-11)
    assert training.passes.num_left == 0
    assert training.weights._copies == {}
    assert timeline.makespan > 0


@pytest.mark.gpu
@needs_accelerator
def test_a_run_on_accelerators_gives_the_same_bits_twice():
    schedule = roundpipe(3, 4)
    first, second = (
        on_accelerators(schedule, workload_of(schedule, dtype=torch.float32))[0].optimizer.masters for _ in range(2)
    )
    assert all(torch.equal(first[place], second[place]) for place in first)


@pytest.mark.gpu
@needs_accelerator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_plain_training_and_the_peak_is_of_this_run_alone(dtype, rpbench):
    """Attention over long sequences, whose usual backward has other bits every time; runs one after another."""
    tiny = ("schedule=1f1b", "model=mid_gpt", "model.num_layers=2", "model.seq_len=2048", "num_devices=2")
    rows = [
        rpbench(*tiny, "num_microbatches=3", "backend=device", "verify=true", f"dtype={dtype}", f"seed={seed}")[1][0]
        for seed in range(3)
    ]
    assert [(row["status"], row["device_grad_max_abs_diff"]) for row in rows] == [("ok", 0.0)] * 3
    peaks = [row["accelerator_peak_memory_bytes"][0] - row["accelerator_workspace_bytes"][0] for row in rows]
    assert max(peaks) < 1.1 * min(peaks)  # when memory comes back differs by some per cent; workspaces were a third
