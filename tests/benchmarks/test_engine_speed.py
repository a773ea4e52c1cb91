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

from rpbench.config.loading import load
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.backends.threads import CpuBackend, one_thread, usable_cores
from rpbench.engine.backends.virtual import replay_clock
from rpbench.engine.executor import execute
from rpbench.engine.measure.stopwatch import ForeignLoad
from rpbench.engine.program import make_program
from rpbench.engine.training import Training
from rpbench.engine.workload import Workload
from rpbench.ir.schedule import Schedule
from rpbench.models.build import build_model
from rpbench.models.data import SyntheticTokens
from rpbench.plan import choose
from rpbench.plan.whole import evaluate_whole
from rpbench.run.assemble import pose
from rpbench.sim.longest_path import simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from cases import build
from sizes import sized
from training_cases import assert_same, reference_of, train, uneven_costs

pytestmark = pytest.mark.benchmarks


def random_costs(schedule: Schedule, shortest_s: float, longest_s: float) -> CostTable:
    """Layers of any length between the two, without hops."""
    draw = np.random.default_rng(0)
    layers = schedule.partition.num_layers
    forward, backward = (draw.uniform(shortest_s, longest_s, layers).tolist() for _ in range(2))
    return LayerTimes(forward, [0.0] * layers, backward).table(schedule.partition)


@pytest.mark.parametrize("devices, microbatches", sized([(8, 16), (64, 64)], [(2, 2)]))
def test_error_of_an_emulated_makespan(devices, microbatches):
    """In plain mode, actions of 5 ms and more; the bar is 1 %."""
    schedule = build("1f1b", devices, microbatches, num_layers=devices)
    costs = random_costs(schedule, 0.005, 0.05 if devices == 8 else 0.02)
    ideal = simulate(schedule, costs).makespan
    program = make_program(schedule, costs)
    with EmulatedBackend(costs) as backend:
        found = [execute(program, backend.handlers, backend).makespan / ideal - 1 for _ in range(sized(3, 1))]
    errors = ", ".join(f"{100 * error:.2f} %" for error in found)
    print(f"\n{devices} x {microbatches}: ideal {ideal:.3f} s, median error {100 * median(found):.2f} % of {errors}")


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


@pytest.mark.parametrize(
    "name, stages", sized([("1f1b", None), ("gpipe", None), ("roundpipe", (43, 62))], [("1f1b", None)])
)
def test_time_of_64_virtual_devices(name, stages):
    """128 microbatches with gradients; the bar is 10 s."""
    torch.set_num_threads(1)
    devices, microbatches, layers = sized((64, 128, 62), (4, 4, 4))
    schedule = build(name, devices, microbatches, num_layers=layers, stages=stages)
    workload = Workload([Tokens(), *(Block() for _ in range(layers)), Loss()], SyntheticTokens(37, 8, 1), microbatches)
    began = time.perf_counter()
    run = train(schedule, workload)
    took = time.perf_counter() - began
    reference = reference_of(run, updates=False)
    print(
        f"\n{name}: {schedule.num_actions} actions {took:.2f} s, reference {time.perf_counter() - began - took:.2f} s"
    )
    assert_same(run, reference)
    np.testing.assert_allclose(run.timeline.end, simulate(schedule, uneven_costs(schedule)).end, rtol=0, atol=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "roundpipe"])
def test_wall_over_replay(schedule):
    """Steps of the duel's model on two bound cores; the bar is 1.01 on a quiet machine.

    Waiting inside actions is for the interpreter or for a core; what remains of wall over replay is waking up.
    """
    request = load(["experiment=cpu_duel", "cost=constant", f"schedule={schedule}"])
    problem = pose(request)
    steps = evaluate_whole(problem, choose("even", problem).partition, "round_robin", {}).schedule
    tokens = SyntheticTokens(request.model.vocab, request.model.seq_len, 1)
    workload = Workload(list(build_model(request.model)), tokens, request.num_microbatches)
    found = []
    with one_thread(), CpuBackend(usable_cores()) as backend:
        for _ in range(sized(12, 3)):
            training = Training(workload, steps)
            program = training.program(CostTable({}), real_time=True)
            with ForeignLoad() as others:
                timeline = execute(program, training.handlers, backend)
            used = sum(backend.pre_cpu_s) + sum(backend.main_cpu_s)
            replayed = replay_clock(program, backend.pre_cpu_s, backend.main_cpu_s).makespan
            busy = sum(span.end - span.start for span in timeline.spans())
            found.append((timeline.makespan / replayed, busy / used, others.cores or 0.0))
    ratio, inside, load_cores = (median(column) for column in zip(*found[2:], strict=True))
    print(f"\n{schedule}: wall over replay {ratio:.4f}, actions' wall over their processor time {inside:.4f}, "
          f"other programs {load_cores:.2f} cores")  # fmt: skip


def test_time_of_a_gpt_layer_on_each_of_64_virtual_devices():
    """128 microbatches, a decoder layer a device; the bar is 12 s. Wall and processor time."""
    devices, microbatches = sized((64, 128), (4, 8))
    request = load(["backend=virtual", "model=tiny_gpt", f"model.num_layers={devices}", f"num_devices={devices}",
                    f"num_microbatches={microbatches}", "schedule=1f1b"])  # fmt: skip
    schedule = build("1f1b", devices, microbatches, num_layers=devices)
    workload = Workload(list(build_model(request.model)), SyntheticTokens(256, 16, 4), microbatches)
    with one_thread():
        began, used = time.perf_counter(), time.process_time()
        train(schedule, workload)
    print(f"\n{schedule.num_actions} actions: {time.perf_counter() - began:.1f} s of the clock, "
          f"{time.process_time() - used:.1f} s of the processor")  # fmt: skip
