"""The duel: fair by construction, its records complete, and nobody in it who does not train as plain training does."""

import gc
import json
import math
import os
from functools import partial
from pathlib import Path
from random import Random

import pytest
from omegaconf import OmegaConf

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.hardware.measured import CALIBRATED
from rpbench.engine.measure.calibration import Probe, Sizes, calibrate_cores
from rpbench.records import record
from rpbench.run.allocator import is_tuned
from rpbench.run.modes.duel import run as duel_run
from rpbench.run.modes.duel import starts, teams
from rpbench.run.modes.duel.contenders import BASE, LIMIT, REFERENCES, TWINS, contenders
from rpbench.run.modes.duel.findings import findings
from rpbench.run.modes.duel.plans import complete, make_plans
from rpbench.run.modes.duel.run import CLUSTER, PLANS, SUMMARY, records
from rpbench.run.modes.duel.starts import play, turn_order
from rpbench.run.modes.duel.summary import lines, summary
from rpbench.run.modes.duel.teams import Sample
from rpbench.run.modes.duel.verdict import Ratio, drift, over_predicted, predictions, ratio, times
from rpbench.run.scheduled import PROFILE
from rpbench.workload.architecture import Architecture

SMALL = (
    "experiment=cpu_duel", "model=tiny_gpt", "model.num_layers=3", "model.seq_len=16", "num_microbatches=4",
    "num_steps=2", "mode.budget_s=0.01", "mode.run_off_s=0.01", "mode.search_budget=12",
    "cost.microbatches_per_device=1",
)  # fmt: skip
# Ranks of torch take seconds to begin, and so does a process: both are in the slow test below.
OURS = [contender for contender in contenders() if contender.engine != "torch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("duel")


@pytest.fixture(scope="module")
def rows(folder):
    """A duel in which 'gpipe' has a bug that only the comparison with plain training can see."""
    honest = teams.verified

    def verified(training):
        found = honest(training)
        return found | ({"grad_max_abs_diff": 1e-9} if training.schedule.name == "gpipe" else {})

    def calibrated(num_devices, tell):
        """The real thing on two small probes: six would take longer than the duel."""
        shapes = ((16, 32, 8), (32, 16, 16))
        models = [
            Architecture("p", 1, hidden, 2, vocab, gated=False, seq_len=length) for hidden, vocab, length in shapes
        ]
        probes = [Probe(model, model.seq_len) for model in models]
        return calibrate_cores(num_devices, tell, probes, Sizes(64, 2**14))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teams, "verified", verified)
        patch.setattr(duel_run, "calibrate_cores", calibrated)
        patch.setattr(duel_run, "contenders", lambda who: OURS)
        patch.setattr(duel_run, "start_apart", starts.play_start)
        return records(load([*SMALL, f"results_dir={folder}"]))


@pytest.mark.slow
def test_every_contender_has_a_record_with_its_runs(rows, folder):
    assert [row["contender"] for row in rows] == [contender.name for contender in OURS]
    for row in rows:
        assert record.read(folder / row["run_id"]) == row
        assert (folder / row["run_id"] / PROFILE).exists()
        if row["contender"] == "gpipe":
            continue
        assert row["status"] == "ok", row["reason"]
        assert row["evidence"] == "measured"
        assert row["parity"] is True
        assert row["grad_max_abs_diff"] == 0.0
        assert row["emulated_makespan_s"] > 0
        assert row["replay_makespan_s"] > 0
        assert row["num_plans_evaluated"] <= 12
        assert 0 <= row["num_plans_raced"] <= 3
        for about, runs in zip(row["starts"], row["runs"], strict=True):
            counted = about["num_turns"] + (row["contender"] in REFERENCES and len(runs["at_s"]) > about["num_turns"])
            assert {len(column) for column in runs.values()} == {counted}
            assert about["is_malloc_tuned"] is is_tuned()


@pytest.mark.slow
def test_starts_have_an_order_of_their_own(rows):
    ok = [row for row in rows if row["status"] == "ok"]
    one, two = ok[0]["starts"]
    assert (one["order_seed"], two["order_seed"]) == (0, 1)
    orders = [sorted(range(len(ok)), key=lambda k: ok[k]["runs"][number]["at_s"][-1]) for number in range(2)]
    assert orders[0] != orders[1]
    assert all(row["starts"] == ok[0]["starts"] for row in ok), "what is true of all is in every record"


@pytest.mark.slow
def test_every_plan_is_predicted_by_every_calibration(rows, folder):
    """The machine is calibrated before the first of two starts and after each."""
    by_name = {row["contender"]: row for row in rows if row["status"] == "ok"}
    for row in by_name.values():
        assert len(row["calibrated_makespans_s"]) == len(row["calibration_foreign_cores"]) == 3
        assert min(row["calibrated_makespans_s"]) > 0
        one, two, three = row["calibrated_makespans_s"]
        assert predictions(row) == [(one + two) / 2, (two + three) / 2]
        assert drift(row) == max(one, two, three) / min(one, two, three) - 1
        assert over_predicted(row, "replay") == ratio(times(row, "replay"), predictions(row))
    same = (BASE, *TWINS)  # the same plan, whoever runs it
    assert len({tuple(by_name[name]["calibrated_makespans_s"]) for name in same}) == 1
    assert max(by_name[LIMIT]["calibrated_makespans_s"]) <= max(by_name["roundpipe"]["calibrated_makespans_s"])
    folder = folder / by_name[BASE]["run_id"]
    found = json.loads((folder / SUMMARY).read_text())["contenders"][BASE]
    assert found["replay_over_predicted"] == list(over_predicted(by_name[BASE], "replay"))
    assert found["calibration_drift"] == drift(by_name[BASE])
    written = OmegaConf.to_container(OmegaConf.load(folder / CLUSTER))
    assert Machine(**written).num_devices == 2
    assert set(written["measured"]) == set(CALIBRATED)  # no accelerator is here


@pytest.mark.slow
def test_who_does_not_want_calibrations_has_none(rows):
    without = [{key: value for key, value in row.items() if not key.startswith("calibrat")} for row in rows]
    assert "replay_over_predicted" not in summary(without)["contenders"][BASE]
    assert not any("predicted" in line for line in lines(summary(without)))
    assert any("wall/predicted" in line for line in lines(summary(rows)))


@pytest.mark.slow
def test_who_does_not_train_as_plain_training_does_is_not_timed_and_stays_in_the_table(rows):
    (out,) = (row for row in rows if row["contender"] == "gpipe")
    assert out["status"] == "failed"
    assert out["reason"] == "it does not train as plain training does: off by 1e-09"
    assert out["evidence"] is None
    assert out["partition_layers"]
    assert "makespan_s" not in out
    assert any("gpipe" in line and "failed: it does not train" in line for line in lines(summary(rows)))


@pytest.mark.slow
def test_too_short_a_duel_has_no_verdict_and_says_why(rows, folder):
    (base,) = (row for row in rows if row["contender"] == BASE)
    found = json.loads((folder / base["run_id"] / SUMMARY).read_text())
    assert found == json.loads(json.dumps(summary(rows)))
    ok = {name: own for name, own in found["contenders"].items() if own["status"] == "ok"}
    assert {own["wall"]["verdict"] for own in ok.values()} == {"no verdict"}
    assert all("clean comparisons of at least 30" in own["wall"]["reason"] for own in ok.values())
    assert found["false_alarms"]["same_plan"] == 4, "1F1B and its three twins"


@pytest.mark.slow
def test_what_is_the_same_work_is_the_same_plan(rows):
    schedules = {row["contender"]: row for row in rows}
    for name in TWINS:
        assert schedules[name]["partition_layers"] == schedules[BASE]["partition_layers"]
    streamed = [row for name, row in schedules.items() if name.startswith("roundpipe")]
    assert schedules[LIMIT]["partition_layers"] in {row["partition_layers"] for row in streamed}
    assert schedules[TWINS[2]]["recompute"] == schedules[BASE]["recompute"] == "except_last"
    assert schedules["gpipe"]["recompute"] == schedules["looped_bfs"]["recompute"] == "all"
    for row in (row for row in streamed if row["partition_layers"] == schedules[LIMIT]["partition_layers"]):
        assert row["simulated_makespan_s"] >= schedules[LIMIT]["simulated_makespan_s"] * (1 - 1e-9)


@pytest.mark.slow
def test_plans_are_read_back_as_they_were_and_nothing_is_profiled(rows, folder, monkeypatch):
    by_name = {row["contender"]: row for row in rows}
    path = folder / by_name[BASE]["run_id"] / PLANS
    monkeypatch.setattr("rpbench.run.layer_times._measured", None)
    request = load([*SMALL, f"mode.plans={path}", f"results_dir={folder}"])
    assert request.subject["sha256"]["mode.plans"]
    _, read = make_plans(request, OURS)
    assert {len(plans) for plans in read.values()} == {1}, "what is given is run, without a run-off"
    for name, plan in complete(OURS, {name: plans[0] for name, plans in read.items()}).items():
        row = by_name[name]
        assert str(plan.schedule.partition) == row["partition_layers"]
        assert plan.makespan == pytest.approx(row["simulated_makespan_s"], rel=1e-12)
        assert plan.num_evaluated == row["num_plans_evaluated"]
        assert plan.schedule.num_actions == row["num_actions"]
    path.write_text(path.read_text().replace("plans 1", "plans 0"))
    with pytest.raises(ConfigError, match=r"mode\.plans=.*its schema is not"):
        make_plans(load([*SMALL, f"mode.plans={path}", f"results_dir={folder}"]), OURS)


@pytest.mark.slow
def test_what_has_its_records_is_not_run_again_unless_one_failed(rows, folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("ran again")

    monkeypatch.setattr(duel_run, "play_all", refuse)
    monkeypatch.setattr(duel_run, "contenders", lambda who: OURS)
    with pytest.raises(AssertionError):
        records(load([*SMALL, f"results_dir={folder}"]))
    path = next(Path(folder).glob(f"{next(r['run_id'] for r in rows if r['contender'] == 'gpipe')}/record.json"))
    record.write(path.parent, json.loads(path.read_text()) | {"status": "oom"})
    assert len(records(load([*SMALL, f"results_dir={folder}"]))) == len(rows)


@pytest.mark.slow
def test_a_whole_duel_in_processes_of_its_own_with_torch_s_ranks(tmp_path):
    rows = records(load([*SMALL, "mode.calibrate=false", f"results_dir={tmp_path}"]))
    assert [row["status"] for row in rows] == ["ok"] * len(contenders())
    by_name = {row["contender"]: row for row in rows}
    assert by_name["torch_1f1b"]["grad_max_abs_diff"] <= 1e-6
    assert by_name["torch_1f1b"]["num_plans_evaluated"] == by_name[BASE]["num_plans_evaluated"], "the same search"
    processes = {start["process"] for start in rows[0]["starts"]}
    assert len(processes - {os.getpid()}) == 2


def test_some_contenders_meet_all_references():
    assert [each.name for each in contenders("limit+gpipe")] == [*REFERENCES, "gpipe", LIMIT]


def test_an_a_a_duel_is_the_same_plan_many_times():
    names = [contender.name for contender in contenders("twins")]
    assert names[:4] == list(REFERENCES)
    assert len(names) == len(contenders())
    assert all(contender.plan_of == BASE for contender in contenders("twins")[1:])


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="mode=duel needs a model with a shape"):
        load(["experiment=cpu_duel", "model=abstract", f"results_dir={tmp_path}"])
    for key, value in (("num_starts", 0), ("budget_s", 0), ("run_off_s", 0), ("half_width", -1)):
        with pytest.raises(ConfigError, match=rf"mode\.{key}={value}"):
            load([*SMALL, f"mode.{key}={value}", f"results_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"mode\.plans=nowhere: cannot be read"):
        load([*SMALL, "mode.plans=nowhere", f"results_dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"mode\.contenders=gpipe\+some: all, twins, or some of .*; some is none of"):
        records(load([*SMALL, "mode.contenders=gpipe+some", f"results_dir={tmp_path}"]))
    assert not list(tmp_path.iterdir())


# --- a made-up duel: verdicts from records ---------------------------------------------------------------------


def made_up(names, seconds, *, num=40, cores=2, others=0.0):
    """Records of two starts in which every run takes as long as it should but for a hundredth."""
    rows = {}
    for place, name in enumerate(names):
        starts = []
        for number in range(2):
            draw = Random(100 * place + number)
            at = [20.0 * turn + 1.4 * place for turn in range(num)]
            took = [seconds(name) * draw.uniform(0.99, 1.01) for _ in at]
            load_s = [None if others is None else others * each for each in took]
            starts.append({"at_s": at, "wall_s": took, "replay_s": took, "cpu_s": took, "elapsed_s": took,
                           "others_s": load_s})  # fmt: skip
        rows[name] = {
            "contender": name, "status": "ok", "runs": starts, "num_devices": 2, "foreign_cpu_share": others,
            "starts": [{"num_cores": cores, "num_turns": num, "spent_s": 800.0}] * 2, "run_id": name, "reason": None,
            "config": {"mode": {"half_width": 0.02, "num_starts": 2}}, "model": "m", "partition_layers": "1-1",
            "round_size": None, "recompute": "all", "cpu_s": 1.0, "replay_makespan_s": 1.0, "simulated_makespan_s": 1.0,
        }  # fmt: skip
    return rows


NAMES = (BASE, "a", TWINS[0], "b", TWINS[1], "c", TWINS[2])


def test_verdicts_follow_from_records_alone():
    rows = made_up(NAMES, lambda name: {"a": 0.9, "b": 1.1}.get(name, 1.0))
    found = findings(rows, "wall")
    verdicts = {name: each.verdict for name, each in found.items()}
    assert (verdicts["a"], verdicts["b"], verdicts["c"]) == ("faster", "slower", "no difference shown")
    assert found["a"].ratio == pytest.approx(1 / 0.9, rel=0.005)
    assert summary(list(rows.values()))["false_alarms"] == {"same_plan": 4, "verdicts": 0, "intervals": 0}
    more = findings(rows, "wall", num_verdicts=500)["a"]
    assert more.sure_low < found["a"].sure_low


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"cores": 1}, "2 devices on 1 core: they take turns"),
        ({"others": None}, "this system does not say what other programs do"),
    ],
)
def test_what_nobody_can_judge_has_no_verdict_at_all(how, reason):
    found = summary(list(made_up(NAMES, lambda name: 1.0, **how).values()))
    assert found["no_verdict"] == reason
    assert reason in lines(found)[1]
    assert {own["wall"]["verdict"] for own in found["contenders"].values()} == {"no verdict"}


def test_a_busy_neighbour_leaves_no_verdict():
    found = findings(made_up(NAMES, lambda name: 0.5 if name == "a" else 1.0, others=0.06), "wall")
    assert found["a"].verdict == "no verdict"
    assert found["a"].reason.startswith("start 1: 0 clean comparisons of at least 30, other programs spoilt 40")
    assert [start.num_disturbed for start in found["a"].starts] == [40, 40]
    json.dumps(summary(list(made_up(NAMES, lambda name: 1.0, others=0.06).values())), allow_nan=False)


# --- turns and ratios ------------------------------------------------------------------------------------------


class Still:
    tolerance = 0.0

    def __init__(self, name, log):
        self.name, self.log = name, log

    def check(self, sequence_tokens):
        return {}

    def run(self):
        assert not gc.isenabled(), "no collection in a run"
        self.log.append(self.name)
        return Sample(1.0, 1.0, 2.0, 1.0, None)


def test_turns_go_on_until_enough_is_known_and_the_first_only_warms_up():
    log, asked = [], []

    def is_enough(runs):
        asked.append(len(runs))
        return len(asked) == 2

    make_turn = partial(turn_order, "abc", "R", Random(0))
    runs = play({name: Still(name, log) for name in "abcR"}, make_turn, math.inf, is_enough)
    assert asked == [1 + 5 * 4, 1 + 10 * 4]
    assert len(log) == 11 * 4
    assert [run.name for run in runs] == log[3:]
    assert all(sorted(log[k : k + 4]) == sorted("abcR") for k in range(0, len(log), 4))
    assert [run.at_s for run in runs] == sorted(run.at_s for run in runs)
    assert gc.isenabled()


def test_no_turn_begins_after_the_budget_but_one_is_played():
    log = []
    play({name: Still(name, log) for name in "aR"}, lambda: "aR", 0.0, lambda runs: False)
    assert len(log) == 4


def test_devices_that_share_a_core_take_one_turn(monkeypatch):
    job = starts.Job("duel", (), None, 2, None, budget_s=99.0, order_seed=0)
    monkeypatch.setattr(starts, "usable_cores", lambda: [0])
    assert starts._budget_s(job) == 0.0
    monkeypatch.setattr(starts, "usable_cores", lambda: [0, 1])
    assert starts._budget_s(job) == 99.0


def test_ratios_over_starts_have_a_range():
    assert ratio([2.0, 20.0, 4.4], [1.0, 10.0, 2.0]) == Ratio(2.0, 2.0, 2.2)
    with pytest.raises(ValueError, match="at least 1"):
        ratio([], [])
