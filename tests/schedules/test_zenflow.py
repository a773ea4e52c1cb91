"""ZenFlow: what stands in its lanes, what waits for what, how late the rest is, and what it moves and holds."""

from dataclasses import replace
from fractions import Fraction

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
from rpbench.ir.policy import LateRest, Policy, boundaries, steps_late
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture

# One device, two stages, five steps of a microbatch, an interval of two, by hand from the rule: windows end with 2, 4
# and 5; at 4 comes what was made at 2, and the last boundary is waited for.
COMPUTE = "0F{0} 1F{0} 1B{0} 0B{0} 1STEP@{1} 0STEP@{1}"
HOST = "1STEP_REST@2 0STEP_REST@2 1STEP_REST@4 0STEP_REST@4 1STEP_REST@5 0STEP_REST@5"
LOADS = "0LOAD:P@4 1LOAD:P@4 0LOAD:P@5 1LOAD:P@5"


def complete(shape: Shape, num_layers: int = 0, name: str = "zenflow", **options) -> Schedule:
    found = entry(name)
    cut = symmetric(split_evenly(num_layers or shape.num_stages, shape.num_stages))
    order = found.build(shape, **options).with_partition(cut)
    return found.lower(order, prefetch=1, **(found.options | options))


def two(num_steps: int = 5, **options) -> Schedule:
    return complete(Shape(1, 2, 1, num_steps=num_steps), **({"update_interval": 2} | options))


def tokens(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))


def test_rows():
    (row,) = two().lanes
    assert tokens(row["compute"]) == " ".join(COMPUTE.format(step, step + 1) for step in range(5))
    assert tokens(row["d2h"]) == " ".join(["1STORE:G 0STORE:G"] * 5)
    assert tokens(row["host"]) == HOST
    assert tokens(row["h2d"]) == LOADS
    assert from_text(to_text(two())) == two()
    assert parse("1STEP_REST@4") == Action(Kind.STEP_REST, 1, version=4)


def test_without_overlap_every_boundary_brings_its_own():
    (row,) = two(overlap=False).lanes
    assert tokens(row["host"]) == HOST
    assert tokens(row["h2d"]) == "0LOAD:P@2 1LOAD:P@2 " + LOADS


def test_the_warm_up_is_the_hosts():
    (row,) = two(num_warmup_steps=2).lanes
    assert tokens(row["compute"]).startswith("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2 1STEP@3 0STEP@3")
    assert tokens(row["host"]) == "1STEP@1 0STEP@1 1STEP@2 0STEP@2 1STEP_REST@4 0STEP_REST@4 1STEP_REST@5 0STEP_REST@5"
    assert tokens(row["h2d"]) == "0LOAD:P@1 1LOAD:P@1 0LOAD:P@2 1LOAD:P@2 0LOAD:P@5 1LOAD:P@5"


def test_where_all_is_stepped_at_once_nothing_moves():
    (row,) = two(topk=1).lanes
    assert set(row) == {"compute"}


def test_three_devices_share_what_moves():
    lanes = complete(Shape(3, 3, 3, num_steps=1)).lanes
    gathers = "0UNSHARD@0 1UNSHARD@0 2UNSHARD@0"
    sums = "2REDUCE_GRAD 2RESHARD 1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD"
    for device, row in enumerate(lanes):
        passes = " ".join(stage_kind + str(device) for stage_kind in ("0F", "1F", "2F", "2B", "1B", "0B"))
        assert tokens(row["compute"]) == f"{passes} {device}STEP@1"
        assert tokens(row["net"]) == f"{gathers} {sums}"
        assert tokens(row["d2h"]) == "2STORE:G 1STORE:G 0STORE:G"
        assert tokens(row["host"]) == f"{device}STEP_REST@1"
        assert tokens(row["h2d"]) == "0LOAD:P@1 1LOAD:P@1 2LOAD:P@1"


# --- how late -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, late",
    [
        # An interval of 3, eight steps: windows 1-3, 4-6 and 7-8. Window 1 enters at 6, the others at the end.
        ({"update_interval": 3}, [5, 4, 3, 4, 3, 2, 1, 0]),
        ({"update_interval": 3, "overlap": False}, [2, 1, 0, 2, 1, 0, 1, 0]),
        ({"update_interval": 1}, [1, 1, 1, 1, 1, 1, 1, 0]),
        ({"update_interval": 1, "overlap": False}, [0] * 8),
        ({"update_interval": 2, "select_interval": 4}, [3, 2, 1, 0, 3, 2, 1, 0]),
        ({"update_interval": 2, "num_warmup_steps": 3}, [0, 0, 0, 3, 2, 2, 1, 0]),
        ({"update_interval": 4, "topk": 1.0}, [0] * 8),
    ],
)
def test_steps_late_by_hand(options, late):
    assert steps_late(LateRest(**({"topk": 0.1} | options)), 8) == late
    schedule = complete(Shape(1, 2, 1, num_steps=8), **options)
    versions = check(schedule)
    assert [versions.staleness_steps[0, step] for step in range(8)] == late
    assert Analysis(entry("zenflow").build(schedule.shape, **options)).versions.max_staleness == max(late)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_a_rest_that_overlaps_is_s_to_2s_less_1_steps_late(interval):
    late = steps_late(LateRest(0.1, interval), 4 * interval)
    assert late[: 2 * interval] == list(range(2 * interval - 1, interval - 1, -1)) * 2


def test_what_is_chosen_anew_finds_nothing_under_way():
    """Before each choice but the first the boundary is settled: it brings what it has made itself."""
    rule = LateRest(0.1, 2, 6, num_warmup_steps=1)
    settled = {end.version for end in boundaries(rule, 20) if end.brings == end.version}
    chosen = [version for version in range(1, 21) if rule.chooses(version)]
    assert chosen == [2, 8, 14, 20]
    assert {version - 1 for version in chosen} <= settled == {1, 7, 13, 19, 20}


# --- time -----------------------------------------------------------------------------------------------------------


def costs(schedule: Schedule, step: float) -> CostTable:
    """Forward 1, backward 2, a whole step as given; every transfer 1."""
    stages = schedule.shape.num_stages
    table = LayerTimes([1] * stages, [0] * stages, [2] * stages, step=[step] * stages).table(schedule.partition)
    return replace(table, transfer_time=lambda payload: None if payload.lane == "host" else 1)


def spans(schedule: Schedule, step: float) -> dict[str, tuple[float, float]]:
    found = simulate(schedule, costs(schedule, step)).spans()
    return {str(span.action): (float(span.start), float(span.end)) for span in found}


def test_the_host_steps_beside_the_next_interval():
    """By hand, a whole step takes 2, half of it each is the device's and the host's.

    A step of the device is 1 + 1 forward, 2 + 2 back and 1 + 1 of stepping: 0-8, 8-16, 16-24, 24-32. The host's first
    window ends with step 2: 15-16 and 16-17, which nobody waits for. At 32 its weights come, 32-33 and 33-34: the next
    forward begins at 33, and 1 of 17 is lost every two steps. Only then the host has its next window, 34-36.
    """
    found = spans(two(7, topk=0.5), 2)
    assert [found[f"0F{step}"][0] for step in range(5)] == [0, 8, 16, 24, 33]
    assert (found["1STEP_REST@2"], found["0STEP_REST@2"]) == ((15, 16), (16, 17))
    assert (found["0LOAD:P@4"], found["1LOAD:P@4"]) == ((32, 33), (33, 34))
    assert found["1F4"] == (34, 35)
    assert (found["1STEP_REST@4"], found["0STEP_REST@4"]) == ((34, 35), (35, 36))


def test_what_zero_offload_waits_for():
    """The same costs: the last gradient down, its step and the first weights up, 1 + 2 + 1 behind each backward."""
    found = spans(complete(Shape(1, 2, 1, num_steps=3), name="zero_offload"), 2)
    assert found["0F1"][0] - found["0B0"][1] == found["0F2"][0] - found["0B1"][1] == 1 + 2 + 1
    ours = spans(two(7, topk=0.5), 2)
    assert [ours[f"0F{step + 1}"][0] - ours[f"0STEP@{step + 1}"][1] for step in range(4)] == [0, 0, 0, 1]


def test_a_host_that_is_too_slow_is_waited_for_a_whole_interval_later():
    """A whole step takes 40, 36 of it the host's, and the device's steps are 0-14, 14-28, 28-42 and 42-56.

    The device steps stage 1 for version 2 until 24, the host from there to 60, and stage 0 to 96: the device waits 40.
    """
    found = spans(two(5, topk=0.1), 40)
    assert (found["1STEP_REST@2"], found["0STEP_REST@2"]) == ((24, 60), (60, 96))
    assert (found["0LOAD:P@4"][0], found["0F4"][0]) == (96, 97)


# --- what is waited for ---------------------------------------------------------------------------------------------


def waits(schedule: Schedule, token: str) -> set[str]:
    analysis = Analysis(schedule)
    number = next(n for n, action in enumerate(analysis.index.actions) if str(action) == token)
    return {str(analysis.index.actions[producer]) for producer in analysis.producers[number]}


def test_edges():
    schedule = two(7)
    assert waits(schedule, "1STEP@2") == set(), "its gradient stands before it, and no STORE:G holds it up"
    assert waits(schedule, "1STEP_REST@2") == {"1STORE:G", "1STEP@2"}
    assert waits(schedule, "1STEP_REST@4") == {"1STORE:G", "1STEP@4", "1LOAD:P@4"}
    assert waits(schedule, "0LOAD:P@4") == {"0STEP_REST@2", "0STEP@4"}
    assert waits(schedule, "0F4") == {"0LOAD:P@4"}
    assert waits(two(7, overlap=False), "0LOAD:P@4") == {"0STEP_REST@4", "0STEP@4"}
    assert waits(two(num_warmup_steps=1), "0LOAD:P@1") == {"0STEP@1"}


def test_edges_of_several_devices():
    schedule = complete(Shape(2, 2, 2, num_steps=4), update_interval=1)
    assert waits(schedule, "0UNSHARD@2") == {"0STEP@2", "0LOAD:P@2"}
    analysis = Analysis(schedule)
    actions = analysis.index.actions
    first = next(number for number, action in enumerate(actions) if str(action) == "1STORE:G")
    sources = {number for number in analysis.producers[first] if actions[number].kind is Kind.REDUCE_GRAD}
    assert len(sources) == 2, "both devices choose by the sum of all"


def test_the_simulators_edges_are_the_same():
    for schedule in (two(), two(num_warmup_steps=1), two(overlap=False), complete(Shape(3, 4, 6, num_steps=3))):
        graph, analysis = build_graph(schedule), Analysis(schedule)
        order, first = graph.order.tolist(), graph.pred_start.tolist()
        for position, number in enumerate(order):
            found = {order[p] for p in graph.pred[first[position] : first[position + 1]].tolist()}
            assert found == set(analysis.producers[number]), analysis.index.actions[number]


# --- what is refused ------------------------------------------------------------------------------------------------


def changed(schedule: Schedule, lane: str, token: str, other: str = "") -> Schedule:
    (lanes,) = schedule.lanes
    row = [action for action in lanes[lane] if str(action) != token] + ([parse(other)] if other else [])
    return replace(schedule, rows=({**lanes, lane: tuple(row)},))


def test_rows_that_break_the_rule_are_refused():
    with pytest.raises(ScheduleError, match=r"1STEP_REST@2 is missing: what the host has added up is never applied"):
        check(changed(two(), "host", "1STEP_REST@2"))
    with pytest.raises(ScheduleError, match=r"1STEP_REST@3 stands where no window .* end at \[2, 4, 5\]"):
        check(changed(two(), "host", "1STEP_REST@2", "1STEP_REST@3"))
    with pytest.raises(ScheduleError, match=r"1STEP_REST@2 stands on another lane than host"):
        check(changed(changed(two(), "host", "1STEP_REST@2"), "compute", "", "1STEP_REST@2"))
    with pytest.raises(
        ScheduleError, match=r"stage 0 for versions \[2, 4, 5\], and the host has something at \[4, 5\]"
    ):
        check(changed(two(), "h2d", "", "0LOAD:P@2"))
    with pytest.raises(
        ScheduleError, match=r"(?s)rank 0 brings stage 1 for versions \[5\], .* one LOAD:P for each of them"
    ):
        check(changed(two(), "h2d", "1LOAD:P@4"))
    with pytest.raises(ScheduleError, match=r"1LOAD:P.1@4 is a piece: a late rest comes whole"):
        check(changed(two(), "h2d", "1LOAD:P@4", "1LOAD:P.1@4"))
    with pytest.raises(ScheduleError, match=r"no rank can move"):  # what is made later is made first
        check(changed(two(), "host", "0STEP_REST@2", "0STEP_REST@2"))
    with pytest.raises(ScheduleError, match=r"0STORE:G is of no use: devices step all of it at once"):
        check(replace(two(), late_rest=LateRest(1.0, 2), rows=({**two().lanes[0], "host": (), "h2d": ()},)))


def test_a_rule_and_its_policy_stand_together():
    with pytest.raises(ScheduleError, match=r"policy flush with late_rest=.*take both or neither"):
        check(replace(two(), policy=Policy.FLUSH))
    with pytest.raises(ScheduleError, match="policy selective with late_rest=None"):
        check(replace(two(), late_rest=None))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topk": 1.5}, r"schedule.topk=1.5: .*from 0 to 1; take 0.1"),
        ({"topk": True}, r"schedule.topk=True"),
        ({"topk": float("nan")}, r"schedule.topk=nan"),
        ({"update_interval": 0}, r"schedule.update_interval=0: a whole number from 1, .*take 4"),
        ({"select_interval": 6}, r"schedule.select_interval=6: .*multiple of schedule.update_interval=4; take 8, or 0"),
        ({"select_interval": -4}, r"schedule.select_interval=-4: a whole number from 0"),
        ({"num_warmup_steps": 1.0}, r"schedule.num_warmup_steps=1.0: a whole number from 0"),
        ({"overlap": 1}, r"schedule.overlap=1: .*true or false"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        entry("zenflow").build(Shape(1, 2, 1), **options)


# --- bytes ----------------------------------------------------------------------------------------------------------

MODEL = Architecture("tiny", num_layers=8, hidden=32, heads=2, vocab=60, seq_len=7)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("topk", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, training_mode="lora", lora_rank=2)], ids=["full", "lora"])
def test_bytes_over_the_link(model, n, topk):
    """2 (1 - k) bytes a trained parameter down a step, 2 up at a boundary that brings any: 4, 6, 8 and 9 of 9."""
    sizes, parameters = model_bytes(model, 14), model.trainable_parameters
    moved = moved_bytes(complete(Shape(n, 4, 3 * n, num_steps=9), 8, topk=topk, update_interval=2), sizes)
    down, up = (sum(device[what] for device in moved) for what in ("d2h STORE:G", "h2d LOAD:P"))
    assert down == pytest.approx(9 * 2 * (1 - topk) * parameters, rel=1e-5)
    assert up == pytest.approx(4 * 2 * parameters, abs=10)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_memory_of_devices_and_host(n):
    """A device: 12 k bytes of state, shared. The host: 12 of state, two sums of 4 (1 - k), or one without overlap."""
    sizes, parameters = model_bytes(MODEL, 14), MODEL.total_parameters
    for overlap in (True, False):
        schedule = complete(Shape(n, 4, 3 * n, num_steps=3), 8, topk=0.25, overlap=overlap)
        assert host_bytes(schedule, sizes) == (12 + 4 * 0.75 * (1 + overlap)) * parameters
        first = classes_of(schedule, sizes, peak_in_flight(build_graph(schedule)))[0]
        assert first["optimizer state"] * n == pytest.approx(12 * 0.25 * parameters, abs=n)
        assert first["weights"] * n == pytest.approx(2 * parameters, abs=n)
        assert first["gradients"] * n == pytest.approx(2 * parameters, abs=n)
    whole = complete(Shape(1, 4, 1), 8, topk=1)
    assert host_bytes(whole, sizes) == 0
    one = complete(Shape(1, 4, 1), 8, topk=0.25)
    (found,) = classes_of(one, sizes, peak_in_flight(build_graph(one)))
    assert found["gradients"] == Fraction(1, 4) * 2 * parameters, "of one microbatch a step the rest leaves at once"
