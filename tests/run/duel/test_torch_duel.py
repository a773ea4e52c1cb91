"""The torch duel: the duel's rules on steps of torch's own schedule, a table of ours, and threads."""

from dataclasses import replace

import pytest
from torch_duel_rows import PREDICTED, REPLAYED, SHARES, rows

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.records import record
from rpbench.run.modes.duel import run as duel_run
from rpbench.run.modes.duel import starts
from rpbench.run.modes.duel.contenders import is_reference, torch_contenders
from rpbench.run.modes.duel.findings import derived_fields, findings
from rpbench.run.modes.torch_duel import records
from rpbench.run.recording import run


def test_a_dearer_table_is_slower_and_the_same_schedule_twice_is_not():
    found = rows({"1f1b/table": 1.1, "zb_v/threads": 0.8})
    assert {name for name, row in found.items() if row["verdict"] == "slower"} == {"1f1b/table"}
    assert {name for name, row in found.items() if row["verdict"] == "faster"} == {"zb_v/threads"}
    assert found["1f1b/table"]["over_own"] == pytest.approx(1.1, rel=2e-3)
    assert found["zb_v/threads"]["over_own"] == pytest.approx(0.8, rel=2e-3)
    for row in found.values():
        assert row["over_own_low"] < row["over_own"] < row["over_own_high"]
        assert row["cpu_over_own_disturbed"] == pytest.approx(row["over_own_disturbed"], rel=1e-9)


def test_schedules_are_not_compared_with_each_other():
    """All of zb_v takes twice as long: that is no finding about any of its entrants."""
    slow = {each.name: 2.0 for each in torch_contenders(["zb_v"])}
    assert {row["verdict"] for row in rows(slow).values()} == {"no difference shown"}


def test_a_drift_of_the_machine_is_no_difference():
    found = rows()
    for row in found.values():
        for runs in row["runs"]:
            runs["wall_s"] = [wall * (1 + at / 160) for at, wall in zip(runs["at_s"], runs["wall_s"], strict=True)]
    assert {each.verdict for each in findings(found, "wall").values()} == {"no difference shown"}
    assert all(abs(each.ratio - 1) < 0.01 for each in findings(found, "wall").values())


def test_a_busy_machine_gives_ratios_and_no_verdict():
    found = rows({"1f1b/table": 1.1}, others=0.5)
    table = found["1f1b/table"]
    assert table["verdict"] == "no verdict"
    assert "0 clean comparisons of at least 30, other programs spoilt" in table["verdict_reason"]
    assert table["over_own"] is None
    assert table["over_own_low"] is None
    assert table["over_own_disturbed"] == pytest.approx(1.1, rel=2e-3)


@pytest.mark.parametrize(
    "change, said", [({"num_cores": 1}, "2 devices on 1 core: they take turns"), ({"others": None}, "does not say")]
)
def test_what_has_no_verdict_at_all(change, said):
    found = rows(num_cores=change.get("num_cores", 2))
    if "others" in change:
        for row in found.values():
            for runs in row["runs"]:
                runs["others_s"] = [None] * len(runs["at_s"])
    reasons = {each.reason for each in findings(found, "wall").values()}
    assert all(said in reason for reason in reasons)


def test_replay_and_prediction_are_shares_of_the_step_and_what_is_missing_adds_up():
    for row in rows().values():
        assert row["replay_over_wall"] == pytest.approx(REPLAYED)
        assert row["predicted_over_wall"] == pytest.approx(PREDICTED)
        assert row["missing_shares"] == pytest.approx(SHARES)
        assert sum(row["missing_shares"].values()) == pytest.approx(1 - row["replay_over_wall"])
        # 2 ranks, 32 actions, a step of about 1 s of which 8 % are not replayed
        assert row["overhead_per_action_s"] == pytest.approx(2 * (1 - REPLAYED) / 32, rel=2e-3)


def test_without_a_second_run_of_torchs_own_there_is_no_ratio():
    found = rows()
    found["1f1b/own_twin"]["status"] = "failed"
    derived = derived_fields(found)
    assert "over_own" not in derived["1f1b/table"]
    assert derived["1f1b/table"]["verdict_reason"] == "torch's own schedule has not run twice"
    assert derived["zb_v/table"]["verdict"] == "no difference shown"


def test_schedules_that_torch_does_not_have_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"mode\.schedules=v_half: torch has gpipe, 1f1b, .* of its own"):
        run(load(["experiment=torch_duel", "mode.schedules=[1f1b,v_half]", f"results_dir={tmp_path}"]))
    with pytest.raises(ConfigError, match=r"mode\.budget_s=0\.0: a number above 0"):
        load(["experiment=torch_duel", "mode.budget_s=0"])


@pytest.mark.slow
def test_a_duel_leaves_a_record_of_everybody(tmp_path, monkeypatch):
    """Two turns of real ranks; one entrant has a bug that only the comparison with plain training can see."""
    honest = starts._parity

    def parity(team, sequence_tokens):
        found = honest(team, sequence_tokens)
        wrong = getattr(team, "_asked", None) is not None and team._asked.name == "zb_v/table"
        return found | ({"parity": False, "reason": "off by 1"} if wrong else {})

    monkeypatch.setattr(starts, "_parity", parity)
    monkeypatch.setattr(duel_run, "start_apart", lambda job: starts.play_start(replace(job, budget_s=0.01)))
    small = ("experiment=torch_duel", "model=tiny_gpt", "model.num_layers=4", "model.seq_len=16", "num_microbatches=4",
             "cost.microbatches_per_device=1")  # fmt: skip
    request = load([*small, f"results_dir={tmp_path}"])
    found = {row["contender"]: row for row in records(request)}
    assert list(found) == [each.name for each in torch_contenders(["1f1b", "zb_v"])]
    failed = {name for name, row in found.items() if row["status"] != "ok"}
    assert failed == {"zb_v/table"}
    for name in found.keys() - failed:
        row = found[name]
        assert record.read(tmp_path / row["run_id"]) == row
        assert row["grad_max_abs_diff"] <= (1e-6 if is_reference(name) else 0.0)
        assert [about["order_seed"] for about in row["starts"]] == [0, 1]
        for runs in row["runs"]:
            lengths = {len(column) for column in runs.values()}
            assert lengths <= {1, 2}
            assert len(lengths) == 1
            for wall, replay, predicted in zip(runs["wall_s"], runs["replay_s"], runs["predicted_s"], strict=True):
                assert 0 < replay <= wall
                assert predicted is None or predicted > 0
        assert sum(row["missing_shares"].values()) > 0
