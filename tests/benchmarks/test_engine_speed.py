"""How fast the engine is. Prints figures, asserts none about time; run it alone on a quiet machine.

python -m pytest tests/benchmarks/test_engine_speed.py -m benchmarks -n 0 -s
"""

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rpbench.cost.table import CostTable, LayerTimes
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.executor import execute
from rpbench.engine.program import make_program
from rpbench.engine.transfers.link import Link
from rpbench.engine.workload import Workload
from rpbench.ir.schedule import Schedule
from rpbench.models.data import SyntheticTokens
from rpbench.sim.longest_path import simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from cases import build
from training_cases import assert_same, reference_of, train, uneven_costs

pytestmark = pytest.mark.benchmarks


def random_costs(schedule: Schedule, shortest_s: float, longest_s: float) -> CostTable:
    """Layers of any length between the two, without hops."""
    draw = np.random.default_rng(0)
    layers = schedule.partition.num_layers
    forward, backward = (draw.uniform(shortest_s, longest_s, layers).tolist() for _ in range(2))
    return LayerTimes(forward, [0.0] * layers, backward).table(schedule.partition)


@pytest.mark.parametrize("devices, microbatches", [(8, 16), (64, 64)])
def test_error_of_an_emulated_makespan(devices, microbatches):
    """In plain mode, actions of 5 ms and more; the bar is 1 %."""
    schedule = build("1f1b", devices, microbatches, num_layers=devices)
    costs = random_costs(schedule, 0.005, 0.05 if devices == 8 else 0.02)
    ideal = simulate(schedule, costs).makespan
    program = make_program(schedule, costs)
    with EmulatedBackend(costs) as backend:
        found = [execute(program, backend.handlers, backend).makespan / ideal - 1 for _ in range(3)]
    errors = ", ".join(f"{100 * error:.2f} %" for error in found)
    print(f"\n{devices} x {microbatches}: ideal {ideal:.3f} s, median error {100 * median(found):.2f} % of {errors}")


def test_time_of_an_urgent_transfer():
    """4 MB during 64 MB at 1 GB/s: 4.2 ms and one chunk of 1 MB; the bar is 6 ms."""
    with Link(1e9) as link:
        found = []
        for _ in range(20):
            bulk = link.send(64 << 20, priority=1)
            time.sleep(0.01)
            began = time.perf_counter()
            urgent = link.send(4 << 20)
            urgent.done.wait()
            found.append(urgent.end_s - began)
            bulk.done.wait()
    print(f"\nurgent 4 MB: median {1000 * median(found):.2f} ms, worst {1000 * max(found):.2f} ms")


class Tokens(nn.Module):
    """The simplest layers there are, so that the engine is measured and not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(37, 16) / 4)

    def forward(self, tokens):
        return functional.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Loss(Block):
    def forward(self, x, labels):
        return (x @ self.weight).logsumexp(-1).mean() + labels.float().mean()


@pytest.mark.parametrize("name, stages", [("1f1b", None), ("gpipe", None), ("roundpipe", (43, 62))])
def test_time_of_64_virtual_devices(name, stages):
    """128 microbatches with gradients; the bar is 10 s."""
    torch.set_num_threads(1)
    schedule = build(name, 64, 128, num_layers=62, stages=stages)
    workload = Workload([Tokens(), *(Block() for _ in range(62)), Loss()], SyntheticTokens(37, 8, 1), 128)
    began = time.perf_counter()
    run = train(schedule, workload)
    took = time.perf_counter() - began
    reference = reference_of(run, updates=False)
    print(
        f"\n{name}: {schedule.num_actions} actions {took:.2f} s, reference {time.perf_counter() - began - took:.2f} s"
    )
    assert_same(run, reference)
    np.testing.assert_allclose(run.timeline.end, simulate(schedule, uneven_costs(schedule)).end, rtol=0, atol=1e-9)
