"""ACCO: rounds of half an update, sums and steps beside the next round, every other step a trial."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import LayerSize, ModelBytes, model_bytes
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Action, Kind, parse
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.policy import Policy, is_trial, update_of, versions_averaged
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

# Three devices, two stages, two updates of 6 microbatches by the rule, by hand: halves of 3, one for each device.
GOLDEN = """
    0F0 1F0 1B0 0B0 0F3 1F3 1B3 0B3 0F6 1F6 1B6 0B6 0F9 1F9 1B9 0B9
    0F1 1F1 1B1 0B1 0F4 1F4 1B4 0B4 0F7 1F7 1B7 0B7 0F10 1F10 1B10 0B10
    0F2 1F2 1B2 0B2 0F5 1F5 1B5 0B5 0F8 1F8 1B8 0B8 0F11 1F11 1B11 0B11
"""
# Beside it on device 1, which has the step of stage 1. The first two rounds both read what the run begins with; behind
# round 0 comes the trial, whose weights round 2 reads, behind round 1 the step, which round 3 reads.
NET = """
    0UNSHARD@0 1UNSHARD@0 0UNSHARD@0 1UNSHARD@0
    1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD 1STEP@1 0UNSHARD@1 1UNSHARD@1
    1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD 1STEP@2 0UNSHARD@2 1UNSHARD@2
    1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD 1STEP@3
    1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD 1STEP@4
"""


def edit(schedule: Schedule, device: int, change: Callable[[list[Action]], object], lane: str = "compute") -> Schedule:
    """The schedule with one row changed in place by `change`."""
    rows = [{name: list(row) for name, row in lanes} for lanes in schedule.rows]
    change(rows[device][lane])
    return replace(schedule, rows=tuple({name: tuple(row) for name, row in lanes.items()} for lanes in rows))


def complete(p: int, stages: int, each: int = 1, updates: int = 2) -> Schedule:
    """ACCO with all it moves; `each`: microbatches of a device in a half."""
    found = entry("acco")
    shape = Shape(p, stages, p * each, num_steps=2 * updates)
    return found.lower(found.build(shape).with_partition(symmetric((1,) * stages)), prefetch=1)


def words(text: str) -> str:
    return " ".join(text.split())


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_order_and_what_is_beside_it():
    schedule = complete(3, 2)
    assert [" ".join(map(str, schedule.compute(device))) for device in range(3)] == lines(GOLDEN)
    assert " ".join(map(str, schedule.lanes[1]["net"])) == words(NET)
    for device, stepped in ((0, ["0STEP@1", "0STEP@2", "0STEP@3", "0STEP@4"]), (2, [])):
        steps = [str(action) for action in schedule.lanes[device]["net"] if action.kind is Kind.STEP]
        assert steps == stepped, "a device has a third of every stage's step, which stands in the lane of one"
    assert from_text(to_text(schedule)) == schedule


def test_an_update_is_two_rounds():
    assert entry("acco").steps(6, 2) == (3, 4)
    with pytest.raises(ValueError, match=r"num_microbatches=5: acco .* multiple of 2; take num_microbatches=6"):
        entry("acco").steps(5, 2)


def test_every_other_step_is_a_trial():
    versions = range(1, 7)
    assert [is_trial(Policy.TRIAL, version) for version in versions] == [True, False] * 3
    assert [versions_averaged(Policy.TRIAL, version) for version in versions] == [
        (1,), (1, 2), (3,), (3, 4), (5,), (5, 6)
    ]  # fmt: skip
    assert [update_of(Policy.TRIAL, version) for version in versions] == [1, 1, 2, 2, 3, 3]
    assert not any(is_trial(policy, version) for policy in Policy if policy is not Policy.TRIAL for version in versions)


@pytest.mark.parametrize("p, stages, each, updates", [(1, 3, 2, 2), (2, 2, 1, 1), (3, 4, 2, 3)])
def test_first_halves_read_trials_and_second_halves_what_stays(p, stages, each, updates):
    schedule, half = complete(p, stages, each, updates), p * each
    versions = check(schedule, max_versions=2)
    assert versions.published == (2 * updates,) * stages
    numbered = enumerate(action for _, _, row in schedule.items() for action in row)
    for number, action in numbered:
        if action.kind in (Kind.F, Kind.B):
            update, second = divmod(action.microbatch // half, 2)
            trial, stays = 2 * update - 1, 2 * update  # theta~_t, theta_t
            assert versions.read[number] == (stays if second else max(0, trial)), action
    assert not any(versions.drift.values())


# --- what would train something else is refused ---------------------------------------------------------------------


def test_a_first_half_at_the_weights_that_stay_is_refused():
    """Round 2 is the first half of update 1: it is to read theta~_1, version 1, and not theta_1, version 2."""
    marked = edit(complete(3, 2), 1, lambda row: row.__setitem__(8, parse("0F7@2")))
    with pytest.raises(ScheduleError, match=r"0F7@2 reads version 1 here, by policy trial"):
        check(marked)
    schedule = complete(3, 2)
    for device in range(3):
        schedule = edit(schedule, device, lambda row: _instead(row, "0UNSHARD@1", "0UNSHARD@2"), "net")
    with pytest.raises(ScheduleError, match=r"0UNSHARD@2 brings version 2 to 0F\d, which reads version 1"):
        check(schedule)


def _instead(row: list, token: str, other: str) -> None:
    row[row.index(parse(token))] = parse(other)


def test_a_second_half_at_the_trial_is_refused():
    """Round 3 is the second half of update 1, which reads theta_1; round 1 reads theta_0, which has no trial."""
    marked = edit(complete(3, 2), 1, lambda row: row.__setitem__(12, parse("0F10@3")))
    with pytest.raises(ScheduleError, match=r"0F10@3 reads version 2 here, by policy trial"):
        check(marked)


def test_a_trial_left_out_and_a_step_before_its_gradient_are_refused():
    with pytest.raises(ScheduleError, match=r"1STEP@3 is missing: the gradients of microbatches 6 to 8"):
        check(edit(complete(3, 2), 1, lambda row: row.remove(parse("1STEP@3")), "net"))

    def early(row: list) -> None:
        row.remove(parse("1STEP@2"))
        row.insert(row.index(parse("1STEP@1")) + 1, parse("1STEP@2"))

    with pytest.raises(ScheduleError, match="no rank can move"):
        check(edit(complete(3, 2), 1, early, "net"))


# --- time -----------------------------------------------------------------------------------------------------------


def costs(schedule: Schedule, transfer: float) -> CostTable:
    """Forward 1, backward 2, step 1 of a stage; every transfer as given."""
    stages = schedule.shape.num_stages
    table = LayerTimes([1] * stages, [0] * stages, [2] * stages, step=[1] * stages).table(schedule.partition)
    return replace(table, transfer_time=lambda payload: transfer)


def starts(schedule: Schedule, transfer: float, token: str) -> float:
    spans = simulate(schedule, costs(schedule, transfer)).spans()
    return next(float(span.start) for span in spans if str(span.action) == token)


def test_sums_steps_and_gathers_hide_behind_a_round():
    """Device 0 of 2, by hand. Gathers 0-2 and 2-4, round 0 runs 1-7 with 0F0 at 1 and 1F0 at 2.

    Sums of stages 1 and 0 at 5-6 and 7-8, trial 8-9, gathers 9-10 and 10-11: before round 2 begins at 13. All is hidden
    but the first gather and, behind the last round, a sum and a step: 1 + 4 x 6 + 2.
    """
    schedule = complete(2, 2)
    assert starts(schedule, 1, "1REDUCE_GRAD") == 5
    assert starts(schedule, 1, "0STEP@1") == 8
    assert starts(schedule, 1, "0UNSHARD@1") == 9
    assert [starts(schedule, 1, f"0F{microbatch}") for microbatch in (0, 2, 4, 6)] == [1, 7, 13, 19]
    assert simulate(schedule, costs(schedule, 1)).makespan == 1 + 4 * 6 + 2


def test_what_a_slow_link_lets_out():
    """Transfers of 4, by hand: gathers 0-16, 0F0 at 4, 1F0 at 8, backwards to 13; sums 16-24, trial -25, gather -29.

    Round 1 begins at 13 and is over long before; round 2 waits for the weights of the trial, until 29.
    """
    schedule = complete(2, 2)
    assert starts(schedule, 4, "0STEP@1") == 24
    assert starts(schedule, 4, "0F2") == 13
    assert starts(schedule, 4, "0F4") == 29


def test_an_update_in_time_waits_for_what_this_one_hides():
    """The same microbatches with ZeRO-1, which sums once a step: an update ends in a sum, a step and a gather."""
    found = entry("zero_2")
    options = {"reduce_each_microbatch": False}
    order = found.build(Shape(2, 2, 4, num_steps=2), **options).with_partition(symmetric((1, 1)))
    zero_1 = found.lower(order, prefetch=1, **options)
    acco = complete(2, 2)
    paces = [float(simulate(schedule, costs(schedule, 1)).makespan) for schedule in (acco, zero_1)]
    assert paces[0] == 27
    assert paces[1] == 1 + 12 + 3 + 12 + 2, "the first gather, rounds, sum, step and gather between them, sum and step"


# --- bytes ----------------------------------------------------------------------------------------------------------


def equal_layers(p: int) -> ModelBytes:
    """Stages of the same size: layers and nothing else."""
    sizes = model_bytes(Architecture("equal", num_layers=p, hidden=8, heads=2, vocab=16, seq_len=4), 4)
    none = LayerSize(0, 0, 0, 0)
    return replace(sizes, embedding=none, head=none)


@pytest.mark.parametrize("n, stages, each", [(2, 4, 1), (4, 3, 1), (4, 3, 3)])
def test_what_goes_over_links_and_what_a_device_holds(n, stages, each):
    """A round sums gradients and gathers weights once, (n - 1) / n each; two copies of weights, a shard of state."""
    schedule, sizes = complete(n, stages, each), equal_layers(stages)
    weights, state = stages * sizes.layers[0].weights, sizes.layers[0].optimizer
    for moved in moved_bytes(schedule, sizes):
        assert set(moved) == {"net REDUCE_GRAD", "net UNSHARD"}
        assert set(moved.values()) == {4 * weights * (n - 1) // n}
    for found in classes_of(schedule, sizes, peak_in_flight(build_graph(schedule))):
        assert found["weights"] + found["gathered weights"] == weights // n + 2 * weights * (n - 1) // n
        assert found["optimizer state"] == stages * state // n
        assert found["kept by trials"] == state // n + weights // n, "of one stage, and a shard of the first half"
        assert found["gradients"] == (weights // n if each == 1 else weights)
        assert found["gradients on their way"] == (2 * weights // stages if each == 1 else weights)


def test_halves_that_cannot_be_shared_are_refused():
    with pytest.raises(
        ValueError, match=r"the 3 microbatches of each half .* take num_microbatches=8, two halves of 4"
    ):
        entry("acco").build(Shape(2, 2, 3))
