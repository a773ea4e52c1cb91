"""Calibration: every device busy, every part timed; on accelerators both directions of a link at once."""

import threading

import pytest
import torch
from spared import slow

from rpbench.config.configuration import CONF
from rpbench.config.loading import load
from rpbench.cost.hardware.measured import PARTS
from rpbench.engine.backends import accelerator
from rpbench.engine.measure.calibration import (
    ON_ACCELERATORS,
    ON_CORES,
    Probe,
    Sizes,
    calibrate_accelerators,
    calibrate_cores,
    check_device,
)
from rpbench.engine.measure.stopwatch import AcceleratorStopwatch, CoreStopwatch
from rpbench.engine.stream_order.happens_before import HappensBefore, findings
from rpbench.engine.stream_order.machine import Machine
from rpbench.engine.stream_order.notes import KIND
from rpbench.engine.stream_order.trace import Recorded, SynchronisedEvent, Work
from rpbench.workload.architecture import Architecture

SMALL = Probe(Architecture("small", num_layers=1, hidden=16, heads=2, vocab=32, gated=False, seq_len=8), 16)
SIZES = Sizes(64, 2**14)


@pytest.mark.parametrize("num_devices", [slow(1), 2])
@pytest.mark.slow
def test_every_rate_and_every_part_is_measured(num_devices):
    told = []
    found = calibrate_cores(num_devices, told.append, [SMALL, SMALL], SIZES)
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
    with pytest.raises(ValueError, match="device=tpu: one of cpu, accelerator"):
        check_device("tpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no accelerator on this machine; use device=cpu"):
        check_device("accelerator")


@pytest.mark.parametrize("probes", [ON_CORES, ON_ACCELERATORS])
def test_probes_are_no_layers_of_the_duel_and_tell_the_terms_apart(probes):
    for name in ("mid_gpt", "fat_head_gpt"):
        duel = load(["experiment=cpu_duel", f"model={name}"]).model
        assert all((probe.model.hidden, probe.model.vocab) != (duel.hidden, duel.vocab) for probe in probes)
        assert all(probe.model.hidden != duel.hidden for probe in probes)
    assert len({probe.model.hidden for probe in probes}) >= 4
    assert len(probes) > max(len(terms) for terms in PARTS.values())
    assert all(probe.num_tokens % probe.model.seq_len == 0 for probe in probes)
    assert (CONF / "experiment" / "cpu_duel.yaml").exists()


# --- accelerators, made up -----------------------------------------------------------------------------------


def test_both_directions_are_under_way_together():
    """Each on a stream of its own, none behind the other, both between the two events of the clock."""
    with Machine(1) as machine:
        watch = AcceleratorStopwatch(repeats=1)
        place, marks = torch.device(watch.device), {}

        def copying(name):
            def made():
                source, target = torch.ones(4, pin_memory=True), torch.zeros(4, device=place)
                marks[name] = machine.home(target).number
                return lambda: target.copy_(source, non_blocking=True)

            return made

        assert watch.seconds_together(copying("up"), copying("down")) > 0
    assert not findings(machine.trace)
    order, copies, clocks = HappensBefore(machine.trace), {"up": [], "down": []}, []
    for entry in machine.trace.entries:
        order.take(entry)
        if isinstance(entry, Recorded):
            clocks.append((entry.stream, list(order.clocks[entry.stream])))
        for name, number in marks.items():
            if isinstance(entry, Work) and entry.name == "copy_" and number in entry.writes:
                copies[name].append((entry.stream, list(order.clocks[entry.stream])))
    assert list(map(len, copies.values())) == [2, 2]  # a warm-up and a repeat
    (up, of_up), (down, of_down) = copies["up"][-1], copies["down"][-1]
    assert up != down
    assert of_down[up] < of_up[up]
    assert of_up[down] < of_down[down]
    (main, start), (_, end) = clocks[-2:]
    assert of_up[main] >= start[main]
    assert of_down[main] >= start[main]
    assert end[up] >= of_up[up]
    assert end[down] >= of_down[down]


def test_what_is_timed_lies_between_two_events_of_the_stream():
    with Machine(1) as machine:
        watch = AcceleratorStopwatch(repeats=2)

        def made():
            target = torch.zeros(4, device=watch.device)
            return lambda: target.add_(1)

        watch.seconds(made)
    told = [entry for entry in machine.trace.entries if isinstance(entry, Recorded | Work | SynchronisedEvent)]
    names = [getattr(entry, "name", type(entry).__name__) for entry in told]
    assert names == ["zeros", "add_", *["Recorded", "add_", "Recorded", "SynchronisedEvent"] * 2]
    assert len({entry.stream for entry in told if not isinstance(entry, SynchronisedEvent)}) == 1


@pytest.mark.parametrize("kind, num", [(KIND, 2), slow(("cuda", 1)), slow(("xpu", 1))])
def test_accelerators_are_measured_whatever_their_kind_and_host_steps_on_one_core(kind, num):
    threads, before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_fp16_accumulation
    with Machine(num, kind) as machine:
        found = calibrate_accelerators(lambda line: None, [SMALL], [SMALL], SIZES)
    assert not findings(machine.trace)
    assert min(found.halves) >= 0
    assert min(vars(found.rates).values()) > 0
    assert (found.peer_bytes_per_s or 0.0) > 0.0 or num == 1
    ((_, times),) = found.probes
    assert set(times) == set(PARTS)
    assert min(times.values()) > 0
    assert torch.get_num_threads() == threads
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is before


def test_kernels_repeat_their_bits_only_where_they_are_asked_to(monkeypatch):
    """Where torch only warned, the backward of attention would be the faster kernel, which does not."""
    monkeypatch.setattr(accelerator, "kind", lambda: "a kind without a table")
    before = torch.utils.deterministic.fill_uninitialized_memory
    try:
        for repeatable in (True, False):
            accelerator.choose_kernels(repeatable=repeatable)
            assert torch.are_deterministic_algorithms_enabled() is repeatable
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
def test_a_real_accelerator_is_measured():
    found = calibrate_accelerators(lambda line: None, ON_ACCELERATORS[:2])
    assert found.rates.matmul_flops_per_s > 1e13
    assert found.rates.memory_bytes_per_s > 1e11
    assert all(0 < took < 1 for _, times in found.probes for took in times.values())
