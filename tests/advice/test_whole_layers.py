"""Whole layers: the least memory of every setting, cut and recomputation of small cases, one after the other."""

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from contest_terms import small

from rpbench.advice.ranking import Misfit
from rpbench.advice.side_searches import Share
from rpbench.advice.whole_layers import lightest
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.frame import Frames
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import Search

BUDGET = Budget(60, 100_000)
NO_ROOM = 1  # byte: then nothing fits, and every setting is looked at


def peaks(name, case):
    """Bytes of the fullest device of every plan: all settings, all cuts, all that may run again."""
    frames, space = Frames(contender(name), case), space_of(contender(name), case)
    num_layers = case.model.num_layers
    for values in product(*space.dimensions.values()):
        setting = space.first
        for dimension, value in zip(space.dimensions, values, strict=True):
            setting = setting.changed(dimension, value)
        num_stages = setting.chunks_per_device * case.num_devices
        for ends in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
            cut = symmetric(tuple(np.diff((0, *ends, num_layers)).tolist()))
            try:
                yield frames.of(setting, cut, case.num_steps).outcome(cut, setting.recompute).peak_bytes
            except ValueError:  # the schedule does not take the setting
                break


@pytest.mark.parametrize("name", ["interleaved_1f1b", "dualpipe_v", "stp", "combined_1f1b", "two_bp"])
def test_no_plan_holds_less(name):
    """A device may choose what runs again without the others here, which no plan can: hence the hundredth."""
    case = small(NO_ROOM, num_layers=3, sequences_per_step=8)
    least = min(peaks(name, case))
    assert 0.99 * least <= lightest(Search(contender(name), case, BUDGET), lambda: False).bytes <= least


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "looped_bfs", "gis", "xpipe"])
def test_no_plan_holds_less_and_one_holds_just_that(name):
    case = small(NO_ROOM, num_layers=3, sequences_per_step=4)
    least = min(peaks(name, case))
    found = lightest(Search(contender(name), case, BUDGET), lambda: False)
    assert found.bytes == least
    frame = Frames(contender(name), case).of(found.setting, found.cut, case.num_steps)
    assert frame.outcome(found.cut, "all").peak_bytes == least


@pytest.mark.parametrize("name", ["zb_v", "zero_3", "dualpipe", "roundpipe"])
def test_of_orders_by_times_and_shared_stages_nothing_is_known(name):
    assert lightest(Search(contender(name), small(NO_ROOM), BUDGET), lambda: False) is None


def test_a_share_goes_on_from_the_plan_that_just_fits_and_proves_that_a_byte_less_is_too_few():
    least = min(peaks("gpipe", small(NO_ROOM, num_layers=3, sequences_per_step=4)))
    for limit in (least, least - 1):
        case = small(limit, num_layers=3, sequences_per_step=4)
        share = Share([contender("gpipe")], [0], case, BUDGET, lambda plan, frames: Misfit(plan, 0, 0, False))
        share.look(1e9)
        search = share.searches[0]
        assert not search.cannot_fit()
        for setting, tried in search.tried.items():  # as if it had found nothing
            if tried.outcome is not None:
                search.tried[setting] = tried._replace(outcome=replace(tried.outcome, misfit=2.0))
        assert share._is_too_much(0) == (limit < least)
        share.go_by_turns([], None, 0.0, [])
        found = share.finish(None, [])[0].plan
        assert found.outcome.fits == (limit == least)
        assert found.least_bytes == (0 if found.outcome.fits else least)
