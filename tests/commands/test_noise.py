"""Noise: what two runs differ in by chance, and what by more."""

import pytest

from rpbench.commands.recorded.compare import interval, noises, verdict
from rpbench.records.describe import clock, under_unit
from rpbench.records.record import read_all


def measured(step, *ends):
    return {"evidence": "measured", "step_time_s": step, "tokens_per_s": 100 / step, "loss_curve_s": list(ends)}


def test_a_simulation_has_no_noise():
    row = {"evidence": "simulated", "step_time_s": 2.0}
    assert interval(row, "step_time_s") == (2.0, 2.0)
    assert verdict((2.0, 2.0), (2.0 + 1e-12, 2.0 + 1e-12)) == "equal"
    assert verdict((2.0, 2.0), (2.001, 2.001)) == "beyond"


def test_a_prediction_has_the_interval_that_it_declares():
    row = {"evidence": "predicted", "tokens_per_s": 10.0, "tokens_per_s_low": 8.0, "tokens_per_s_high": 11.0}
    assert interval(row, "tokens_per_s") == (8.0, 11.0)


def test_a_measured_run_has_the_range_of_its_steps_but_the_first():
    """Steps of 1, 1.5 and 0.5 s after a cold one; their mean is 1 s."""
    row = measured(2.0, 9.0, 10.0, 11.5, 12.0)
    assert interval(row, "step_time_s") == pytest.approx((1.0, 3.0))
    assert interval(row, "tokens_per_s") == pytest.approx((100 / 3, 100.0))
    assert interval(row, "bubble_span") is None
    assert interval(measured(2.0, 9.0, 10.0, 11.0), "step_time_s") is None, "two steps tell no range"
    assert interval(measured(2.0, 9.0, 8.0, 7.0, 6.0), "step_time_s") is None, "a clock that runs backwards tells none"


def test_repetitions_share_their_range():
    rows = [measured(each) for each in (1.0, 1.2, 1.5)]
    assert noises(rows, "step_time_s", ["a", "a", "b"]) == [(1.0, 1.2), (1.0, 1.2), None]
    assert verdict((1.0, 1.2), None) == "unknown"
    assert verdict((1.0, 1.2), (1.1, 1.6)) == "within"


@pytest.mark.parametrize(
    "row, unit",
    [
        ({"cost": "unit", "evidence": "simulated"}, "slots"),
        ({"cost": "unit", "evidence": "measured"}, "seconds"),
        ({"cost": "constant", "evidence": "simulated"}, "seconds"),
    ],
)
def test_slots_are_no_seconds(row, unit):
    assert clock(row) == unit
    assert under_unit(row, "makespan_s") == ("makespan_slots" if unit == "slots" else "makespan_s")
    assert [under_unit(row, name) for name in ("loss", "tokens_per_s")] == ["loss", "tokens_per_s"]


def test_compare_says_what_is_noise(rpbench):
    asked = (("gpipe", "constant"), ("dapple", "constant"), ("gpipe", "unit"))
    names = [rpbench(f"schedule={name}", "num_devices=4", f"cost={cost}")[1][0]["run_id"] for name, cost in asked]
    _, (answer,), err = rpbench("compare", *names)
    assert answer["noise"]["makespan_s"] == [None, "equal", None]
    assert answer["over_first"]["makespan_s"] == [1, 1, None]
    assert "some runs count slots and others seconds" in err


def test_no_repetitions_are_runs_whose_options_or_surroundings_differ(rpbench, monkeypatch):
    """Options of one cost differ also beside a run of another cost; variables of the environment change the run."""
    asked = (("constant", 0), ("constant", 1), ("unit", None))
    words = [(f"cost={cost}", *([] if hop is None else [f"cost.hop_ms={hop}"])) for cost, hop in asked]
    runs = [rpbench("num_devices=4", *each)[1][0]["run_id"] for each in words]
    _, (answer,), _ = rpbench("compare", *runs)
    assert answer["differing"]["cost.hop_ms"] == [0, 1, None]
    assert answer["noise"]["makespan_s"] == [None, "beyond", None]
    monkeypatch.setenv("OPENBLAS_CORETYPE", "another")
    other = rpbench("num_devices=4", *words[0])[1][0]["run_id"]
    _, (answer,), _ = rpbench("compare", runs[0], other)
    assert [*answer["differing"]] == ["environment.OPENBLAS_CORETYPE"]
    err = rpbench("pivot", "--rows", "cost.hop_ms", "--columns", "cost", "--value", "bubble_span")[2]
    assert "up to 2 runs of one request; compare says in what surroundings" in err


def test_compare_knows_what_failures_cost(rpbench):
    asked = ("mode=failures", "num_devices=4", "num_microbatches=8", "mode.failures=[[1,400]]", "mode.horizon_steps=20")
    rows = [rpbench(*asked, f"mode.policy={policy}")[1][0] for policy in ("checkpoint", "gemini")]
    _, (answer,), _ = rpbench("compare", *(row["run_id"] for row in rows))
    assert answer["metrics"]["goodput"] == [row["goodput"] for row in rows]
    assert answer["metrics"]["recover_s"] == [row["recover_s"] for row in rows]


def test_compare_takes_runs_that_differ_in_their_seed_for_repetitions(rpbench, tmp_path):
    for seed, seconds in ((1, 1.0), (2, 1.2)):
        table = tmp_path / "runs.csv"
        table.write_text(f"schedule,seed,step_time_s\ngpipe,{seed},{seconds}\n1f1b,{seed},{seconds + 0.1}\n")
        assert rpbench("import", "csv", str(table), "results_dir=results")[0] == 0
    runs = sorted(read_all(tmp_path / "results"), key=lambda row: (row["schedule"] != "gpipe", row["seed"]))
    _, (answer,), err = rpbench("compare", *(row["run_id"] for row in runs))
    assert answer["noise"]["step_time_s"] == [None, "within", "within", "within"]
    assert "~ within the noise" in err
    _, (answer,), err = rpbench("compare", runs[0]["run_id"], runs[2]["run_id"])
    assert answer["noise"]["step_time_s"] == [None, "unknown"]
    assert "measured once" in err


def test_compare_puts_runs_side_by_side(rpbench):
    rows = [rpbench(f"schedule={name}", "num_devices=4")[1][0] for name in ("gpipe", "interleaved_1f1b")]
    status, (answer,), err = rpbench("compare", rows[0]["run_id"], rows[1]["run_id"][:12])
    assert status == 0
    assert answer["differing"]["schedule"] == ["gpipe", "interleaved_1f1b"]
    assert answer["metrics"]["makespan_s"] == [row["makespan_s"] for row in rows]
    assert answer["over_first"]["makespan_s"][1] == pytest.approx(rows[1]["makespan_s"] / rows[0]["makespan_s"])
    assert "makespan_s" in err
    assert answer["metrics"]["comm_exposed_s"] == [0, 0]
    assert answer["over_first"]["comm_exposed_s"] == [None, None]  # nothing has no ratio
