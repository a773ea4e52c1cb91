"""Cuts that a planner tries, counted one by one; which plan beats which; what restarts may spend."""

from dataclasses import dataclass, field, replace
from itertools import permutations, product
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from contest_terms import small as small_terms
from problems import small, uniform

from rpbench.cost.footprint.sizes import DeviceMemory, LayerSize, ModelBytes
from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.climb import _moves
from rpbench.plan.contest.contender import Setting, Space, contender, space_of
from rpbench.plan.contest.frame import Outcome
from rpbench.plan.contest.layer_limits import Limit, _times_of
from rpbench.plan.contest.plans import Budget, Tried, Tuned, beats, leaders, rank
from rpbench.plan.contest.restarts import climbed, restart, shifted
from rpbench.plan.contest.sketch import _turn
from rpbench.plan.contest.terms import default_microbatches
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.plan.even_and_greedy import fill_stages
from rpbench.plan.whole import _neighbours, _starts

FUSED = Partition((1, 2, 1), (1, 2, 1, 2), fused=True)  # six layers, two of them in the fused stage


def one_moved(counts, least, pairs):
    """Counts after one layer went from a stage to another, where as many stay behind."""
    found = set()
    for giver, taker in pairs:
        if counts[giver] > least:
            found.add(tuple(n - (at == giver) + (at == taker) for at, n in enumerate(counts)))
    return found


def pairs_of(number, far):
    return [pair for pair in permutations(range(number), 2) if (abs(pair[0] - pair[1]) > 1) is far]


@pytest.mark.parametrize("far", [False, True])
def test_a_layer_goes_to_a_neighbour_or_to_one_far_away(far):
    """A stage on a device may be empty; one that is a job of its own may not."""
    counts = (2, 0, 1, 3)
    found = list(shifted(symmetric(counts), far=far))
    assert {cut.forward for cut in found} == one_moved(counts, 0, pairs_of(4, far))
    assert len(found) == len(set(found))
    forward = one_moved(FUSED.forward, 1, pairs_of(3, far))
    below = one_moved(FUSED.backward[:-1], 1, pairs_of(3, far))
    fused = {(cut.forward, cut.backward) for cut in shifted(FUSED, far=far)}
    assert fused == {(cut, FUSED.backward) for cut in forward} | {(FUSED.forward, (*cut, 2)) for cut in below}


def test_a_climb_moves_one_layer_between_any_two_stages_near_ones_first():
    moves = _moves((4, 4), separate=False)
    assert {tuple(row) for row in moves.tolist()} == {
        tuple((at == taker) - (at == giver) for at in range(4)) for giver, taker in permutations(range(4), 2)
    }
    assert len(moves) == 12
    far = [int(np.abs(np.subtract(*np.flatnonzero(row)))) for row in moves]
    assert far == sorted(far)


def test_where_directions_are_cut_apart_layers_enter_the_fused_stage_from_both():
    """Three forward stages, two backward ones below the fused one; what enters leaves next to it in one direction."""
    moves = {tuple(row) for row in _moves((3, 3), separate=True).tolist()}
    up = {(*((at == b) - (at == a) for at in range(3)), 0, 0, 0) for a, b in permutations(range(3), 2)}
    down = {(0, 0, 0, *((at == b) - (at == a) for at in range(2)), 0) for a, b in permutations(range(2), 2)}
    enter = {
        (*(-(at == a) for at in range(3)), *(-(at == b) for at in range(2)), 1)
        for a, b in product(range(3), range(2))
        if a == 2 or b == 1
    }
    assert moves == up | down | enter | {tuple(-each for each in row) for row in enter}


def test_whole_plans_move_merge_and_split_stages():
    plain = {cut.forward for cut in _neighbours(symmetric((2, 1, 0)), opens_top=False)}
    assert plain == one_moved((2, 1, 0), 0, permutations(range(3), 2))

    def recut(counts):
        found = {cut for cut in one_moved(counts, 0, permutations(range(len(counts)), 2)) if min(cut) > 0}
        found |= {(*counts[:at], counts[at] + counts[at + 1], *counts[at + 2 :]) for at in range(len(counts) - 1)}
        return found | {
            (*counts[:at], first, n - first, *counts[at + 1 :]) for at, n in enumerate(counts) for first in range(1, n)
        }

    top = FUSED.backward[-1]
    closed = {(cut.forward, cut.backward) for cut in _neighbours(FUSED, opens_top=False)}
    assert closed == {(cut, FUSED.backward) for cut in recut((1, 2, 1))} | {
        (FUSED.forward, (*cut, top)) for cut in recut((1, 2, 1))
    }
    opened = {(cut.forward, cut.backward) for cut in _neighbours(FUSED, opens_top=True)} - closed
    assert opened == {((1, 2), (1, 2, 3)), ((1, 2, 2), (1, 2, 2, 1))}
    alone = {(cut.forward, cut.backward) for cut in _neighbours(Partition((1,), (1, 0), fused=True), opens_top=True)}
    assert alone == set()


def test_whole_plans_start_from_even_cuts_of_one_to_four_stages():
    bound = [cut.forward for cut in _starts(small("1f1b", uniform(6), 3))]
    assert bound == [(2, 2, 2), (3, 3, 0)]
    looped = {len(cut.forward) for cut in _starts(small("interleaved_1f1b", uniform(9), 3))}
    assert looped == {6, 9}
    apart = [(len(cut.forward), len(cut.backward) - 1) for cut in _starts(small("roundpipe", uniform(3), 2))]
    assert apart == [(up, down) for up in (1, 2, 3) for down in (1, 2, 3)]


# --- numbers of stages -----------------------------------------------------------------------------------------


def test_plain_cuts_are_even_with_the_rest_in_the_middle_at_either_end_or_the_head_alone():
    problem = small("1f1b", uniform(10, head=1.0), 4)
    found = {cut.forward for cut in plain_partitions(problem, (4, 4))}
    even = {(2, 3, 3, 2), (3, 3, 2, 2), (2, 2, 3, 3)}
    alone = {(3, 4, 3, 0), (4, 3, 3, 0), (3, 3, 4, 0)}
    assert found == even | alone | {fill_stages([4.0] * 10, 3.0, 4)}
    assert [cut.forward for cut in plain_partitions(small("1f1b", uniform(3), 1), (1, 1))] == [(3,)]


def test_a_cut_has_as_many_stages_with_layers_on_every_device_and_the_head_apart():
    """Two devices in loops: stages 1 to 4 have the layers, two on each device; stage 0 has none, stage 5 the head."""
    cuts = {cut.forward for cut in plain_partitions(small("interleaved_1f1b", uniform(8), 2), (6, 6))}
    assert (0, 2, 2, 2, 2, 0) in cuts
    waves = {cut.forward for cut in plain_partitions(small("zb_v", uniform(8), 2), (4, 4))}
    assert (0, 4, 4, 0) not in waves  # both stages lie on one device there


def test_a_fused_stage_has_the_head_alone_or_as_many_layers_as_make_it_as_long_as_the_others():
    """Twelve layers of 1, 1 and 2; with four backward stages below the mean is 9: a head of 3, and 2 layers of 3."""
    problem = small("roundpipe", uniform(12, head=1.0), 2)
    cuts = plain_partitions(problem, (3, 5))
    assert {cut.backward[-1] for cut in cuts} == {0, 2}
    for cut in cuts:
        below = 12 - cut.backward[-1]
        assert (len(cut.forward), len(cut.backward), sum(cut.forward), sum(cut.backward)) == (3, 5, below, 12)
        for part in (cut.forward, cut.backward[:-1]):
            assert max(part) - min(part) <= 1
    assert {cut.backward[-1] for cut in plain_partitions(small("roundpipe", uniform(12, head=9.0), 2), (3, 5))} == {0}
    assert plain_partitions(small("roundpipe", uniform(2), 2), (3, 2)) == []


def test_looped_schedules_may_have_a_layer_a_stage_and_the_head_alone():
    assert promising_counts(small("looped_bfs", uniform(8), 3)) == [(3, 3), (6, 6), (9, 9)]
    assert promising_counts(small("looped_bfs", uniform(9), 3)) == [(3, 3), (6, 6), (9, 9), (12, 12)]
    assert promising_counts(small("looped_bfs", uniform(8), 3, chunks_per_rank=2)) == [(6, 6)]
    assert promising_counts(small("1f1b", uniform(8), 3)) == [(3, 3)]


def test_pairs_of_numbers_of_stages_stand_by_an_estimate_of_their_step():
    """Half of perfect packing and lock-step over the devices, and (p - 1) / 2 stages each way at the ends."""
    problem = small("roundpipe", uniform(6, head=2.0), 3, num_microbatches=4)
    found = promising_counts(problem)
    assert sorted(found) == [(up, down) for up in range(1, 7) for down in range(2, 8)]

    def estimate(pair):
        up, down = pair[0], pair[1] - 1
        longest = max(-(-6 // up) * 1, -(-6 // down) * 3, 6)
        work, slots = 6 + 18 + 6, max(up + down + 1, 3) * longest
        return (work + max(slots, work)) / 2 * 4 / 3 + (6 / up + 18 / down) * 2 / 2

    paces = [estimate(pair) for pair in found]
    assert paces == pytest.approx(sorted(paces))


@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 2, 1), (3, 1, 2)])
def test_stages_on_devices_of_other_speeds_have_the_shortest_longest_time(speeds):
    layers, head = [3, 1, 4, 1, 5, 9], 2
    cuts = [(a, b, 6 - a - b) for a in range(7) for b in range(7 - a)]

    def longest(cut):
        ends = (0, cut[0], cut[0] + cut[1], 6)
        times = [sum(layers[ends[at] : ends[at + 1]]) + head * (at == 2) for at in range(3)]
        return max(time / speed for time, speed in zip(times, speeds, strict=True))

    found = fill_stages(layers, head, 3, speeds)
    assert longest(found) == pytest.approx(min(map(longest, cuts)))


# --- problems --------------------------------------------------------------------------------------------------


def test_a_device_has_two_stages_of_a_looped_schedule_where_layers_suffice():
    for layers, chunks in ((3, 1), (5, 1), (6, 2), (9, 2)):
        assert small("looped_bfs", uniform(layers), 3).default_chunks == chunks
    assert small("looped_bfs", uniform(9), 3, chunks_per_rank=3).num_bound_stages == 9
    assert small("looped_bfs", uniform(9), 3, published=symmetric((1,) * 9)).default_chunks == 3
    assert small("looped_bfs", uniform(9), 3, published=symmetric((3, 3, 2, 1))).default_chunks == 2
    assert small("1f1b", uniform(9), 3).num_bound_stages == 3


def test_a_head_that_devices_share_is_in_no_stage():
    assert small("1f1b", uniform(4, head=5.0), 2).head_time == 15
    assert small("vocab_parallel", uniform(4, head=5.0), 2).head_time == 0


def test_a_stage_is_as_fast_as_the_slowest_device_that_holds_it():
    times = replace(uniform(8), speeds=(1.0, 2.0, 3.0, 4.0))
    assert small("1f1b", times, 4).stage_speeds(4) == (1, 2, 3, 4)
    assert small("interleaved_1f1b", times, 4).stage_speeds(8) == (1, 2, 3, 4) * 2
    assert small("chimera", times, 4).stage_speeds(4) == (1, 2, 2, 1)  # two pipelines, in either direction
    assert small("1f1b", uniform(8), 4).stage_speeds(4) == (1,) * 4


def test_where_all_activations_stay_nothing_is_made_again():
    sizes = ModelBytes((LayerSize(1, 1, 6),) * 4, LayerSize(0, 0, 0), LayerSize(0, 0, 0), 0, 0, 0)
    problem = small("1f1b", uniform(4), 2, memory=DeviceMemory(sizes, 10)).recomputing_nothing()
    assert problem.times.recompute == [0] * 4
    assert problem.memory.sizes.keeps_activations
    assert small("1f1b", uniform(4), 2).recomputing_nothing().memory is None


# --- which plan is better --------------------------------------------------------------------------------------

SETTING = Setting(1, 1, "all", 1, ())


def outcome(pace=0.0, misfit=1.0):
    """An outcome that fits if it is at most once the limit."""
    return Outcome(pace, 0.0, (), 0, 0, misfit)


def tried(pace=0.0, misfit=1.0):
    return Tried(SETTING, symmetric((1, 1)), outcome(pace, misfit))


def test_the_size_of_microbatches_leaves_one_to_thirty_two_for_a_device_by_twos():
    assert default_microbatches(64, 8) == (1, 2, 4, 8)
    assert default_microbatches(64, 1) == (2, 4, 8, 16, 32, 64)
    assert default_microbatches(5, 8) == (1,)
    assert default_microbatches(24, 1) == (1, 2, 4, 8, 24)  # not 3, 6 or 12: less than twice the one before


def test_microbatches_that_devices_share_evenly_have_sizes_of_their_own():
    assert default_microbatches(12, 4) == (1, 2, 3)  # 12, 6 and 4 microbatches
    assert default_microbatches(12, 2) == (1, 2, 4, 6)
    assert default_microbatches(1000, 2) == (20, 40, 50, 100, 200, 250, 500)


def test_a_step_of_a_device_that_runs_all_stages_is_its_part_of_the_microbatches():
    """Six layers of 1, 1 and 2 and a head of 2 + 4, for 8 microbatches on 2 devices."""
    problem = small("1f1b", uniform(6, head=2.0), 2, num_microbatches=8)
    assert _turn(problem, 6) == (6 * 4 + 6) * 8 / 2
    assert _turn(problem, 0) == (6 * 3 + 6) * 8 / 2


def test_a_stage_keeps_as_many_of_its_layers_as_its_bytes_allow():
    """Layers take 5 s, 2 s of them recomputation; 3 bytes stay of each, 4 more of a kept one; there are 20 bytes."""
    none = np.zeros(1)
    rows = [Limit(np.array([5.0]), np.array([-2.0]), 1.0)]
    rows += [Limit(np.array([3.0]), each, 0.0, room=20.0) for each in (none, np.array([4.0]))]
    (own, below), *others = _times_of(rows, 0, True, np.arange(9))
    assert not others
    assert own.tolist() == [1, 4, 7, 12, 17, 24, 31, np.inf, np.inf]  # kept: 0, 1, 2, 2, 2, 1, 0, and no room
    assert below.tolist() == [0] * 9
    (own, _), *_ = _times_of(rows, 0, False, np.arange(4))
    assert own.tolist() == [1, 6, 11, 16]


# --- restarts --------------------------------------------------------------------------------------------------


@dataclass
class Searching:
    """A search that spends what it is given, and whose pace grows by a share with every climb."""

    grows: float = 0.0
    refuses: bool = False
    ends_after: int = 1000
    pace: float = 100.0
    gap: float = 1.0
    budget: Budget = field(default_factory=lambda: Budget(100))
    space: Space = field(default_factory=lambda: Space({"microbatch_sequences": (1, 2), "chunks_per_device": (1, 2),
                                                        "recompute": ("all", "none"), "prefetch": (1,)}))  # fmt: skip
    work: int = 100
    begun: list = field(default_factory=list)
    climbs: list = field(default_factory=list)

    def time_is_over(self):
        return len(self.begun) + len(self.climbs) >= self.ends_after

    def close(self):
        return [Tried(SETTING, symmetric((3, 3, 3)), outcome(self.pace))]

    def best_pace(self):
        return self.pace

    def plan(self):
        return SimpleNamespace(gap=self.gap)

    def begin_at(self, setting, work):
        self.begun.append((setting, work))
        if not self.refuses:
            self._spend(work)

    def climb_from(self, setting, cut, work):
        assert setting == SETTING
        self.climbs.append((cut, work))
        self._spend(work)

    def _spend(self, work):
        self.work += work
        self.pace *= 1 + self.grows


def test_half_of_the_restarts_begin_at_random_settings_and_half_at_moved_layers():
    search = Searching()
    found = restart(search, 8)
    assert (found.number, found.gain) == (8, 0)  # nothing was gained: there is no second round
    assert (len(search.begun), len(search.climbs)) == (4, 4)
    for setting, _ in search.begun:
        assert setting.prefetch == 1
        assert setting.microbatch_sequences in (1, 2)
    assert len({setting for setting, _ in search.begun}) > 1
    for cut, _ in search.climbs:
        moved = sum(abs(n - 3) for n in cut.forward)
        assert sum(cut.forward) == 9
        assert moved <= 2 * 5  # two to five layers, each by one stage
    assert any(cut.forward != (3, 3, 3) for cut, _ in search.climbs)


def test_restarts_go_on_while_a_round_gains_and_spend_six_tenths_more_than_the_search():
    search = Searching(grows=0.01)
    found = restart(search, 8)
    assert found.number == 16
    assert found.gain > 0.005
    assert search.work <= 160
    assert all(work <= 10 for _, work in (*search.begun, *search.climbs))  # a tenth of the budget each at most
    slow = restart(Searching(grows=0.0001), 8)
    assert slow.number == 8  # less than half a percent


def test_a_random_setting_that_is_refused_is_replaced_by_moved_layers():
    search = Searching(refuses=True)
    assert restart(search, 4).number == 4
    assert (len(search.begun), len(search.climbs)) == (2, 4)


def test_restarts_end_with_time_with_the_work_and_where_nothing_fits():
    assert restart(Searching(ends_after=3), 8) == (3, None)
    assert restart(Searching(work=161), 8) == (0, None)
    assert restart(Searching(pace=0.0), 8) == (0, None)
    assert restart(Searching(), 0) == (0, None)
    assert restart(Searching(gap=0.004), 8) == (0, None), "a bound says that no restart gains more than 0.5 %"


def test_a_climb_ends_when_no_shifted_cut_is_better_and_takes_each_that_is():
    """A pace that falls with the distance from (1, 4, 1): from (2, 2, 2) two layers move."""
    looked = []

    def recut(_, cut):
        looked.append(cut.forward)
        return Tried(SETTING, cut, outcome(10.0 - sum(abs(a - b) for a, b in zip(cut.forward, (1, 4, 1), strict=True))))

    begun = Tried(SETTING, symmetric((2, 2, 2)), outcome(6.0))
    assert climbed(begun, recut, lambda: False).partition.forward == (1, 4, 1)
    assert len(looked) >= len(list(shifted(symmetric((1, 4, 1)))))  # all were looked at before it ended
    looked.clear()
    best = Tried(SETTING, symmetric((1, 4, 1)), outcome(10.0))
    assert climbed(best, recut, lambda: False) is best
    assert sorted(looked) == sorted(cut.forward for cut in shifted(symmetric((1, 4, 1))))
    assert climbed(begun, recut, lambda: True) is begun
    assert climbed(begun, lambda *_: None, lambda: False) is begun
    far = climbed(Tried(SETTING, symmetric((3, 2, 1)), outcome(4.0)), recut, lambda: False, far=True)
    assert far.partition.forward in ((2, 2, 2), (1, 2, 3), (3, 2, 1))  # only the ends trade


def test_a_climb_looks_at_all_neighbours_of_many_stages():
    """129 boundaries, and the one layer that is worth moving is the last."""
    begun, wanted = Tried(SETTING, symmetric((1,) * 130), outcome(1.0)), (1,) * 128 + (2, 0)
    found = climbed(begun, lambda _, cut: Tried(SETTING, cut, outcome(1.0 + (cut.forward == wanted))), lambda: False)
    assert found.partition.forward == wanted


def test_what_fits_beats_what_does_not_and_what_lacks_less_what_lacks_more():
    slow, fast, misfit, worse = tried(1.0), tried(2.0), tried(9.0, 1.5), tried(9.0, 1.75)
    none = Tried(SETTING)
    order = [none, worse, misfit, slow, fast]
    for low, high in product(range(5), range(5)):
        assert beats(order[high], order[low]) == (high > low)
    assert rank(slow.outcome) == 1 > rank(misfit.outcome) == -1.5
    assert not beats(tried(1.00005), tried(1.0))  # rounding
    assert beats(tried(1.001), tried(1.0))


def test_leaders_are_the_best_so_many_within_a_share_of_the_best():
    plans = [tried(pace) for pace in (90.0, 100.0, 99.0, 97.0)]
    assert leaders(plans, 3, 0.02) == [plans[1], plans[2]]
    assert leaders(plans, 1, 0.5) == [plans[1]]
    assert leaders(plans, 9, 0.5) == [plans[1], plans[2], plans[3], plans[0]]


def test_a_gap_is_what_the_bound_leaves_over_the_pace():
    plan = Tuned(contender("1f1b"), SETTING, symmetric((1, 1)), outcome(80.0), (), Budget(), 1, 1, 1, 3, bound=100.0)
    assert plan.gap == pytest.approx(0.25)
    assert replace(plan, bound=79.0).gap == 0
    assert replace(plan, bound=inf).gap == inf
    with pytest.raises(ValueError, match="at least 1 each"):
        Budget(0)
    with pytest.raises(ValueError, match="at least 1 each"):
        Budget(1, 0)


# --- spaces ----------------------------------------------------------------------------------------------------


def test_every_change_of_a_space_differs_in_one_dimension():
    space = Space({"microbatch_sequences": (1, 2, 4), "recompute": ("all", "none"), "chunks_per_device": (1,),
                   "prefetch": (1,), "schedule.size": (8, 16)}, (("other", 3),))  # fmt: skip
    first = space.first
    assert first == Setting(1, 1, "all", 1, (("size", 8), ("other", 3)))
    found = list(space.changes(first))
    assert [name for name, _ in found] == ["microbatch_sequences"] * 2 + ["recompute", "schedule.size"]
    for name, setting in found:
        assert setting.changed(name, first.value(name)) == first
    begun = space.beginning_at(first.changed("microbatch_sequences", 4))
    assert begun.dimensions["microbatch_sequences"] == (4, 1, 2)
    assert space.restricted(recompute=("none",)).first.recompute == "none"


def test_the_usual_microbatch_is_that_of_which_two_come_to_a_device():
    case = small_terms(sequences_per_step=16, microbatches=(1, 2, 4, 8))
    assert space_of(contender("1f1b"), case).dimensions["microbatch_sequences"][0] == 4


@pytest.mark.parametrize(
    "name, layers, chunks",
    [("1f1b", 8, {1}), ("interleaved_1f1b", 8, {1, 2, 3, 4}), ("zb_v", 8, {2}), ("interleaved_1f1b", 23, None)],
)
def test_stages_on_a_device_go_up_to_a_layer_each_with_the_head_alone(name, layers, chunks):
    """On two devices; above four in steps of a half."""
    found = space_of(contender(name), small_terms(num_layers=layers)).dimensions["chunks_per_device"]
    assert set(found) == (chunks or {1, 2, 3, 4, 6, 9})
    assert [abs(each - 2) for each in found] == sorted(abs(each - 2) for each in found)  # the usual two first
