"""The search where weights, gradients and boundary tensors move: memory counts shares, finalists are timed in full."""

from dataclasses import replace
from functools import partial

from evaluated import evaluate

from rpbench.cost.constant import constant_times
from rpbench.cost.footprint.memory import classes_of, why_infeasible
from rpbench.cost.footprint.sizes import DeviceMemory, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import Traffic
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Shape
from rpbench.passes.lower import add_steps
from rpbench.plan import choose
from rpbench.plan.problem import Problem
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

MODEL = Architecture("tiny", num_layers=12, hidden=64, heads=2, vocab=16, seq_len=4)
SIZES = model_bytes(MODEL, 8)


def problem_of(name: str, limit_bytes: int, cluster: Machine) -> Problem:
    found = entry(name)
    return Problem(
        found,
        constant_times(12, 2, forward_ms=1, input_grad_ms=1, weight_grad_ms=1),
        num_ranks=2,
        num_microbatches=4,
        num_steps=2,
        options=found.options,
        memory=DeviceMemory(SIZES, limit_bytes),
        finish=partial(found.lower, prefetch=1, **found.options),
        traffic=Traffic(SIZES, cluster, boundaries=True),
    )


def needed(problem: Problem, num_stages: int) -> int:
    order = problem.order(symmetric(split_evenly(12, num_stages)))
    in_flight = peak_in_flight(build_graph(order))
    return max(sum(found.values()) for found in classes_of(problem.finished(order), SIZES, in_flight))


def test_stages_are_as_small_as_the_memory_of_shards_asks_for():
    cluster = Machine("x", 2, host_to_device_bytes_per_s=1e9)
    large = problem_of("zero_3", 10**12, cluster)
    few, many = needed(large, 2), needed(large, 12)
    assert many < few, "whole stages are gathered, two at a time"
    limit = (few + many) // 2
    tight = problem_of("zero_3", limit, cluster)
    found = choose("search", tight).partition
    order = tight.order(found)
    classes = classes_of(tight.finished(order), SIZES, peak_in_flight(build_graph(order)))
    fits = why_infeasible(order, classes, limit)
    assert fits == ""
    # Without what moves the filter sees whole replicas, which never fit.
    assert max(sum(each.values()) for each in classes_of(order, SIZES, peak_in_flight(build_graph(order)))) > limit


def test_finalists_are_judged_by_what_they_move():
    better = []
    for pace in (2e5, 1e6, 5e6, 2e7):
        cluster = Machine("x", 2, host_to_device_bytes_per_s=pace)
        problem = replace(problem_of("mobius", 10**12, cluster), num_steps=1)
        budget = 10**7
        by_all = choose("search", problem, budget=budget).partition
        work_alone = replace(problem, traffic=None)
        by_work = choose("search", work_alone, budget=budget).partition
        chosen, other = (evaluate(problem, partition, method="search") for partition in (by_all, by_work))
        assert chosen.makespan <= other.makespan * (1 + 1e-9)
        better.append(chosen.makespan < 0.99 * other.makespan)
    assert any(better), "what moves never mattered"


def test_stashed_versions_take_memory():
    shape = Shape(4, 4, 1, num_steps=12)
    for name, versions in (("pipedream", [4, 3, 2, 1]), ("pipedream_2bw", [2, 2, 2, 2])):
        if name == "pipedream_2bw":
            shape = Shape(4, 4, 4, num_steps=3)
        schedule = add_steps(entry(name).build(shape)).with_partition(symmetric((3, 3, 3, 3)))
        for found, kept in zip(classes_of(schedule, SIZES, [1] * 4), versions, strict=True):
            assert found["stashed weights"] == (kept - 1) * found["weights"], name
