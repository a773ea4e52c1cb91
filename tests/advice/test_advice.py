"""Advice: seconds that add up to the step, the order of the ranking, what turns it, what does not fit."""

import csv
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import log, sqrt
from pathlib import Path
from types import SimpleNamespace

import pytest
from contest_terms import read, small, terms

from rpbench.advice import side_searches
from rpbench.advice.causes import CAUSES, causes_at, causes_of
from rpbench.advice.interval import OWN, Shared, compute_reach, ratio_reach
from rpbench.advice.levers import CHANGES, Timed, _turning, levers_of, pace_with_twice_the_memory, turns_of
from rpbench.advice.ranking import AS_PLAIN, QUICK, advise
from rpbench.advice.rows import HERE, OPTIONS, RUNS_IN, as_run_by, command_of, contender_runs_in, mfu, runs_in
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.machine import machine
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Shape
from rpbench.plan.contest.contender import contender, contenders, space_of
from rpbench.plan.contest.frame import Frame
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import tune
from rpbench.plan.contest.terms import Limits
from rpbench.predict.prediction import NORMAL
from rpbench.registry import entry
from rpbench.sim import kernels
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.workload.architecture import architecture

NAMES = ("1f1b", "gpipe", "zb_h1", "roundpipe", "data_parallel")


def timed(plan, case):
    """A plan, ready to be timed with other costs."""
    return Timed(plan, Frame(plan.contender, plan.setting, case, plan.partition, plan.num_steps))


def basis_of(case):
    costs = read("cost/analytic.yaml")
    return make_basis(case.cluster, costs["constants"], costs["declared"])


@pytest.fixture(scope="module")
def advice():
    case = small(1_500_000_000, microbatches=(1,))
    return advise(case, basis_of(case), names=NAMES, budget=Budget(60, 100_000))


def framed(name, case, cut):
    who = contender(name)
    setting = space_of(who, case).first
    return Frame(who, setting, case, cut, case.num_steps)


@pytest.fixture(scope="module")
def alone():
    case = small(num_devices=1, microbatches=(1,))
    return case, advise(case, basis_of(case), budget=Budget(1, 1_000))


def test_one_device_lists_plain_training_and_what_uses_the_host(alone):
    _, found = alone
    ranked = {row.plan.contender.entry.name for row in (*found.ranking, *found.ranking_late)}
    assert ranked == {
        *("data_parallel", "pipe_offload", "zero_offload", "superoffload", "zenflow", "zero_infinity"),
        *("roundpipe", "mobius", "greedysnake", "megatrain"),
    }
    assert {name for name, why in found.left_out.items() if why == AS_PLAIN} >= {
        "1f1b",
        "zero_3",
        "bitpipe",
        "pipedream",
    }


def test_what_one_device_leaves_out_is_no_faster_than_plain_training(alone):
    case, found = alone
    compared = 0
    for name in found.left_out:
        setting = space_of(contender(name), case).first
        cut = symmetric((3, 3) if setting.chunks_per_device == 2 else (6,))
        plain = space_of(contender("data_parallel"), case).first.changed("chunks_per_device", len(cut.forward))
        try:
            frame = Frame(contender(name), setting, case, cut, case.num_steps)
        except ValueError:  # the two ends of a pipeline take two devices
            continue
        if frame.schedule.policy is Policy.FLUSH and not frame.schedule.shape.num_head_shards:
            pace = frame.outcome(cut, "none" if frame.refuses("all") else "all").tokens_per_s
            best = Frame(contender("data_parallel"), plain, case, cut, case.num_steps).outcome(cut, "all").tokens_per_s
            assert pace <= best * (1 + 1e-9)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zero_2", "mobius"])
def test_causes_add_up_to_the_step(name):
    case = small(microbatches=(1,))
    cut = symmetric((2, 1, 2, 1) if name in ("zero_2", "mobius") else (3, 3))
    frame = framed(name, case, cut)
    found = causes_of(frame, cut, ())
    assert tuple(found) == CAUSES
    assert sum(found.values()) == pytest.approx(frame.outcome(cut, "all").step_time_s)
    assert min(found.values()) > -1e-3 * sum(found.values())
    assert (found["collectives"] > 0) == (name in ("chimera", "zero_2"))


def test_work_is_the_layers_own():
    case, cut = small(microbatches=(1,)), symmetric((3, 3))
    found = causes_of(framed("1f1b", case, cut), cut, ())
    times = case.times(1)
    each = 8 / 2  # microbatches of a step, over devices
    plain = sum(times.forward) + sum(times.backward) + times.head_forward + times.head_backward
    assert found["computation"] == pytest.approx(plain * each)
    assert found["recomputation"] == pytest.approx(sum(times.recompute) * each)
    assert causes_of(framed("1f1b", case, cut), cut, (3, 3))["recomputation"] == 0


def test_with_links_of_no_time_nothing_is_held_up():
    case, cut = small(microbatches=(1,)), symmetric((3, 3))
    fast = replace(case.cluster, copy_bytes_per_s=1e18, host_to_device_bytes_per_s=1e18, host_bytes_per_s=1e18)
    found = causes_of(framed("1f1b", replace(case, cluster=fast), cut), cut, ())
    assert found["transfers"] == pytest.approx(0, abs=1e-6)
    assert causes_of(framed("1f1b", case, cut), cut, ())["transfers"] > 1e-5


def test_what_an_optimizer_takes_is_named_by_hand():
    """Adam reads and writes what `OptimizerTraffic` says of every parameter; of two devices, as a mean."""
    case, cut = small(microbatches=(1,)), symmetric((3, 3))
    found = causes_of(framed("gpipe", case, cut), cut, ())
    sizes, traffic = case.sizes(1), case.optimizer
    parameters = (sum(each.optimizer for each in sizes.layers) + sizes.embedding.optimizer + sizes.head.optimizer) / 12
    adam_s = traffic.on_device * parameters / traffic.device_bytes_per_s
    assert found["optimizer"] >= adam_s / 2 * (1 - 1e-6)


def test_what_hops_add_is_named_as_transfers():
    """GPipe on two devices: the boundary is passed once forth and once back where nothing hides it."""
    graph = build_graph(entry("gpipe").build(Shape(2, 2, 4)))
    costs = LayerTimes([1.0] * 4, [0.0] * 4, [2.0] * 4, hop=0.5).table(symmetric((2, 2)))
    found = causes_at(graph, costs, lambda each: float(max(simulate_graph(graph, each).end)))
    work = 4 * (2 + 4)
    assert found["transfers"] == pytest.approx(2 * 0.5)
    assert found["computation"] == pytest.approx(work)
    assert found["bubble"] == pytest.approx(work / 4), "(p - 1) / m of the work"


def test_faster_links_make_a_plan_with_hops_faster_and_slower_ones_slower():
    case = small()
    plan = timed(tune(contender("1f1b"), case, Budget(60)), case)
    links = CHANGES["links"]
    assert plan.pace(links, 0.25) < plan.plan.outcome.tokens_per_s < plan.pace(links, 4.0)
    given = replace(plan.costs, hop=1.0)  # as where the boundary is no transfer
    assert [links(given, factor).hop for factor in (0.25, 4.0)] == [4.0, 0.25]
    assert CHANGES["devices"](given, 2.0).hop == CHANGES["host memory bandwidth"](given, 2.0).hop == 1.0


@pytest.mark.parametrize(
    "below, above, nearest", [(0.5, 1.25, 1.25), (0.8, 4.0, 0.8), (0.01, 3.0, 3.0), (0.01, 99.0, None)]
)
def test_of_two_factors_that_turn_an_order_the_nearer_one_is_told(below, above, nearest):
    """The first loses with a factor below one mark, the second gains beyond another."""

    def plan(now, pace):
        return SimpleNamespace(pace=pace, plan=SimpleNamespace(outcome=SimpleNamespace(tokens_per_s=now)))

    first = plan(100.0, lambda _, factor: 100.0 if factor > below else 50.0)
    second = plan(90.0, lambda _, factor: 90.0 if factor < above else 120.0)
    found = _turning(first, second, CHANGES["links"])
    assert found == (None if nearest is None else pytest.approx(nearest, rel=0.05))


def test_the_ranking_falls_and_says_why(advice):
    paces = [row.plan.outcome.tokens_per_s for row in advice.ranking]
    assert paces == sorted(paces, reverse=True)
    every = (*advice.ranking, *advice.ranking_late, *advice.does_not_fit)
    assert {row.plan.contender.name for row in every} == {*NAMES, "roundpipe(asynchronous=True)"}
    assert not any(row.staleness_steps for row in advice.ranking)
    assert all(row.staleness_steps for row in advice.ranking_late)
    for row in (*advice.ranking, *advice.ranking_late):
        assert row.low < row.plan.outcome.tokens_per_s < row.high
        assert sum(row.why.values()) == pytest.approx(row.plan.outcome.step_time_s)
        assert 0 <= row.bubble < 1
        assert row.staleness_steps == ("asynchronous" in row.plan.contender.name)
    for row in advice.does_not_fit:
        assert row.device_lacks_bytes == row.plan.outcome.peak_bytes - 1_500_000_000 > 0


def test_it_is_json_with_the_fields_that_were_promised(advice):
    plain = json.loads(json.dumps(advice.plain()))
    promised = {
        "schedule",
        "options",
        "tokens_per_s",
        "tokens_per_s_low",
        "tokens_per_s_high",
        "peak_memory_bytes",
        "staleness_steps",
        "why",
        "command",
    }
    assert promised <= plain["ranking"][0].keys()
    assert {"ranking", "does_not_fit", "levers"} <= plain.keys()
    assert plain["ranking"][0]["command"].startswith("python -m rpbench schedule=")


def test_processes_side_by_side_find_the_same(advice):
    both = advise(advice.terms, basis_of(advice.terms), names=NAMES, budget=Budget(60, 100_000), processes=2)
    assert both.plain() == advice.plain()


def test_levers_and_turns_hold_when_tried():
    case = small(microbatches=(1,))
    first, second = (timed(tune(contender(name), case, QUICK), case) for name in ("1f1b", "gpipe"))
    if first.plan.outcome.tokens_per_s < second.plan.outcome.tokens_per_s:
        first, second = second, first
    roomy = partial(pace_with_twice_the_memory, first.plan, case, QUICK)
    levers = {lever.name: lever for lever in levers_of(first, case, roomy)}
    assert 1.5 < levers["devices twice as fast"].gain + 1 <= 2
    assert levers["one more microbatch a step"].tokens_per_s > 0
    for turn in turns_of(first, second):
        if turn.factor is not None:
            change = CHANGES[turn.name]
            assert second.pace(change, turn.factor) > first.pace(change, turn.factor)


@pytest.mark.parametrize("room, behind", [(2.7, 2), (0.9, 1)], ids=["all fit anyway", "the best does not fit"])
def test_memory_is_not_credited_with_what_a_longer_search_finds(room, behind):
    """A plan at half of the pace that has three times the memory it needs gains nothing by more."""
    case = small(microbatches=(1,))
    best = tune(contender("1f1b"), case, QUICK)
    tight = replace(case, limits=Limits(int(best.outcome.peak_bytes * room), None))
    plan = tune(contender("1f1b"), tight, QUICK)
    expected = best.outcome.tokens_per_s / plan.outcome.tokens_per_s
    plan = replace(plan, outcome=replace(plan.outcome, tokens_per_s=plan.outcome.tokens_per_s / behind))
    gain = pace_with_twice_the_memory(plan, tight, QUICK) / plan.outcome.tokens_per_s
    assert gain == pytest.approx(expected, rel=1e-3)
    assert (gain > 1.01) is (room < 1)


def test_published_times_are_surer_than_counted_ones():
    case = terms()
    basis = basis_of(case)
    measured, counted = (compute_reach(each, 8192, basis) for each in (case, replace(case, source="analytic")))
    assert measured == pytest.approx(0.01645)
    assert counted > measured


def test_nobody_left_is_an_error():
    case = small(num_devices=3, sequences_per_step=9, microbatches=(1,))
    with pytest.raises(ValueError, match="even number"):
        advise(case, basis_of(case), names=("chimera",))


def test_the_command_has_the_plan():
    case = small(microbatches=(1,))
    plan = tune(contender("seq1f1b"), case, Budget(60))
    words = command_of(plan, case)
    assert f'partition="{plan.partition}"' in words
    assert f"schedule.num_segments={dict(plan.setting.options)['num_segments']}" in words


def test_what_two_rows_have_in_common_cancels_in_their_ratio():
    """Rows that spend alike differ by what is their own; on a link of ln 2 that has half of one step alone, by more."""
    shared = Shared({"transfers": log(2)}, 0.0)
    alike = {"computation": 3.0, "transfers": 1.0}
    assert log(ratio_reach(alike, {"computation": 6.0, "transfers": 2.0}, shared)) == pytest.approx(NORMAL * OWN)
    none = {"computation": 1.0}
    half = {"computation": 1.0, "transfers": 1.0}
    apart = log(2) / 2
    assert log(ratio_reach(none, half, shared)) == pytest.approx(sqrt((NORMAL * OWN) ** 2 + apart**2))
    assert ratio_reach(none, half, shared) == pytest.approx(ratio_reach(half, none, shared))


def test_what_schedules_have_of_their_own_is_measured():
    """Errors of rows that decided nothing, by pairs of schedules with one model and as many microbatches."""
    folder = Path(__file__).parents[2] / "analysis"
    with (folder / "published/measured/zero_bubble_table4.csv").open(newline="") as file:
        measured = {row["id"]: (row["model"], row["num_microbatches"]) for row in csv.DictReader(file)}
    errors = defaultdict(list)
    with (folder / "predictions/clusters_holdout.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["id"] in measured:
                errors[measured[row["id"]]].append(log(float(row["predicted_s"]) / float(row["step_time_s"])))
    apart = [one - other for group in errors.values() for one, other in combinations(group, 2)]
    assert len(apart) == 36
    assert pytest.approx(sqrt(sum(each * each for each in apart) / len(apart)), abs=5e-4) == OWN


def test_frameworks_are_named_for_contenders():
    """DeepSpeed has ZeRO-Offload, but no delayed update; RoundPipe's library has both of its updates."""
    assert set(RUNS_IN) <= {each.name for each in contenders()}
    assert runs_in("zero_offload") == ["DeepSpeed"]
    assert runs_in("zero_offload(delayed_update=True)") == (HERE,)
    assert runs_in("roundpipe(asynchronous=True)") == runs_in("roundpipe")


def test_kernels_of_a_search_in_short_time_are_compiled_before_its_clock(monkeypatch):
    case = small()
    monkeypatch.setattr(side_searches, "_compiled", [])
    kernels.compiled.cache_clear()
    side_searches.compile_kernels(case, basis_of(case))
    known = kernels.compiled.cache_info().currsize
    for name in ("roundpipe", "zb_v", "mobius", "pipe_offload"):
        tune(contender(name), case, QUICK, is_over=lambda: False)
    assert kernels.compiled.cache_info().currsize == known


def test_a_framework_gets_no_plan_with_an_option_that_it_lacks():
    """DeepSpeed offloads all or nothing at ZeRO-2; FSDP2 alone can scatter gradients once a step."""
    case, offload, zero_2 = small(), contender("zero_offload"), contender("zero_2")
    assert space_of(offload, case).dimensions["schedule.share"] == (1.0, 0.75, 0.5, 0.25)
    assert space_of(as_run_by(offload, "DeepSpeed"), case).dimensions["schedule.share"] == (1.0,)
    assert contender_runs_in(offload, case, {"share": 0.25}) == (HERE,)
    assert contender_runs_in(zero_2, case, {"reduce_each_microbatch": False}) == ["FSDP2", "DeepSpeed"]
    for framework, schedules in OPTIONS.items():
        for name, options in schedules.items():
            assert framework in runs_in(name)
            assert options.keys() <= entry(name).searched.keys()


def test_torchtitan_runs_no_more_tensor_shards_than_heads_of_keys():
    case = small()  # on two devices
    alone = replace(case, model=replace(case.model, key_value_heads=1))
    assert contender_runs_in(contender("megatron_tp"), case) == ["Megatron", "torchtitan"]
    assert contender_runs_in(contender("megatron_tp"), alone) == ["Megatron"]
    assert contender_runs_in(contender("1f1b"), alone) == runs_in("1f1b")


@pytest.mark.parametrize("windows", [(), (1024, None)])
def test_devices_that_do_what_the_model_needs_and_nothing_else_have_an_mfu_of_one(windows):
    """With 131,072 tokens, where attention to keys that no query sees would be most of it."""
    model, cluster = replace(architecture("llama3_8b"), seq_len=131_072, windows=windows), machine("dgx_h100")
    pace = 8 * cluster.matmul_flops_per_s / model.flops_per_token(131_072)
    assert mfu(model, cluster, 8, pace) == pytest.approx(1)
