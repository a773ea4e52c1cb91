"""A head cut over all devices: complete, balanced, with its waits, and trained with tensors."""

from dataclasses import replace
from fractions import Fraction

import pytest
from evaluated import evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from spared import slow

from rpbench.config.loading import load
from rpbench.cost.published import published_times
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.index import Index
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import ScheduleError, Shape, from_text, to_text
from rpbench.passes.lower import add_steps
from rpbench.plan import choose
from rpbench.plan.problem import Problem
from rpbench.registry import entry
from rpbench.run.recording import run
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

TIMES = st.fractions(Fraction(1, 10), 10, max_denominator=20)


def stages(p: int, f=Fraction(1), b=Fraction(2), head=(Fraction(2), Fraction(4)), **more) -> LayerTimes:
    return LayerTimes([f] * p, [0] * p, [b] * p, head_forward=head[0], head_backward=head[1], **more)


@settings(deadline=None, max_examples=10)
@given(p=st.integers(1, 16), m=st.integers(1, 24), f=TIMES, b=TIMES, h=TIMES, g=TIMES)
def test_every_device_does_its_share_and_no_more(p, m, f, b, h, g):
    schedule = entry("vocab_parallel").build(Shape(p, p, m))
    check(schedule)
    assert from_text(to_text(schedule)) == schedule
    timeline = simulate(schedule, stages(p, f, b, (h, g)).table(symmetric((1,) * p), num_head_shards=p))
    for device in range(p):
        assert timeline.busy(device) == m * (f + b + (h + g) / p)
    # The first microbatch goes up, through both parts of the head, and down.
    assert timeline.makespan >= p * (f + b) + (h + g) / p
    assert all(peak <= min(p - rank + 4, m) for rank, peak in enumerate(peak_in_flight(build_graph(schedule))))
    papers = entry("vocab_parallel").build(Shape(p, p, m), slack=2)
    assert all(peak <= min(p - rank + 2, m) for rank, peak in enumerate(peak_in_flight(build_graph(papers))))


@pytest.mark.parametrize("p, m", [(4, 16), (8, 32)])
def test_a_heavy_head_weighs_no_longer_on_one_stage(p, m):
    """A head twice as long as a stage: 1F1B goes at its pace, here all devices share it."""
    times = stages(p)
    shared = simulate(
        entry("vocab_parallel").build(Shape(p, p, m)), times.table(symmetric((1,) * p), num_head_shards=p)
    )
    alone = simulate(entry("1f1b").build(Shape(p, p, m)), times.table(symmetric((1,) * p)))
    assert alone.makespan == m * 9 + (p - 1) * 3
    assert shared.makespan < alone.makespan * Fraction(7, 10)


def test_shares_wait_for_each_other():
    schedule = entry("vocab_parallel").build(Shape(2, 2, 1))
    timeline = simulate(schedule, stages(2, hop=Fraction(1, 2)).table(symmetric((1, 1)), num_head_shards=2))
    times = {str(span.action): (span.start, span.end) for span in timeline.spans()}
    assert times["0HF0"][0] == times["1F0"][1] + Fraction(1, 2)
    assert times["1HF0"][0] == times["1F0"][1]
    assert times["1HB0"][0] == times["0HF0"][1] + Fraction(1, 2)
    assert times["1B0"][0] == times["0HB0"][1] + Fraction(1, 2)


def test_a_share_that_is_missing_or_misplaced_is_shown():
    schedule = entry("vocab_parallel").build(Shape(2, 2, 2))
    rows = [list(schedule.compute(rank)) for rank in range(2)]
    without = [[action for action in row if action != Action(Kind.HB, 1, 1)] for row in rows]
    with pytest.raises(ScheduleError, match="1HB1 is missing"):
        check(replace(schedule, rows=tuple(map(tuple, without))))
    moved = [[*without[0], Action(Kind.HB, 1, 1)], without[1]]
    with pytest.raises(ScheduleError, match="1HB1 stands on rank 0, but share 1 of the head is placed on rank 1"):
        check(replace(schedule, rows=tuple(map(tuple, moved))))
    with pytest.raises(ScheduleError, match=r"these costs leave the head to the last stage"):
        simulate(schedule, stages(2).table(symmetric((1, 1))))
    with pytest.raises(ValueError, match="num_head_shards=3"):
        Shape(2, 2, 2, num_head_shards=3)


def test_a_share_is_stepped_with_the_stage_of_its_device():
    schedule = add_steps(entry("vocab_parallel").build(Shape(3, 3, 4, num_steps=2)).with_partition(symmetric((1,) * 3)))
    check(schedule)
    for device in range(3):
        row = schedule.compute(device)
        steps = [place for place, action in enumerate(row) if action.kind is Kind.STEP]
        assert [row[place] for place in steps] == [Action(Kind.STEP, device, version=version) for version in (1, 2)]
        assert sum(action.kind is Kind.HB for action in row[: steps[0]]) == 4
        assert sum(action.kind is Kind.HB for action in row[steps[0] : steps[1]]) == 4
    index = Index(schedule)
    producers = {str(index.actions[number]) for number in index.gradients(2, 2)}
    assert producers == {f"2{kind}{microbatch}" for kind in ("B", "HB") for microbatch in range(4, 8)}
    times = stages(3, step=[Fraction(1)] * 3, head_step=Fraction(6))
    table = times.table(symmetric((1,) * 3), num_head_shards=3)
    assert [work.main for work in table.work[Kind.STEP]] == [3, 3, 3]


@pytest.mark.parametrize("backend, devices", [slow(("virtual", 5)), ("cpu", 2)])
@pytest.mark.slow
def test_it_trains_as_plain_training_does(backend, devices, tmp_path):
    (row,) = run(
        load(
            [
                "schedule=vocab_parallel",
                f"backend={backend}",
                "model=tiny_gpt",
                "verify=true",
                "dtype=float64",
                f"num_devices={devices}",
                f"num_microbatches={2 * devices}",
                f"results_dir={tmp_path}",
            ]
        )
    )
    assert row["status"] == "ok"
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert row["versions_as_reference"]


def test_beside_roundpipes_cure_on_a_model_with_a_heavy_head():
    """Qwen3-1.7B on eight devices, measured times: both do away with most of what the head costs 1F1B."""
    found = {}
    for name in ("1f1b", "vocab_parallel", "roundpipe"):
        generator = entry(name)
        ahead = generator.recompute_ahead
        problem = Problem(generator, published_times("qwen3-1.7b"), 8, 16, recompute_ahead=ahead)
        choice = choose("even", problem)
        found[name] = evaluate(problem, choice.partition, method="even").makespan
    assert found["roundpipe"] < found["vocab_parallel"] < found["1f1b"]
