"""Emulated devices and links: what happens in which order; how long it takes is for the benchmarks."""

import pytest
import torch
from cases import SPARED, build
from training_cases import uneven_costs

from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.executor import execute
from rpbench.engine.program import make_program
from rpbench.engine.transfers import Link
from rpbench.passes.lower import lower_communication
from rpbench.sim.longest_path import simulate

SCALE = 2e-4  # seconds for a unit of cost


@pytest.mark.parametrize("name", SPARED)
def test_an_emulated_run_takes_as_long_as_simulated_or_longer(name):
    schedule = lower_communication(build(name, 4, 4, num_steps=2), lane="net")
    costs = uneven_costs(schedule)
    program = make_program(schedule, costs)
    with EmulatedBackend(costs, SCALE) as backend:
        timeline = execute(program, backend.handlers, backend)
    simulated = simulate(schedule, costs)
    assert timeline.makespan >= SCALE * simulated.makespan
    slack = 1e-9
    for span, expected in zip(timeline.spans(), simulated.spans(), strict=True):
        assert span.end - span.main >= SCALE * (expected.end - expected.main) - slack, span
        assert span.main - span.start >= SCALE * (expected.main - expected.start) - slack, span
    for number, edges in enumerate(program.waits):
        for edge in edges:
            hop = SCALE * costs.hop if edge.crosses else 0
            begin = timeline.main if edge.late else timeline.start
            assert begin[number] >= timeline.end[edge.producer] + hop - slack


def test_an_urgent_transfer_overtakes_a_bulky_one():
    with Link(1e9, chunk_bytes=1 << 18) as link:
        first, second = link.send(1 << 20, priority=1), link.send(1 << 20, priority=1)
        assert second.done.wait(10)
        assert first.end_s < second.end_s
        endless = link.send(1 << 50, priority=1)  # however late this thread comes to send the urgent one
        urgent = link.send(1 << 20, priority=0)
        assert urgent.done.wait(10)
        assert not endless.done.is_set()


def test_a_link_is_not_faster_than_its_pace():
    with Link(1e8) as link:
        first, second = link.send(1_000_000), link.send(3_000_000)
        assert second.done.wait(10)
    assert second.end_s - first.end_s >= 0.03 - 1e-3


def test_a_copy_arrives_whole_while_others_overtake_it():
    source = torch.arange(100_000, dtype=torch.float64).view(100, 1000)
    small = torch.ones(100)
    with Link(1e9, chunk_bytes=1000) as link:
        for _ in range(100):  # this thread may sleep until the bulky copy has ended; then nothing overtook it
            target, there = torch.zeros_like(source), torch.zeros(100)
            bulk = link.copy(source, target, priority=1)
            urgent = link.copy(small, there)
            assert bulk.done.wait(10)
            assert urgent.done.wait(10)
            assert torch.equal(source, target)
            assert torch.equal(small, there)
            if urgent.end_s < bulk.end_s:
                return
    pytest.fail("no copy was overtaken in 100 tries")


def test_a_link_that_is_closed_or_cannot_be_is_refused():
    with pytest.raises(ValueError, match="bytes_per_s=0"):
        Link(0)
    link = Link(1.0, chunk_bytes=1)
    link.close()
    with pytest.raises(RuntimeError, match="closed"):
        link.send(1)
