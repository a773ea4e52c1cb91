"""Processes that are killed while they train: the weights are those of training without failures, bit for bit."""

import os
import signal
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch

from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.threads import one_thread
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.recovery.plan import Death, Plan
from rpbench.engine.recovery.watch import CannotRecover, Watch, train
from rpbench.engine.training import Settings, Training
from rpbench.failures.copies import holders
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Shape, to_text
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.workload.architecture import Architecture

TINY = Architecture("tiny", num_layers=4, hidden=16, heads=2, vocab=37, seq_len=5, dropout=0.1)
STEPS = 4


def order(name="1f1b", ranks=2, num_steps=1, microbatches=3):
    shape = Shape(ranks, ranks, microbatches, num_steps=num_steps)
    schedule = entry(name).build(shape).with_partition(symmetric(split_evenly(4, ranks)))
    return add_steps(schedule)


def plan_of(*deaths, name="1f1b", ranks=2, copies=2, **options):
    return Plan(
        to_text(order(name, ranks)),
        asdict(TINY),
        STEPS,
        tuple(holders(rank, ranks, copies) for rank in range(ranks)),
        tuple(deaths),
        optimizer={"learning_rate": 0.01},
        stall_s=30.0,
        **options,
    )


def undisturbed(plan, name="1f1b", ranks=2):
    """The same training in this process, all steps in one run of the engine."""
    schedule = order(name, ranks, plan.num_steps)
    times = LayerTimes([1] * 4, [0] * 4, [2] * 4, input_grad=[1] * 4, weight_grad=[1] * 4)
    costs = times.table(schedule.partition)
    training = Training(plan.workload(), schedule, Settings(plan.settings()))
    with one_thread():  # as every process computes: sums in parts have other last bits
        execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training.optimizer.masters


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for place, weight in expected.items():
        assert torch.equal(found[place], weight), place


def state_bytes(masters, modules):
    """Masters, AdamW's two moments, and its count of steps, a number of 4 bytes."""
    return sum(3 * value.nbytes + 4 for place, value in masters.items() if place[0] in modules)


def test_a_killed_rank_comes_back_from_its_partners_memory():
    """Rank 0 dies before the fourth action of step 2, `0F0 0F1 0B0 >0F2<`: with two microbatches begun."""
    plan = plan_of(Death(0, 2, 3))
    found, expected = train(plan), undisturbed(plan)
    assert_same_weights(found.masters, expected)
    (back,) = found.returns
    assert (back.ranks, back.step, back.source, back.lost_steps) == ((0,), 2, "memory", 0)
    assert (back.num_actions[0], back.num_microbatches) == (3, 2)
    assert back.fetched_bytes == state_bytes(expected, range(3))  # embedding and two layers
    in_all = STEPS * sum(len(plan.order.compute(rank)) for rank in range(2))
    assert found.num_actions == in_all + sum(back.num_actions)


@pytest.mark.slow
def test_a_killed_rank_and_files_alone(tmp_path):
    """Files after steps 0 and 3: who dies in step 2 has two steps to do again, everybody with them."""
    plan = replace(plan_of(Death(1, 2, 1), copies=1), source="store", store_every=3, folder=str(tmp_path))
    found, expected = train(plan), undisturbed(plan)
    assert_same_weights(found.masters, expected)
    (back,) = found.returns
    assert (back.source, back.lost_steps) == ("store", 2)
    in_all = sum(len(plan.order.compute(rank)) for rank in range(2))
    assert found.num_actions == (STEPS + 2) * in_all + sum(back.num_actions)


def test_a_return_names_the_step_that_was_running_and_a_death_comes_once(tmp_path, monkeypatch):
    """Files of step 3 and a death while number 5 runs: two steps are lost. Nobody is started or spoken to."""
    deaths = Death(1, 5), Death(1, 7), Death(0, 2)
    plan = replace(plan_of(copies=1), source="store", store_every=3, folder=str(tmp_path), num_steps=9, deaths=deaths)
    watch = Watch(plan)
    for name in ("_tell", "_start", "_hear"):
        monkeypatch.setattr(watch, name, lambda *_: None)
    watch._num_steps, watch._stored, watch._has_begun, watch._lost = 5, 3, True, {1}
    watch._recover()
    (back,) = watch._returns
    assert (back.ranks, back.step, back.source, back.lost_steps, watch._num_steps) == ((1,), 5, "store", 2, 3)
    assert watch._deaths == deaths[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_three_ranks_two_deaths_and_the_last_step(name):
    deaths = Death(2, 0, 0), Death(1, 3, 5)
    plan = plan_of(*deaths, name=name, ranks=3)
    found = train(plan)
    assert_same_weights(found.masters, undisturbed(plan, name, 3))
    assert [(back.ranks, back.step, back.num_actions[back.ranks[0]]) for back in found.returns] == [
        ((2,), 0, 0),
        ((1,), 3, 5),
    ]


@pytest.mark.slow
def test_somebody_elses_kill_at_any_moment():
    """A kill that no plan knows of, from outside and between any two actions."""
    plan = replace(plan_of(), num_steps=60)
    with Watch(plan) as ranks:
        victim = ranks.pids[1]
        threading.Timer(0.15, os.kill, (victim, signal.SIGKILL)).start()
        found = ranks.train()
    assert [(back.ranks, back.source) for back in found.returns] == [((1,), "memory")]
    assert_same_weights(found.masters, undisturbed(plan))


@pytest.mark.slow
def test_without_a_copy_it_ends_and_nobody_is_left():
    plan = plan_of(Death(1, 1), copies=1)
    with Watch(plan) as ranks:
        pids = list(ranks.pids.values())
        with pytest.raises(CannotRecover, match=r"rank 1 and every holder of its state, \[1\], are gone"):
            ranks.train()
    assert not any(map(lives, pids))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_within_the_limit():
    plan = replace(plan_of(), stall_s=3.0, num_steps=10_000)
    began = time.monotonic()
    with Watch(plan) as ranks:
        pids = list(ranks.pids.values())
        threading.Timer(0.2, os.kill, (pids[0], signal.SIGSTOP)).start()
        with pytest.raises(CannotRecover, match=r"waited too long for Tensor|said anything for 3 s"):
            ranks.train()
    assert time.monotonic() - began < 60
    assert not any(map(lives, pids))


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "change, words",
    [
        ({"deaths": (Death(2, 0),)}, "death of rank 2: the run has ranks 0 to 1; name one"),
        ({"deaths": (Death(1, 4),)}, "death in step 4: the run has steps 0 to 3; name one"),
        ({"deaths": (Death(1, 0, 99),)}, "death before action 99: its row has 0 to 6"),
        ({"source": "tape"}, "source='tape': one of memory, store"),
        ({"source": "store"}, "name a folder and store_every"),
        ({"schedule": to_text(order("chimera", 2, microbatches=4))}, "stage 0 is on ranks"),
    ],
    ids=["rank", "step", "action", "source", "folder", "two-copies"],
)
def test_what_cannot_be_planned(change, words):
    with pytest.raises(ValueError, match=words):
        replace(plan_of(), **change)


def test_what_steps_together_is_refused():
    with pytest.raises(ValueError, match=r"clip_norm=1.0: .* set optimizer.clip_norm=null"):
        replace(plan_of(), optimizer={"clip_norm": 1.0}).settings()
    with pytest.raises(ValueError, match=r"share a matrix.* set model.tied=false"):
        replace(plan_of(), model=asdict(replace(TINY, tied=True))).workload()
