"""Levels: what a ranking charges at each, and that leaving memory out is what lets hungry schedules win."""

from itertools import pairwise

import pytest

from rpbench.mesh.layout import Mesh
from rpbench.mesh.levels import LEVELS, _time, level_times, rankings
from rpbench.workload.architecture import architecture
from tests.mesh.jobs import job

DEEP = {"own": architecture("llama3_70b"), "seq_len": 8192, "num_microbatches": 16}


def test_order_alone_knows_no_model():
    times = level_times(job(Mesh(pipeline=4)), "order")
    assert set(times.forward) == {1.0}
    assert times.hop == times.head_forward == 0


def test_each_level_charges_more():
    found = job(Mesh(data=2, pipeline=4, tensor=4, sequence_parallel=True))
    plain, hops, split, all_of_it = (
        level_times(found, level) for level in ("times", "hops", "splitting", "collectives")
    )
    assert plain.hop == 0 < hops.hop
    assert split.weight_grad[0] == pytest.approx(found.software.split_penalty * hops.weight_grad[0])
    assert all_of_it.forward[0] > split.forward[0]
    assert all_of_it.weight_grad == split.weight_grad


def test_what_replicas_exchange_is_charged_from_the_level_of_transfers_on():
    found = job(Mesh(data=2, pipeline=4))
    before, at, behind = (_time(found, LEVELS[LEVELS.index("transfers") + place]) for place in (-1, 0, 1))
    assert before < at == behind


def test_schedules_that_do_not_fit_are_out_from_the_level_of_memory_on():
    found = rankings(
        job(Mesh(data=2, pipeline=8, tensor=4, sequence_parallel=True), **DEEP), [("1f1b", 1), ("gpipe", 1)]
    )
    names = {each.level: [name for name, _ in each.ranking] for each in found}
    assert [each.level for each in found] == list(LEVELS)
    assert "gpipe" in names["transfers"]
    assert "gpipe" not in names["memory"]


def test_a_ranking_starts_at_one_and_rises():
    for each in rankings(job(Mesh(pipeline=4, tensor=2)), [("1f1b", 1), ("zb_h1", 1)]):
        ratios = [ratio for _, ratio in each.ranking]
        assert ratios[0] == 1.0
        assert ratios == sorted(ratios)


def test_a_ranking_has_turned_where_another_one_is_first():
    found = rankings(job(Mesh(pipeline=4, tensor=2)), [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2)])
    first = [each.ranking[0][0] for each in found]
    assert [each.turned for each in found] == [False, *(one != other for one, other in pairwise(first))]
