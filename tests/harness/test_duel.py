"""The duel: fair by construction, its records complete, and nobody in it who does not train as plain training does."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rpbench.cost.hardware import Cluster
from rpbench.cost.measured import MEASURED
from rpbench.cost.model import Model
from rpbench.engine.measure.calibration import calibrate_cores
from rpbench.engine.measure.probes import Probe
from rpbench.harness import record
from rpbench.harness.allocator import is_tuned
from rpbench.harness.choices import ConfigError
from rpbench.harness.modes.duel import rounds, team
from rpbench.harness.modes.duel import run as duel_run
from rpbench.harness.modes.duel.contenders import BASE, LIMIT, TWIN, contenders
from rpbench.harness.modes.duel.paired import Ratio, noise, ratio
from rpbench.harness.modes.duel.rounds import play
from rpbench.harness.modes.duel.rows import drift, lines, over_predicted, predictions, summary
from rpbench.harness.modes.duel.run import CLUSTER, SUMMARY, records
from rpbench.harness.modes.duel.sample import Sample
from rpbench.harness.request import load
from rpbench.harness.scheduled import PROFILE

SMALL = (
    "experiment=cpu_duel", "model=tiny_gpt", "model.num_layers=3", "model.seq_len=16", "num_microbatches=4",
    "num_steps=2", "mode.num_rounds=2", "mode.search_budget=12", "cost.microbatches_per_device=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("duel")


@pytest.fixture(scope="module")
def rows(folder):
    """A duel in which 'gpipe' has a bug that only the comparison with plain training can see."""
    honest = team.verified

    def verified(training):
        found = honest(training)
        return found | ({"grad_max_abs_diff": 1e-9} if training.schedule.name == "gpipe" else {})

    def calibrated(num_devices, tell):
        """The real thing on two small probes: six would take longer than the duel."""
        shapes = ((16, 32, 8), (32, 16, 16))
        models = [Model("p", 1, hidden, 2, vocab, gated_mlp=False, seq_len=length) for hidden, vocab, length in shapes]
        probes = [Probe(model, model.seq_len) for model in models]
        return calibrate_cores(num_devices, tell, probes, width=64, copy_bytes=2**14)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "verified", verified)
        patch.setattr(duel_run, "calibrate_cores", calibrated)
        return records(load([*SMALL, f"results_dir={folder}"]))


def test_every_contender_has_a_record_with_its_rounds(rows, folder):
    assert [row["contender"] for row in rows] == [contender.name for contender in contenders()]
    for row in rows:
        assert record.read(folder / row["run_id"]) == row
        assert (folder / row["run_id"] / PROFILE).exists()
        if row["contender"] == "gpipe":
            continue
        assert row["status"] == "ok", row["reason"]
        assert row["evidence"] == "measured"
        assert row["malloc_tuned"] is is_tuned()
        assert row["parity"] is True
        assert row["grad_max_abs_diff"] <= (1e-6 if row["engine"] == "torch" else 0.0)
        assert len(row["round_walls_s"]) == len(row["round_replays_s"]) == 2
        assert row["emulated_makespan_s"] > 0
        assert row["replay_makespan_s"] > 0
        assert row["num_plans_evaluated"] <= 12


def test_every_plan_is_predicted_by_every_calibration(rows, folder):
    """The machine is calibrated before the first of two rounds and after each."""
    by_name = {row["contender"]: row for row in rows if row["status"] == "ok"}
    for row in by_name.values():
        assert len(row["calibrated_makespans_s"]) == len(row["calibration_foreign_cores"]) == 3
        assert min(row["calibrated_makespans_s"]) > 0
        one, two, three = row["calibrated_makespans_s"]
        assert predictions(row) == [(one + two) / 2, (two + three) / 2]
        assert drift(row) == max(one, two, three) / min(one, two, three) - 1
        found = over_predicted(row, "replay")
        assert found == ratio(row["round_replays_s"], predictions(row))
    same = (BASE, TWIN, "torch_1f1b")  # the same plan, whoever runs it
    assert len({tuple(by_name[name]["calibrated_makespans_s"]) for name in same}) == 1
    assert max(by_name[LIMIT]["calibrated_makespans_s"]) <= max(by_name["roundpipe"]["calibrated_makespans_s"])
    folder = folder / by_name[BASE]["run_id"]
    found = json.loads((folder / SUMMARY).read_text())["contenders"][BASE]
    assert found["replay_over_predicted"] == list(over_predicted(by_name[BASE], "replay"))
    assert found["calibration_drift"] == drift(by_name[BASE])
    written = OmegaConf.to_container(OmegaConf.load(folder / CLUSTER))
    assert Cluster(**written).num_devices == 2
    assert set(written["measured"]) == set(MEASURED)


def test_who_does_not_want_calibrations_has_none(rows):
    (base,) = (row for row in rows if row["contender"] == BASE)
    without = [{key: value for key, value in base.items() if not key.startswith("calibrat")}]
    (found,) = summary(without)["contenders"].values()
    assert "replay_over_predicted" not in found
    assert "predicted" not in lines(summary(without))[1]
    assert all(f"{clock}/predicted" in lines(summary([base]))[1] for clock in ("wall", "replay"))


def test_who_does_not_train_as_plain_training_does_is_not_timed(rows):
    (out,) = (row for row in rows if row["contender"] == "gpipe")
    assert out["status"] == "failed"
    assert out["reason"] == "it does not train as plain training does: off by 1e-09"
    assert out["evidence"] is None
    assert "makespan_s" not in out


def test_the_summary_is_that_of_the_records(rows, folder):
    (base,) = (row for row in rows if row["contender"] == BASE)
    found = json.loads((folder / base["run_id"] / SUMMARY).read_text())
    assert found == json.loads(json.dumps(summary(rows)))
    assert found["contenders"][BASE]["speed_up_wall"] == [1.0, 1.0, 1.0]
    assert found["contenders"]["gpipe"]["status"] == "failed"
    assert set(found["noise"]) == {"wall", "replay"}


def test_all_do_the_same_work(rows):
    """Same forwards, recomputations, backwards and steps: what differs is when."""
    schedules = {row["contender"]: row for row in rows}
    assert schedules[TWIN]["partition_layers"] == schedules[BASE]["partition_layers"]
    assert schedules["torch_1f1b"]["partition_layers"] == schedules[BASE]["partition_layers"]
    streamed = [row for name, row in schedules.items() if name.startswith("roundpipe")]
    assert schedules[LIMIT]["partition_layers"] in {row["partition_layers"] for row in streamed}
    assert schedules["torch_1f1b"]["recompute"] == schedules[BASE]["recompute"] == "except_last"
    assert schedules["gpipe"]["recompute"] == schedules["looped_bfs"]["recompute"] == "all"
    for row in rows:
        if "limit" not in row["contender"] and row["num_steps"]:
            assert row["simulated_makespan_s"] > schedules[LIMIT]["simulated_makespan_s"] * (1 - 1e-9)


def test_what_has_its_records_is_not_run_again_unless_one_failed(rows, folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("ran again")

    monkeypatch.setattr(duel_run, "_Duel", refuse)
    with pytest.raises(AssertionError):
        records(load([*SMALL, f"results_dir={folder}"]))
    path = next(Path(folder).glob(f"{next(r['run_id'] for r in rows if r['contender'] == 'gpipe')}/record.json"))
    path.write_text(path.read_text().replace('"status": "failed"', '"status": "oom"'))
    assert len(records(load([*SMALL, f"results_dir={folder}"]))) == len(rows)


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="mode=duel needs a model with a shape"):
        records(load(["experiment=cpu_duel", "model=abstract", "~model.seq_len", f"results_dir={tmp_path}"]))
    with pytest.raises(ConfigError, match=r"mode\.num_rounds=0"):
        records(load([*SMALL, "mode.num_rounds=0", f"results_dir={tmp_path}"]))
    assert not list(tmp_path.iterdir())


# --- rounds and ratios ---------------------------------------------------------------------------------------


class Still:
    tolerance = 0.0

    def __init__(self, name, log):
        self.name, self.log = name, log

    def check(self, sequence_tokens):
        return {}

    def run(self):
        self.log.append(self.name)
        return Sample(1.0, 1.0, 2.0, None)


def test_the_order_rotates_and_everybody_has_every_round(monkeypatch):
    monkeypatch.setattr(rounds.gc, "collect", lambda: 0)
    log = []
    samples = play({name: Still(name, log) for name in "abcd"}, 4, lambda line: None, lambda: log.append("|"))
    assert "".join(log) == "|abcd|bcda|cdab|dabc|"
    assert all(len(found) == 4 for found in samples.values())


def test_a_ratio_is_taken_within_rounds():
    slow, fast = [2.0, 20.0, 4.0], [1.0, 10.0, 2.0]
    assert ratio(slow, fast) == Ratio(2.0, 2.0, 2.0)
    found = ratio([1.0, 1.1, 1.2, 1.3], [1.0] * 4)
    assert found.median == pytest.approx(1.15)
    assert 1.0 <= found.low < found.median < found.high <= 1.3
    assert ratio([1.0, 1.1, 1.2, 1.3], [1.0] * 4) == found, "the same rounds give the same interval"
    assert noise(Ratio(1.0, 0.97, 1.01)) == pytest.approx(0.03)
    with pytest.raises(ValueError, match="at least 1"):
        ratio([], [])
