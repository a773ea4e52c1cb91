"""Emulated devices and links: what happens in which order; how long it takes is for the benchmarks."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import SPARED, build
from training_cases import uneven_costs

from rpbench.cost.hardware.machine import Machine
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.executor import execute
from rpbench.engine.program import make_program
from rpbench.engine.transfers import PacedCopies
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


def test_a_link_is_not_faster_than_its_pace_and_what_it_sends_arrives_whole():
    copy = PacedCopies(Machine("slow", 2, host_to_device_bytes_per_s=1e8))
    sent = torch.arange(250_000, dtype=torch.float64).view(500, 500).T
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: copy(sent, 0, "h2d"), range(2))
    assert time.perf_counter() - began >= 2 * sent.nbytes / 1e8
    assert torch.equal(first, sent)
    assert torch.equal(second, sent)
    assert first.is_contiguous()
