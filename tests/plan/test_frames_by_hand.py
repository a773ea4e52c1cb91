"""What a cut of a small pipeline takes and holds, and what a sketch and single changes say of it, by hand."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from contest_terms import small
from contest_terms import terms as terms_of_figure_10
from single_changes import every_change, improvements

from rpbench.cost.footprint.sizes import LayerSize, ModelBytes, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.published import published_times
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import OptimizerTraffic
from rpbench.ir.partition import symmetric
from rpbench.plan.contest import frame as frame_of
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.frame import Frames, posed
from rpbench.plan.contest.plans import Budget, Tuned
from rpbench.plan.contest.search import Search
from rpbench.plan.contest.sketch import Sketcher
from rpbench.plan.contest.terms import Limits
from rpbench.sim import metrics

F, R, B, LAYERS, M = 1.0, 1.0, 2.5, 6, 8
NOTHING = LayerSize(0, 0, 0)
EVEN = symmetric((3, 3))


def terms(limit=None, *, each=lambda size: size, sizes=None, head=0.0, units=1, **changes):
    """Six equal layers on two devices that share nothing, eight sequences a step; a layer takes 1, 1 and 2.5 s of each.

    Args:
        each: how many times as long a microbatch of so many sequences takes.
    """

    def timed(size):
        return LayerTimes(
            *([part * each(size)] * LAYERS for part in (F, R, B)),
            head * each(size),
            head * each(size),
            units_per_second=units,
        )

    def sized(size):
        layer = LayerSize(10, 10, 60, activations=round(100 * size))
        return sizes or ModelBytes((layer,) * LAYERS, NOTHING, NOTHING, 0, 0, 0)

    given = {
        "timed": timed,
        "sized": sized,
        "optimizer": OptimizerTraffic(0, 1, inf),
        "cluster": Machine("free", 2),
        "limits": Limits(limit),
    }
    return replace(small(sequences_per_step=M, microbatches=(1,)), **given, **changes)


def setting_of(case, name="1f1b", **changes):
    found = space_of(contender(name), case).first
    for dimension, value in changes.items():
        found = found.changed(dimension, value)
    return found


def outcome(case, cut=EVEN, recompute="none", name="1f1b"):
    frames, at = Frames(contender(name), case), setting_of(case, name, recompute=recompute)
    return frames.of(at, cut, 3).outcome(cut, recompute)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("recompute, layer", [("none", F + B), ("all", F + R + B)])
def test_a_pipeline_of_segments_fills_with_one_of_them(segments, recompute, layer):
    """(p - 1)(F + B) / k of bubble; a segment takes 0.1 + 1 / k of a microbatch here, not 1 / k."""
    case = terms(each=lambda size: 0.1 + size)
    at = setting_of(case, "seq1f1b", recompute=recompute).changed("schedule.num_segments", segments)
    found = Frames(contender("seq1f1b"), case).of(at, EVEN, 3).outcome(EVEN, recompute)
    assert found.step_time_s == pytest.approx((M * segments + 1) * 3 * layer * (0.1 + 1 / segments))


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_the_first_device_keeps_the_activations_of_p_plus_k_minus_1_segments(segments):
    """A (p + k - 1) / k, of three layers; weights, gradients and optimizer state besides."""
    at = setting_of(terms(), "seq1f1b", recompute="none").changed("schedule.num_segments", segments)
    found = Frames(contender("seq1f1b"), terms()).of(at, EVEN, 3).outcome(EVEN, "none")
    assert found.peak_bytes == 3 * (10 + 10 + 60) + 3 * 100 * (2 + segments - 1) / segments


@pytest.mark.parametrize("recompute, layer", [("none", F + B), ("all", F + R + B)])
def test_an_even_pipeline_takes_m_plus_p_minus_1_stages(recompute, layer):
    found = outcome(terms(), recompute=recompute)
    assert found.step_time_s == pytest.approx((M + 1) * 3 * layer)
    assert found.tokens_per_s == pytest.approx(M * 1024 / found.step_time_s)
    assert found.fits
    one_left = outcome(terms(), symmetric((1, 5)), recompute)  # the larger stage is busy, the other one fills it
    assert one_left.step_time_s == pytest.approx((M * 5 + 1) * layer)


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_steps_that_do_not_overlap_take_the_same_however_many_there_are(num_steps):
    case = terms()
    frame = Frames(contender("1f1b"), case).of(setting_of(case, recompute="none"), EVEN, num_steps)
    assert frame.outcome(EVEN, "none").step_time_s == pytest.approx((M + 1) * 3 * (F + B))


def test_the_pace_of_two_steps_is_the_second_and_of_more_the_middle_ones(monkeypatch):
    """What is loaded before the first step is no part of the pace. Ten units are a second."""
    case = terms(units=10)
    alone = (M + 1) * 3 * (F + B) / 10
    for num_steps, ends, pace in ((2, [9, 16], 0.7), (3, [9, 16, 21], 0.5), (1, [9], alone)):
        frame = Frames(contender("1f1b"), case).of(setting_of(case, recompute="none"), EVEN, num_steps)
        for module in (frame_of, metrics):
            monkeypatch.setattr(module, "step_ends", lambda graph, timeline, ends=ends: np.array(ends, float))
        assert frame.paced(frame.costs(EVEN, (3, 3))) == pytest.approx(pace)


@pytest.mark.parametrize(
    "asked, overlaps, posed, few, searching, ended",
    [
        (4, False, False, False, 2, 4),
        (1, False, False, False, 1, 1),
        (4, True, False, False, 6, 6),
        (4, True, False, True, 12, 12),  # four microbatches a step on eight devices
        (4, False, False, True, 2, 4),
        (9, True, False, False, 9, 9),
        (4, True, True, True, 4, 4),
    ],
)
def test_two_steps_are_timed_while_searching_and_of_steps_that_overlap_six_at_least(
    asked, overlaps, posed, few, searching, ended
):
    search = SimpleNamespace(
        terms=replace(terms_of_figure_10(num_steps=max(3, asked)), problem="posed" if posed else None),
        sketcher=SimpleNamespace(overlaps=lambda setting: overlaps),
    )
    object.__setattr__(search.terms, "num_steps", asked)
    at = SimpleNamespace(microbatch_sequences=16 if few else 8)
    assert [Search._num_steps(search, at, all_steps=each) for each in (False, True)] == [searching, ended]


def test_the_last_stage_alone_may_keep_its_activations():
    """The first one runs all again, and waits for the last one's F and B before its first B, two forwards ahead."""
    found = outcome(terms(), recompute="except_last")
    assert found.keeps == (0, 3)
    first, waits = 3 * (F + R + B), 3 * (F + B) - 3 * F
    assert found.step_time_s == pytest.approx(M * first + waits)


def test_a_cut_fits_into_the_bytes_of_its_fullest_device():
    """80 bytes of a layer's states; of its activations two microbatches on the first device, one on the last."""
    assert outcome(terms()).peak_bytes == 3 * 80 + 2 * 3 * 100
    assert outcome(terms(), recompute="all").peak_bytes == 3 * 80 + 3 * 100
    assert outcome(terms(), symmetric((1, 5))).peak_bytes == 5 * 80 + 5 * 100
    assert outcome(terms(840)).misfit == 1
    lacking = outcome(terms(420))
    assert lacking.misfit == pytest.approx(2)
    assert not lacking.fits
    assert outcome(replace(terms(), limits=Limits(None, 1))).fits  # nothing is on the host


@pytest.mark.parametrize(
    "limit, keeps", [(840, (3, 3)), (839, (2, 3)), (740, (2, 3)), (739, (1, 3)), (540, (0, 3)), (539, (0, 0))]
)
def test_as_few_layers_run_again_as_fit_those_of_the_last_stage_first(limit, keeps):
    """A kept layer takes 100 bytes for each of two microbatches on the first device, less 100 made again."""
    found = outcome(terms(limit), recompute="fitting")
    assert found.keeps == keeps
    assert found.fits == (limit >= 540)


def test_memory_says_what_the_fullest_device_holds():
    case = terms()
    frame = Frames(contender("1f1b"), case).of(setting_of(case), EVEN, 3)
    assert frame.memory(EVEN, (3, 3), "fitting") == {
        "weights": 30,
        "gradients": 30,
        "optimizer state": 180,
        "activations": 600,
    }
    assert frame.memory(EVEN, (), "all") == {
        "weights": 30, "gradients": 30, "optimizer state": 180, "recomputed activations": 300
    }  # fmt: skip
    assert frame.least_bytes == 3 * 80
    frozen, trained = LayerSize(1000, 0, 0, activations=1), LayerSize(10, 10, 60, activations=100)
    case = terms(sizes=ModelBytes((frozen,) * 3 + (trained,) * 3, NOTHING, NOTHING, 0, 0, 0))
    frame = Frames(contender("1f1b"), case).of(setting_of(case), EVEN, 3)
    assert frame.memory(EVEN, (3, 3), "fitting") == {"weights": 3000, "activations": 2 * 3 * 1}  # the other holds 540


def test_full_devices_give_layers_away_until_they_lack_nothing():
    """Where all is made again a device of n layers holds 180 n bytes."""
    case = terms(3 * 180)
    frame = Frames(contender("1f1b"), case).of(setting_of(case), EVEN, 3)
    assert frame.emptier(symmetric((1, 5)), "all") == EVEN
    assert frame.emptier(symmetric((6, 0)), "all") == EVEN
    assert frame.emptier(EVEN, "all") == EVEN
    roomy = Frames(contender("1f1b"), terms(10**6)).of(setting_of(case), EVEN, 3)
    assert roomy.emptier(symmetric((1, 5)), "all") == symmetric((1, 5))
    free = Frames(contender("1f1b"), terms()).of(setting_of(case), EVEN, 3)
    assert free.emptier(symmetric((1, 5)), "all") == symmetric((1, 5))


def test_frames_are_made_once_for_all_cuts_into_as_many_stages():
    case, who = terms(), contender("interleaved_1f1b")
    frames, at = Frames(who, case), setting_of(case, "interleaved_1f1b", chunks_per_device=2)
    cuts = [symmetric((2, 1, 2, 1)), symmetric((1, 2, 1, 2))]
    assert not frames.has(at, cuts[0], 3)
    made = frames.of(at, cuts[0], 3)
    assert frames.of(at, cuts[1], 3) is made
    assert frames.of(at.changed("recompute", "all"), cuts[1], 3) is made  # what runs again is not in the order
    assert frames.has(at, cuts[1], 3)
    assert not frames.has(at, cuts[1], 2)
    assert not frames.has(at, EVEN, 3)
    other = frames.of(at.changed("chunks_per_device", 1), EVEN, 3)
    assert (other is made, frames.num_made) == (False, 2)
    frames.keep_only(at, cuts[0], 3)
    assert frames.of(at, cuts[0], 3) is made
    assert not frames.has(at.changed("chunks_per_device", 1), EVEN, 3)


def test_frames_that_make_room_are_made_again_and_change_no_search(monkeypatch):
    case, who = terms(), contender("interleaved_1f1b")
    found, kept = [], []
    for most in (10**9, 1):
        monkeypatch.setattr(frame_of, "MOST_ACTIONS", most)
        search = Search(who, case, Budget(60, 20_000))
        search.look()
        best = search.finish(None)
        found.append((best, search.work, search.frames.num_made, list(search.tried)))
        kept.append(len(search.frames._known))
    assert found[0] == found[1]
    assert kept[0] > kept[1] == 1


# --- sketches --------------------------------------------------------------------------------------------------


def test_a_sketch_has_the_best_cut_and_its_pace():
    case = terms()
    sketcher, setting = Sketcher(contender("1f1b"), case, 5_000), setting_of(case, recompute="none")
    found = sketcher.of(setting)
    assert found.cuts[0] == EVEN
    assert found.tokens_per_s == pytest.approx(M * 1024 / ((M + 1) * 3 * (F + B)))
    assert (found.is_level, sketcher.overlaps(setting), found.moves) == (False, False, False)
    ticks = terms(units=1000)
    quicker = Sketcher(contender("1f1b"), ticks, 1_000).of(setting_of(ticks, recompute="none"))
    assert quicker.tokens_per_s == pytest.approx(1000 * found.tokens_per_s)
    uneven = terms(head=2.0)  # the head is worth more than a layer: the last stage has one less
    best = Sketcher(contender("1f1b"), uneven, 5_000).of(setting_of(uneven, recompute="none"))
    assert best.cuts[0] == symmetric((4, 2))
    # The first device works M times 14 s. Before its first B it waits 4 + 7 - 4 s, before its last one 4 + 7 - 10.
    assert best.tokens_per_s == pytest.approx(M * 1024 / (M * 14 + 7 + 1))


def test_a_sketch_of_steps_that_overlap_leaves_the_filling_out():
    """PipeDream's devices are never idle between steps."""
    case = terms()
    at = setting_of(case, "pipedream", recompute="all")
    sketcher = Sketcher(contender("pipedream"), case, 5_000)
    found = sketcher.of(at)
    assert sketcher.overlaps(at)
    assert found.tokens_per_s == pytest.approx(M * 1024 / (M * 3 * (F + R + B)), rel=1e-3)


@pytest.mark.parametrize("limit", [1_600_000_000, 1_700_000_000])
def test_a_sketch_of_steps_that_overlap_recomputes_alike_in_all_of_them(limit):
    """PipeDream-2BW's first step alone needs less memory, and would recompute less than it does in a row."""
    case, who = small(limit, num_layers=12, num_devices=4, num_steps=6), contender("pipedream_2bw")
    at = space_of(who, case).first.changed("recompute", "fitting")
    sketcher = Sketcher(who, case, 5_000)
    found = sketcher.of(at)
    ends = []
    for num_steps in (2, 3, 4):
        problem = replace(posed(who, at, case, 1), num_steps=num_steps)
        order = sketcher._order(at, problem, (4, 4))
        ends.append(sketcher._climb(at, problem, found.cuts[:1], order).best_score)
    steady = 1024 * 8 * problem.times.units_per_second / (ends[2] - ends[1])
    assert ends[1] - ends[0] == pytest.approx(ends[2] - ends[1])
    assert found.tokens_per_s == pytest.approx(steady)


def test_all_cuts_of_replicas_compute_alike():
    """Each of two devices runs all layers of half of the microbatches."""
    case = terms()
    for recompute, layer in (("all", F + R + B), ("none", F + B)):
        found = Sketcher(contender("zero_2"), case, 1_000).of(setting_of(case, "zero_2", recompute=recompute))
        assert found.is_level
        assert found.tokens_per_s == pytest.approx(M * 1024 / (M / 2 * 6 * layer))


def test_what_fits_nowhere_or_cannot_be_built_has_no_pace():
    case = terms(100)
    sketcher = Sketcher(contender("1f1b"), case, 1_000)
    assert sketcher.pace(setting_of(case, recompute="all")) == 0
    roomy = Sketcher(contender("1f1b"), terms(), 1_000)
    assert not roomy.knows(setting_of(case))
    assert roomy.pace(setting_of(case)) > 0
    assert roomy.knows(setting_of(case).changed("prefetch", 2))  # what comes ahead is nothing to computation
    over = Sketcher(contender("1f1b"), terms(), 1_000, is_over=lambda: True)
    assert over.pace(setting_of(case)) == 0


def test_sizes_are_tried_as_long_as_they_get_faster_the_smaller_ones_first():
    """Of 1, 2, 4 and 8 sequences two are the quickest: those beyond what is slower are not looked at."""
    slow = {1: 3.0, 2: 2.0, 4: 8.0, 8: 99.0}
    case = terms(each=slow.__getitem__, microbatches=(1, 2, 4, 8))
    space = space_of(contender("1f1b"), case)
    sketcher = Sketcher(contender("1f1b"), case, 5_000)
    at = setting_of(case, recompute="none", microbatch_sequences=4)
    assert [each.microbatch_sequences for each in sketcher.by_promise(at, space)] == [2, 1]
    assert not sketcher.knows(at.changed("microbatch_sequences", 8))
    assert sketcher.first_size(at, space).microbatch_sequences == 2
    small_first = at.changed("microbatch_sequences", 2)
    assert sketcher.first_size(small_first, space) == small_first


def test_a_boundary_tensor_goes_over_the_host_where_devices_have_no_link():
    sizes = ModelBytes((LayerSize(1, 1, 6),) * LAYERS, NOTHING, NOTHING, boundary=40, logits=0, logits_chunk=0)
    figures = {"host_to_device_bytes_per_s": 8.0, "device_to_host_bytes_per_s": 4.0, "transfer_latency_s": 0.5}
    plain = replace(terms(sizes=sizes), cluster=Machine("x", 2, **figures))
    joined = replace(plain, cluster=replace(plain.cluster, intra_bytes_per_s=10.0))
    for case, streamed, seconds in ((plain, False, 16), (joined, False, 4.5), (joined, True, 16)):
        assert Sketcher(contender("1f1b"), case, 1)._hop(setting_of(case), streamed=streamed) == pytest.approx(seconds)


def test_published_times_come_with_the_sizes_that_figure_2_counts_and_counted_ones_with_those_of_the_software():
    published, counted = terms_of_figure_10(), small()
    assert published.sizes(4) == model_bytes(published.model, 4 * published.model.seq_len)
    assert published.times(4).forward == published_times("qwen3-1.7b").forward
    assert published.optimizer.beside_s == 0
    assert counted.optimizer.beside_s > 0  # what Megatron's step takes beside its parameters
    assert counted.sizes(1) != model_bytes(counted.model, counted.model.seq_len)
    assert counted.sizes(1).summed_bytes == 4  # Megatron's gradients add up in 32 bits


# --- single changes --------------------------------------------------------------------------------------------


def plan_of(case, cut, **changes):
    at = setting_of(case, **changes)
    found = Frames(contender("1f1b"), case).of(at, cut, 3).outcome(cut, at.recompute)
    return Tuned(contender("1f1b"), at, cut, found, (), Budget(60, 10_000), 0, 0, 0, 3)


def test_every_change_of_a_plan_is_timed_and_the_best_first():
    """From (2, 4) with all made again: a layer up helps, and so does what is kept."""
    case = terms()
    plan = plan_of(case, symmetric((2, 4)), recompute="all")
    found = {(change.dimension, change.setting.recompute, change.partition.forward): change.gain
             for change in every_change(plan, case)}  # fmt: skip
    before = (M * 4 + 2) * (F + R + B)
    assert found["partition", "all", (3, 3)] == pytest.approx(before / ((M + 1) * 3 * (F + R + B)) - 1)
    assert found["partition", "all", (1, 5)] == pytest.approx(before / ((M * 5 + 1) * (F + R + B)) - 1)
    assert found["recompute", "none", (3, 3)] == pytest.approx(before / ((M + 1) * 3 * (F + B)) - 1)
    better = improvements(plan, case)
    gains = [change.gain for change in better]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0.01
    assert better[0].setting.recompute in ("none", "fitting")
    assert all(change.dimension != "partition" for change in every_change(plan, case, cuts=False))


def test_a_change_that_does_not_fit_brings_nothing():
    case = terms(540)
    plan = plan_of(case, EVEN, recompute="all")
    gains = {change.setting.recompute: change.gain for change in every_change(plan, case, cuts=False)}
    assert gains["none"] == -1
    assert gains["except_last"] > 0
