"""Weight gradients left out where that ends the batch first: optima by hand, bounds, and what a record says."""

import random
from importlib.util import find_spec
from itertools import pairwise

import pytest

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.registry import entry
from rpbench.run.recording import run
from rpbench.sim.freezing import freeze
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph

solved = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-tools is not installed: extra `exact`")


def times(p: int, forward=1.0, input_grad=1.0, weight_grad=1.0, hop=0.0, recompute=0.0) -> LayerTimes:
    each = ([float(time)] * p for time in (forward, recompute, input_grad + weight_grad))
    return LayerTimes(*each, input_grad=[input_grad] * p, weight_grad=[weight_grad] * p, hop=hop)


def problem(name: str, p: int, m: int, layers: LayerTimes | None = None, **options):
    """Graph and costs of a schedule with one layer a stage."""
    schedule = entry(name).build(Shape(p, p, m), **options).with_partition(symmetric((1,) * p))
    return build_graph(schedule), (layers or times(p)).table(schedule.partition)


def makespan(timeline) -> float:
    return float(max(timeline.end))


# --- optima by hand, F = I = W = 1 ----------------------------------------------------------------------------------


@solved
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("m", [1, 3])
def test_one_device_saves_what_it_may(m, ratio):
    """All backwards stand behind each other: m(F+I) + m(1-R)W."""
    found = freeze(*problem("1f1b", 1, m), ratio)
    assert makespan(found.timeline) == pytest.approx(m * (3 - ratio))
    assert found.fraction == pytest.approx(ratio)


@solved
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("p", [2, 3])
def test_one_microbatch_is_a_chain(p, ratio):
    """Nothing overlaps: p(F+I) + p(1-R)W, every ratio R."""
    found = freeze(*problem("1f1b", p, 1), ratio)
    assert makespan(found.timeline) == pytest.approx(p * (3 - ratio))
    assert found.ratios == pytest.approx([ratio] * p)


@solved
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("m", [2, 3])
def test_two_ranks_of_1f1b(m, ratio):
    """3(m+1) - mR - min(1, mR).

    On the critical path lie all backwards of rank 1, which may save mR together, and the last one of rank 0. With
    m = 2 and a, b the ratios of ranks 1 and 0: max(7-a0-a1, 6-a0-b0) + 2 - b1, where the first term is never the
    smaller one. With m = 3: 12 - a0 - a2 - min(a1, b0) - b2; b2 takes what rank 0 has, and what is left goes to b0.
    """
    found = freeze(*problem("1f1b", 2, m), ratio)
    assert makespan(found.timeline) == pytest.approx(3 * (m + 1) - m * ratio - min(1, m * ratio))


@solved
def test_ratios_of_two_ranks_by_hand():
    """m = 2, R = 1/2: rank 1 has a ratio of 1 for its two; rank 0 needs it in the last one alone."""
    found = freeze(*problem("1f1b", 2, 2), 0.5)
    assert found.ratios[:2] == pytest.approx([0, 1])
    assert sum(found.ratios[2:]) == pytest.approx(1)
    assert found.ratio_of_stage == pytest.approx([0.5, 0.5])
    whole = freeze(*problem("1f1b", 2, 2), 1.0)  # the first backward of rank 0 is not on the path
    assert whole.ratios == pytest.approx([0, 1, 1, 1])
    assert makespan(whole.timeline) == pytest.approx(6)
    assert whole.fraction == pytest.approx(0.75)


# --- what holds for all -----------------------------------------------------------------------------------------


CASES = {
    "1f1b": ("1f1b", 3, 4, times(3, 1.0, 1.2, 0.7, hop=0.1)),
    "recomputed": ("1f1b", 3, 4, times(3, 1.0, 1.2, 0.7, hop=0.1, recompute=1.0)),
    "gpipe": ("gpipe", 3, 4, times(3, 1.0, 0.9, 1.3)),
    "halves": ("zb_h1", 3, 5, times(3, 1.0, 1.2, 0.7)),
}


@solved
@pytest.mark.parametrize("name", CASES)
def test_more_freezing_never_ends_later_and_its_ends_are_known(name):
    schedule, p, m, layers = CASES[name]
    graph, costs = problem(schedule, p, m, layers)
    plain = makespan(simulate_graph(graph, costs))
    ends = [makespan(freeze(graph, costs, ratio).timeline) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert ends[0] == pytest.approx(plain)
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(ends))
    without = LayerTimes(
        layers.forward, layers.recompute, layers.input_grad, input_grad=layers.input_grad, weight_grad=[0.0] * p,
        hop=layers.hop,
    )  # fmt: skip
    bare = simulate_graph(*problem(schedule, p, m, without))
    compute = [span.end for span in bare.spans() if span.action.kind in (Kind.F, Kind.B, Kind.I)]
    assert ends[-1] == pytest.approx(max(compute))


@solved
@pytest.mark.parametrize("name", CASES)
def test_no_other_ratios_end_sooner(name):
    """Two hundred random ratios within the same means."""
    schedule, p, m, layers = CASES[name]
    graph, costs = problem(schedule, p, m, layers)
    found, rng = freeze(graph, costs, 0.4), random.Random(1)
    assert all(mean <= 0.4 + 1e-6 for mean in found.ratio_of_stage)
    kind = Kind.W if schedule == "zb_h1" else Kind.B
    actions, order = graph.analysis.index.actions, graph.order.tolist()
    for _ in range(200):
        drawn = {stage: [rng.random() ** rng.choice((0.2, 1, 5)) for _ in range(m)] for stage in range(p)}
        scale = {stage: min(1.0, 0.4 * m / sum(own)) for stage, own in drawn.items()}
        less = [
            0.7 * drawn[action.stage][action.microbatch] * scale[action.stage] if action.kind is kind else 0.0
            for action in (actions[number] for number in order)
        ]
        if schedule == "gpipe":
            less = [short / 0.7 * 1.3 for short in less]
        assert makespan(simulate_graph(graph, costs, less)) >= makespan(found.timeline) - 1e-6


@solved
def test_a_backward_is_never_shorter_than_its_input_gradient():
    graph, costs = problem(*CASES["1f1b"])
    for span in freeze(graph, costs, 1.0).timeline.spans():
        if span.action.kind is Kind.B:
            assert 1.2 - 1e-9 <= span.end - span.start <= 1.9 + 1e-9


# --- as an option of the costs ------------------------------------------------------------------------------------


def record(tmp_path, *more: str):
    asked = ("schedule=1f1b", "num_devices=2", "num_microbatches=2", "cost=constant", f"results_dir={tmp_path}")
    (row,) = run(load([*asked, *more]))
    return row


@solved
def test_a_record_says_what_is_left_out(tmp_path):
    row, plain = record(tmp_path, "cost.max_freeze_ratio=0.5"), record(tmp_path)
    assert row["makespan_s"] == pytest.approx(7e-3)
    assert row["unfrozen_step_time_s"] == plain["step_time_s"] == pytest.approx(9e-3)
    assert row["freeze_ratio_of_stage"] == pytest.approx([0.5, 0.5])
    assert len(row["freeze_ratios"]) == 4
    assert row["frozen_weight_gradients"] == pytest.approx(0.5)
    assert row["evidence"] == "simulated"
    assert any("not made" in note for note in row["notes"])
    assert "freeze_ratios" not in plain
    assert not plain["notes"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["cost.max_freeze_ratio=1.5"], r"max_freeze_ratio=1\.5: a mean ratio of a stage, from 0"),
        (["backend=virtual", "model=tiny_gpt", "cost.max_freeze_ratio=0.5"], "with mode=train: .* use mode=simulate"),
        (["model=tiny_gpt", "cost.max_freeze_ratio=0.5", "tuning_budget=10"], "with tuning_budget=10"),
    ],
)
def test_what_cannot_be_frozen_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        load(["schedule=1f1b", "cost=constant", *words])


def test_backwards_beside_forwards_and_costs_without_halves_are_refused():
    graph, costs = problem("dualpipe", 2, 4)
    with pytest.raises(ScheduleError, match=r"dualpipe has OVERLAP, .* such as 1f1b"):
        freeze(graph, costs, 0.5)
    with pytest.raises(ScheduleError, match=r"roundpipe has FB, .* such as 1f1b"):
        freeze(build_graph(entry("roundpipe").build(Shape(2, 2, 2, 3, fused=True))), costs, 0.5)
    schedule = build_graph(entry("1f1b").build(Shape(2, 2, 2)))
    whole = LayerTimes([1.0] * 2, [0.0] * 2, [2.0] * 2).table(symmetric((1, 1)))
    with pytest.raises(ScheduleError, match="do not split backward"):
        freeze(schedule, whole, 0.5)


def test_without_the_solver_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("rpbench.run.modes.simulate.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs OR-tools; pip install"):
        record(tmp_path, "cost.max_freeze_ratio=0.5")


@solved
@pytest.mark.parametrize("words", [["schedule=1f1b", "cluster=8x_rtx4090"], ["schedule=zb_h1", "charge=hops"]])
def test_published_machines_are_frozen_as_well(words, tmp_path):
    """On shared links as far as it is known: no later than without, and the record says that nobody has proven more."""
    asked = ("num_devices=4", "num_microbatches=6", "model=qwen3_1p7b", "cost=analytic", f"results_dir={tmp_path}")
    cluster = [] if "cluster=8x_rtx4090" in words else ["cluster=8x_h100"]
    (plain,) = run(load([*asked, *words, *cluster]))
    (row,) = run(load([*asked, *words, *cluster, "cost.max_freeze_ratio=0.5"]))
    assert row["unfrozen_step_time_s"] == pytest.approx(plain["step_time_s"])
    assert row["step_time_s"] < plain["step_time_s"]
    assert row["freezing_proven"] == ("charge=hops" in words)
    assert max(row["freeze_ratio_of_stage"]) <= 0.5 + 1e-6
