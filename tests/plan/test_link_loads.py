"""Loads of links: crossings of long steps follow from short ones, and their bytes are those that transfers count."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from contest_terms import small

from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.analysis import analysed
from rpbench.plan.contest.bounds import Bounds
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.link_loads import LinkLoads, crossings, extended, least_seconds
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import tune
from rpbench.plan.counts import plain_partitions, promising_counts

MOVING = ("zero_2", "zero_3", "zero_infinity", "zero_offload", "superoffload", "zenflow", "acco", "data_parallel")
MOVING += ("cyclic_dp", "weipipe", "tawpipe", "megatron_tp", "greedysnake", "megatrain")


def settings_of(name, case):
    """Every number of stages and option of a contender, with the smallest microbatch."""
    found = contender(name)
    space = space_of(found, case)
    first = space.first.changed("microbatch_sequences", min(case.microbatches))
    changes = [changed for dimension, changed in space.changes(first) if dimension not in ("recompute", "prefetch")]
    return found, [first, *(each for each in changes if each.microbatch_sequences == first.microbatch_sequences)]


def order_of(found, setting, case):
    problem = posed(found, setting, case, 1)
    return problem.finished(problem.order(plain_partitions(problem, promising_counts(problem)[0])[0]))


@pytest.mark.parametrize("name", MOVING)
def test_crossings_of_many_microbatches_lie_on_the_line_of_three_short_steps(name):
    case = small(sequences_per_step=32, microbatches=(1, 16))
    found, settings = settings_of(name, case)
    loads, known = LinkLoads(found, case), 0
    for setting in settings:
        try:
            whole = analysed(order_of(found, setting, case))
        except ValueError:
            continue
        num, counted = whole.schedule.shape.num_microbatches, crossings(whole)
        sizes = case.sizes(setting.microbatch_sequences).under(whole.schedule)
        assert loads.least_seconds(setting, num) == pytest.approx(least_seconds(counted, sizes, case), rel=1e-9)
        short = [(each.schedule.shape.num_microbatches, crossings(each)) for each in loads.short(setting)]
        if len(short) < 3:  # its own order is made
            assert name == "acco"
            continue
        guessed = extended(short, num)
        assert max(number for number, _ in short) < num
        assert guessed is not None
        assert {key for key, shares in guessed.items() if shares.any()} == counted.keys()
        for key, shares in counted.items():
            np.testing.assert_allclose(guessed[key], shares, atol=1e-9, err_msg=str(key))
        known += 1
    assert known or name == "acco"


@pytest.mark.parametrize("name", MOVING)
def test_no_setting_tried_is_faster_than_its_bound(name):
    """What goes from device to device is sent in one lane and received in another at the same time."""
    case, found = small(sequences_per_step=32, microbatches=(1, 4)), contender(name)
    plan, bounds = tune(found, case, Budget(30, 10_000)), Bounds(found, case, space_of(found, case))
    known = [each for each in plan.tried if each.outcome is not None]
    assert known
    for each in known:
        assert each.timed.tokens_per_s <= bounds.pace(each.setting) * (1 + 1e-6), each.setting


@pytest.mark.parametrize("name", ["zero_3", "zero_offload", "acco"])
def test_seconds_are_the_bytes_that_transfers_count_over_the_paces_of_links(name):
    """All layers alike, and every stage crosses as often: no cut moves less. Optimizer on the device, no sums."""
    cluster = Machine("x", 2, host_to_device_bytes_per_s=3e9, device_to_host_bytes_per_s=2e9, intra_bytes_per_s=1e9)
    case = replace(small(), cluster=cluster)
    found, (setting, *_) = settings_of(name, case)
    order = order_of(found, setting, case)
    sizes = replace(case.sizes(setting.microbatch_sequences), tied=False)
    bytes_by_lane = Counter()
    for device in moved_bytes(order, sizes):
        for what, moved in device.items():
            if not what.endswith(":A"):
                bytes_by_lane[what.split()[0]] += moved / order.shape.num_steps
    paces = {"h2d": 3e9, "d2h": 2e9, "net": 1e9}
    expected = max(bytes_by_lane[lane] / (2 * pace) for lane, pace in paces.items())
    assert least_seconds(crossings(analysed(order)), sizes, case) == pytest.approx(expected, rel=1e-6)


def test_what_lies_on_no_line_is_not_extended():
    key = next(iter(crossings(analysed(order_of(*_one())))))
    table = [(number, {key: np.array([float(share)])}) for number, share in ((2, 1), (4, 2), (6, 3.5))]
    assert extended(table, 8) is None
    assert extended([*table[:2], (6, {key: np.array([3.0])})], 8)[key].tolist() == [4.0]
    assert extended([*table[:2], (6, {})], 8) is None
    assert extended([(2, {}), (4, {key: np.ones(2)}), (6, {key: 2 * np.ones(2)})], 8)[key].tolist() == [3.0, 3.0]


def _one():
    case = small()
    found, (setting, *_) = settings_of("zero_3", case)
    return found, setting, case
