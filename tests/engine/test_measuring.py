"""What a run's times are turned into: costs that can be simulated again, and the load of other processes."""

from itertools import count

import pytest
from cases import NAMES, build
from training_cases import uneven_costs

from rpbench.engine.measure import other_load as foreign
from rpbench.engine.measure.action_times import measured_costs
from rpbench.engine.measure.other_load import ForeignLoad
from rpbench.sim.longest_path import simulate


@pytest.mark.parametrize("name", NAMES)
def test_costs_measured_on_a_timeline_give_it_again(name):
    schedule = build(name, 3, 6, num_steps=2)
    costs = uneven_costs(schedule)
    timeline = simulate(schedule, costs)
    again = measured_costs(timeline, recompute_ahead=True, hop_s=costs.hop)
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
    assert load.cores == pytest.approx((18 - 3) / 10)


def test_foreign_load_is_unknown_where_the_system_is_silent(monkeypatch, tmp_path):
    monkeypatch.setattr(foreign, "_STAT", tmp_path / "stat")
    with ForeignLoad() as load:
        pass
    assert load.cores is None
    (tmp_path / "stat").write_text("cpu  100 2 30 4000 50 6 7 8 9 10\ncpu0 1 1\n")
    assert foreign._busy_s() == (100 + 2 + 30 + 6 + 7 + 8) / foreign.os.sysconf("SC_CLK_TCK")
