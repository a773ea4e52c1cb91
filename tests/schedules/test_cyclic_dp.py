"""Cyclic data parallelism: two slots between workers, half of the activations, sums and weights from hand to hand."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import LayerSize, ModelBytes, model_bytes
from rpbench.cost.table import LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Action, Kind, parse
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.ir.timeline import Timeline
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate
from rpbench.workload.architecture import Architecture

# Three workers and two steps by the rule, by hand: every worker one microbatch a step, two slots behind the one before.
GOLDEN = """
    0F0 1F0 2F0 2B0 1B0 0B0 0F3 1F3 2F3 2B3 1B3 0B3
    1WAIT0 0F1 1F1 2F1 2B1 1B1 0B1 1WAIT3 0F4 1F4 2F4 2B4 1B4 0B4
    1WAIT1 0F2 1F2 2F2 2B2 1B2 0B2 1WAIT4 0F5 1F5 2F5 2B5 1B5 0B5
"""
# The same with its steps: worker 2 has stage 0 at home, which is the last to be summed and the first to be used.
STEPPED = """
    0F0 1F0 2F0 2B0 1B0 0B0 0F3 1F3 2STEP@1 2F3 2B3 1B3 0B3 2STEP@2
    1WAIT0 0F1 1F1 2F1 2B1 1B1 0B1 1WAIT3 0F4 1STEP@1 1F4 2F4 2B4 1B4 0B4 1STEP@2
    1WAIT1 0F2 1F2 2F2 2B2 1B2 0B2 1WAIT4 0STEP@1 0F5 1F5 2F5 2B5 1B5 0B5 0STEP@2
"""
# What worker 1 of 3 gets and lets go: the middle stage is its own, the others come from worker 0.
LOADED = """
    0LOAD:P@0>0 1LOAD:P@0>1 2LOAD:P@0>0
    2FREE:P 0LOAD:P@0>0 1FREE:P 1LOAD:P@0>1 0FREE:P 2LOAD:P@0>0
    2FREE:P 1FREE:P 0FREE:P
"""
SUMMED = """
    2STORE:G>2 2FREE:G 1STORE:G>2 1FREE:G 0STORE:G>2 0FREE:G
    2STORE:G>2 2FREE:G 1STORE:G>2 1FREE:G 0STORE:G>2 0FREE:G
"""


# With the newest weights, the same worker in steps 0 and 1. The last stage comes from worker 0, where it is at home and
# new; its own is new as well; the first stage comes from worker 0, too, and is that of the step before.
LOADED_NEWEST = """
    0LOAD:P@0>0 1LOAD:P@0>1 2LOAD:P@0>0 2FREE:P 1FREE:P 0LOAD:P@0>0 0FREE:P
    1LOAD:P@1>1 2LOAD:P@1>0 2FREE:P 1FREE:P 0FREE:P
"""


def order(p: int, rounds: int = 1, num_steps: int = 1, name: str = "cyclic_dp", **options) -> Schedule:
    shape = Shape(p, p, p * rounds, num_steps=num_steps)
    return entry(name).build(shape, **options).with_partition(symmetric((1,) * p))


def complete(p: int, rounds: int = 1, num_steps: int = 1, name: str = "cyclic_dp", **options) -> Schedule:
    ordered = order(p, rounds, num_steps, name, **options)
    return entry(name).lower(ordered, prefetch=1, **(entry(name).options | options))


def newest(p: int, rounds: int = 1, num_steps: int = 1) -> Schedule:
    return complete(p, rounds, num_steps, newest=True)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_order():
    schedule = order(3, num_steps=2)
    assert [" ".join(map(str, schedule.compute(worker))) for worker in range(3)] == lines(GOLDEN)


def test_steps_weights_and_sums():
    schedule = complete(3, num_steps=2)
    assert [" ".join(map(str, schedule.compute(worker))) for worker in range(3)] == lines(STEPPED)
    assert " ".join(map(str, schedule.lanes[1]["h2d"])) == " ".join(lines(LOADED))
    assert " ".join(map(str, schedule.lanes[1]["d2h"])) == " ".join(lines(SUMMED))
    assert [str(action) for action in schedule.lanes[2]["d2h"] if action.kind is Kind.STORE] == [
        "2STORE:G>0", "1STORE:G>1", "0STORE:G>2", "2STORE:G>0", "1STORE:G>1", "0STORE:G>2"
    ]  # fmt: skip


def test_the_newest_weights_come_from_the_worker_before():
    schedule = newest(3, num_steps=2)
    assert [schedule.compute(worker) for worker in range(3)] == [complete(3, num_steps=2).compute(w) for w in range(3)]
    assert " ".join(map(str, schedule.lanes[1]["h2d"])) == " ".join(lines(LOADED_NEWEST))
    comes = [[str(action) for action in row["h2d"] if action.kind is Kind.LOAD] for row in schedule.lanes]
    # The last worker keeps nothing old; what worker 0 has old has come to it from there.
    assert comes[2][3:] == ["0LOAD:P@1>2", "1LOAD:P@1>1", "2LOAD:P@1>1"]
    assert comes[0][3:] == ["0LOAD:P@0>2", "1LOAD:P@0>2", "2LOAD:P@1>0"]
    assert from_text(to_text(schedule)) == schedule


SIZES = [(1, 1, 3), (1, 2, 2), (2, 1, 3), (3, 2, 2), (4, 1, 4), (6, 3, 1)]


@pytest.mark.parametrize("p, rounds, steps", SIZES)
def test_the_newest_weights_that_are_out(p, rounds, steps):
    """theta_t where stage + worker reaches the last stage, theta_{t-1} elsewhere; both ways."""
    schedule = newest(p, rounds, steps)
    versions = check(schedule)
    numbered = enumerate(action for _, _, row in schedule.items() for action in row)
    for number, action in numbered:
        if action.kind in (Kind.F, Kind.B):
            step, place = divmod(action.microbatch, p * rounds)
            new = action.stage + place % p >= p - 1
            assert versions.read[number] == (step if new else max(0, step - 1)), action
    for (stage, microbatch), late in versions.staleness_steps.items():
        assert late == (microbatch >= p * rounds and stage + microbatch % p < p - 1)


@pytest.mark.parametrize("p, rounds, steps", SIZES)
def test_with_all_it_moves_it_runs_one_step_late(p, rounds, steps):
    versions = check(complete(p, rounds, steps))
    assert versions.published == (steps,) * p
    for (_, microbatch), late in versions.staleness_steps.items():
        assert late == min(microbatch // (p * rounds), 1)
    assert not any(versions.drift.values())


# --- time and activations -------------------------------------------------------------------------------------


def timed(schedule: Schedule, f: Fraction = Fraction(1), b: Fraction = Fraction(1)) -> Timeline:
    """Every forward of a stage takes f, every backward b, all else nothing."""
    p = schedule.shape.num_ranks
    return simulate(schedule, LayerTimes([f] * p, [Fraction(0)] * p, [b] * p).table(symmetric((1,) * p)))


def held(timeline: Timeline) -> list[int]:
    """Stage inputs on all devices together, in every slot: from the start of a forward to the end of its backward."""
    changes: Counter[int] = Counter()
    for span in timeline.spans():
        if span.action.kind in (Kind.F, Kind.B):
            at = span.start if span.action.kind is Kind.F else span.end
            changes[int(at)] += 1 if span.action.kind is Kind.F else -1
    level, levels = 0, []
    for slot in range(int(timeline.makespan)):
        level += changes[slot]
        levels.append(level)
    return levels


@pytest.mark.parametrize("make", [order, complete, newest])
@pytest.mark.parametrize("p, rounds, steps", [(2, 1, 3), (3, 1, 3), (4, 2, 2), (7, 1, 2)])
def test_a_worker_is_two_slots_behind_the_one_before_and_never_idle(make, p, rounds, steps):
    timeline = timed(make(p, rounds, steps))
    for span in timeline.spans():
        if span.action.kind in (Kind.F, Kind.B):
            run, place = divmod(span.action.microbatch, p)
            stage = span.action.stage
            slot = stage if span.action.kind is Kind.F else 2 * p - 1 - stage
            assert span.start == 2 * p * run + 2 * place + slot
    assert timeline.makespan == 2 * p * rounds * steps + 2 * (p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_every_stage_is_run_by_one_worker_at_a_time(p):
    spans = [span for span in timed(order(p, num_steps=3)).spans() if span.action.kind in (Kind.F, Kind.B)]
    found = Counter((span.start, span.action.stage) for span in spans)
    assert set(found.values()) == {1}
    busy = Counter(start for start, _ in found)
    assert all(busy[slot] == p for slot in range(2 * p - 2, 6 * p)), "as many workers as stages"


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_activations_are_constant_and_half_of_data_parallelisms(p):
    """N (N + 1) / 2 at all times once all have begun, and never more; N^2 where all begin at once."""
    levels = held(timed(order(p, num_steps=3)))
    assert max(levels) == p * (p + 1) // 2
    assert set(levels[2 * (p - 1) : 6 * p]) == {p * (p + 1) // 2}
    assert max(held(timed(order(p, num_steps=3, name="data_parallel")))) == p * p


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("p, stagger", [(3, 3), (4, 3), (5, 4), (8, 3)])
def test_longer_backwards_are_further_apart_and_hold_as_much(p, stagger, late):
    """A backward of k - 1 forwards and workers k forwards apart: a worker is never idle, and the count is the same."""
    timeline = timed(complete(p, num_steps=3, newest=not late, stagger=stagger), b=Fraction(stagger - 1))
    levels = held(timeline)
    assert timeline.makespan == stagger * (3 * p + p - 1)
    assert set(levels[stagger * (p - 1) : 3 * stagger * p]) == {p * (p + 1) // 2} == {max(levels)}
    assert max(held(timed(order(p, num_steps=3), b=Fraction(stagger - 1)))) > p * (p + 1) // 2, "two forwards apart"


@pytest.mark.parametrize("p", [2, 4])
def test_without_waiting_all_begin_at_once(p):
    """It is the WAITs that keep workers apart: neither weights nor sums would."""
    schedule = complete(p, num_steps=2)
    rows = [dict(row) for row in schedule.lanes]
    for row in rows:
        row["compute"] = tuple(action for action in row["compute"] if action.kind is not Kind.WAIT)
    at_once = replace(schedule, rows=tuple(rows))
    check(at_once)
    assert max(held(timed(at_once))) == p * p


def test_a_wait_for_what_never_comes_is_shown():
    schedule = order(3)
    rows = [dict(row) for row in schedule.lanes]
    first, *others = rows[1]["compute"]
    rows[1]["compute"] = (first._replace(microbatch=1), *others)  # for its own forward
    with pytest.raises(ScheduleError, match=r"1WAIT1 stands twice|no rank can move"):
        check(replace(schedule, rows=tuple(rows)))
    assert str(parse("1WAIT4")) == "1WAIT4"
    assert parse("1WAIT4") == Action(Kind.WAIT, 1, 4)
    with pytest.raises(ValueError, match="WAIT needs a microbatch"):
        parse("1WAIT")


# --- bytes ----------------------------------------------------------------------------------------------------


def equal_layers(p: int) -> ModelBytes:
    """Stages of the same size: layers and nothing else."""
    sizes = model_bytes(Architecture("equal", num_layers=p, hidden=8, heads=2, vocab=16, seq_len=4), 4)
    none = LayerSize(0, 0, 0, 0)
    return replace(sizes, embedding=none, head=none)


@pytest.mark.parametrize("make", [complete, newest])
@pytest.mark.parametrize("p, rounds, steps", [(2, 1, 1), (3, 1, 4), (3, 2, 2), (5, 3, 2)])
def test_what_goes_over_links(make, p, rounds, steps):
    """N (N - 1) weights and k N^2 - 1 sums of a stage in a step, all workers together."""
    sizes = equal_layers(p)
    layer, total = sizes.layers[0], Counter()
    for device in moved_bytes(make(p, rounds, steps), sizes):
        total.update(device)
    assert total["net LOAD:P"] == steps * p * (p - 1) * layer.weights
    assert total["net STORE:G"] == steps * (rounds * p * p - 1) * layer.gradients
    assert set(total) == {"net LOAD:P", "net STORE:G"}


def test_a_worker_alone_sends_nothing():
    (moved,) = moved_bytes(complete(1, 2), equal_layers(1))
    assert not any(moved.values())


@pytest.mark.parametrize("p", [2, 3, 5])
def test_over_links_beside_an_all_reduce(p):
    """(N - 1) (2 N + 1) stages against 2 N (N - 1)."""
    sizes = equal_layers(p)
    cyclic, parallel = (
        sum(sum(device.values()) for device in moved_bytes(complete(p, name=name), sizes))
        for name in ("cyclic_dp", "data_parallel")
    )
    assert Fraction(cyclic, parallel) == Fraction((p - 1) * (2 * p + 1), 2 * p * (p - 1))


@pytest.mark.parametrize("make", [complete, newest])
@pytest.mark.parametrize("p", [2, 4, 5])
def test_a_worker_holds_the_model_its_own_stage_and_two_gradients_on_their_way(make, p):
    sizes = equal_layers(p)
    layer = sizes.layers[0]
    for classes in classes_of(make(p, num_steps=3), sizes, [p] * p):
        assert classes["weights"] == layer.weights
        assert classes["optimizer state"] == layer.optimizer
        assert classes["gathered weights"] == p * layer.weights
        assert classes["gradients"] == 0
        assert classes["gradients on their way"] == 2 * layer.gradients


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stagger", [0, 5])
def test_a_worker_begins_after_some_forward(stagger):
    with pytest.raises(ValueError, match=f"stagger={stagger}: a worker begins after 1 to 4 forwards .* try 2"):
        entry("cyclic_dp").build(Shape(4, 4, 4), stagger=stagger)


def test_weights_that_are_not_the_newest_are_refused():
    """Worker 1 of 3 is to have the new weights of the last stage; those of the step before are a broken promise."""
    schedule = newest(3, num_steps=2)
    rows = [dict(row) for row in schedule.lanes]
    late = parse("2LOAD:P@0>0")
    rows[1]["h2d"] = tuple(late if str(action) == "2LOAD:P@1>0" else action for action in rows[1]["h2d"])
    with pytest.raises(ScheduleError, match=r"2LOAD:P@0>0 brings version 0 to 2F4, which reads version 1"):
        check(replace(schedule, rows=tuple(rows)))


def test_a_copy_of_another_version_is_not_handed_on():
    """Worker 0 needs what is new of the last stage; the last worker has that of the step before when it begins."""
    schedule = newest(3, num_steps=2)
    rows = [dict(row) for row in schedule.lanes]
    rows[0]["h2d"] = tuple(
        action._replace(peer=2) if str(action) == "2LOAD:P@1>0" else action for action in rows[0]["h2d"]
    )
    with pytest.raises(ScheduleError, match=r"takes what rank 2 does not have: stage 2 is at home on rank 0"):
        check(replace(schedule, rows=tuple(rows)))


@pytest.mark.parametrize(
    "shape, message",
    [
        (Shape(4, 8, 8), "8 slices for 4 ranks: there must be one for each; set chunks_per_device=1"),
        (Shape(4, 4, 6), "6 microbatches to 4 ranks: they must be a multiple of 4; take num_microbatches=8"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        entry("cyclic_dp").build(shape)
