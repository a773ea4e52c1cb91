"""Calibration: every device busy, every part timed; on a GPU, by a stand-in, both directions of a link at once."""

import contextlib
import threading
import time

import pytest
import torch
from spared import slow

from rpbench.config.configuration import CONF
from rpbench.config.request import load
from rpbench.cost.measured import PARTS
from rpbench.engine.measure import calibration
from rpbench.engine.measure.calibration import calibrate_cores, calibrate_gpu, check_device
from rpbench.engine.measure.probes import ON_CORES, ON_GPUS, Probe
from rpbench.engine.measure.stopwatch import CoreStopwatch, GpuStopwatch
from rpbench.workload.architecture import Architecture

SMALL = Probe(Architecture("small", num_layers=1, hidden=16, heads=2, vocab=32, gated=False, seq_len=8), 16)
SIZES = {"width": 64, "copy_bytes": 2**14}


@pytest.mark.parametrize("num_devices", [slow(1), 2])
@pytest.mark.slow
def test_every_rate_and_every_part_is_measured(num_devices):
    told = []
    found = calibrate_cores(num_devices, told.append, [SMALL, SMALL], **SIZES)
    assert min(vars(found.rates).values()) > 0
    assert [set(times) for _, times in found.probes] == [set(PARTS)] * 2
    assert all(0 < took < 1 for _, times in found.probes for took in times.values())
    assert all(0 < share < 5 for share in found.halves)
    assert len(told) == 4
    assert f"{num_devices} cores" in told[0]


def test_all_devices_work_at_the_same_time_on_one_core_each():
    met, threads = threading.Barrier(3), set()

    def made():
        threads.add((threading.get_ident(), torch.get_num_threads()))
        return lambda: met.wait(timeout=10)  # breaks unless all three are there

    with CoreStopwatch(3, repeats=2) as watch:
        watch.seconds(made)
    assert len(threads) == 3
    assert {cores for _, cores in threads} == {1}


def test_an_error_in_a_worker_is_raised_and_nobody_waits_for_it():
    def made():
        raise MemoryError("no room")

    with CoreStopwatch(2) as watch, pytest.raises(MemoryError, match="no room"):
        watch.seconds(made)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="device=tpu: one of cpu, cuda"):
        check_device("tpu")
    monkeypatch.setattr(calibration.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device; use device=cpu"):
        check_device("cuda")


@pytest.mark.parametrize("probes", [ON_CORES, ON_GPUS])
def test_probes_are_no_layers_of_the_duel_and_tell_the_terms_apart(probes):
    for name in ("mid_gpt", "fat_head_gpt"):
        duel = load(["experiment=cpu_duel", f"model={name}"]).model
        assert all((probe.model.hidden, probe.model.vocab) != (duel.hidden, duel.vocab) for probe in probes)
        assert all(probe.model.hidden != duel.hidden for probe in probes)
    assert len({probe.model.hidden for probe in probes}) >= 4
    assert len(probes) > max(len(terms) for terms in PARTS.values())
    assert all(probe.num_tokens % probe.model.seq_len == 0 for probe in probes)
    assert (CONF / "experiment" / "cpu_duel.yaml").exists()


# --- a GPU, by a stand-in ------------------------------------------------------------------------------------


class StandIn:
    """A torch.cuda of streams that are done at once, and that note what they were told."""

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_s = None

        def record(self, stream) -> None:
            self.at_s = time.perf_counter()
            stream.told.append(("record", self))

        def synchronize(self) -> None:
            assert self.at_s is not None

        def elapsed_time(self, other) -> float:
            return 1e3 * (other.at_s - self.at_s)

    class Stream:
        def __init__(self, device: int) -> None:
            self.device, self.told = device, []

        def wait_event(self, event) -> None:
            assert event.at_s is not None, "waits for an event that nobody has recorded"
            self.told.append(("wait", event))

    def device_count(self) -> int:
        return self.num_gpus

    def current_stream(self, gpu: int):
        return self.Stream(gpu)

    def synchronize(self, gpu: int) -> None:
        pass

    def device(self, gpu: int):
        return contextlib.nullcontext()

    def stream(self, stream):
        return contextlib.nullcontext()


class Noting(StandIn):
    """Keeps its streams, and which of them work was issued to."""

    def __init__(self):
        super().__init__(1)
        self.streams, self.issued = [], []
        self.main = self.Stream(0)

    def current_stream(self, gpu):
        return self.main

    def new_stream(self, device):
        self.streams.append(StandIn.Stream(device))
        return self.streams[-1]

    def stream(self, stream):
        self.issued.append(stream)
        return super().stream(stream)


def gpu_watch():
    cuda = Noting()
    runtime = Noting()
    runtime.Stream = runtime.new_stream
    runtime.main = cuda.main
    return runtime, GpuStopwatch(runtime, "cpu", torch.float32, pins=False, repeats=2)


def test_both_directions_are_under_way_together():
    runtime, watch = gpu_watch()
    order = []

    def work(name):
        return lambda: lambda: order.append((name, runtime.issued[-1]))

    assert watch.seconds_together(work("up"), work("down")) >= 0
    up, down = runtime.streams
    assert order == [("up", up), ("down", down)] * 3  # a warm-up and two repeats, each way on a stream of its own
    for stream in (up, down):
        # Nothing of it begins before the clock does, and the clock's end waits for it.
        (waits, begun), (records, ended), *_ = stream.told
        assert (waits, records) == ("wait", "record")
        assert ("record", begun) in runtime.main.told
        assert ("wait", ended) in runtime.main.told
        assert runtime.main.told.index(("record", begun)) < runtime.main.told.index(("wait", ended))


def test_what_is_timed_lies_between_two_events_of_the_stream():
    runtime, watch = gpu_watch()
    watch.seconds(lambda: lambda: runtime.main.told.append(("work", None)))
    assert [what for what, _ in runtime.main.told] == ["work", *["record", "work", "record"] * 2]


def test_a_gpu_is_measured_and_its_host_steps_on_one_core():
    _, watch = gpu_watch()
    threads = torch.get_num_threads()
    found = calibrate_gpu(lambda line: None, watch, [SMALL], [SMALL], **SIZES)
    assert min(found.halves) >= 0
    assert min(vars(found.rates).values()) > 0
    ((_, times),) = found.probes
    assert set(times) == set(PARTS)
    assert min(times.values()) > 0
    assert torch.get_num_threads() == threads
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")
def test_a_real_gpu_is_measured():
    found = calibrate_gpu(lambda line: None, probes=ON_GPUS[:2], width=2048)
    assert found.rates.matmul_flops_per_s > 1e12
    assert all(0 < took < 1 for _, times in found.probes for took in times.values())
