"""The statistics of a duel: order, neighbours, intervals, and on a made-up machine how often verdicts are wrong."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from machine_noise import Noise, made_up_start

from rpbench.run.modes.duel.runs import Comparisons, Runs, compare, pairs
from rpbench.run.modes.duel.starts import family_order, turn_order
from rpbench.run.modes.duel.verdict import (
    Rules,
    StartFinding,
    block_means,
    find_start,
    judge,
    mean_square,
    order_interval,
    student_quantile,
)

REFERENCES = ("r0", "r1", "r2", "r3")
OTHERS = tuple(f"c{number}" for number in range(10))
NAMES = (*REFERENCES, *OTHERS)


# --- order ---------------------------------------------------------------------------------------------------


def test_a_turn_has_everybody_once_and_references_scattered_in_it():
    draw = Random(0)
    firsts = set()
    for _ in range(50):
        turn = turn_order(OTHERS, REFERENCES, draw)
        assert sorted(turn) == sorted(NAMES)
        places = [-1, *(place for place, name in enumerate(turn) if name in REFERENCES)]
        sizes = [after - before - 1 for before, after in pairwise(places)]
        assert sorted(sizes) == [2, 2, 3, 3], "ten between four"
        assert turn[-1] in REFERENCES, "so that the next turn begins behind one"
        firsts.add(turn[0])
    assert firsts == set(OTHERS)
    assert turn_order("ab", "R", Random(3)) == turn_order("ab", "R", Random(3))
    with pytest.raises(ValueError, match="no reference"):
        turn_order("ab", "", Random(0))


def test_plans_of_a_contender_run_one_after_the_other_in_every_order():
    families = (("a1", "a2", "a3"), ("b1", "b2"), ("c1", "c2"))
    draw, seen = Random(0), set()
    for _ in range(200):
        turn = family_order(families, draw)
        assert sorted(turn) == sorted(name for family in families for name in family)
        groups = [name[0] for name in turn]
        assert sum(one != other for one, other in pairwise(groups)) == len(families) - 1
        seen.add(tuple(turn))
    assert len(seen) > 100, "of 144"


# --- neighbours ----------------------------------------------------------------------------------------------


def runs_of(who, took, others=None, at=None):
    took = np.asarray(took, float)
    others = np.zeros(len(who)) if others is None else np.asarray(others, float)
    return Runs(np.asarray(who), np.arange(len(who)) if at is None else np.asarray(at), took, others, took)


def test_steady_drift_cancels_exactly():
    """Contender 2 takes 0.8 of what the references take, on a machine that gets slower by a tenth every run."""
    who = [0, 2, 3, 1, 2, 0, 3, 2, 1]
    took = [1.1**place * (0.8 if number == 2 else 1.0) for place, number in enumerate(who)]
    np.testing.assert_allclose(np.exp(compare(runs_of(who, took), 2, (0, 1)).log_ratios), 1.25)
    np.testing.assert_allclose(compare(runs_of(who, took), 3, (0, 1)).log_ratios, 0, atol=1e-12)


def test_a_pair_is_of_one_turn_whoever_warmed_up_in_front():
    """Turns of 0 and 1 behind a run that only warms up; a machine three times as slow in the second turn."""
    for first in (0, 1):
        runs = runs_of([first, 0, 1, 1, 0], [9, 0.8, 1.0, 3.0, 2.4], [0, 0, 0, 0.5, 0])
        found = pairs(runs, 0, 1)
        np.testing.assert_allclose(np.exp(found.log_ratios), 1.25)
        np.testing.assert_allclose(np.exp(pairs(runs, 1, 0).log_ratios), 0.8)
        np.testing.assert_array_equal(found.clean, [True, False])
    assert pairs(runs_of([0, 0], [1.0, 1.0]), 0, 1).log_ratios.size == 0


def test_a_reference_is_compared_with_the_others_alone():
    found = compare(runs_of([1, 0, 1, 0, 1], [1.0, 2.0, 1.0, 4.0, 1.0]), 0, (0, 1))
    np.testing.assert_allclose(np.exp(found.log_ratios), [0.5, 0.25])
    with pytest.raises(ValueError, match="no reference has run"):
        compare(runs_of([0, 2], [1, 1]), 0, (0,))


def test_a_run_without_a_neighbour_on_either_side_is_no_comparison():
    assert compare(runs_of([2, 0, 2, 0, 2], [1] * 5), 2, (0,)).log_ratios.size == 1


def test_other_programs_spoil_a_run_and_its_neighbours_and_nobody_else():
    """0.12 s of others in run 3: 0.04 of a core over three runs of 1 s; 0.3 s: 0.1."""
    who = [0, 2, 0, 2, 0, 2, 0]
    for others, clean in ((0.12, [True, True, True]), (0.3, [True, False, True]), (math.nan, [True, False, True])):
        found = compare(runs_of(who, [1.0] * 7, [0, 0, 0, others, 0, 0, 0]), 2, (0,))
        assert found.clean.tolist() == clean
    spoilt = compare(runs_of(who, [1.0] * 7, [0, 0, 0.3, 0, 0, 0, 0]), 2, (0,))
    assert spoilt.clean.tolist() == [False, False, True]


# --- intervals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.99, 3, 5.841), (0.95, 8, 2.306), (0.999, 10, 4.587), (0.9, 30, 1.697)],
)
def test_quantiles_of_student_s_t(confidence, freedom, expected):
    """Table of Student, "The probable error of a mean", as every textbook prints it."""
    assert student_quantile(confidence, freedom) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("num", "depth", "covered"), [(6, 1, 0.96875), (8, 1, 0.9921875), (8, 2, 0.9296875), (10, 2, 0.978515625)]
)
def test_order_statistics_hold_a_median_as_often_as_coins_fall(num, depth, covered):
    values = np.arange(1.0, num + 1)
    assert order_interval(values, covered) == (depth, num + 1 - depth)


def test_between_two_order_statistics_is_interpolated_and_too_few_say_nothing():
    low, high = order_interval(np.arange(1.0, 9.0), 0.95)  # 8 values: 0.992 at depth 1, 0.930 at depth 2
    assert 1 < low < 2
    assert low + high == pytest.approx(9)
    assert order_interval(np.arange(5.0), 0.95) == (-math.inf, math.inf), "least and greatest of 5 hold it with 0.9375"
    draw = np.random.default_rng(0)
    inside = [low <= 0 <= high for low, high in (order_interval(x, 0.95) for x in draw.normal(size=(2000, 12)))]
    assert 0.935 <= np.mean(inside) <= 0.965


def test_blocks_leave_out_what_was_interrupted():
    values = np.array([1.0, 1.1, 0.9, 1.0, 9.0, 2.0, 2.1, 1.9, 2.0, -9.0])
    np.testing.assert_allclose(block_means(values, 2), [31 / 30, 59 / 30])
    assert mean_square([np.array([1.0, 3.0]), np.array([0.0, 0.0]), np.array([5.0])]) == 1.0
    with pytest.raises(ValueError, match="3 values in 4 blocks"):
        block_means(np.zeros(3), 4)


# --- verdicts ------------------------------------------------------------------------------------------------


def start(centre, spread=0.002, num=40, minutes=5, *, dirty=0):
    """A start whose blocks are spread evenly around a value."""
    logs = centre + spread * np.linspace(-1, 1, num)[np.random.default_rng(num).permutation(num)]
    others = np.array([0.0] * num + [1.0] * dirty)
    at = np.linspace(0, 60 * minutes - 1, num + dirty)
    return find_start(Comparisons(np.array([*logs, *([9.0] * dirty)]), at, others), Rules())


def judged(*starts: StartFinding, **others):
    table = {"it": starts, **{f"r{k}": (start(0.001 * k), start(-0.001 * k)) for k in range(4)}, **others}
    return judge(table, 4, Rules())["it"]


def test_a_clear_difference_in_two_starts_is_one():
    faster, slower = judged(start(0.1), start(0.102)), judged(start(-0.1), start(-0.102))
    assert (faster.verdict, slower.verdict) == ("faster", "slower")
    assert faster.ratio == pytest.approx(math.exp(0.101), rel=1e-3)
    assert faster.sure_low < faster.low < faster.ratio < faster.high < faster.sure_high
    assert judged(start(0.001), start(-0.001)).verdict == "no difference shown"


def test_starts_that_disagree_show_nothing():
    assert judged(start(0.1), start(-0.02)).verdict == "no difference shown"


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ([start(0.2)], "1 starts of at least 2"),
        ([start(0.2), start(0.2, num=25)], "start 2: 25 clean comparisons of at least 30"),
        ([start(0.2, minutes=2), start(0.2)], "start 1: comparisons in 2 minutes of at least 3"),
        ([start(0.2, spread=0.2), start(0.2, spread=0.2)], r"half width \d+\.\d % of at most 2 %"),
        ([start(0.2, num=3), start(0.2, num=3)], "start 1: 3 clean comparisons"),
    ],
)
def test_whatever_is_lacking_there_is_no_verdict_and_the_reason(starts, reason):
    found = judged(*starts)
    assert found.verdict == "no verdict"
    assert re.search(reason, found.reason), found.reason


def test_a_width_is_a_share_whoever_is_compared_with_whom():
    fast = StartFinding(1.25, 1.2, 1.3, 40, 0, 4, np.zeros(8))
    slow = StartFinding(1 / fast.ratio, 1 / fast.high, 1 / fast.low, 40, 0, 4, np.zeros(8))
    assert fast.half_width == pytest.approx(slow.half_width)
    assert fast.half_width == pytest.approx(0.05 / 1.25, rel=1e-2)


def test_disturbed_comparisons_are_counted_apart():
    found = start(0.1, dirty=7)
    assert (found.num_pairs, found.num_disturbed) == (40, 7)
    assert found.ratio == pytest.approx(math.exp(0.1), rel=1e-2)


def test_more_verdicts_at_once_need_more():
    table = {"it": (start(0.03), start(0.026)), **{f"r{k}": (start(0.004 * k), start(0)) for k in range(4)}}
    few, many = judge(table, 4, Rules())["it"], judge(table, 4, Rules(), num_verdicts=200)["it"]
    assert many.sure_high - many.sure_low > few.sure_high - few.sure_low
    assert (many.low, many.high) == (few.low, few.high)


# --- how often it is wrong -----------------------------------------------------------------------------------

LOOKS = (35, 50, 70, 100, 140)  # turns after which a start is looked at


def play_start(draw, logs, noise, rules):
    """A start that ends, like a real one, when everybody is known well enough, or the budget is spent."""
    runs = made_up_start(draw, NAMES, REFERENCES, logs, LOOKS[-1], noise)
    for turns in LOOKS:
        so_far = Runs(*(column[: turns * len(NAMES)] for column in runs))
        found = [find_start(compare(so_far, number, range(4)), rules) for number in range(len(NAMES))]
        if all(start.is_enough(rules) for start in found):
            break
    return dict(zip(NAMES, found, strict=True))


def calibrate(num_tables, noise, *, effect, num_starts=2, seed=0):
    """Coverage of the 95 % intervals, share of tables with a false alarm, power for the one that is faster."""
    draw, rules = np.random.default_rng(seed), Rules(least_starts=num_starts)
    logs = np.zeros(len(NAMES))
    logs[NAMES.index("c0")] = -math.log(1 + effect)
    covered, alarms, power = [], 0, 0
    for _ in range(num_tables):
        starts = [play_start(draw, logs, noise, rules) for _ in range(num_starts)]
        found = judge({name: [one[name] for one in starts] for name in NAMES}, len(REFERENCES), rules)
        true = np.exp(-logs)
        covered += [found[name].low <= ratio <= found[name].high for name, ratio in zip(NAMES, true, strict=True)]
        alarms += any(found[name].verdict in ("faster", "slower") for name in NAMES if name != "c0")
        power += found["c0"].verdict == "faster"
    result = float(np.mean(covered)), alarms / num_tables, power / num_tables
    print(f"\n{noise}: {100 * result[0]:.1f} % covered, {100 * result[1]:.1f} % of tables with a false alarm, "
          f"power {100 * result[2]:.1f} % for {100 * effect:g} %")  # fmt: skip
    return result


CALM = Noise(speed=0.05, own=0.01, run=0.02, start=0.005)


def test_verdicts_have_the_error_rate_they_claim():
    covered, alarms, power = calibrate(40, CALM, effect=0.05, seed=2)
    assert 0.93 <= covered <= 0.97
    assert alarms <= 0.05
    assert power >= 0.9


def test_verdicts_over_another_base_are_careful():
    """One of the contenders is the base of all: nothing wrong for the table, and power for a question by itself."""
    draw, rules, base = np.random.default_rng(1), Rules(), NAMES.index("c9")
    logs = np.zeros(len(NAMES))
    logs[NAMES.index("c0")] = -math.log(1.05)
    covered, alarms, power = [], 0, 0
    for _ in range(60):
        starts = [made_up_start(draw, NAMES, REFERENCES, logs, 70, CALM) for _ in range(2)]
        table = {
            name: [find_start(pairs(runs, number, base), rules) for runs in starts]
            for number, name in enumerate(NAMES)
            if number != base
        }
        together, alone = judge(table, 1, rules), judge(table, 1, rules, num_verdicts=1)
        covered += [one.low <= math.exp(-logs[NAMES.index(name)]) <= one.high for name, one in together.items()]
        alarms += any(one.verdict in ("faster", "slower") for name, one in together.items() if name != "c0")
        power += alone["c0"].verdict == "faster"
    assert np.mean(covered) >= 0.95
    assert alarms <= 0.05 * 60
    assert power >= 0.9 * 60


# A machine whose speed changes by a fifth within three seconds: no verdicts, but no wrong ones either.
WILD = replace(Noise(), speed=0.2, speed_s=3.0)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "least_power"), [(CALM, 0.9), (Noise(), 0.9), (WILD, 0.0)])
def test_verdicts_have_the_error_rate_they_claim_on_many_tables(noise, least_power):
    covered, alarms, power = calibrate(300, noise, effect=0.05, seed=1)
    assert 0.93 <= covered <= 0.97
    assert alarms <= 0.05
    assert power >= least_power
