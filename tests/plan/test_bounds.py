"""Bounds: no plan of a small space exceeds them, by every setting and cut; what a search prints as its gap holds."""

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from contest_terms import read, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpbench.cost.hardware.basis import make_basis
from rpbench.ir.partition import symmetric
from rpbench.mesh.plan_search.terms import terms_of
from rpbench.passes.recomputation import RECOMPUTES
from rpbench.plan.climb import Climb, Tally
from rpbench.plan.contest.bounds import Bounds
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.frame import Frame, Frames, posed
from rpbench.plan.contest.plans import rank
from rpbench.plan.contest.search import tune
from rpbench.plan.contest.sketch import Sketcher
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.plan.linear import prices
from rpbench.run.scheduled import why_not

# Pipelines of one and several stages a device, split backwards, a V, shared weights, weights on the host.
NAMES = ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "looped_bfs", "dualpipe_v", "zb_v", "gis", "zero_2", "zero_3")
NAMES += ("data_parallel", "two_bp", "zb_h2")


def cuts(num_layers, num_stages):
    """Every cut of so many layers."""
    for ends in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        yield symmetric(tuple(np.diff((0, *ends, num_layers)).tolist()))


def every_plan(frames, of=Frame.outcome):
    """Every setting with every cut, timed with all steps; or what else is asked of each frame."""
    case = frames.terms
    space = space_of(frames.contender, case)
    for values in product(*space.dimensions.values()):
        setting = space.first
        for dimension, value in zip(space.dimensions, values, strict=True):
            setting = setting.changed(dimension, value)
        for cut in cuts(case.model.num_layers, setting.chunks_per_device * case.num_devices):
            try:
                yield of(frames.of(setting, cut, case.num_steps), cut, setting.recompute)
            except ValueError:
                break


def peak_of(frame, cut, recompute):
    """Bytes of the fullest device, without a timeline."""
    frame.check(recompute)
    return sum(frame.memory(cut, frame.keeps(cut, recompute), recompute).values())


@st.composite
def cases(draw):
    """A contender, and terms of two or three devices with room for everything, or for less."""
    name, num_devices = draw(st.sampled_from(NAMES)), draw(st.sampled_from((2, 2, 3)))
    layers = draw(st.integers(num_devices, 5 if num_devices == 2 else 4))
    case = small(num_devices=num_devices, sequences_per_step=4 * num_devices, num_steps=3)
    sizes = {"hidden": 512 * draw(st.integers(1, 4)), "vocab": draw(st.sampled_from((2_000, 32_000)))}
    case = small_of(case, layers, sizes)
    return name, case, draw(st.sampled_from((None, 1.0, 0.8, 0.6, 0.4)))


def small_of(case, layers, sizes):
    """The same terms of another model."""
    costs, model = read("cost/analytic.yaml"), replace(case.model, num_layers=layers, **sizes)
    basis = make_basis(case.cluster, costs["constants"], costs["declared"])
    given = {
        "num_devices": case.num_devices,
        "sequences_per_step": case.sequences_per_step,
        "num_steps": case.num_steps,
    }
    return terms_of(model, case.cluster, basis, microbatches=(1, 2), limits=case.limits, **given)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_best_of_every_setting_and_cut_is_met_within_the_printed_gap(drawn):
    check(*drawn)


@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_the_same_of_many_more(drawn):
    check(*drawn)


@pytest.mark.parametrize("name", ["1f1b", "gis", "hanayo", "zero_2", "pipe_offload"])
@pytest.mark.parametrize("limit", [None, 2_500_000_000])
def test_the_bound_of_a_contender_is_that_of_its_best_setting(name, limit):
    """Settings whose loose bound is no better are not asked for their own: that one exceeds no loose bound."""
    case, who = small(limit, sequences_per_step=16), contender(name)
    bounds = Bounds(who, case, space_of(who, case))
    found = bounds.best_pace(lambda: False)
    every = list(bounds.settings())
    assert found == max(map(bounds.pace, every))
    assert all(bounds.pace(each) <= bounds.loose_pace(each) for each in every)
    assert bounds.best_pace(lambda: True) == max(map(bounds.loose_pace, every))


def test_a_plan_two_changes_away_is_found():
    """Larger microbatches fit with one stage a device alone, and one stage a device is slower with small ones."""
    case = small(num_devices=3, sequences_per_step=12, num_steps=3)
    check("gis", small_of(case, 4, {"hidden": 2048, "vocab": 32_000}), 0.8)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "looped_bfs"])
def test_a_sketch_promises_no_less_than_timelines_give(name):
    """It has the same order and the same hops, links that nobody shares, and no optimizer."""
    who, case = contender(name), small()
    for size in case.microbatches:
        at = space_of(who, case).first.changed("microbatch_sequences", size).changed("recompute", "none")
        sketch = Sketcher(who, case, 100_000).of(at)
        timed = [Frames(who, case).of(at, cut, case.num_steps).outcome(cut, "none") for cut in sketch.cuts]
        assert sketch.tokens_per_s >= max(each.tokens_per_s for each in timed) * (1 - 1e-6)


def test_the_best_plain_cut_is_among_those_of_a_sketch_where_orders_follow_from_times():
    """Seven layers on three devices: with the order that is made for the first plain cut, the best one is slower."""
    who = contender("zb_auto")
    case = small_of(small(num_devices=3, sequences_per_step=12, num_steps=3), 7, {"hidden": 1024, "vocab": 32_000})
    at = space_of(who, case).first.changed("recompute", "all")
    frames, problem = Frames(who, case), posed(who, at, case, 1)
    paces = {cut: frames.of(at, cut, 3).outcome(cut, "all").tokens_per_s for cut in plain_partitions(problem, (3, 3))}
    assert max(paces, key=paces.get) in Sketcher(who, case, 1_000_000).of(at).cuts


def test_a_sketch_finds_a_better_pair_of_stage_numbers_than_that_of_the_best_plain_cut():
    """Where it has to find the pair alone: with a time limit."""
    case, who = small(num_devices=3, sequences_per_step=9, num_layers=12, microbatches=(1,)), contender("roundpipe")
    at = space_of(who, case).first
    sketcher, problem = Sketcher(who, case, 100_000, is_over=lambda: False), posed(who, at, case, 1)
    cuts = [cuts for counts in promising_counts(problem)[:12] if (cuts := plain_partitions(problem, counts))]
    alone = min((Climb(problem, each, Tally()) for each in cuts), key=lambda climb: climb.best_score)
    alone.run(12_000_000)
    assert sketcher.of(at).tokens_per_s > 1.01 * sketcher._pace(problem, alone.best_score)


def test_sketches_choose_the_microbatch_size_where_directions_are_cut_apart_and_time_is_short():
    case, who = small(num_devices=3, sequences_per_step=9, num_layers=12, microbatches=(1, 3)), contender("roundpipe")
    space, over = space_of(who, case), lambda: False
    found = Sketcher(who, case, 100_000, is_over=over).first_size(space.first, space)
    other = next(changed for dimension, changed in space.changes(space.first) if dimension == "microbatch_sequences")
    sketcher = Sketcher(who, case, 100_000, is_over=over)
    assert found == other
    assert sketcher.pace(other) > 1.05 * sketcher.pace(space.first)


def test_where_times_choose_the_devices_of_stages_no_device_is_bounded_by_those_of_one_order():
    """In waves both ends of a model are on one device, where a tied matrix counts once."""
    who, given = contender("adaptis"), {"hidden": 1024, "vocab": 128_000, "tied": True}
    case = small_of(small(10**12, sequences_per_step=4), 3, given)
    peaks = every_plan(Frames(who, case), peak_of)
    assert 0 < Bounds(who, case, space_of(who, case)).least_bytes(1) <= min(peaks)


def test_a_sketch_without_time_has_cuts_and_is_made_again_once_there_is_time():
    case, over = small(), True
    at = space_of(contender("zb_auto"), case).first
    sketcher = Sketcher(contender("zb_auto"), case, 1_000_000, is_over=lambda: over)
    hasty = sketcher.of(at)
    few = sketcher.tally.num_evaluated
    assert hasty.cuts
    assert sketcher.of(at) is hasty
    over = False
    whole = Sketcher(contender("zb_auto"), case, 1_000_000)
    assert sketcher.of(at) == whole.of(at)
    assert few < whole.tally.num_evaluated
    assert sketcher.of(at) is sketcher.of(at)


@pytest.mark.parametrize(
    "name, num_layers, sequences, last, speeds",
    [("zb_h1", 5, 8, 8, None), ("1f1b", 5, 8, 1, (4.0, 1.0)), ("1f1b", 4, 32, 1, None)],
    ids=["one layer takes eight times as long", "the first device is four times as fast", "the bubble is small"],
)
def test_the_best_plan_is_bounded_by_the_quickest_layer_the_devices_and_no_recomputation(
    name, num_layers, sequences, last, speeds
):
    case = small_of(small(sequences_per_step=sequences), num_layers, {"hidden": 2048, "vocab": 2_000})

    def uneven(sequences):
        times = case.timed(sequences)
        names = ("forward", "recompute", "backward", "input_grad", "weight_grad")
        return replace(times, **{each: (*getattr(times, each)[:-1], last * getattr(times, each)[-1]) for each in names})

    check(name, replace(case, cluster=replace(case.cluster, device_speeds=speeds), timed=uneven), None)


def check(name, case, share):
    """Every plan against the bounds, and the found one against every plan."""
    who = contender(name)
    frames = Frames(who, case)
    if share is not None and (peaks := list(every_plan(frames, peak_of))):
        limit = int(share * float(np.median(peaks)))
        case = replace(case, limits=replace(case.limits, device_memory_bytes=limit))
        frames = frames.under(case)
    known = list(every_plan(frames))
    if not known:
        return
    best = max(known, key=rank)
    plan = tune(who, case)
    if not best.fits:
        assert not plan.outcome.fits
        return
    assert plan.outcome.fits, f"{name}: one fits"
    bounds = Bounds(who, case, space_of(who, case))
    assert best.tokens_per_s <= bounds.best_pace(lambda: False) * (1 + 1e-6)
    assert best.tokens_per_s <= plan.outcome.tokens_per_s * (1 + plan.gap) * (1 + 1e-6)
    assert best.tokens_per_s <= plan.outcome.tokens_per_s * 1.03, "a search leaves little, whatever it can prove"
    assert bounds.least_bytes(0) <= min(each.peak_bytes for each in known)


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "interleaved_1f1b", "zero_2", "chimera"])
def test_what_is_proven_not_to_fit_fits_in_no_setting(name):
    """With a byte less than the bound there is a proof; with as much as the least plan takes, there is a plan."""
    case = small()
    bound = Bounds(contender(name), case, space_of(contender(name), case)).least_bytes(0)
    assert bound > 0
    tight = replace(case, limits=replace(case.limits, device_memory_bytes=bound - 1))
    plan = tune(contender(name), tight)
    assert not plan.outcome.fits
    assert plan.least_bytes >= bound
    assert plan.outcome.peak_bytes >= bound


@pytest.mark.parametrize("name", ["zero_2", "zero_3", "cyclic_dp", "weipipe", "tawpipe", "acco", "data_parallel"])
def test_the_bytes_of_shards_and_of_what_is_gathered_are_bounded_whatever_the_cut(name):
    """Every cut and setting; layers are recomputed one by one, so that gradients of one are on their way at most."""
    case = small(num_layers=4, microbatches=(1,))
    assert case.sizes(1).by_layer
    peaks = list(every_plan(Frames(contender(name), case), peak_of))
    bound = Bounds(contender(name), case, space_of(contender(name), case)).least_bytes(0)
    assert min(peaks) * 0.7 <= bound <= min(peaks)
    if name in ("zero_2", "cyclic_dp", "acco"):  # beside a shard of 14 bytes a parameter, all weights are there
        assert bound >= (14 / case.num_devices + 2 * 0.5) * case.model.total_parameters


NEEDED = [("zero_infinity", 16), ("megatrain", 16), ("roundpipe", 16), ("zero_offload", 0), ("1f1b", 0)]


@pytest.mark.parametrize("name, of_a_parameter", NEEDED)
def test_what_the_host_holds_of_every_plan_is_known_before_one_is_timed(name, of_a_parameter):
    """Weights and gradients of 2 bytes each, and 12 of the optimizer; ZeRO-Offload may leave all on the devices."""
    case = small()
    needed = of_a_parameter * case.model.total_parameters
    bound = Bounds(contender(name), case, space_of(contender(name), case)).least_host_bytes(0)
    assert bound <= needed
    assert bound == pytest.approx(needed, rel=1e-6)
    tight = replace(case, limits=replace(case.limits, host_memory_bytes=needed * 9 // 10))
    plan = tune(contender(name), tight)
    assert plan.outcome.fits is not bool(needed)
    if needed:
        assert plan.least_host_bytes == bound
        assert sum(each.outcome is not None for each in plan.tried) == 1, "a proof ends the search"
        roomless = replace(tight.cluster, host_memory_bytes=needed * 9 // 10)
        assert why_not(plan, roomless).endswith(f"; every plan takes {bound / 1e9:.1f} GB of the host")


def test_the_least_bytes_of_two_stages_are_those_of_the_best_cut_by_hand():
    """1F1B, all recomputed at once: 16 bytes a parameter, and a microbatch's activations of the device's own layers."""
    case = replace(small(1, microbatches=(1,)), sized=None)
    model, tokens = case.model, case.model.seq_len
    layer = model.layer_parameters * 16 + model.layer_activation_bytes(tokens)
    embedding = model.embedding_parameters * 16
    head = model.head_parameters * 16 + 6 * tokens * model.vocab
    best = min(max(layer * n + embedding, layer * (6 - n) + head) for n in range(7))
    space = space_of(contender("1f1b"), case)
    assert Bounds(contender("1f1b"), case, space).least_bytes(0) == pytest.approx(best, rel=1e-5)


def test_prices_bound_a_program_known_by_hand():
    """Dantzig's way on a textbook case: 3x + 5y under x <= 4, 2y <= 12, 3x + 2y <= 18 comes to 36."""
    rows, limits = np.array([[1.0, 0], [0, 2], [3, 2]]), np.array([4.0, 12, 18])
    found = prices(rows, limits, np.array([3.0, 5]))
    assert found @ limits == pytest.approx(36)
    assert (found @ rows >= np.array([3.0, 5]) - 1e-9).all()
    assert np.isinf(prices(np.array([[1.0, 0]]), np.array([1.0]), np.array([1.0, 1]))).all(), "nothing limits y"
    assert not prices(rows, limits, np.zeros(2)).any(), "nothing is worth anything"


def test_where_orders_follow_from_times_every_recomputation_is_near_with_every_microbatch_size():
    """Their best plan may be two changes away from where single ones end; others come as usual and as the best does."""
    case = small(num_devices=2, sequences_per_step=16, microbatches=(1, 2, 4))
    for name, recomputes in (("v_half", set(RECOMPUTES)), ("1f1b", {"fitting", "except_last"})):
        space = space_of(contender(name), case)
        best = space.first.changed("recompute", "except_last")
        assert space.first.recompute == "fitting"
        near = Bounds(contender(name), case, space).nearest_first(best)
        assert {(each.microbatch_sequences, each.recompute) for each in near} == set(product((1, 2, 4), recomputes))
