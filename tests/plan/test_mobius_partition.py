"""`partition=mobius`: its memory is that of the verdict, its steps are near the simulation's, and what it refuses."""

import json
import re
from bisect import bisect_left
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from evaluated import evaluate
from problems import small, uniform

from rpbench.cli import dispatch
from rpbench.config.loading import load
from rpbench.cost.constant import constant_times
from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.sizes import DeviceMemory, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import Traffic
from rpbench.ir.checks.residency import prefetch_depth
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Shape
from rpbench.plan import choose
from rpbench.plan.mobius import _rotates, pose_rotation
from rpbench.plan.problem import Problem
from rpbench.plan.rotation_program import solve, step_times
from rpbench.registry import entry
from rpbench.run.assemble import pose
from rpbench.workload.architecture import Architecture

MODEL = Architecture("tiny", num_layers=12, hidden=64, heads=2, vocab=256, seq_len=32)
SIZES = model_bytes(MODEL, 32)


def posed(limit_bytes=10**12, pace=1e8, num_ranks=3, prefetch=1, **changes):
    """12 layers on 3 devices with transfers, under a limit of memory."""
    found = entry("mobius")
    cluster = Machine("x", num_ranks, host_to_device_bytes_per_s=pace, host_bytes_per_s=4 * pace)
    given = {
        "entry": found,
        "times": constant_times(12, 2, forward_ms=2, input_grad_ms=2, weight_grad_ms=2),
        "num_ranks": num_ranks,
        "num_microbatches": 5,
        "options": found.options,
        "memory": DeviceMemory(SIZES, limit_bytes),
        "finish": partial(found.lower, prefetch=prefetch, **found.options),
        "traffic": Traffic(SIZES, cluster, boundaries=True),
    }
    return Problem(**{**given, **changes})


def random_cuts(num_stages, num):
    """Cuts of 12 layers, the last stage maybe with the head alone."""
    draw = np.random.default_rng(num_stages)
    inner = [sorted(draw.choice(np.arange(1, 13), num_stages - 1, replace=False)) for _ in range(num)]
    return [tuple(np.diff([0, *ends, 12]).tolist()) for ends in inner]


@pytest.mark.parametrize("prefetch, num_steps", [(0, 1), (1, 1), (1, 2)])
def test_what_fits_the_program_is_what_fits_the_verdict(prefetch, num_steps):
    problem = posed(prefetch=prefetch, num_steps=num_steps)
    needed = [max(_peaks(problem, cut)) for number in (3, 6, 8) for cut in random_cuts(number, 6)]
    limit = int(np.median(needed))
    problem = posed(limit, prefetch=prefetch, num_steps=num_steps)
    verdicts = []
    for number in (3, 6, 8):
        cuts = random_cuts(number, 6)
        fits = np.isfinite(step_times(pose_rotation(problem)[0], np.array(cuts)))
        verdicts += fits.tolist()
        assert fits.tolist() == [not evaluate(problem, symmetric(cut), method="given").infeasible for cut in cuts]
    assert len(set(verdicts)) == 2


def _peaks(problem, cut):
    order = problem.finished(problem.order(symmetric(cut)))
    return Footprint(order, SIZES, [0] * problem.num_ranks).peaks(np.array([cut]), np.array([cut]))[0]


def test_weights_that_come_ahead_take_memory_as_often_as_they_are_there():
    cut = split_evenly(12, 12)
    peaks = [max(_peaks(posed(prefetch=prefetch), cut)) for prefetch in (0, 1, 2)]
    layer = SIZES.layers[0].weights
    # The fullest device runs the last stage with the head; the weights ahead of it are a layer's each, 2 at most.
    schedules = [posed(prefetch=prefetch).finished(posed().order(symmetric(cut))) for prefetch in (0, 1, 2)]
    assert [prefetch_depth(schedule) for schedule in schedules] == [0, 1, 2]
    assert np.diff(peaks).tolist() == [layer, layer]
    assert prefetch_depth(entry("1f1b").build(posed().schedule(3, 3).shape)) == 1  # nothing says when weights come


@pytest.mark.parametrize("pace", [2e7, 1e8, 1e9])
def test_its_own_step_is_near_the_simulated_one_and_no_longer_than_of_even_cuts(pace):
    problem = posed(pace=pace)
    rotation, numbers = pose_rotation(problem)
    program = solve(rotation, numbers)
    assert choose("mobius", problem).partition.forward == program.counts
    for number in (3, 6, 9, 12):
        assert program.step <= step_times(rotation, np.array([split_evenly(12, number)]))[0] * (1 + 1e-9)
    simulated = evaluate(problem, symmetric(program.counts), method="mobius").makespan
    assert program.step == pytest.approx(simulated, rel=0.15)


def test_published_layers_on_the_4090s_are_timed_within_two_percent():
    choices = ("schedule=mobius", "model=llama31_8b", "cost=published", "cluster=8x_rtx4090")
    problem = pose(load(choices))
    rotation, _ = pose_rotation(problem)
    cuts = [split_evenly(32, number) for number in (8, 16, 24, 32)] + [solve(rotation, (16,)).counts]
    for cut in cuts:
        (own,) = step_times(rotation, np.array([cut]))
        simulated = evaluate(problem, symmetric(cut), method="x").makespan
        assert own == pytest.approx(simulated, rel=0.02)


THREE_B = ("model.num_layers=28", "model.hidden=3072", "model.heads=24", "model.key_value_heads=8", "model.inner=8192")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("model=qwen3_1p7b", "cost=published"),
        ("model=llama31_8b", "cost=published"),
        ("model=llama31_8b", *THREE_B, "cost=analytic"),
    ],
)
def test_the_page_says_how_far_model_and_simulation_are_apart_and_who_wins(words):
    problem = pose(load(("schedule=mobius", "cluster=8x_rtx4090", *words)))
    rotation, numbers = pose_rotation(problem)
    steps = {}
    chosen = {name: choose(name, problem) for name in ("mobius", "search", "greedy", "pipedream", "even")}
    cuts = {name: choice.partition.forward for name, choice in chosen.items()}
    for name, cut in (*cuts.items(), *((n, split_evenly(problem.num_layers, n)) for n in numbers[:-1])):
        steps[name] = evaluate(problem, symmetric(cut), method="x").makespan
        assert step_times(rotation, np.array([cut]))[0] == pytest.approx(steps[name], rel=0.026)
    assert chosen["mobius"].proven
    assert steps["mobius"] <= min(steps.values()) * (1 + 1e-9)


def test_chunks_that_are_asked_for_are_kept():
    found = choose("mobius", posed(chunks_per_rank=2))
    assert (len(found.partition.forward), found.method) == (6, "mobius")


@pytest.mark.parametrize(
    "problem, message",
    [
        (posed(limit_bytes=10), r"partition=mobius: no cut of 12 layers into 3 to 13 stages fits"),
        (posed(chunks_per_rank=5), "12 layers make no 15 stages (3 devices x 5)"),
        (posed(traffic=None), "the cluster has no links or the model no bytes; take"),
        (posed(traffic=Traffic(SIZES, Machine("x"), boundaries=True)), "set cluster.host_to_device_bytes_per_s"),
        (posed(prefetch=2), "prefetch=2: the program has the weights of one stage come ahead; take prefetch=1"),
        (posed(times=replace(uniform(12), speeds=(1, 1, 0.5))), "devices of speeds [1, 1, 0.5]"),
        (small("roundpipe", uniform(6), 3), "roundpipe cuts forward and backward apart"),
        (small("1f1b", uniform(6), 3), "those of 1f1b do not; use schedule=mobius"),
        (small("looped_bfs", uniform(6), 3), "those of looped_bfs do not"),
    ],
)
def test_what_has_no_program_is_refused_with_a_way_out(problem, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        choose("mobius", problem)


def test_no_prefetch_is_the_way_out_where_it_is_one():
    chunks = {"chunks_per_rank": 2}
    rotation, numbers = pose_rotation(posed(prefetch=0, **chunks))
    least = bisect_left(
        range(max(_peaks(posed(), (2,) * 6)) * 2),
        True,
        key=lambda limit: bool(solve(replace(rotation, limit_bytes=limit), numbers).counts),
    )
    assert choose("mobius", posed(least, prefetch=0, **chunks)).method == "mobius"
    with pytest.raises(ValueError, match="take prefetch=0, with which it fits"):
        choose("mobius", posed(least, **chunks))
    with pytest.raises(ValueError, match="take smaller microbatches"):
        choose("mobius", posed(least - 1, prefetch=0, **chunks))


def test_the_command_line_takes_it(capsys, tmp_path):
    words = ("schedule=mobius", "model=qwen3_1p7b", "cost=published", "cluster=8x_rtx4090", f"results_dir={tmp_path}")
    assert dispatch((*words, "partition=mobius", "--json")) == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (record["status"], record["partition"]) == ("ok", "mobius")
    assert dispatch((*words, "partition=mobius", "cluster=local", "cost=constant", "num_devices=4")) == 2
    assert "partition=mobius" in capsys.readouterr().err


@pytest.mark.parametrize("device", [None, 0, 1, 2])
def test_every_device_has_to_go_round_its_stages(device):
    found = entry("mobius").build(Shape(3, 6, 2))
    swapped = [list(found.compute(each)) for each in range(3)]
    if device is not None:
        swapped[device][:2] = reversed(swapped[device][:2])
    assert _rotates(replace(found, rows=tuple(map(tuple, swapped)))) is (device is None)
