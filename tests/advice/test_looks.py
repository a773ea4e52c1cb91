"""Looks under a time limit: what single changes of a first plan bring, where a sketch says nothing of them."""

from dataclasses import replace

import pytest
from contest_terms import small

from rpbench.advice.causes import causes_of
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import contender
from rpbench.plan.contest.frame import Frame, Frames
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import Known, Search

BUDGET, SIZES = Budget(60, 100_000), (1, 2, 4)


def looked(name, case, known=()):
    search = Search(contender(name), case, BUDGET, is_over=lambda: False)
    search.look(known)
    return search


def pace_at(search, setting, cut):
    """Of a frame made for it alone."""
    return Frame(search.contender, setting, search.terms, cut, 2).outcome(cut, setting.recompute).tokens_per_s


@pytest.mark.parametrize("name", ["megatrain", "mobius", "greedysnake", "zero_3", "zero_offload", "bpipe"])
def test_a_look_ends_at_a_microbatch_size_whose_neighbours_are_no_faster(name):
    search = looked(name, small(sequences_per_step=16, microbatches=SIZES))
    best = search.best()
    size = best.setting.microbatch_sequences
    for other in {2 * size, size / 2} & set(SIZES):
        if other > size or search._may_gain(best.setting.changed("microbatch_sequences", other), best.setting):
            near = best.setting.changed("microbatch_sequences", other)
            assert pace_at(search, near, best.cut) <= best.timed.tokens_per_s * (1 + 1e-9), (name, size, other)


@pytest.mark.parametrize("name", ["zero_2", "zero_3", "zero_offload", "greedysnake"])
def test_a_look_passes_over_microbatch_sizes_that_replicas_cannot_share(name):
    """Twelve sequences are six microbatches of two, which four replicas do not share; of one they are twelve."""
    search = looked(name, small(num_devices=4, sequences_per_step=12, microbatches=(1, 2)))
    assert search.best().setting.microbatch_sequences == 1


@pytest.mark.parametrize("name", ["bpipe", "dapple", "chimera", "megatrain"])
@pytest.mark.parametrize("lent", SIZES)
def test_a_look_near_a_plan_leaves_a_microbatch_size_that_is_slow_here(name, lent):
    """Whoever begins near a plan of another size ends within a tenth of whoever begins near the best one."""
    case = small(sequences_per_step=16, microbatches=SIZES)
    alone = looked(name, case).best()
    plan = Known(alone.setting.changed("microbatch_sequences", lent), alone.cut, alone.timed.tokens_per_s)
    assert looked(name, case, [plan]).best_pace() >= 0.9 * alone.timed.tokens_per_s


def test_a_look_near_a_plan_tries_it_recomputed_where_activations_move():
    """BPipe's activations go to another device and back, and take no time there if they are made again."""
    case = small(sequences_per_step=16, microbatches=SIZES, num_devices=4)
    lent = Search(contender("1f1b"), case, BUDGET, is_over=lambda: False)
    lent.look()
    plan = lent.best()
    assert plan.setting.recompute == "fitting"
    tried = looked("bpipe", case, [Known(plan.setting, plan.cut, plan.timed.tokens_per_s)]).tried
    assert any(each.recompute == "all" and found.outcome for each, found in tried.items())


def test_a_first_look_takes_more_stages_while_they_are_faster():
    search = looked("interleaved_1f1b", small(sequences_per_step=8, microbatches=(1,), num_layers=12))
    best = search.best()
    chunks = sorted(search.space.dimensions["chunks_per_device"])
    for number in [each for each in chunks if each > best.setting.chunks_per_device][:1]:
        assert search.tried[best.setting.changed("chunks_per_device", number)].score <= best.score
    assert best.setting.chunks_per_device >= 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_3", "mobius", "pipe_offload"])
def test_a_frame_tells_of_another_cut_what_a_frame_of_its_own_tells(name):
    case = small(sequences_per_step=8, microbatches=(1,), num_layers=12)
    plan = looked(name, case).plan()
    chunks = 1 if name == "1f1b" else 2
    setting = plan.setting.changed("chunks_per_device", chunks).changed("recompute", "all")
    first, cut = map(symmetric, ((6, 6), (7, 5)) if chunks == 1 else ((3, 3, 3, 3), (4, 2, 3, 3)))
    frames = Frames(contender(name), case)
    known, taken = (frames.of_plan(replace(plan, setting=setting, partition=each)) for each in (first, cut))
    own = Frame(contender(name), setting, case, cut, plan.num_steps)
    assert taken.graph is known.graph
    outcome = own.outcome(cut, "all")
    assert taken.outcome(cut, "all") == outcome
    assert taken.memory(cut, outcome.keeps, "fitting") == own.memory(cut, outcome.keeps, "fitting")
    assert causes_of(taken, cut, outcome.keeps) == causes_of(own, cut, outcome.keeps)


def test_the_frame_of_a_cut_whose_transfers_differ_is_made_anew():
    """Tensor parallelism adds up as often as layers say, and a stage without layers keeps no input."""
    case = small(sequences_per_step=8, microbatches=(1,), num_layers=12)
    for name, cuts in {"megatron_tp": ((3, 3, 3, 3), (4, 2, 3, 3)), "mobius": ((3, 3, 3, 3), (6, 0, 3, 3))}.items():
        first, second = map(symmetric, cuts)
        setting = Search(contender(name), case, BUDGET).space.first.changed("recompute", "all")
        assert not Frame(contender(name), setting.changed("chunks_per_device", 2), case, first, 2).moves_alike(second)
