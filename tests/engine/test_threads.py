"""Real threads: the same numbers as the virtual clock, and a quick and clear end when something goes wrong."""

import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import torch
from cases import SPARED, build
from spared import spared
from training_cases import TINY, assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends import threads
from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import replay_clock
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.program import Edge, Program, _group_edges, make_program
from rpbench.engine.training import Training
from rpbench.ir.action import Kind
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.passes.lower import add_steps, split_backward
from rpbench.registry import entries
from rpbench.sim.events import deal
from rpbench.sim.graph import build_graph


@pytest.fixture
def backend():
    before = set(threading.enumerate())
    with CpuBackend() as found:
        yield found
    left = [thread.name for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert not left, "no worker outlives its backend"


def test_steps_of_a_group_wait_for_the_gradients_and_the_last_steps_of_the_others():
    """Two stages under one norm, three steps: threads alone could bring a STEP before the other's last one."""
    order = entries()["1f1b"].build(Shape(2, 2, 2, num_steps=3)).with_partition(symmetric((1, 1)))
    analysis = build_graph(add_steps(order)).analysis
    index, steps = analysis.index, analysis.index.steps
    found = set(_group_edges(analysis, [(0, 1)]))
    last = {(steps[stage, version], steps[1 - stage, version - 1]) for stage in (0, 1) for version in (2, 3)}
    assert {edge for edge in found if edge[1] in steps.values()} == last
    gradients = {
        (steps[stage, version], number) for stage, version in steps for number in index.gradients(1 - stage, version)
    }
    assert found == last | gradients


def nothing(action, number, gate):
    """A handler that takes its place in the table."""


HANDLERS = dict.fromkeys(Kind, nothing)


def program_of(schedule):
    return make_program(schedule, uneven_costs(schedule))


# --- numbers ---


@pytest.mark.parametrize("name", SPARED)
def test_threads_give_the_reference_bit_for_bit(name, backend):
    schedule = build(name, 3, 4, num_steps=2, num_layers=3)
    run = train(schedule, workload_of(schedule, replace(TINY, dropout=0.2)), backend=backend)
    assert_same(run, reference_of(run))


def test_dynamic_dispatch_and_stale_weights_too(backend):
    schedule = build("roundpipe", 3, 6)
    schedule = deal(schedule, uneven_costs(schedule), "dynamic")
    run = train(schedule, workload_of(schedule), backend=backend)
    assert_same(run, reference_of(run, updates=False))
    schedule = build("roundpipe", 3, 4, num_steps=5, num_layers=3, asynchronous=True)
    workload = workload_of(schedule, replace(TINY, tied=True))
    run = train(schedule, workload, backend=backend, clip_norm=0.1)
    assert_same(run, reference_of(run, read_version=lambda module, mb: max(0, mb // 4 - 1)))


@pytest.mark.parametrize("seed", spared(range(12), lambda seed: seed % 3 == 0))
def test_any_shape_gives_the_reference_whatever_the_threads_do(seed, backend):
    rng = random.Random(seed)
    microbatches, stale = rng.randint(1, 6), seed % 2
    schedule = build(
        "roundpipe",
        rng.randint(1, 6),
        microbatches,
        num_layers=rng.randint(1, 5),
        num_steps=3,
        seed=seed,
        stages=(rng.randint(1, 4), rng.randint(1, 5)),
        asynchronous=bool(stale),
    )
    if rng.random() < 0.3:
        schedule = split_backward(schedule)
    workload = workload_of(schedule, replace(TINY, tied=rng.random() < 0.5), torch.float32)
    grain, clip_norm = rng.choice(["stage", "layer"]), rng.choice([None, 0.1])
    run = train(schedule, workload, backend=backend, recompute_grain=grain, clip_norm=clip_norm)
    assert_same(run, reference_of(run, read_version=lambda module, mb: max(0, mb // microbatches - stale)))
    assert run.training.passes.num_left == 0


@pytest.mark.slow
def test_sixteen_devices_on_two_cores(backend):
    schedule = build("roundpipe", 16, 16, num_layers=16, stages=(15, 19))
    run = train(schedule, workload_of(schedule, dtype=torch.float32), backend=backend)
    assert_same(run, reference_of(run, updates=False))


def test_every_worker_uses_one_core(backend):
    """A thread asks for as many as the process has by default, whatever the main thread was told."""
    torch.set_num_threads(2)
    schedule = build("1f1b", 3, 2)
    seen = []
    execute(program_of(schedule), dict.fromkeys(Kind, lambda *_: seen.append(torch.get_num_threads())), backend)
    assert set(seen) == {1}


def test_workers_take_short_turns_with_the_interpreter_and_leave_it_as_it_was(backend):
    before, schedule, seen = sys.getswitchinterval(), build("1f1b", 2, 2), []
    handlers = dict.fromkeys(Kind, lambda *_: seen.append(sys.getswitchinterval()))
    execute(program_of(schedule), handlers, backend)
    assert seen
    assert seen == [pytest.approx(threads.SWITCH_S)] * len(seen)
    with pytest.raises(ActionFailed):
        execute(program_of(schedule), handlers | {Kind.B: lambda *_: 1 / 0}, backend)
    assert sys.getswitchinterval() == before > threads.SWITCH_S


# --- times ---


def test_actions_run_in_the_order_of_lanes_and_edges(backend):
    schedule = build("1f1b", 3, 6, num_steps=2)
    run = train(schedule, workload_of(schedule), backend=backend)
    program, timeline = run.training.program(uneven_costs(schedule), real_time=True), run.timeline
    for lane in program.lanes:
        for number in range(lane.start, lane.stop):
            assert timeline.start[number] <= timeline.main[number] <= timeline.end[number]
            for edge in program.waits[number]:
                moment = timeline.main if edge.late else timeline.start
                assert timeline.end[edge.producer] <= moment[number]
            if number > lane.start:
                assert timeline.end[number - 1] <= timeline.main[number]
    assert min(timeline.start) == 0


def test_processor_time_leaves_out_waiting(backend):
    schedule = build("1f1b", 2, 2)

    def slow(action, number, gate):
        if action.stage == 0:
            time.sleep(0.02)
        else:
            sum(range(200_000))

    program = program_of(schedule)
    timeline = execute(program, dict.fromkeys(Kind, slow), backend)
    assert timeline.makespan > 0.06
    used = [pre + main for pre, main in zip(backend.pre_cpu_s, backend.main_cpu_s, strict=True)]
    slept = [span.action.stage == 0 for span in timeline.spans()]
    assert sum(time for time, asleep in zip(used, slept, strict=True) if asleep) < 0.02
    assert all(time > 0 for time, asleep in zip(used, slept, strict=True) if not asleep)
    replayed = replay_clock(program, backend.pre_cpu_s, backend.main_cpu_s)
    assert max(used) <= replayed.makespan <= sum(used) + 1e-9


def test_recomputation_begins_before_its_gradient_is_there(backend):
    """Stage 0's backward has its recomputation done while stage 1's backward still works."""
    schedule = build("roundpipe", 2, 1, num_layers=4, stages=(1, 2))
    order = []
    ahead, told = threading.Event(), threading.Event()

    def lower(action, number, gate):
        order.append("recomputed")
        ahead.set()
        gate()
        order.append("gradient there")
        told.set()

    def upper(action, number, gate):
        assert ahead.wait(5), "the lower stage waits for the gradient before it recomputes"
        order.append("gradient made")

    handlers = HANDLERS | {Kind.B: lower, Kind.FB: upper}
    execute(make_program(schedule, uneven_costs(schedule)), handlers, backend)
    assert order == ["recomputed", "gradient made", "gradient there"]


# --- faults ---


@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.FB, Kind.STEP])
def test_an_action_that_raises_ends_the_run(kind, backend):
    schedule = build("roundpipe", 3, 4, num_steps=3)
    workload = workload_of(schedule)
    training = Training(workload, schedule)

    def broken(action, number, gate):
        handled = training.handlers[kind]
        handled(action, number, gate)
        if (action.microbatch or action.version) == 1:
            raise MemoryError("no more room")

    with pytest.raises(
        ActionFailed, match=rf"{kind.name}[@0-9]* failed on device .*: MemoryError: no more room"
    ) as seen:
        execute(training.program(uneven_costs(schedule), real_time=True), training.handlers | {kind: broken}, backend)
    assert f"{kind.name}" in str(seen.value).split(">")[1], "the table marks the action"
    cause = seen.value.__cause__
    assert isinstance(cause, MemoryError)
    frames = []
    trace = cause.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "broken", "the worker's own traceback is there"


def test_other_workers_stop_while_one_is_busy(backend):
    schedule = build("gpipe", 2, 50)
    done = []

    def handler(action, number, gate):
        if action.stage == 1:
            raise ValueError("early")
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(ActionFailed, match="1F0 failed"):
        execute(program_of(schedule), dict.fromkeys(Kind, handler), backend)
    assert len(done) < 25


def test_a_backend_works_again_after_a_failure(backend):
    schedule = build("1f1b", 2, 2)
    for _ in range(2):
        with pytest.raises(ActionFailed):
            execute(program_of(schedule), HANDLERS | {Kind.B: lambda *_: 1 / 0}, backend)
        assert execute(program_of(schedule), HANDLERS, backend).makespan >= 0


def test_lanes_that_can_never_move_are_noticed(backend):
    schedule = build("gpipe", 2, 2)
    program = program_of(schedule)
    waits = list(program.waits)
    waits[0] = [Edge(len(waits) - 1, False, False)]
    with pytest.raises(ScheduleError, match="no lane can move") as seen:
        execute(Program(program.graph, waits), HANDLERS, backend)
    assert "rank 0 waits at 0F0 for 1B1" in str(seen.value)
    assert "rank 1 waits at 1F0 for 0F0" in str(seen.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_is_noticed(backend, monkeypatch):
    schedule = build("1f1b", 2, 2)
    monkeypatch.setattr(threads.Walk, "run_lane", die)
    with pytest.raises(RuntimeError, match="the worker of device 1, lane compute has died"):
        execute(program_of(schedule), HANDLERS, backend)


def die(walk, place):
    """What is left of a lane whose thread ends without a word."""
    if place == 1:
        raise SystemExit
    walk._leave(place)


def test_ctrl_c_ends_a_run_and_leaves_nothing(tmp_path):
    program = textwrap.dedent("""
        import sys, time
        from rpbench.__main__ import main
        from rpbench.engine.compute.forward_backward import Passes

        def forever(self, action, number, gate):
            print("ready", flush=True)
            time.sleep(60)

        Passes.forward = forever
        main()
    """)
    arguments = ("backend=cpu", "model=tiny_gpt", "num_devices=2", "num_microbatches=2", f"results_dir={tmp_path}")
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=50)  # less than the worker would go on sleeping
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "rpbench: interrupted; finished runs are kept"
    assert not list(tmp_path.glob("*/*record*")), "no record, nor half of one"
