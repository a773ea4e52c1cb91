"""How fast the simulator is. Prints figures, asserts none: a timing is a benchmark, never a test.

python -m pytest tests/benchmarks -m benchmarks -n 0 -s
"""

import subprocess
import sys
import time

import numpy as np
import pytest
from sizes import sized

from rpbench.cost.constant import unit_times
from rpbench.cost.published import published_partition, published_times
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.kernels import compiled, relax
from rpbench.sim.longest_path import late_edges, simulate_graph
from rpbench.sim.metrics import measure

pytestmark = pytest.mark.benchmarks

REPEATS = sized(5, 1)


def seconds(call):
    """Median of a few calls, the first (which may compile or load) left out."""
    call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def whole_run(name, p, m, v):
    """Order, graph, times, every metric with the memory replay; returns the number of actions."""
    partition = symmetric((1,) * (p * v))
    costs = unit_times(p * v).table(partition)
    graph = build_graph(entry(name).build(Shape(p, p * v, m)).with_partition(partition))
    measure(graph, simulate_graph(graph, costs), costs, switch_after_last_forward=False)
    return graph.num_actions


def test_cost_is_linear_in_actions():
    """64 times the actions take at most 4 times as long each; what is quadratic would take 64 times."""
    print("\ninterleaved 1F1B, 2 chunks: order, graph, times, metrics and memory replay")
    each = []
    for p, m in sized(((16, 256), (32, 512), (64, 1024), (64, 4096)), ((2, 4), (4, 32))):
        actions = whole_run("interleaved_1f1b", p, m, 2)
        took = seconds(lambda p=p, m=m: whole_run("interleaved_1f1b", p, m, 2))
        each.append(took / actions)
        print(
            f"  {p:3} devices x {m:5} microbatches {actions:9,} actions {took:7.3f} s "
            f"{1e6 * took / actions:6.2f} us/action"
        )
    assert actions == 2 * 2 * p * m, "a forward and a backward of two chunks"
    assert each[-1] <= 4 * each[0]


def test_timing_pass_alone():
    print("\ntiming pass alone, compiled")
    for name, p, m, v in sized((("1f1b", 64, 512, 1), ("interleaved_1f1b", 64, 1024, 2)), (("1f1b", 2, 4, 1),)):
        partition = symmetric((1,) * (p * v))
        costs = unit_times(p * v).table(partition)
        graph = build_graph(entry(name).build(Shape(p, p * v, m)).with_partition(partition))
        works = [costs.together(members) for members in graph.slots]
        arguments = (
            graph.previous,
            graph.pred_start,
            graph.pred,
            np.where(graph.crosses, costs.hop, 0).astype(float),
            late_edges(graph, costs),
            graph.slot,
            np.array([work.pre for work in works], float),
            np.array([work.main for work in works], float),
            *(np.empty(graph.num_actions) for _ in range(4)),
        )
        kernel = compiled(relax)
        took = seconds(lambda: kernel(*arguments))  # noqa: B023
        print(
            f"  {name:17} {p}x{m} {graph.num_actions:8,} actions {1e3 * took:6.2f} ms "
            f"{graph.num_actions / took / 1e6:6.0f} M/s"
        )


def test_published_cells_together():
    cells = [
        (name, model)
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "roundpipe")
        for model in ("qwen3-1.7b", "llama-3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-lora")
    ]

    def all_cells():
        for name, model in cells:
            generator, partition = entry(name), published_partition(name, model)
            shape = Shape(8, len(partition.forward), 16, len(partition.backward), fused=partition.fused)
            costs = published_times(model).table(
                partition, recompute_ahead=generator.recompute_ahead, fused_ahead=partition.fused
            )
            graph = build_graph(generator.build(shape).with_partition(partition))
            measure(graph, simulate_graph(graph, costs), costs, switch_after_last_forward=False)

    print(f"\nall {len(cells)} published cells: {seconds(all_cells):.3f} s")


def test_commands_answer_at_once():
    print("\ncommands, whole process")
    commands = {
        "import rpbench.sim (and all of it)": ["-c", "import rpbench.sim.longest_path, rpbench.sim.metrics"],
        "show": ["-m", "rpbench", "show", "schedule=interleaved_1f1b", "num_devices=4", "num_microbatches=8"],
    }
    for what, arguments in commands.items():
        took = seconds(
            lambda arguments=arguments: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        )
        print(f"  {what}: {took:.2f} s")
