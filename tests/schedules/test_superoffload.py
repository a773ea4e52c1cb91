"""SuperOffload: steps beside the backward, one look at all gradients, and what takes steps back that were too early."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.replicas import host_bytes
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.cost.transfers import moved_bytes
from rpbench.ir.action import Action, Kind, parse
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

# One device, three stages, two steps of a microbatch, by hand from the rule.
COMPUTE = "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"
STORES = "2STORE:G 2FREE:G 1STORE:G 1FREE:G 0STORE:G 0FREE:G"
HOST = "2STEP@{0} 1STEP@{0} 0STEP@{0} 0VALIDATE@{0} 2ROLLBACK@{0} 1ROLLBACK@{0} 0ROLLBACK@{0}"
LOADS = """
    0LOAD:P@0 1LOAD:P@0 2LOAD:P@0
    2FREE:P 2LOAD:P@1 1FREE:P 1LOAD:P@1 0FREE:P 0LOAD:P@1
    2FREE:P 1FREE:P 0FREE:P
"""


def edit(schedule: Schedule, device: int, change: Callable[[list[Action]], object], lane: str = "compute") -> Schedule:
    """The schedule with one row changed in place by `change`."""
    rows = [{name: list(row) for name, row in lanes} for lanes in schedule.rows]
    change(rows[device][lane])
    return replace(schedule, rows=tuple({name: tuple(row) for name, row in lanes.items()} for lanes in rows))


def complete(shape: Shape, num_layers: int = 0, name: str = "superoffload", **options) -> Schedule:
    found = entry(name)
    cut = symmetric(split_evenly(num_layers or shape.num_stages, shape.num_stages))
    order = found.build(shape, **options).with_partition(cut)
    return found.lower(order, prefetch=1, **(found.options | options))


def tokens(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))


def three(**options) -> Schedule:
    return complete(Shape(1, 3, 1, num_steps=2), **options)


def test_rows():
    (row,) = three().lanes
    assert tokens(row["compute"]) == COMPUTE
    assert tokens(row["d2h"]) == f"{STORES} {STORES}"
    assert tokens(row["host"]) == f"{HOST.format(1)} {HOST.format(2)}"
    assert tokens(row["h2d"]) == " ".join(LOADS.split())
    assert from_text(to_text(three())) == three()
    assert parse("1ROLLBACK@3") == Action(Kind.ROLLBACK, 1, version=3)


def test_without_speculation_the_look_comes_first():
    (row,) = three(speculate=False).lanes
    assert tokens(row["host"]) == "0VALIDATE@1 2STEP@1 1STEP@1 0STEP@1 0VALIDATE@2 2STEP@2 1STEP@2 0STEP@2"


def test_the_last_gradients_steps_can_be_the_devices():
    """Stage 0 is stepped on the device: neither its gradient nor its weights travel, and it waits for the look."""
    (row,) = three(device_stages=1).lanes
    assert tokens(row["compute"][:8]) == "0F0 1F0 2F0 2B0 1B0 0B0 0VALIDATE@1 0STEP@1"
    assert tokens(row["host"][:4]) == "2STEP@1 1STEP@1 2ROLLBACK@1 1ROLLBACK@1"
    assert not any(action.stage == 0 for lane in ("h2d", "d2h") for action in row[lane])
    (whole,) = three(device_stages=3).lanes
    assert set(whole) == {"compute"}


@pytest.mark.parametrize(
    "options", [{}, {"speculate": False}, {"device_stages": 1}, {"device_stages": 3}, {"gather_each_visit": False}]
)
@pytest.mark.parametrize("shape", [Shape(1, 3, 2, num_steps=3), Shape(3, 4, 6, num_steps=2), Shape(4, 2, 4)])
def test_nothing_is_stale(shape, options):
    if options.get("device_stages", 0) > shape.num_stages:
        return
    versions = check(complete(shape, **options))
    assert versions.max_staleness == 0
    assert versions.published == (shape.num_steps,) * shape.num_stages


# --- time -----------------------------------------------------------------------------------------------------------


def costs(schedule: Schedule, step: float, transfer: float = 1) -> CostTable:
    """Forward 1, backward 2, step as given; every transfer as given."""
    stages = schedule.shape.num_stages
    table = LayerTimes([1] * stages, [0] * stages, [2] * stages, step=[step] * stages).table(schedule.partition)
    return replace(table, transfer_time=lambda payload: None if payload.lane == "host" else transfer)


def spans(schedule: Schedule, step: float, transfer: float = 1) -> dict[str, tuple[float, float]]:
    found = simulate(schedule, costs(schedule, step, transfer)).spans()
    return {str(span.action): (float(span.start), float(span.end)) for span in found}


def test_steps_lie_beside_the_backward():
    """By hand: loads of what the run begins with 0-3, forwards 1-4, backwards 4-10; a step takes 1.

    Gradients reach the host at 7, 9 and 11; steps 7-8, 9-10, 11-12; weights 8-9, 10-11, 12-13. The step of the last
    gradient ends at 12, when it is known that all are finite, and the next forward begins at 13: 3 behind the backward.
    """
    found = spans(three(), step=1)
    assert [found[f"{stage}B0"] for stage in (2, 1, 0)] == [(4, 6), (6, 8), (8, 10)]
    assert [found[f"{stage}STEP@1"] for stage in (2, 1, 0)] == [(7, 8), (9, 10), (11, 12)]
    assert [found[f"{stage}LOAD:P@1"] for stage in (2, 1, 0)] == [(8, 9), (10, 11), (12, 13)]
    assert found["0VALIDATE@1"] == (12, 12)
    assert found["0F1"] == (13, 14)


def test_a_slow_host_leaves_a_tail():
    """A step takes 3: 7-10, 10-13, 13-16, weights at 17. The tail is 7, and 11 where all three wait for the look."""
    found = spans(three(), step=3)
    assert [found[f"{stage}STEP@1"] for stage in (2, 1, 0)] == [(7, 10), (10, 13), (13, 16)]
    assert found["0F1"][0] - found["0B0"][1] == 7
    waits = spans(three(speculate=False), step=3)
    assert [waits[f"{stage}STEP@1"] for stage in (2, 1, 0)] == [(11, 14), (14, 17), (17, 20)]
    assert waits["0F1"][0] - waits["0B0"][1] == 11


def test_the_tail_is_shorter_where_the_device_steps_the_last():
    """A step takes 3, and stage 0 does not travel: forwards 0-3, backwards 3-9, gradients of 2 and 1 down at 6 and 8.

    Steps of the host 6-9 and 9-12, weights up at 10 and 13. The device looks at 9 and steps stage 0 until 12.
    """
    found = spans(three(device_stages=1), step=3)
    assert found["0VALIDATE@1"] == (9, 9)
    assert found["0STEP@1"] == (9, 12)
    assert found["1LOAD:P@1"] == (12, 13)
    assert (found["0F1"][0], found["1F1"][0]) == (12, 13)
    assert found["0F1"][0] - found["0B0"][1] == 3, "and not 7"


def test_it_is_zero_offload_but_for_when_weights_come_up():
    """Transfers of 3, a step of 1, by hand. Loads 0-9, forwards 3-4, 6-7, 9-10, backwards 10-16.

    Gradients are down at 15, 18 and 21, steps 15-16, 18-19, 21-22. Weights of stages 2 and 1 are up at 19 and 22, of
    stage 0 at 25. `zero_offload` brings stage 0 first, at 25, then the others, at 28 and 31.
    """
    ours, other = spans(three(), 1, 3), spans(three(name="zero_offload"), 1, 3)
    assert [ours[f"{stage}LOAD:P@1"][1] for stage in (2, 1, 0)] == [19, 22, 25]
    assert [other[f"{stage}LOAD:P@1"][1] for stage in (2, 1, 0)] == [31, 28, 25]
    assert (ours["2F1"][0], other["2F1"][0]) == (27, 31)


# --- what is waited for ---------------------------------------------------------------------------------------------


def waits(schedule: Schedule, token: str) -> set[str]:
    analysis = Analysis(schedule)
    number = next(n for n, action in enumerate(analysis.index.actions) if str(action) == token)
    return {str(analysis.index.actions[producer]) for producer in analysis.producers[number]}


def test_edges():
    schedule = three()
    assert waits(schedule, "2STEP@1") == {"2B0", "2STORE:G"}, "of its own gradient alone"
    assert waits(schedule, "0VALIDATE@1") == {"2B0", "1B0", "0B0", "2STORE:G", "1STORE:G", "0STORE:G"}
    assert waits(schedule, "1ROLLBACK@1") == {"1LOAD:P@1"}, "the rest stands before it in its lane"
    assert waits(schedule, "1LOAD:P@1") == {"1STEP@1"}
    assert waits(schedule, "1F1") == {"1ROLLBACK@1", "1LOAD:P@1"}
    assert waits(three(device_stages=1), "0F1") == set(), "stands behind its step"
    assert waits(three(device_stages=1), "1ROLLBACK@1") == {"0VALIDATE@1", "1LOAD:P@1"}


def test_the_simulators_edges_are_the_same():
    for schedule in (three(), three(speculate=False), three(device_stages=2), complete(Shape(3, 4, 6, num_steps=2))):
        graph, analysis = build_graph(schedule), Analysis(schedule)
        order, first = graph.order.tolist(), graph.pred_start.tolist()
        for position, number in enumerate(order):
            found = {order[p] for p in graph.pred[first[position] : first[position + 1]].tolist()}
            assert found == set(analysis.producers[number]), analysis.index.actions[number]


# --- what is refused ------------------------------------------------------------------------------------------------


def drop(schedule: Schedule, token: str) -> Schedule:
    return edit(schedule, 0, lambda row: row.remove(parse(token)), "host")


def test_what_could_not_be_taken_back_is_refused():
    with pytest.raises(ScheduleError, match=r"1STEP@1 stands before 0VALIDATE@1 and nothing takes it back") as error:
        check(drop(three(), "1ROLLBACK@1"))
    assert "add 1ROLLBACK@1, or put it behind" in str(error.value)
    with pytest.raises(ScheduleError, match=r"0VALIDATE@2 is missing: either all steps are validated or none is"):
        check(drop(three(), "0VALIDATE@2"))
    with pytest.raises(ScheduleError, match=r"1STEP@2 is missing"):
        check(drop(three(), "1STEP@2"))


def test_a_forward_does_not_read_what_may_be_taken_back():
    """A ROLLBACK behind the next forward's own wait is a circle, not a race."""

    def late(row: list) -> None:
        row.remove(parse("0ROLLBACK@1"))
        row.insert(row.index(parse("2STEP@2")) + 1, parse("0ROLLBACK@1"))

    with pytest.raises(ScheduleError, match="no rank can move"):
        check(edit(three(), 0, late, "host"))


def test_other_policies_take_nothing_back():
    for policy in (Policy.FLUSH, Policy.DELAYED):
        with pytest.raises(ScheduleError, match=rf"policy {policy.value} takes no step before it knows"):
            check(replace(three(device_stages=3), policy=policy))
    with pytest.raises(ScheduleError, match=r"no step before|stands twice"):
        check(edit(three(), 0, lambda row: row.append(parse("0VALIDATE@1")), "host"))


def test_who_steps_takes_back():
    schedule = drop(three(), "1ROLLBACK@1")
    moved = edit(schedule, 0, lambda row: row.insert(6, parse("1ROLLBACK@1")))
    with pytest.raises(ScheduleError, match=r"1ROLLBACK@1 stands on another lane than 1STEP@1"):
        check(moved)


@pytest.mark.parametrize("value", [4, -1, True, 1.0])
def test_stages_that_are_not_there_are_refused(value):
    with pytest.raises(ValueError, match=r"schedule.device_stages=.*from 0 to 3.*take 0"):
        entry("superoffload").build(Shape(1, 3, 1), device_stages=value)


# --- bytes ----------------------------------------------------------------------------------------------------------

MODEL = Architecture("tiny", num_layers=8, hidden=32, heads=2, vocab=60, seq_len=7)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_two_bytes_a_parameter_down_and_two_up(n):
    sizes, parameters = model_bytes(MODEL, 14), MODEL.total_parameters
    moved = moved_bytes(complete(Shape(n, 4, 3 * n), 8), sizes)
    assert sum(device["d2h STORE:G"] for device in moved) == pytest.approx(2 * 3 * parameters, abs=10)
    assert sum(device["h2d LOAD:P"] for device in moved) == pytest.approx(2 * parameters, abs=10)


def test_the_host_keeps_a_copy_of_what_it_may_take_back():
    sizes, parameters = model_bytes(MODEL, 14), MODEL.total_parameters
    speculating, waiting = complete(Shape(1, 4, 1), 8), complete(Shape(1, 4, 1), 8, speculate=False)
    assert host_bytes(waiting, sizes) == (2 + 12) * parameters
    assert host_bytes(speculating, sizes) == (2 + 12 + 12) * parameters
    (found,) = classes_of(speculating, sizes, peak_in_flight(build_graph(speculating)))
    assert (found["weights"], found["optimizer state"], found["gradients"]) == (2 * parameters, 0, 0)
