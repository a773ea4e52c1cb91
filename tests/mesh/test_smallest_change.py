"""Smallest change: applied, it makes a run fit; nothing that stands before it in the tried order does."""

from dataclasses import replace
from math import ceil

import pytest

from rpbench.cost.hardware.machine import machine
from rpbench.mesh.job import Job
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.memory import bytes_of_ranks, fullest, measured_bytes
from rpbench.mesh.plan_search.closed_forms import Question, timed_plans
from rpbench.mesh.plan_search.plans import Space
from rpbench.mesh.plan_search.search import NothingFits, search
from rpbench.mesh.plan_search.smallest_change import CUTS, FACTORS, changes, smallest_change
from rpbench.mesh.software import declared_software
from rpbench.mesh.step import step_terms
from rpbench.workload.architecture import architecture

PLAIN = declared_software("megatron_core")
NARROW = Space(sequences=(1,), schedules=("1f1b",))


def job(name, mesh, *, layers=0, software=PLAIN, **options):
    own = architecture(name)
    options = {"seq_len": 4096, "num_microbatches": 8, **options}
    own = replace(own, num_layers=layers or own.num_layers)
    return Job(own, machine("dgx_h100").with_devices(mesh.num_devices), mesh, software, **options)


def fits(found):
    """By every rank of the pipeline, without what the package thinks may be left out."""
    most = max(sum(bytes_of_ranks(found)[rank].values()) for rank in range(found.mesh.pipeline))
    return found.software.scale * most + found.machine.reserved_memory_bytes <= found.machine.device.memory_bytes


def applied(found, settings):
    """A run with the named settings, put in one by one and by hand."""
    mesh = replace(
        found.mesh,
        **{name: settings[name] for name in ("data", *CUTS) if name in settings},
        sharing=Sharing(settings.get("shard", found.mesh.sharing.what), found.mesh.sharing.group),
        sequence_parallel=settings.get(
            "sequence_parallel", found.mesh.sequence_parallel or (found.mesh.tensor == 1 and "tensor" in settings)
        ),
    )
    sequences = settings.get("sequences", found.sequences)
    return replace(
        found,
        mesh=mesh,
        sequences=sequences,
        num_microbatches=found.global_batch // (sequences * mesh.data),
        recompute=settings.get("recompute", found.recompute),
        cut=() if "pipeline" in settings else found.cut,
    )


CASES = {
    "microbatch": (("llama3_8b", Mesh(8)), {"sequences": 8}),
    "recompute": (("llama3_8b", Mesh(8)), {"sequences": 2}),
    "share": (("llama3_8b", Mesh(8, sharing=Sharing("none"))), {}),
    "tensor": (("llama3_70b", Mesh(64)), {}),
    "two": (("llama31_405b", Mesh(64, tensor=8)), {}),
    "experts": (("qwen3_235b_a22b", Mesh(64, expert=8)), {}),
    "long": (("llama3_8b", Mesh(8)), {"seq_len": 131072}),
    "stages": (("llama31_405b", Mesh(16, 2, 8, sequence_parallel=True)), {"recompute": "full"}),
}


# What a reader of the order would expect, by hand.
NAMES = {
    "microbatch": {"sequences"},
    "recompute": {"recompute"},
    "share": {"shard"},
    "tensor": {"tensor", "data"},
    "two": {"recompute", "shard"},
    "experts": {"recompute", "shard"},
    "long": {"recompute", "tensor", "data"},
    "stages": {"pipeline", "data"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_change_makes_it_fit_and_no_smaller_one_of_the_tried_order_does(name):
    (model, mesh), options = CASES[name]
    whole = job(model, mesh, **options)
    assert not fits(whole)
    change = smallest_change(whole)
    assert NAMES[name] == set(change.settings)
    changed = applied(whole, change.settings)
    assert fits(changed)
    assert (changed.global_batch, changed.mesh.num_devices) == (whole.global_batch, whole.mesh.num_devices)
    for settings, smaller in changes(whole):
        if settings == change.settings:
            break
        assert not fits(smaller), settings
    else:
        pytest.fail("the change is not of the tried order")


def test_one_setting_is_tried_before_two_and_a_smaller_step_before_a_larger():
    found = [settings for settings, _ in changes(job("llama3_8b", Mesh(8, sharing=Sharing("none")), sequences=4))]
    counts = [len(settings.keys() - {"data"}) for settings in found]
    assert counts == sorted(counts)
    alone = [settings for settings, count in zip(found, counts, strict=True) if count == 1]
    assert alone[:8] == [
        {"recompute": "selective"},
        {"recompute": "per_op"},
        {"recompute": "full"},
        {"sequences": 2},
        {"sequences": 1},
        {"shard": "optimizer"},
        {"shard": "gradients"},
        {"shard": "parameters"},
    ]
    assert alone[8:11] == [{"tensor": 2, "data": 4}, {"tensor": 4, "data": 2}, {"tensor": 8, "data": 1}]


def test_sequences_are_cut_only_where_they_divide():
    """4100 tokens are cut over two and four devices, never over eight."""
    found = [settings for settings, _ in changes(job("llama3_8b", Mesh(8), seq_len=4100))]
    assert [each["context"] for each in found if set(each) == {"context", "data"}] == [2, 4]


def test_every_change_that_is_tried_is_another_run_of_the_same_batch_on_the_same_devices():
    whole = job("llama3_8b", Mesh(4, 2), sequences=2)
    runs = [changed for _, changed in changes(whole)]
    assert len({(each.mesh, each.sequences, each.recompute) for each in runs}) == len(runs)
    assert {(each.global_batch, each.mesh.num_devices) for each in runs} == {(whole.global_batch, 8)}


def test_selective_recomputation_is_enough_where_scores_are_kept():
    """Korthikanti et al., section 5: the scores of unfused attention are most of what a layer keeps."""
    own = replace(PLAIN, attention="unfused")
    change = smallest_change(job("llama3_8b", Mesh(8), software=own, sequences=2, layers=16))
    assert change.settings == {"recompute": "selective"}


def test_what_fits_needs_no_change_and_what_does_not_says_it_in_the_record():
    assert smallest_change(job("llama3_8b", Mesh(8))) is None
    whole = job("llama3_8b", Mesh(8), sequences=8)
    assert fullest(whole).verdict().answer == "oom"
    found = smallest_change(whole).plain()
    assert found["settings"] == {"sequences": 1}
    assert "fits with sequences=1" in found["text"]


def test_the_step_of_a_change_recomputes_what_its_memory_does_not_keep():
    whole = job("llama3_8b", Mesh(8, pipeline=2, tensor=4), sequences=48, recompute="fitting", num_microbatches=4)
    change = smallest_change(whole)
    again, kept = (sum(step_terms(replace(change.job, recompute=each)).values()) for each in ("full", "none"))
    assert kept <= change.plain()["step_time_s"] < 0.95 * again


def test_the_bytes_that_are_lacking_are_those_that_are_lacking():
    whole = job("llama3_70b", Mesh(8))
    lacks = fullest(whole).lacks
    for more, enough in ((lacks + 1, True), (lacks - 1e6, False)):
        memory = int(whole.machine.device.memory_bytes + more)
        assert fits(replace(whole, machine=replace(whole.machine, device_memory_bytes=memory))) is enough


def test_more_devices_are_as_few_as_were_tried():
    """Of all plans of the search, counted rank by rank: none fits on half as many devices."""
    whole = job("llama3_70b", Mesh(4), num_microbatches=4)
    change = smallest_change(whole, NARROW)
    assert change.num_devices == 16
    assert fits(change.job)
    for count in (4, 8):
        on = whole.machine.with_devices(count) if count <= 4 else machine("dgx_h100").with_devices(count)
        asked = Question(whole.architecture, on, PLAIN, 4096, 16, "bf16")
        plans, _ = timed_plans(asked, replace(NARROW, max_context=count // 4))
        assert not any(fits(asked.job_of(plans, number)) for number in range(plans.count))


def test_where_nothing_helps_the_bytes_are_named():
    whole = job("llama31_405b", Mesh(1), num_microbatches=1)
    change = smallest_change(whole)
    assert change.job is None
    assert f"lacks {ceil(fullest(whole).lacks / 1e8) / 10:.1f} GB a device" in str(change)
    assert f"{FACTORS[-1]} times as many devices" in str(change)


def test_a_search_that_finds_nothing_names_a_change_of_its_smallest_plan():
    with pytest.raises(NothingFits) as caught:
        search(Question(architecture("llama3_70b"), machine("dgx_h100").with_devices(8), PLAIN, 4096, 16), NARROW)
    found = caught.value
    assert not fits(found.smallest)
    assert fits(found.change.job)
    assert str(found.change) in str(found)


@pytest.mark.parametrize("pipeline, layers", [(8, 20), (6, 13), (5, 12)])
def test_the_fullest_rank_is_found_where_larger_stages_stand_in_the_middle(pipeline, layers):
    found = job("llama3_8b", Mesh(1, pipeline), layers=layers, num_microbatches=64)
    need = sum(fullest(found).classes.values())
    assert need == max(sum(bytes_of_ranks(found)[rank].values()) for rank in range(pipeline))
    assert measured_bytes(found, {"all": need}) == found.software.scale * need + found.software.reserve_bytes


def test_gpipe_keeps_all_microbatches_of_a_long_step():
    few, many = (job("llama3_8b", Mesh(1, 2), schedule="gpipe", num_microbatches=m) for m in (4, 64))
    assert bytes_of_ranks(many)[0]["activations"] == pytest.approx(16 * bytes_of_ranks(few)[0]["activations"])
