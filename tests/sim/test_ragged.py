"""Microbatches of unequal length: every timer says the same, equal ones change nothing, orders and memory follow."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from test_unequal_devices import NAMES, cell

from baselines.zero_bubble.zb_auto import read_limit
from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.pieces import between, mean_times, of_lengths
from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.virtual import known_clock
from rpbench.engine.program import make_program
from rpbench.ir.analysis import Analysis
from rpbench.ir.partition import symmetric
from rpbench.plan.problem import Problem
from rpbench.registry import entry
from rpbench.run.assemble import assemble
from rpbench.sim.events import deal
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.walk import walk


def scaled(times: LayerTimes, factor: object) -> LayerTimes:
    """Everything that a microbatch takes, a hop included, so many times as long."""
    lists = ("forward", "recompute", "backward", "input_grad", "weight_grad")
    ends = ("head_forward", "head_backward", "head_input_grad", "head_weight_grad", "hop")
    found = {name: [factor * time for time in getattr(times, name)] for name in lists}
    return replace(times, **found, **{name: factor * getattr(times, name) for name in ends})


def tables(name: str, factors: list) -> tuple:
    """A schedule, and costs whose microbatches take so many times as long, in turn."""
    schedule, partition, times = cell(name, ())
    each = [
        scaled(times, factor).table(partition, num_head_shards=schedule.shape.num_head_shards) for factor in factors
    ]
    base = times.table(partition, num_head_shards=schedule.shape.num_head_shards)
    return schedule, base, replace(base, each=tuple(each))


@pytest.mark.parametrize("name", NAMES)
def test_equal_microbatches_change_nothing(name):
    schedule, base, each = tables(name, [1, 1, 1])
    assert simulate(schedule, base).end == simulate(schedule, each).end
    assert simulate(schedule, base).comm_total == simulate(schedule, each).comm_total


@pytest.mark.parametrize("name", NAMES)
def test_arrays_plain_lists_and_the_virtual_clock_agree(name):
    schedule, base, each = tables(name, [1, 3, 2, 5])
    found, others = simulate(schedule, each), [walk(Analysis(schedule), each)]
    others.append(known_clock(make_program(schedule, each), each))
    assert found.end != simulate(schedule, base).end
    for other in others:
        assert (found.start, found.main, found.end) == (other.start, other.main, other.end)


def test_forwards_of_gpipe_are_a_flow_shop():
    """A forward ends its own time after the later of the one before it in its row and the same one a stage below."""
    factors = [3, 1, 4, 1, 5, 9]
    times = LayerTimes([2, 3, 1], [0, 0, 0], [1, 1, 1])
    cut = symmetric((1, 1, 1))
    costs = replace(times.table(cut), each=tuple(scaled(times, factor).table(cut) for factor in factors))
    schedule = Problem(entry("gpipe"), times, 3, 6).order(cut)
    ends = {str(span.action): span.end for span in simulate(schedule, costs).spans()}
    expected: dict[tuple[int, int], int] = {}
    for stage in range(3):
        for mb, factor in enumerate(factors):
            before = max(expected.get((stage - 1, mb), 0), expected.get((stage, mb - 1), 0))
            expected[stage, mb] = before + factor * times.forward[stage]
            assert ends[f"{stage}F{mb}"] == expected[stage, mb]


# --- orders that are chosen by cost ---


def problem(name: str, seed: int, p: int, m: int) -> tuple[Problem, Problem]:
    """The problem of one layer a stage with microbatches of random lengths, and the same with all as their mean."""
    draw = random.Random(seed)
    layers = [draw.uniform(1, 2) for _ in range(p)]
    times = LayerTimes(layers, [0.0] * p, [2 * time for time in layers], input_grad=layers, weight_grad=layers, hop=0.1)
    sizes = [draw.lognormvariate(0, 0.8) for _ in range(m)]
    each = tuple(replace(scaled(times, size), hop=0.1) for size in sizes)
    alike = Problem(entry(name), mean_times(each), p, m, chunks_per_rank=1)
    return replace(alike, each=each, sizes=tuple(size / max(sizes) for size in sizes)), alike


@pytest.mark.parametrize("name", ["zb_auto", "adaptis"])
@pytest.mark.parametrize("seed", range(12))
def test_an_order_for_unequal_microbatches_is_no_longer_than_one_for_their_mean(name, seed):
    p, m = 2 + seed % 3, 5 + seed
    ragged, alike = problem(name, seed, p, m)
    cut = symmetric((1,) * p)
    costs = ragged.costs(cut)
    ours, other = (simulate(each.order(cut), costs).makespan for each in (ragged, alike))
    assert ours <= other * (1 + 1e-9)


def test_they_are_shorter_often():
    """Of 24 cases more than half; else the times of microbatches would not be read."""
    shorter = 0
    for seed in range(24):
        ragged, alike = problem("zb_auto", 100 + seed, 3, 8)
        cut = symmetric((1, 1, 1))
        costs = ragged.costs(cut)
        shorter += simulate(ragged.order(cut), costs).makespan < 0.999 * simulate(alike.order(cut), costs).makespan
    assert shorter > 12


def test_zb_auto_holds_no_more_than_its_limit_of_the_largest_microbatch():
    ragged, _ = problem("zb_auto", 3, 3, 12)
    order = replace(ragged, options={"memory_limit": "1p"}).order(symmetric((1, 1, 1)))
    for rank in range(3):
        held = most = 0.0
        for action in order.compute(rank):
            held += ragged.sizes[action.microbatch] * ((action.kind.name == "F") - (action.kind.name == "W"))
            most = max(most, held)
        assert most <= read_limit("1p", 3) * (1 + 1e-9)


def test_dynamic_dispatch_sees_each_microbatch():
    """A device that has a short job is free for the next one sooner."""
    words = ["schedule=roundpipe", "model=qwen3_1p7b", "cost=constant", "num_devices=3", "num_microbatches=6"]
    words += ["workload.microbatch_sequences=1", "workload.lengths=[2048,64,64,64,64,2048]"]
    found = assemble(load([*words, "dispatch=round_robin"]))
    dealt = deal(found.schedule, found.costs, "dynamic")
    blind = deal(found.schedule, replace(found.costs, each=()), "dynamic")
    assert dealt.rows != blind.rows
    assert simulate(dealt, found.costs).makespan < simulate(found.schedule, found.costs).makespan


# --- costs ---


def model():
    return load(["model=qwen3_1p7b"]).model


def test_lengths_of_the_model_keep_the_times_and_halves_sum_to_the_whole():
    own = model()
    times = LayerTimes([3.0], [3.0], [6.0], 1.0, 2.0, [3.5], [2.5], 1.0, 1.0)
    same = of_lengths(times, own, [own.seq_len] * 4, 4 * own.seq_len)
    for name in ("forward", "recompute", "backward", "input_grad", "weight_grad"):
        assert getattr(same, name) == pytest.approx(getattr(times, name))
    half = of_lengths(times, own, [own.seq_len // 2] * 8, 4 * own.seq_len)
    assert half.weight_grad == times.weight_grad
    assert half.head_forward == times.head_forward
    assert half.input_grad[0] < half.forward[0] / times.forward[0] * times.input_grad[0], "attention is more of it"
    assert half.input_grad[0] + half.weight_grad[0] == pytest.approx(half.backward[0])
    attention = own.layer_forward_flops(own.seq_len, "causal") - 2 * own.seq_len * own.layer_matrix_weights(
        None, "causal"
    )
    saved = 1 - half.forward[0] / times.forward[0]
    assert saved == pytest.approx(attention / 2 / own.layer_forward_flops(own.seq_len, "causal"), rel=1e-3)


def test_measured_times_lie_on_a_line_through_both_that_were_measured():
    """F = 10 of 100 tokens and 4 of 25: 2, and 0.08 a token."""
    whole = LayerTimes([10.0], [0.0], [20.0], 1.0, 2.0)
    short = LayerTimes([4.0], [0.0], [8.0], 0.5, 1.0)
    scaled = {tokens: of_lengths(whole, None, [tokens], 100) for tokens in (25, 50, 100)}
    found = {tokens: between(short, whole, scaled[tokens], scaled[25]) for tokens in scaled}
    for tokens, measured in ((25, short), (100, whole)):
        assert (found[tokens].forward, found[tokens].backward) == (measured.forward, measured.backward)
    assert found[50].forward == pytest.approx([6.0])
    assert found[50].backward == pytest.approx([12.0])
    assert found[50].head_forward == pytest.approx(0.5 + 0.5 / 3)


@pytest.mark.parametrize("cost", ["constant", "analytic"])
def test_bytes_on_links_and_in_memory_are_those_of_the_tokens(cost):
    lengths = [2048, 100, 900, 1500, 64, 2000, 700, 300]
    words = ["schedule=1f1b", "model=qwen3_1p7b", "cluster=8x_rtx4090", f"cost={cost}", "num_devices=4"]
    words += ["num_microbatches=8", "workload.microbatch_sequences=1", f"workload.lengths={lengths}".replace(" ", "")]
    found = assemble(load(words))
    boundary = found.model.boundary_bytes(1)
    kept = classes_of(found.schedule, found.sizes, peak_in_flight(found.graph))
    for rank, classes in enumerate(kept):  # 1F1B holds as many microbatches in a row as ranks are left
        windows = (sum(lengths[first : first + 4 - rank]) for first in range(len(lengths)))
        inputs = 28 // 4 if cost == "analytic" else 1  # Megatron-Core's, of every layer; or the stage's
        assert classes["kept stage inputs"] == pytest.approx(inputs * boundary * max(windows), abs=8)
    assert found.tokens_per_step == sum(lengths)


def test_a_small_microbatch_is_sooner_over_the_links():
    words = ["schedule=roundpipe", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=published", "num_microbatches=16"]
    found = assemble(load([*words, f"workload.lengths={[2048, 64] * 32}".replace(" ", ""), "charge=bytes"]))
    own = assemble(load([*words, "charge=bytes"]))
    one = {str(span.action): span.end - span.start for span in simulate(found.schedule, found.costs).spans()}
    whole = {str(span.action): span.end - span.start for span in simulate(own.schedule, own.costs).spans()}
    stores = [name for name in one if "STORE:A" in name]
    assert stores
    for name in stores:  # 4 sequences of 2,048 and 64 in turn
        assert one[name] == pytest.approx(whole[name] * (2048 + 64) / 2 / 2048, rel=1e-6)
    moved = [name for name in one if "LOAD:P" in name]
    assert [one[name] for name in moved] == pytest.approx([whole[name] for name in moved])


# --- what is asked for ---


def test_a_list_and_a_file_are_the_same_run_and_equal_lengths_none_at_all(tmp_path):
    (tmp_path / "lengths.txt").write_text("10, 20\n30\n40\n")
    words = ["num_microbatches=4", "workload.microbatch_sequences=1"]
    listed, read = (
        load([*words, f"workload.lengths={given}"]) for given in ("[10,20,30,40]", tmp_path / "lengths.txt")
    )
    assert listed.subject == read.subject
    assert listed.workload.microbatch_tokens == (10, 20, 30, 40)
    assert load([*words, "workload.lengths=[7,7,7,7]"]).subject == load(words).subject
    assert "lengths" not in load(words).subject["workload"], "records from before keep their names"


@pytest.mark.parametrize(
    "words, told",
    [
        (["workload.lengths=[10,20]"], "2 of them, and a step has 64 sequences"),
        (["workload.lengths=[10,0]"], "number 2 is 0; a length is a whole number of tokens, 1 or more"),
        (["workload.lengths=[10,1.5]"], "number 2 is 1.5"),
        (["workload.lengths=[10,-3]"], "number 2 is -3"),
        (["workload.lengths=[]"], "no lengths"),
        (["workload.lengths=5"], "no lengths"),
        (["workload.lengths=nowhere.txt"], "cannot be read (there is no such file); name a file that is there"),
        (
            ["model=tiny_gpt", "workload.lengths=[10,17]"],
            "number 2 is 17, more than model.seq_len=16 has positions for",
        ),
        (["model=tiny_gpt", "workload.lengths=['17','²']"], "number 2 is '²'; a length is a whole number"),
        (["tuning_budget=400"], "tuning_budget=400: microbatches of unequal lengths"),
        (["mode=roofline"], "mode=roofline"),
        (["backend=device"], "backend=device"),
        (["cost=constant", "cost.max_freeze_ratio=0.5"], "cost.max_freeze_ratio=0.5"),
    ],
)
def test_what_cannot_be_is_refused(words, told):
    common = ["model=tiny_gpt"] if words[-1].startswith(("tuning", "mode", "backend", "cost")) else []
    given = [] if "lengths" in words[-1] else [f"workload.lengths={[4, 3] * 32}".replace(" ", "")]
    with pytest.raises(ConfigError) as raised:
        load([*common, *given, *words])
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "content, told",
    [
        (b"1\n" * 2**22, "8,388,608 bytes; at most 4,194,304 are read"),
        (b"1\n\xff", "it is no UTF-8 text (line 2, byte 2)"),
    ],
)
def test_a_file_of_no_lengths_is_named(content, told, tmp_path):
    (tmp_path / "lengths.txt").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load([f"workload.lengths={tmp_path}/lengths.txt"])
    assert f"lengths.txt: {told}" in str(raised.value)


def test_every_window_of_a_queue_of_short_jobs_is_as_long_as_its_jobs():
    """One device: what runs is the sum, whatever the order."""
    words = ["schedule=1f1b", "num_devices=1", "num_microbatches=4", "workload.microbatch_sequences=1"]
    found = assemble(load([*words, "workload.lengths=[1,2,3,6]"]))
    timeline = simulate(found.schedule, found.costs)
    assert timeline.makespan == pytest.approx(4 * 3)  # F = I = W = 1 of the mean
    spans = sorted((span.start, span.end) for span in timeline.spans())
    assert all(one[1] == pytest.approx(two[0]) for one, two in pairwise(spans))
    assert build_graph(found.schedule).num_actions == 8
