"""Restart under another schedule, other stages, devices and cuts: every bit is that of training that does not stop."""

import random
from functools import cache

import pytest
from cases import build
from spared import spared
from test_checkpoint import MODEL, SUBJECT
from training_cases import uneven_costs, workload_of

from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.reference import largest_difference
from rpbench.engine.state import checkpoint
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule

NAMES = (
    "1f1b", "adaptive_1f1b", "dapple", "dualpipe_v", "gpipe", "hanayo", "interleaved_1f1b", "interleaved_zb",
    "looped_bfs", "mobius", "two_bp", "v_half", "v_min", "zb_auto", "zb_h1", "zb_h2", "zb_v",
)  # fmt: skip
NUM_MICROBATCHES, NUM_LAYERS = 6, 8


def drawn(chance: random.Random, num_steps: int) -> tuple[str, dict[str, int]] | None:
    """Words that `build` makes a schedule of: any name, devices, chunks and cut; None where sizes do not fit."""
    name, sizes = chance.choice(NAMES), {
        "num_devices": chance.randint(2, 4),
        "chunks": chance.randint(1, 3),
        "seed": chance.randint(0, 999),
    }  # fmt: skip
    try:
        schedule = made((name, sizes), num_steps)
    except ValueError:
        return None
    fits = schedule.shape.num_microbatches == NUM_MICROBATCHES and schedule.policy is Policy.FLUSH
    return (name, sizes) if fits and sums_in_order(schedule) else None


def made(words: tuple[str, dict[str, int]], num_steps: int) -> Schedule:
    name, sizes = words
    return build(
        name, num_microbatches=NUM_MICROBATCHES, num_layers=NUM_LAYERS, num_steps=num_steps, steps=True, **sizes
    )


def sums_in_order(schedule: Schedule) -> bool:
    """Whether every gradient is one sum over the microbatches in ascending order, which is arithmetic alike."""
    training = Training(workload_of(schedule, MODEL), schedule)
    return all(len(groups) == 1 and groups[0] == tuple(sorted(groups[0])) for groups in training.groups.values())


@cache
def pairs() -> list[tuple[object, object]]:
    """Twenty pairs of schedules that differ in name, stages, devices or cut."""
    chance, found = random.Random("restart"), []
    while len(found) < 20:
        pair = drawn(chance, 2), drawn(chance, 2)
        if None not in pair and pair[0] != pair[1]:
            found.append(pair)
    return found


def trained(words, num_steps, start=None) -> Training:
    schedule = made(words, num_steps)
    settings = Settings(OptimizerSettings(1e-2, num_warmup_steps=3, clip_norm=0.5), keep_state=True)
    training = Training(workload_of(schedule, MODEL), schedule, settings, start)
    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return training


@pytest.mark.parametrize("number", spared(range(20), lambda number: number < 3))
def test_training_goes_on_under_another_cut_bit_for_bit(number, tmp_path):
    goes_on(*pairs()[number], tmp_path)


def test_roundpipe_goes_on_under_another_cut(tmp_path):
    """Its gradients are sums over rounds, so that its arithmetic is its own; two cuts of it are alike."""
    sizes = {"num_devices": 3, "seed": 5}
    goes_on(("roundpipe", sizes), ("roundpipe", sizes | {"seed": 8, "stages": (3, 5)}), tmp_path)


def goes_on(before, after, tmp_path):
    straight, begun = trained(before, 4), trained(before, 2)
    checkpoint.save(tmp_path / "c", begun.state(), SUBJECT)
    resumed = trained(after, 2, checkpoint.load(tmp_path / "c", SUBJECT))
    assert [resumed.mean_loss(step) for step in range(2)] == [straight.mean_loss(step) for step in (2, 3)]
    assert largest_difference(resumed.state().masters, straight.state().masters) == 0.0
    for place, moments in straight.state().moments.items():
        assert largest_difference(resumed.state().moments[place], moments) == 0.0


def test_pairs_are_of_many_kinds():
    found = pairs()
    assert len({name for pair in found for name, _ in pair}) >= 12
    assert sum(one[0] != other[0] for one, other in found) >= 15
    assert sum(one[1]["num_devices"] != other[1]["num_devices"] for one, other in found) >= 8
