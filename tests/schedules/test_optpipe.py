"""Order and offloading chosen together: optima known on paper, what a device really holds, and training bit for bit."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.config.loading import load
from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis, peak_resident
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts, unit_costs
from rpbench.ir.schedule import Schedule, Shape, from_text, to_text
from rpbench.ordering.exact import Case, Plan, needed_before
from rpbench.passes.lower import add_steps
from rpbench.registry import entries, entry, offered
from rpbench.run.scheduled import assembled_of
from rpbench.sim.longest_path import simulate

solved = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-tools is not installed: extra `exact`")


def build(p: int, m: int, costs: StageCosts | None = None, num_steps: int = 1, **options) -> Schedule:
    shape = Shape(p, p, m, num_steps=num_steps)
    return entry("optpipe").build(shape, costs, **options)


def with_transfers(costs: StageCosts, time: float) -> StageCosts:
    return replace(costs, store=(time,) * costs.num_stages, load=(time,) * costs.num_stages)


def timeline_of(schedule: Schedule, costs: StageCosts):
    """The simulator's: every lane as early as it can, transfers at the times of the costs."""
    work = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    table = CostTable({kind: tuple(map(Work, times)) for kind, times in work.items()}, costs.hop)
    ways = {"d2h": costs.store, "h2d": costs.load}
    return simulate(
        schedule, replace(table, transfer_time=lambda payload: (ways[payload.lane] or costs.forward)[payload.stage])
    )


def span_of(schedule: Schedule, costs: StageCosts) -> float:
    """The longest time from a device's first computation to its last."""
    own: dict[int, list] = {}
    for span in timeline_of(schedule, costs).spans():
        if span.action.kind in (Kind.F, Kind.I, Kind.W):
            own.setdefault(span.device, []).append(span)
    return max(max(span.end for span in rank) - min(span.start for span in rank) for rank in own.values())


def most_held(schedule: Schedule, costs: StageCosts) -> float:
    """Activations on the fullest device while the simulator runs the schedule, transfers under way included."""
    changes: list[list[tuple[float, int]]] = [[] for _ in range(schedule.shape.num_ranks)]
    for span in timeline_of(schedule, costs).spans():
        kind = span.action.kind
        if kind in (Kind.F, Kind.LOAD):
            changes[span.device].append((round(span.start, 6), 1))
        elif kind in (Kind.W, Kind.STORE):
            changes[span.device].append((round(span.end, 6), -1))
    most = 0
    for device in changes:
        held = 0
        for _, change in sorted(device):
            held += change
            most = max(most, held)
        assert held == 0
    return most


# --- optima by hand -----------------------------------------------------------------------------------------------


def test_lanes_are_in_the_order_of_a_plans_times_and_name_what_makes_room():
    """Two microbatches of two stages and room for one activation on the first, whose activations all go and come back.

    F1 and LOAD 0 wait until a STORE has made room, LOAD 1 until W0 has. The second stage holds one at a time.
    """
    first = {
        Kind.F: ((0, 1), (2, 3)), Kind.STORE: ((1, 2), (3, 4)), Kind.LOAD: ((4, 5), (7, 8)),
        Kind.I: ((5, 6), (8, 9)), Kind.W: ((6, 7), (9, 10)),
    }  # fmt: skip
    second = {Kind.F: ((1, 2), (4, 5)), Kind.I: ((2, 3), (5, 6)), Kind.W: ((3, 4), (6, 7))}
    plan = Plan(
        {
            (kind, stage, microbatch): span
            for stage, of_kind in enumerate((first, second))
            for kind, spans in of_kind.items()
            for microbatch, span in enumerate(spans)
        }
    )
    found = [{lane: " ".join(map(str, row)) for lane, row in plan.lanes(stage).items()} for stage in range(2)]
    assert found[0] == {
        "compute": "0F0 0FREE:A0 0F1 0I0 0W0 0I1 0W1",
        "h2d": "0FREE:A1 0LOAD:A0 0FREE:A0 0LOAD:A1 0FREE:A1",
        "d2h": "0STORE:A0 0FREE:A0 0STORE:A1 0FREE:A1",
    }
    assert found[1] == {"compute": "1F0 1I0 1W0 1F1 1I1 1W1"}
    assert plan.num_moved() == 2


@pytest.mark.parametrize(
    "action, needs",
    [
        ((Kind.F, 0, 0), []),
        ((Kind.F, 1, 1), [(Kind.F, 1, 0, 0), (Kind.F, 0, 1, 250)]),
        ((Kind.I, 0, 1), [(Kind.I, 0, 0, 0), (Kind.F, 0, 1, 0), (Kind.I, 1, 1, 250)]),
        ((Kind.I, 1, 0), [(Kind.F, 1, 0, 0)]),
        ((Kind.W, 0, 1), [(Kind.W, 0, 0, 0), (Kind.I, 0, 1, 0)]),
    ],
)
def test_an_action_waits_for_the_one_before_its_input_and_its_first_half(action, needs):
    costs = StageCosts((1.0, 2.0), (1.0, 1.0), (0.5, 1.0), 0.25, (1.0, 1.0), (1.0, 1.0))
    assert needed_before(Case(2, costs, 1.0, offload=False), *action) == needs


@pytest.mark.parametrize("offload, horizon", [(False, 3 * (6.5 + 4 * 0.25)), (True, 3 * (6.5 + 6 + 4 * 0.25))])
def test_no_run_takes_longer_than_everything_after_each_other(offload, horizon):
    """F, I and W of both stages take 6.5, STORE and LOAD 6, and a microbatch crosses four times at most."""
    costs = StageCosts((1.0, 2.0), (1.0, 1.0), (0.5, 1.0), 0.25, (1.0, 1.0), (1.0, 1.0))
    assert Case(3, replace(costs, store=(1.0, 1.0), load=(2.0, 2.0)), 1.0, offload).horizon == 1000 * horizon


@solved
@pytest.mark.parametrize("transfer, span, moved", [(0.0, 8, 2), (0.5, 8, 2), (0.75, 9, 2), (1.0, 10, 0), (2.0, 10, 0)])
def test_two_ranks_two_microbatches_and_room_for_one(transfer, span, moved):
    """min(10, max(8, 6 + 4t)) slots.

    Rank 0 holds one microbatch at a time. Without the host each makes its round trip, 0F 1F 1I 0I 0W, before the next:
    10. With it, both must go, or the second would be in the way of the first: the room is taken for F and STORE twice,
    and for LOAD, I and W twice, 6 + 4t. And rank 1 has F I W of one and F I of the other behind it when it hands over
    its last gradient, at 6; 0I1 and 0W1 follow.
    """
    costs = with_transfers(unit_costs(Shape(2, 2, 2)), transfer)
    schedule = build(2, 2, costs, memory_limit="1")
    check(schedule)
    assert schedule.told["order_proven"]
    assert span_of(schedule, costs) == pytest.approx(span, abs=1e-6)
    on_rank_0 = sum(action.kind is Kind.STORE for action in schedule.lanes[0].get("d2h", ()))
    assert on_rank_0 == moved
    assert most_held(schedule, costs) == 1


@solved
@pytest.mark.parametrize("p, m", [(2, 2), (2, 4), (3, 2), (3, 3), (4, 2)])
def test_room_for_one_activation_with_free_transfers_and_without(p, m):
    """3m + 2(p-1) slots against (2p+1)m.

    The last rank holds a microbatch from F to W, so its m-th I ends 3m-1 slots after its first F begins, at p-1; the
    gradient goes down p-1 ranks, and a W ends it. Without the host each microbatch goes up and down alone: 2p and a W.
    """
    costs = unit_costs(Shape(p, p, m))
    free = with_transfers(costs, 0.0)
    assert span_of(build(p, m, free, memory_limit="1"), free) == 3 * m + 2 * (p - 1)
    assert span_of(build(p, m, costs, memory_limit="1"), costs) == (2 * p + 1) * m


@solved
def test_the_table_by_hand():
    """Where the optimum is unique: the drawing of the file."""
    schedule = build(2, 2, memory_limit="1", transfer=0.5)
    lanes = {name: " ".join(map(str, row)) for name, row in schedule.lanes[0].items()}
    assert lanes == {
        "compute": "0F0 0FREE:A0 0F1 0I0 0W0 0I1 0W1",
        "d2h": "0STORE:A0 0FREE:A0 0STORE:A1 0FREE:A1",
        "h2d": "0FREE:A1 0LOAD:A0 0FREE:A0 0LOAD:A1 0FREE:A1",
    }


# --- against the optimum without offloading -----------------------------------------------------------------------


@solved
@settings(deadline=None, max_examples=6)
@given(
    p=st.integers(2, 3),
    m=st.integers(2, 3),
    times=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)),
    transfer=st.sampled_from([0.25, 1.0, 3.0]),
    limit=st.integers(1, 3),
    kept=st.sampled_from([0.5, 1.0]),
)
def test_never_longer_than_the_best_order_that_moves_nothing(p, m, times, transfer, limit, kept):
    forward, input_grad, weight_grad = ((float(time),) * p for time in times)
    costs = StageCosts(forward, input_grad, weight_grad, 0.0, (1.0,) * p, (kept,) * p)
    moving = with_transfers(costs, transfer)
    free, bound = (
        build(p, m, moving, memory_limit=str(limit)),
        build(p, m, moving, memory_limit=str(limit), offload=False),
    )
    assert free.told["order_proven"]
    assert bound.told["order_proven"]
    assert bound.told["num_offloaded"] == 0
    assert span_of(free, moving) <= span_of(bound, moving) + 1e-6
    heuristic = entry("zb_auto").build(Shape(p, p, m), costs, memory_limit=str(limit))
    assert span_of(bound, moving) <= span_of(heuristic, moving) + 1e-6
    for schedule in (free, bound):
        check(add_steps(schedule))
        assert from_text(to_text(schedule)) == schedule
    if free.told["num_offloaded"]:
        assert span_of(free, moving) < span_of(bound, moving)  # or nothing would have moved
    if kept == 1.0:
        assert most_held(free, moving) <= limit
        assert max(peak_resident(Analysis(free))) <= limit


@solved
def test_slow_links_are_not_used():
    costs = with_transfers(unit_costs(Shape(3, 3, 4)), 20.0)
    schedule, plain = (build(3, 4, costs, memory_limit="2", offload=offload) for offload in (True, False))
    assert schedule.told["num_offloaded"] == 0
    assert span_of(schedule, costs) == span_of(plain, costs)


@solved
def test_nothing_moves_where_nobody_knows_how_long_it_takes():
    assert build(2, 2, memory_limit="1").told["num_offloaded"] == 0


@solved
def test_whatever_anything_takes_in_a_run_no_device_holds_more_than_in_the_plan():
    """What takes room waits for what makes it, by order alone: 1F1B would hold 3."""
    planned = with_transfers(unit_costs(Shape(3, 3, 4)), 0.5)
    schedule = build(3, 4, planned, memory_limit="2")
    assert schedule.told["num_offloaded"] > 0
    for transfer, times in product((0.0, 0.1, 0.5, 1.7, 9.0), ((1.0, 1.0, 1.0), (3.0, 1.0, 0.5), (0.2, 1.0, 4.0))):
        forward, input_grad, weight_grad = ((time,) * 3 for time in times)
        found = replace(planned, forward=forward, input_grad=input_grad, weight_grad=weight_grad)
        assert most_held(schedule, with_transfers(found, transfer)) <= 2
    assert max(peak_resident(Analysis(schedule))) == 2


@solved
@pytest.mark.parametrize("transfer", [0.0, 0.5])
def test_backwards_that_are_not_split_make_room_before_the_next_forward(transfer):
    """W takes no time, and lets go of everything."""
    ones, none = (1.0,) * 2, (0.0,) * 2
    costs = with_transfers(StageCosts(ones, (2.0,) * 2, none, 0.0, ones, ones), transfer)
    schedule = build(2, 3, costs, memory_limit="1")
    check(schedule)
    assert most_held(schedule, costs) == 1
    assert max(peak_resident(Analysis(schedule))) == 1


@solved
def test_the_same_case_has_the_same_order():
    from rpbench.ordering.exact import best_order

    costs = with_transfers(unit_costs(Shape(3, 3, 3)), 0.5)
    first, second = (best_order(3, costs, 2, offload=True) for _ in range(2))
    assert first.schedule == second.schedule


@solved
def test_steps_repeat_the_order():
    one, two = (build(2, 2, memory_limit="1", transfer=0.5, num_steps=steps) for steps in (1, 2))
    check(add_steps(two))
    assert two.told["num_offloaded"] == 2 * one.told["num_offloaded"]
    for rank in range(2):
        for lane, row in two.lanes[rank].items():
            half = len(row) // 2
            assert row[:half] == one.lanes[rank][lane]
            assert [action._replace(microbatch=action.microbatch - 2) for action in row[half:]] == list(row[:half])


# --- training -----------------------------------------------------------------------------------------------------

TRAINED = (
    "schedule=optpipe", "schedule.memory_limit=1", "schedule.transfer=0.25", "num_devices=3", "num_microbatches=3",
    "num_steps=2", "model=tiny_gpt", "model.num_layers=3", "workload.microbatch_sequences=1", "dtype=float64",
    "verify=true",
)  # fmt: skip


@solved
@pytest.mark.parametrize("backend", ["virtual", "cpu"])
def test_it_trains_bit_for_bit_and_moves_what_is_counted(backend, tmp_path):
    from rpbench.run.recording import run

    (row,) = run(load([*TRAINED, f"backend={backend}", f"results_dir={tmp_path}"]))
    assert row["status"] == "ok"
    assert (row["grad_max_abs_diff"], row["weight_max_abs_diff"]) == (0, 0)
    assert row["order_proven"] is True
    boundary = 8 * 16 * 32  # float64, tokens of a microbatch, hidden
    for way in ("h2d", "d2h"):
        counted, copied = row[f"{way}_bytes"], row[f"{way}_copied_bytes"]
        assert copied[1] > 0
        assert [number // 2 * 8 for number in counted] == copied  # counted in 16 bits
        assert all(number % boundary == 0 for number in copied)
    assert row["peak_in_flight"] == [1, 1, 1]


# --- refusals -----------------------------------------------------------------------------------------------------


def test_it_is_offered_by_name_and_left_out_of_what_is_swept():
    assert "optpipe" in offered()
    assert "optpipe" not in entries()
    assert load(["schedule=optpipe"]).entry.extra == "exact"


@pytest.mark.parametrize(
    "shape, options, message",
    [
        (Shape(2, 4, 4), {}, "one stage on each rank, got 4 stages on 2 ranks"),
        (Shape(8, 8, 16), {}, "8 ranks with 16 microbatches have 128 forwards.* at most 48: take fewer"),
        (Shape(2, 2, 2), {"transfer": -1.0}, "transfer=-1.0: a time in forwards"),
        (Shape(2, 2, 2), {"time_limit_s": 0}, "time_limit_s=0: seconds above 0"),
    ],
)
def test_what_cannot_be_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        entry("optpipe").build(shape, **options)


@pytest.mark.parametrize("words", [["partition=search"], ["tuning_budget=10"]])
def test_searches_that_would_solve_many_are_refused(words):
    asked = ["schedule=optpipe", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic", "num_devices=2", *words]
    with pytest.raises(ValueError, match=f"{words[0].partition('=')[0]}=.*: optpipe solves a program for every"):
        assembled_of(load(asked))


@solved
def test_a_limit_that_nothing_fits_in_is_refused():
    with pytest.raises(ValueError, match=r"memory_limit=0\.5: a rank must be able to hold"):
        build(2, 2, memory_limit="0.5")


def test_without_the_solver_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("baselines.zero_bubble.optpipe.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs OR-tools; pip install -e "\.\[exact\]"'):
        build(2, 2)
