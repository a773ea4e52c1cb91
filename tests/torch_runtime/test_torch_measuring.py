"""What runs say beyond gradients: replay, where time went, predictions, and requests for GPUs that are not here."""

from types import SimpleNamespace

import pytest
from torch_cases import TINY, request_for, schedule_near

from rpbench.cost.constant import unit_times
from rpbench.engine.measure.profiles import measured_costs
from rpbench.ir.schedule import Shape
from rpbench.ir.timeline import Timeline
from rpbench.registry import entries
from rpbench.sim.longest_path import simulate
from rpbench.torch_runtime.processes.member import Moment, Recorder
from rpbench.torch_runtime.recorded.outcome import (
    Outcome,
    replay_makespan,
    time_parts,
    unexplained,
)
from rpbench.torch_runtime.request import SAME_NAME
from rpbench.torch_runtime.versions import load_runtime


def slowed(schedule, gap):
    """A timeline of unit actions in which every start is late by a gap more than the one before it on its rank."""
    plain = simulate(schedule, unit_times(16).table(schedule.partition))
    start = [at * (1 + gap) for at in plain.start]
    end = [at + last - first for at, first, last in zip(start, plain.start, plain.end, strict=True)]
    return plain, Timeline(schedule, start, start, end, [0.0] * len(start), 0.0)


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe_v"])
def test_a_replay_takes_the_gaps_out(name):
    plain, late = slowed(schedule_near(name, 4, 8), 0.5)
    assert replay_makespan(plain) == pytest.approx(float(plain.makespan))
    assert replay_makespan(late) == pytest.approx(float(plain.makespan))
    assert late.makespan > 1.3 * plain.makespan


def test_costs_of_a_run_predict_that_run():
    schedule = schedule_near("zb_v", 4, 8)
    plain, _ = slowed(schedule, 0.0)
    costs = measured_costs(plain, recompute_ahead=False)
    assert float(simulate(schedule, costs).makespan) == pytest.approx(float(plain.makespan))


def outcome_of(moments):
    """Two ranks of 1F1B with one microbatch, whose moments are given."""
    schedule = entries()["1f1b"].build(Shape(2, 2, 1)).with_partition(schedule_near("1f1b", 2, 2).partition)
    from rpbench.torch_runtime.request import make_request

    ranks = [{"steps": [{"began": 0.0, "ended": 9.0, "moments": own}], "losses": [1.0]} for own in moments]
    return Outcome(make_request(schedule, TINY), {"ranks": ranks, "hop_s": 0.0})


BY_HAND = (
    # token, start, end, computation's first and last moment
    [("0F0", 0.0, 1.1, 0.0, 1.0), ("0SEND_F0", 1.1, 1.3, None, None), ("0RECV_B0", 1.3, 1.4, None, None),
     ("0B0", 1.4, 6.2, 4.2, 6.2)],
    [("1RECV_F0", 0.0, 0.1, None, None), ("1F0", 0.1, 2.0, 1.5, 2.0), ("1B0", 2.1, 4.0, 2.1, 4.0),
     ("1SEND_B0", 4.0, 4.1, None, None)],
)  # fmt: skip


def test_where_time_went_by_hand():
    outcome = outcome_of(BY_HAND)
    parts = time_parts(outcome)
    assert outcome.rows_as_ours
    assert parts.computing == pytest.approx(1.0 + 2.0 + 0.5 + 1.9)
    assert parts.waiting == pytest.approx(2.8 + 1.4)
    assert parts.messages == pytest.approx(0.2 + 0.1 + 0.1 + 0.1)
    assert parts.after == pytest.approx(0.1)
    assert parts.between == pytest.approx(0.1)
    spans = sum(row[-1][2] - row[0][1] for row in BY_HAND)
    assert parts.computing + parts.waiting + parts.messages + parts.after + parts.between == pytest.approx(spans)


def test_a_step_lasts_from_the_first_ranks_start_to_the_last_ones_end():
    outcome = outcome_of(BY_HAND)
    first, last = (rank["steps"][0] for rank in outcome.answer["ranks"])
    first["began"], first["ended"], last["began"], last["ended"] = 1.0, 8.0, 3.0, 9.5
    assert outcome.wall_s() == 8.5


def test_a_timeline_holds_computations_and_waits_apart():
    timeline = outcome_of(BY_HAND).timeline()
    assert [(str(s.action), s.start, s.end) for s in timeline.spans()] == [
        ("0F0", 0.0, 1.0),
        ("0B0", 4.2, 6.2),
        ("1F0", 1.5, 2.0),
        ("1B0", 2.1, 4.0),
    ]


def test_other_rows_than_ours_are_seen():
    swapped = (BY_HAND[0], [BY_HAND[1][0], BY_HAND[1][2], BY_HAND[1][1], BY_HAND[1][3]])
    assert not outcome_of(swapped).rows_as_ours
    with pytest.raises(ValueError, match="1F0 was not run: order_of=table ran other rows"):
        outcome_of((BY_HAND[0], BY_HAND[1][2:])).timeline()


def test_torch_has_the_schedules_that_it_is_said_to_have():
    schedules = load_runtime()
    assert all(schedules.get_schedule_class(name) for name in SAME_NAME.values())


def test_what_a_step_took_longer_than_its_replay_has_names():
    """By hand: 9 s of two ranks; the replay takes 6.4 s, so that 5.2 rank-seconds are to be explained."""
    outcome = outcome_of(BY_HAND)
    replay_s = replay_makespan(outcome.timeline())
    assert replay_s == pytest.approx(1.0 + 0.5 + 1.9 + 2.0)
    found = unexplained(9.0, replay_s, time_parts(outcome), 2)
    assert found["messages"] == pytest.approx(0.5)
    assert found["after"] == found["between"] == pytest.approx(0.1)
    assert found["late"] == pytest.approx(4.2 - (2 * 5.4 - 5.4))
    assert found["outside"] == pytest.approx(2 * 9.0 - 6.2 - 4.1)
    assert sum(found.values()) == pytest.approx(2 * (9.0 - replay_s))


@pytest.mark.slow
@pytest.mark.parametrize("theirs", sorted(SAME_NAME.values()))
def test_torchs_own_schedules_train_the_same(theirs):
    from rpbench.torch_runtime.processes.ranks import Ranks

    ours = next(name for name, own in SAME_NAME.items() if own == theirs)
    with Ranks(2) as ranks:
        outcome = ranks.run(request_for(ours, 2, 8, order_of=theirs))
    assert outcome.fields()["grad_max_abs_diff"] <= 1e-15


# --- GPUs that are not here ---


def test_computations_on_a_gpu_are_timed_by_events(monkeypatch):
    """Events stand in for CUDA's: they hold milliseconds of a device clock that runs beside ours."""
    clock = iter(range(0, 1000, 10))

    class Event:
        def __init__(self, enable_timing):
            self.at_ms = None

        def record(self):
            self.at_ms = next(clock)

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    recorder = Recorder(SimpleNamespace(write=lambda *_: None), {}, on_gpu=True)
    zero = Event(True)
    zero.record()
    with recorder.action("PP:0F0"):
        recorder.computes(lambda: None)()
    with recorder.action("PP:0B0"):  # in two halves
        recorder.computes(lambda: None)()
        recorder.computes(lambda: None)()
    recorder.settle(zero, 100.0)
    assert all(isinstance(moment, Moment) for moment in recorder.moments)
    found = [(moment.begun, moment.done) for moment in recorder.moments]
    assert sum(found, ()) == pytest.approx((100.01, 100.02, 100.03, 100.06))


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="device=cuda: torch sees no CUDA device"):
        request_for("1f1b", device="cuda")


# --- versions ---


def test_a_torch_whose_loader_has_moved_says_so(monkeypatch):
    from torch.distributed.pipelining import schedules

    load_runtime.cache_clear()
    monkeypatch.delattr(schedules._PipelineScheduleRuntime, "_load_csv")
    monkeypatch.delattr(schedules.PipelineScheduleMulti, "_load_csv")
    try:
        with pytest.raises(ValueError, match=r"has no _load_csv of _PipelineScheduleRuntime .* 2\.11 to 2\.15"):
            load_runtime()
    finally:
        load_runtime.cache_clear()
