"""What a run's times are turned into: costs that can be simulated again, and the load of other processes."""

import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace

import pytest
from cases import NAMES, build
from training_cases import uneven_costs

from rpbench.engine.measure import calibration
from rpbench.engine.measure import stopwatch as foreign
from rpbench.engine.measure.calibration import ON_CORES, _half_rate_width
from rpbench.engine.measure.profiles import measured_costs
from rpbench.engine.measure.stopwatch import ForeignLoad
from rpbench.ir.action import Kind
from rpbench.sim.longest_path import simulate


@pytest.mark.parametrize("width, thin", [(1024, 64), (32, 32)])
@pytest.mark.parametrize("half", [1.0, 7.0, 100.0])
def test_the_size_of_half_the_rate_is_found_in_a_thin_products_seconds(width, thin, half):
    """A product of smallest size s reaches s / (s + half) of the rate; 64 rows, or all of a narrower matrix."""
    rate = 1e9
    watch = SimpleNamespace(seconds=lambda made: 2 * thin * width**2 / rate * (thin + half) / thin)
    assert _half_rate_width(watch, width, rate) == pytest.approx(half)


def test_a_probe_has_the_times_of_its_embedding_layer_and_head(monkeypatch):
    """Stages 0, 1 and 2; a backward follows its recomputation, in which the embedding's is counted; 1 us at least."""
    times = {
        (Kind.F, 0): (0.0, 1.0), (Kind.F, 1): (0.0, 2.0), (Kind.F, 2): (0.0, 3.0),
        (Kind.B, 0): (4.0, 0.5), (Kind.B, 1): (5.0, 6.0), (Kind.B, 2): (0.0, 7.0),
        (Kind.STEP, 0): (0.0, 0.0), (Kind.STEP, 1): (0.0, 8.0), (Kind.STEP, 2): (0.0, 9.0),
    }  # fmt: skip
    monkeypatch.setattr(calibration, "time_stages", lambda *_: times)
    assert calibration.probe_on_cores(ON_CORES[0], 2) == {
        "embedding_forward": 1, "forward": 2, "head_forward": 3, "embedding_backward": 4.5, "recompute": 5,
        "backward": 6, "head_backward": 7, "embedding_step": 1e-6, "step": 8, "head_step": 9,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_costs_measured_on_a_timeline_give_it_again(name):
    schedule = build(name, 3, 6, num_steps=2)
    costs = uneven_costs(schedule).of_order(schedule.shape)
    timeline = simulate(schedule, costs)
    again = measured_costs(timeline, recompute_ahead=True, hop_s=costs.hop)
    assert Kind.OVERLAP not in again.work, "its parts have costs"
    for span in timeline.spans():
        found, expected = (table.of_action(span.action, span.device) for table in (again, costs))
        if span.action.sub:  # what runs beside something else is measured as a whole
            assert found.main == pytest.approx(expected.main), span
        else:
            assert (found.main, found.pre) == pytest.approx((expected.main, expected.pre)), span
    assert simulate(schedule, again).makespan == pytest.approx(timeline.makespan)


def test_foreign_load_is_what_is_busy_less_what_is_ours(monkeypatch):
    times = count(step=10)
    monkeypatch.setattr(foreign.time, "perf_counter", lambda: next(times))
    busy, own = iter([100.0, 118.0]), iter([50.0, 53.0])
    monkeypatch.setattr(foreign, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(foreign, "_own_s", lambda pids: next(own))
    with ForeignLoad() as load:
        pass
    assert (load.others_s, load.cores) == pytest.approx((18 - 3, (18 - 3) / 10))


def test_what_ticks_round_away_in_one_block_they_add_in_the_next(monkeypatch):
    busy, own = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.02]), iter([0.0, 0.005, 0.005, 0.010, 0.010, 0.015])
    monkeypatch.setattr(foreign, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(foreign, "_own_s", lambda pids: next(own))
    loads = []
    for _ in range(3):
        with ForeignLoad() as load:
            pass
        loads.append(load)
    assert [load.others_s for load in loads] == pytest.approx([-0.005, -0.005, 0.015])
    assert [load.cores for load in loads[:2]] == [0, 0]


def test_a_process_of_ours_is_counted_by_its_own_clock():
    before = foreign._own_s()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        deadline = time.perf_counter() + 20
        while foreign._own_s([busy.pid]) < before + 0.05 and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert foreign._own_s([busy.pid]) >= before + 0.05
        busy.kill()


def test_foreign_load_is_unknown_where_the_system_is_silent(monkeypatch, tmp_path):
    monkeypatch.setattr(foreign, "_STAT", tmp_path / "stat")
    with ForeignLoad() as load:
        pass
    assert load.others_s is load.cores is None
    (tmp_path / "stat").write_text("cpu  100 2 30 4000 50 6 7 8 9 10\ncpu0 1 1\n")
    assert foreign._busy_s() == (100 + 2 + 30 + 6 + 7 + 8) / foreign.os.sysconf("SC_CLK_TCK")
