"""How many plans are timed a second, and how long a search takes. Prints figures, asserts none.

python -m pytest tests/benchmarks/test_planner_speed.py -m benchmarks -n 0 -s
"""

import time

import numpy as np
import pytest
from evaluated import plan
from sizes import sized

from rpbench.cost.published import published_partition, published_times
from rpbench.plan import Problem
from rpbench.registry import entry
from rpbench.sim.batch import PlanBatch
from rpbench.sim.graph import build_graph

pytestmark = pytest.mark.benchmarks

MODELS = ("qwen3-1.7b", "llama-3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-lora")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "roundpipe")
REPEATS = sized(5, 1)


def published(schedule, model):
    generator = entry(schedule)
    return Problem(
        generator,
        published_times(model),
        8,
        16,
        recompute_ahead=generator.recompute_ahead,
        fused_ahead=generator.separate_cuts,
        published=published_partition(schedule, model),
    )


def random_cuts(num, layers, stages, rng):
    """Distinct cuts into stages of any length, as a plan search meets them."""
    ends = np.sort(rng.integers(0, layers + 1, (num, stages - 1)), axis=1)
    bounds = np.concatenate([np.zeros((num, 1), int), ends, np.full((num, 1), layers)], axis=1)
    return np.diff(bounds, axis=1)


def test_plans_per_second():
    print("\ncomplete plans timed: 8 devices x 16 microbatches, tables of stage times included")
    rng = np.random.default_rng(0)
    for schedule, model in [
        *((name, "llama-3.1-8b") for name in SCHEDULES),
        ("interleaved_1f1b", "qwen3-235b-lora"),
        ("roundpipe", "qwen3-235b-lora"),
    ]:
        problem = published(schedule, model)
        cut = problem.published
        graph = build_graph(problem.schedule(len(cut.forward), len(cut.backward)))
        batch = PlanBatch(
            graph, problem.times, recompute_ahead=problem.recompute_ahead, fused_ahead=problem.fused_ahead
        )
        num = sized(20_000_000, 20_000) // graph.num_actions
        forward = backward = random_cuts(num, problem.num_layers, len(cut.forward), rng)
        if cut.fused:
            below = random_cuts(num, problem.num_layers, len(cut.backward) - 1, rng)
            backward = np.concatenate([below, np.zeros((num, 1), int)], axis=1)
        batch.makespans(forward[:1], backward[:1])  # compiles, or loads what was compiled before
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            batch.makespans(forward, backward)
            took.append(time.perf_counter() - began)
        rate = num / float(np.median(took))
        print(
            f"  {schedule:17} {model:16} {graph.num_actions:5,} actions a plan {rate:9,.0f} plans/s "
            f"{rate * graph.num_actions / 1e6:5.0f} M actions/s"
        )


def test_search_of_every_published_cell():
    print("\nsearch: makespan in ms of published, even, greedy and search")
    plan("search", published("1f1b", "qwen3-1.7b"))
    total = 0.0
    for schedule in sized(SCHEDULES, SCHEDULES[:1]):
        for model in sized(MODELS, MODELS[:1]):
            problem = published(schedule, model)
            makespans = [plan(method, problem).makespan for method in ("published", "even", "greedy")]
            began = time.perf_counter()
            found = plan("search", problem)
            took = time.perf_counter() - began
            total += took
            row = " ".join(f"{makespan:9.1f}" for makespan in (*makespans, found.makespan))
            print(f"  {schedule:17} {model:16} {row} {found.num_evaluated:8,} plans {took:5.2f} s")
    print(f"  together {total:.1f} s")
