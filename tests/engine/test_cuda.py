"""The cuda backend: what it issues, by a stand-in for torch.cuda; and, where there is a GPU, that it trains."""

import contextlib
import time

import pytest
import torch
from cases import build
from spared import slow
from test_replicated_training import complete
from training_cases import assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.cli import dispatch
from rpbench.engine.backends.cuda import CudaBackend, OnCurrentGpu
from rpbench.engine.executor import ActionFailed
from rpbench.engine.training import Settings, Training
from rpbench.harness.choices import ConfigError
from rpbench.harness.config import RunConfig
from rpbench.harness.gpu_request import check_cuda
from rpbench.ir.action import Kind
from rpbench.passes.offload import stream

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")


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


@pytest.mark.parametrize("devices, gpus", [(1, 1), (3, 1), (4, 2)])
def test_every_lane_waits_for_the_events_of_other_lanes(devices, gpus, monkeypatch):
    issued = []
    schedule = stream(build("roundpipe", devices, 3, num_steps=2))
    with CudaBackend(StandIn(gpus)) as backend:
        monkeypatch.setattr("rpbench.engine.backends.cuda._Issue", noted(issued))
        run = train(schedule, workload_of(schedule), backend=backend)
    assert_same(run, reference_of(run))
    (issue,) = issued
    program = issue._program
    assert {stream.device for stream in backend._streams.values()} == set(range(min(devices, gpus)))
    for number, edges in enumerate(program.waits):
        lane = program.lanes[program.index.lane_of[number]]
        if lane.name == "host":
            continue
        told = backend._streams[lane.device, lane.name].told
        main, end = (told.index(("record", column[number])) for column in (issue._main, issue._end))
        begun = told.index(("record", issue._start[number]))
        for edge in edges:
            if issue._end[edge.producer] is not None:
                place = told.index(("wait", issue._end[edge.producer]))
                assert place < (main if edge.late else begun), (program.actions[number], edge)
        assert begun < main < end
    assert all(span.start <= span.main <= span.end for span in run.timeline.spans())


@pytest.mark.parametrize(
    "name, options", [slow(("zero_offload", {})), ("zero_3", {"offload": True}), slow(("zero_infinity", {}))]
)
def test_replicas_gather_and_reduce_behind_the_events_of_each_other(name, options):
    schedule = complete(name, 3, 3, 2, 2, **options)
    with CudaBackend(StandIn(2)) as backend:
        run = train(schedule, workload_of(schedule), backend=backend)
        program = run.training.program(uneven_costs(schedule), real_time=True)
        assert_same(run, reference_of(run))
        for number, action in enumerate(program.actions):
            lane = program.lanes[program.index.lane_of[number]]
            if action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD):
                waited = {program.lanes[program.index.lane_of[edge.producer]].device for edge in program.waits[number]}
                assert lane.name == "net"
                assert waited == {0, 1, 2}


def test_the_replicas_whose_optimizer_is_on_the_gpu_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = RunConfig()
    for name, options in (("zero_2", {}), ("zero_3", {}), ("data_parallel", {}), ("zero_offload", {"share": 0.5})):
        with pytest.raises(ConfigError, match="or steps on them, where the optimizer is not"):
            check_cuda(config, complete(name, 2, 4, 2, 2, **options), "stage")
    for name in ("zero_offload", "zero_infinity"):
        check_cuda(config, complete(name, 2, 4, 2, 2), "stage")


def test_steps_that_are_taken_back_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"superoffload takes steps back, .* use schedule.speculate=false"):
        check_cuda(RunConfig(), complete("superoffload", 2, 4, 2, 2), "stage")
    check_cuda(RunConfig(), complete("superoffload", 2, 4, 2, 2, speculate=False), "stage")
    with pytest.raises(ConfigError, match=r"zenflow steps columns on the devices, .* use schedule=zero_offload"):
        check_cuda(RunConfig(), complete("zenflow", 2, 4, 2, 2), "stage")


def noted(issued):
    from rpbench.engine.backends.cuda import _Issue

    def make(*arguments):
        issued.append(_Issue(*arguments))
        return issued[-1]

    return make


def test_an_action_that_fails_stops_the_run():
    schedule = stream(build("roundpipe", 2, 3))
    training = Training(workload_of(schedule), schedule, Settings())
    handlers = dict(training.handlers) | {Kind.FB: lambda action, number, gate: 1 / 0}
    from rpbench.engine.executor import execute

    with CudaBackend(StandIn(1)) as backend, pytest.raises(ActionFailed, match="ZeroDivisionError"):
        execute(training.program(uneven_costs(schedule), real_time=True), handlers, backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_the_request_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = ("schedule=roundpipe", "backend=cuda", "model=tiny_gpt", "offload=all", "num_devices=2")
    assert dispatch(request) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "backend=cuda: torch finds no CUDA device on this machine; use backend=cpu" in err
    assert "Traceback" not in err
    assert not (tmp_path / "results").exists()


def on_gpus(schedule, dtype: torch.dtype):
    from dataclasses import replace

    from rpbench.engine.executor import execute

    workload = workload_of(schedule, dtype=dtype)
    workload = replace(workload, data=OnCurrentGpu(workload.data))
    with CudaBackend() as backend:
        training = Training(workload, schedule, Settings(keep_gradients=True), None, backend.copy, pin_memory=True)
        timeline = execute(training.program(uneven_costs(schedule), real_time=True), training.handlers, backend)
    return training, timeline


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gpus_train_as_the_processor_does(devices, asynchronous):
    schedule = stream(build("roundpipe", devices, 4, num_steps=3, asynchronous=asynchronous))
    training, timeline = on_gpus(schedule, torch.float64)
    expected = train(schedule, workload_of(schedule)).training.optimizer.masters
    for place, master in training.optimizer.masters.items():
        torch.testing.assert_close(master, expected[place], rtol=1e-9, atol=1e-11)
    assert training.passes.num_left == 0
    assert training.weights.num_on_devices == 0
    assert timeline.makespan > 0


@pytest.mark.gpu
@needs_gpu
def test_a_run_on_gpus_gives_the_same_bits_twice():
    schedule = stream(build("roundpipe", 3, 4, num_steps=2))
    first, second = (on_gpus(schedule, torch.float32)[0].optimizer.masters for _ in range(2))
    assert all(torch.equal(first[place], second[place]) for place in first)
