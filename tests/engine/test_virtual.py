"""The virtual clock against the simulator, and the order in which work is done."""

import math

import numpy as np
import pytest
from cases import SPARED, build
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.table import CostTable, LayerTimes
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.program import gather_steps, make_program
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.passes.lower import lower_communication, split_backward
from rpbench.sim.events import deal
from rpbench.sim.longest_path import simulate


def nothing(action, number, gate):
    """A handler that takes its place in the table."""


HANDLERS = dict.fromkeys(Kind, nothing)


def times(draw, num_layers: int) -> LayerTimes:
    number = st.floats(0, 10, allow_subnormal=False)
    layers = st.lists(number, min_size=num_layers, max_size=num_layers)
    halves = draw(layers), draw(layers)
    return LayerTimes(
        draw(layers), draw(layers), [a + b for a, b in zip(*halves, strict=True)], draw(number), draw(number),
        *halves, draw(number), draw(number), hop=draw(number),
    )  # fmt: skip


def costs_of(draw, schedule: Schedule) -> CostTable:
    layers = schedule.partition.num_layers
    flags = {name: draw(st.booleans()) for name in ("recompute_ahead", "fused_ahead")}
    return times(draw, layers).table(schedule.partition, **flags, num_head_shards=schedule.shape.num_head_shards)


@pytest.mark.parametrize("name", SPARED)
@settings(deadline=None, max_examples=10)  # of every schedule
@given(data=st.data())
def test_the_virtual_clock_tells_the_simulators_time(name, data):
    draw = data.draw
    devices = draw(st.integers(1, 6))
    microbatches = draw(st.integers(1, 9))
    stages = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    schedule = build(
        name, devices, microbatches, num_steps=draw(st.integers(1, 3)), seed=draw(st.integers(0, 99)), stages=stages
    )
    if draw(st.booleans()):
        schedule = split_backward(schedule)
    costs = costs_of(draw, schedule)
    if name == "roundpipe" and "I" not in str(schedule) and schedule.shape.num_steps == 1:
        schedule = deal(schedule, costs, draw(st.sampled_from(["round_robin", "earliest_free", "dynamic"])))
    if draw(st.booleans()):
        schedule = lower_communication(schedule, lane=draw(st.sampled_from(["compute", "net"])))
    executed = execute(make_program(schedule, costs), HANDLERS, VirtualBackend(costs))
    simulated = simulate(schedule, costs)
    for column in ("start", "main", "end", "exposed"):
        np.testing.assert_allclose(getattr(executed, column), getattr(simulated, column), rtol=0, atol=1e-9)
    assert executed.comm_total == pytest.approx(simulated.comm_total)


def unit_costs(schedule: Schedule, **rules: bool) -> CostTable:
    ones = [1.0] * schedule.partition.num_layers
    return LayerTimes(ones, ones, ones, 0.5, 1.5, hop=0.25).table(schedule.partition, **rules)


def test_work_is_done_in_order_of_its_end():
    schedule = build("roundpipe", 3, 7, seed=1)
    costs = unit_costs(schedule, recompute_ahead=True)
    done: list[int] = []
    table = dict.fromkeys(Kind, lambda action, number, gate: done.append(number))
    timeline = execute(make_program(schedule, costs), table, VirtualBackend(costs))
    ends = [timeline.end[number] for number in done]
    assert ends == sorted(ends)
    assert sorted(done) == list(range(schedule.num_actions))
    again: list[int] = []
    table = dict.fromkeys(Kind, lambda action, number, gate: again.append(number))
    execute(make_program(schedule, costs), table, VirtualBackend(costs))
    assert done == again


def test_an_action_that_raises_is_shown_in_its_row():
    schedule = build("1f1b", 2, 3)
    costs = unit_costs(schedule)

    def fail(action, number, gate):
        if action.microbatch == 1:
            raise ArithmeticError("not today")

    with pytest.raises(ActionFailed, match=r"1B1 failed on device 1, lane compute: ArithmeticError: not today") as seen:
        execute(make_program(schedule, costs), HANDLERS | {Kind.B: fail}, VirtualBackend(costs))
    assert ">1B1<" in str(seen.value)
    assert isinstance(seen.value.__cause__, ArithmeticError)


def test_a_kind_without_a_handler_is_refused_before_anything_runs():
    schedule = build("1f1b", 2, 3)
    costs = unit_costs(schedule)
    done = []
    handlers = {Kind.F: lambda *_: done.append(1)}
    with pytest.raises(ScheduleError, match="0B0: this engine does not run B"):
        execute(make_program(schedule, costs), handlers, VirtualBackend(costs))
    assert not done


# --- steps that need the gradients of other stages ---


def test_steps_of_a_group_wait_for_every_gradient_of_their_window():
    schedule = gather_steps(build("interleaved_1f1b", 2, 4, num_steps=3))
    check(schedule)
    costs = unit_costs(schedule)
    program = make_program(schedule, costs, step_groups=[range(4)])
    timeline = execute(program, HANDLERS, VirtualBackend(costs))
    gradients, steps = {}, {}
    for span in timeline.spans():
        if span.action.kind is Kind.B:
            version = span.action.microbatch // 4 + 1
            gradients[version] = max(gradients.get(version, 0), span.end)
        if span.action.kind is Kind.STEP:
            steps.setdefault(span.action.version, []).append(span.start)
    for version, starts in steps.items():
        assert len(starts) == 4
        assert min(starts) >= gradients[version]
    assert math.isfinite(timeline.makespan)


def test_a_step_that_stands_before_work_its_group_needs_is_refused():
    schedule = build("interleaved_1f1b", 2, 4, num_steps=2)
    with pytest.raises(ScheduleError, match="no rank can move"):
        make_program(schedule, unit_costs(schedule), step_groups=[range(4)])


def test_stages_outside_a_group_step_as_before():
    schedule = build("1f1b", 4, 4, num_steps=2)
    costs = unit_costs(schedule)
    alone = execute(make_program(schedule, costs), HANDLERS, VirtualBackend(costs))
    grouped = execute(make_program(schedule, costs, step_groups=[(0, 3)]), HANDLERS, VirtualBackend(costs))
    starts = [
        {str(span.action): span.start for span in timeline.spans() if span.action.kind is Kind.STEP}
        for timeline in (alone, grouped)
    ]
    assert starts[0]["2STEP@1"] == starts[1]["2STEP@1"]
    assert starts[0]["3STEP@1"] < starts[1]["3STEP@1"]


def test_a_schedule_keeps_its_other_lanes_when_steps_are_gathered():
    schedule = build("roundpipe", 2, 3, num_steps=2)
    assert gather_steps(schedule) == schedule
    gathered = gather_steps(build("looped_bfs", 2, 3, num_steps=2))
    rows = [str(action) for action in gathered.compute(0)]
    assert rows[: len(rows) // 2][-2:] == ["2STEP@1", "0STEP@1"]
