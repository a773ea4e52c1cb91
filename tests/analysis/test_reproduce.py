"""The driver: what it runs, how it resumes and ends, and when it is red."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from manifests import put
from omegaconf import OmegaConf
from spared import slow

from analysis.claims import Need, all_claims
from analysis.driver import reproduce as driver
from analysis.driver import sweeps
from analysis.driver.reproduce import main, reproduce
from analysis.driver.sweeps import ALL, DUELS, LOGS, PAPER, QUICK, Scope, Sweep, fork_command, run_sweeps
from analysis.records.experiments import Experiments
from rpbench.config.configuration import CONF, register
from rpbench.records import provenance, record
from rpbench.records.manifest import write_plan
from rpbench.sweep.sweeper import ManifestSweeper

ROOT = Path(__file__).parents[2]

HAND_CUTS = Sweep("hand_cuts")

# What the fixture `results` holds, so that nothing has to run.
AT_HAND = Scope("quick", (Sweep("figure17"), Sweep("roofline")))


def run(scope: tuple[Sweep, ...], results: Path) -> tuple[list[sweeps.Failure], list[str]]:
    said: list[str] = []
    return run_sweeps(scope, results, said.append, lambda line: None), said


# --- scopes --------------------------------------------------------------------------------------------------


def test_the_full_scope_runs_every_experiment_that_needs_no_gpu() -> None:
    files = (ROOT / "conf" / "experiment").glob("*.yaml")
    known = {path.stem for path in files if "override /backend: device" not in path.read_text()}
    assert len(known) > 10
    whole = {sweep.experiment for sweep in (*ALL.sweeps, *DUELS.sweeps)}
    assert whole == known - set(sweeps.ON_REQUEST)
    assert not any(sweep.overrides for sweep in (*ALL.sweeps, *DUELS.sweeps))


def test_what_measures_time_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[subprocess.Popen[bytes]] = []
    beside: dict[str, int] = {}
    begin = _instead("import time; time.sleep(0.3)")

    def start(command: list[str], out: Any, err: Any) -> "subprocess.Popen[bytes]":
        name = next(item for item in command if item.startswith("experiment=")).removeprefix("experiment=")
        beside[name] = sum(process.poll() is None for process in running)
        running.append(begin(command, out, err))
        return running[-1]

    monkeypatch.setattr(sweeps, "_open", start)
    run((Sweep("cpu_duel"), Sweep("a"), Sweep("b"), Sweep("baselines_cpu")), tmp_path)
    assert beside == {"a": 0, "b": 1, "cpu_duel": 0, "baselines_cpu": 0}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Experiments]:
    """The plans of both scopes, as far as claims need them, by scope."""
    needed = {need.experiment for claim in all_claims() for need in claim.needs}
    found = {}
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()  # knows the names that a glob stands for
        for scope in (PAPER, ALL, QUICK):
            folder = tmp_path_factory.mktemp(scope.name)
            for sweep in scope.sweeps:
                if sweep.experiment in needed:
                    write_plan(folder, sweep.experiment, sweep.overrides, _cells(sweep, loader))
            found[scope.name] = scope.experiments(folder)
    return found


def _cells(sweep: Sweep, loader: ConfigLoader) -> list[tuple[str, ...]]:
    """What the sweeper makes of an experiment's file and of what narrows it down."""
    params = {}
    for name in _bases(sweep.experiment):
        params |= _file(name).get("hydra", {}).get("sweeper", {}).get("params", {})
    config = OmegaConf.create({"hydra": {"sweeper": {"params": params}}})
    return ManifestSweeper(config, None, loader).cells(sweep.overrides)


def _bases(experiment: str) -> list[str]:
    """An experiment behind those that its file begins with."""
    named = [name for name in _file(experiment).get("defaults", ()) if isinstance(name, str) and name != "_self_"]
    return [*(each for name in named for each in _bases(name)), experiment]


def _file(experiment: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "experiment" / f"{experiment}.yaml"))


def test_every_run_that_a_claim_needs_is_in_the_full_scope_and_many_in_the_quick_one(
    planned: dict[str, Experiments],
) -> None:
    needs = {need for claim in all_claims() for need in claim.needs}
    left = [need for need in needs if not ALL.plans(need, planned["all"])]
    assert {need.experiment for need in left} <= {sweep.experiment for sweep in DUELS.sweeps}
    in_quick = {need for need in needs if QUICK.plans(need, planned["quick"])}
    assert {need.experiment for need in in_quick} <= {sweep.experiment for sweep in QUICK.sweeps}
    assert {"steady_state", "figure17", "roofline", "causal", "hand_cuts"} <= {need.experiment for need in in_quick}
    assert len(in_quick) < len(needs)


def test_the_quick_scope_knows_what_its_overrides_leave_out(planned: dict[str, Experiments]) -> None:
    def plans(experiment: str, **choices: str) -> bool:
        return QUICK.plans(Need(experiment, choices), planned["quick"])

    assert plans("steady_state", model="qwen3_1p7b", num_microbatches="10")
    assert not plans("steady_state", model="qwen3_1p7b", num_microbatches="16")
    assert not plans("partitions", partition="search", schedule="1f1b", model="qwen3_1p7b")


def test_what_was_never_planned_is_asked_for(tmp_path: Path) -> None:
    assert QUICK.plans(Need("figure17", {"schedule": "gpipe"}), QUICK.experiments(tmp_path))


# --- sweeps --------------------------------------------------------------------------------------------------


def test_a_sweep_runs_once_and_again_when_its_record_is_gone(tmp_path: Path) -> None:
    failures, said = run((HAND_CUTS,), tmp_path)
    assert failures == []
    assert "hand_cuts: 1 runs done" in said[0]
    (row,) = record.read_all(tmp_path)
    assert row["partition"] == "4-4-4-4-4-4-5-3"

    assert run((HAND_CUTS,), tmp_path) == ([], ["hand_cuts: all runs are there"])

    (tmp_path / row["run_id"] / "record.json").write_text("{")
    failures, said = run((HAND_CUTS,), tmp_path)
    assert failures == []
    assert "1 runs done" in said[0]
    assert [again["run_id"] for again in record.read_all(tmp_path)] == [row["run_id"]]


@pytest.mark.parametrize("what", ["code_version", "conf_version"])
def test_a_manifest_does_not_outlive_the_code(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict.fromkeys(record.REQUIRED) | {"run_id": "a", "status": "ok"}
    record.write(tmp_path / "a", row)
    put(tmp_path, "hand_cuts", [({}, [row])])
    monkeypatch.setattr(sweeps, "_open", _instead("print('')"))
    assert run((HAND_CUTS,), tmp_path)[1] == ["hand_cuts: all runs are there"]
    monkeypatch.setattr(provenance, what, lambda: "another")
    assert "runs done" in run((HAND_CUTS,), tmp_path)[1][0]


@pytest.mark.parametrize("files", [["timeline.csv"], []])
def test_a_sweep_whose_files_are_gone_is_run_again(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dict.fromkeys(record.REQUIRED) | {"run_id": "a", "status": "ok", "files": files}
    record.write(tmp_path / "a", row)
    put(tmp_path, "hand_cuts", [({}, [row])])
    monkeypatch.setattr(sweeps, "_open", _instead("print('')"))
    assert ("runs done" in run((HAND_CUTS,), tmp_path)[1][0]) == bool(files)


def _instead(code: str) -> Any:
    """Opens another program where the command line would be run."""

    def start(command: list[str], out: Any, err: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=err)

    return start


def test_a_copy_of_the_driver_runs_a_command_as_a_start_of_its_own_does(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        wrong = fork_command(["list", "nothing"], ROOT, out, err)
        assert wrong.wait(60) == 2
        assert b"invalid choice: 'nothing'" in (tmp_path / "err").read_bytes()
        right = fork_command(["list", "models"], ROOT, out, err)
        assert right.wait(60) == 0
    command = [sys.executable, "-m", "rpbench", "list", "models"]
    assert (tmp_path / "out").read_bytes() == subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout


def test_a_copy_of_the_driver_can_be_ended(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        copy = fork_command(["dashboard", f"results_dir={tmp_path}", "port=0"], ROOT, out, out)
        with pytest.raises(subprocess.TimeoutExpired):
            copy.wait(0.05)
        copy.terminate()
        assert copy.wait(30) == -signal.SIGTERM
        copy.kill()  # too late, and no error


def test_a_copy_of_the_driver_ends_when_the_driver_is_killed(tmp_path: Path) -> None:
    driver = os.fork()
    if not driver:
        with (tmp_path / "out").open("wb") as out:
            copy = fork_command(["dashboard", f"results_dir={tmp_path}", "port=0"], ROOT, out, out)
        (tmp_path / "pid.new").write_text(str(copy.pid))
        (tmp_path / "pid.new").rename(tmp_path / "pid")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(driver, 0)
    pid, end = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    lives_on = is_alive(pid)
    if lives_on:
        os.kill(pid, signal.SIGKILL)
    assert not lives_on


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_sweep_that_fails_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], out: Any, err: Any) -> "subprocess.Popen[bytes]":
        code = "import sys; sys.exit('no such model')" if "experiment=bad" in command else ""
        return subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=err)

    monkeypatch.setattr(sweeps, "_open", start)
    failures, said = run((Sweep("bad"), Sweep("good"), Sweep("better")), tmp_path)
    assert [(each.sweep.experiment, each.status, each.words) for each in failures] == [("bad", 1, "no such model")]
    assert failures[0].log.read_text().strip() == "no such model"
    assert len(said) == 3


def test_an_interruption_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    begin = _instead("import time; time.sleep(60)")

    def start(*arguments: Any) -> "subprocess.Popen[bytes]":
        started.append(begin(*arguments))
        return started[-1]

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "_open", start)
    with pytest.raises(KeyboardInterrupt):
        run_sweeps((Sweep("a"), Sweep("b"), Sweep("c")), tmp_path, print, interrupt)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_long_sweep_left_alone_is_shared_by_a_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    begin = _instead("import time; time.sleep(0.5)")

    def start(command: list[str], *files: Any) -> "subprocess.Popen[bytes]":
        started.append(command)
        return begin(command, *files)

    monkeypatch.setattr(sweeps, "_open", start)
    monkeypatch.setattr(sweeps, "_LONG_S", 0.0)
    failures, said = run((Sweep("figure10"),), tmp_path)
    assert not failures
    assert len(said) == 1
    assert len(started) == 2
    assert started[0] == started[1]
    run((Sweep("baselines_cpu"),), tmp_path)  # timed: it has the machine for itself
    assert len(started) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_ends_the_driver_with_one_line_and_keeps_what_is_done(number: signal.Signals, tmp_path: Path) -> None:
    """Its runs only wait, so that the signal comes while they go on."""
    program = textwrap.dedent("""
        import runpy, subprocess, sys
        from analysis.driver import sweeps

        def wait(command, out, err):
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=out, stderr=err)

        sweeps._open = wait
        import analysis.driver.reproduce
        assert "torch" not in sys.modules, "the driver reads records: its start need not wait for torch"
        runpy.run_module("analysis.driver.reproduce", run_name="__main__")
    """)
    arguments = ["quick", "--results", str(tmp_path), "--out", str(tmp_path)]
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if list((tmp_path / LOGS).glob("*.jsonl")):
                break
            time.sleep(0.05)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; finished runs are kept, the same command goes on from here"
    assert "Traceback" not in err


# --- red and green -------------------------------------------------------------------------------------------


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is run or drawn, and no notebook executed: what takes long has tests of its own."""
    monkeypatch.setattr(driver, "run_sweeps", lambda *_: [])
    monkeypatch.setattr(driver, "notebooks", list)
    monkeypatch.setattr(driver, "draw_all", lambda *_: {})
    monkeypatch.setattr(driver, "MUTANTS", 50)
    return monkeypatch


@pytest.fixture
def unwritten(still: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As `still`, and without pages, tables and falsified records."""
    still.setattr(driver, "write", lambda content, page: page)
    still.setattr(driver, "save_tables", lambda *_: None)
    still.setattr(driver, "_mutation_sample", lambda *_: ("", []))
    return still


def test_all_is_well(
    still: pytest.MonkeyPatch, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(AT_HAND, results, tmp_path) == 0
    out, err = capsys.readouterr()
    assert f"report: {tmp_path / 'report.html'}" in out
    assert "Figure 17: the simulated bubbles" in out
    assert "not in this scope" in out
    assert "RED" not in out
    assert "quick: 2 experiments" in err
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "report_pages" / "exhibit-published-cells.html").exists()
    assert (tmp_path / "figures" / "published_cells.csv").exists()


def test_a_lost_record_turns_it_red(
    unwritten: pytest.MonkeyPatch, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = tmp_path / "results"
    shutil.copytree(results, fewer)
    lost = next(row for row in record.read_all(fewer) if row["experiment"] == "figure17" and row["schedule"] == "gpipe")
    shutil.rmtree(fewer / lost["run_id"])
    assert reproduce(AT_HAND, fewer, tmp_path) == 1
    out, _ = capsys.readouterr()
    assert "RED, not as planned:" in out
    assert re.search(r"figure17/\w+/\w+/\w+: missing", out)
    assert f"the record {lost['run_id']} of cell schedule=gpipe model={lost['model']} is gone" in out


def test_an_exhibit_that_cannot_be_made_turns_the_full_scope_red(
    unwritten: pytest.MonkeyPatch, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = tmp_path / "results"
    shutil.copytree(results, fewer)
    lost = next(row for row in record.read_all(fewer) if row["experiment"] == "roofline")
    shutil.rmtree(fewer / lost["run_id"])
    assert reproduce(ALL, fewer, tmp_path) == 1
    out = capsys.readouterr().out
    assert "exhibit steady_state was not made" in out
    assert "exhibit figure2 was not made" in out
    assert "duel was not made" not in out  # nobody asks for duels there


def test_a_broken_notebook_turns_it_red_and_a_lack_of_runs_does_only_in_full(
    unwritten: pytest.MonkeyPatch, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(notebook: Path, *_: Any) -> Path:
        raise driver.MissingRuns("20 runs") if notebook.stem == "lacking" else ValueError("a cell\nwent wrong")

    unwritten.setattr(driver, "execute", execute)
    unwritten.setattr(driver, "notebooks", lambda: [Path("lacking.py")])
    assert reproduce(AT_HAND, results, tmp_path) == 0
    unwritten.setattr(driver, "notebooks", lambda: [Path("broken.py"), Path("lacking.py")])
    assert reproduce(AT_HAND, results, tmp_path) == 1
    out, err = capsys.readouterr()
    assert "notebook broken: ValueError: went wrong" in out
    assert "lacking" not in out
    assert "notebooks: 0 of 2 executed" in err


def test_quick_executes_the_first_notebook_that_has_its_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[str] = []

    def execute(notebook: Path, *_: Any) -> None:
        tried.append(notebook.stem)
        if notebook.stem == "lacking":
            raise driver.MissingRuns("20 runs")

    monkeypatch.setattr(driver, "execute", execute)
    monkeypatch.setattr(driver, "notebooks", lambda: [Path("lacking.py"), Path("first.py"), Path("second.py")])
    for scope, wanted in ((QUICK, ["lacking", "first"]), (PAPER, ["lacking", "first", "second"])):
        tried.clear()
        assert driver._run_notebooks(scope, tmp_path, tmp_path) == (len(wanted) - 1, [])
        assert tried == wanted


def test_a_failed_sweep_turns_it_red(
    unwritten: pytest.MonkeyPatch, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = sweeps.Failure(Sweep("figure17"), 1, "disk full", Path("a.log"))
    unwritten.setattr(driver, "run_sweeps", lambda *_: [failure])
    assert reproduce(AT_HAND, results, tmp_path) == 1
    assert "experiment=figure17 ended with status 1: disk full (log: a.log)" in capsys.readouterr().out


def test_nothing_measured_is_red(still: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(AT_HAND, tmp_path / "none", tmp_path) == 1
    assert "no finished sweep in it" in capsys.readouterr().out
    assert not (tmp_path / "report.html").exists()


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["slow"])
    assert end.value.code == 2
    assert "invalid choice: 'slow'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_ends_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["quick", "--results", str(tmp_path / "file" / "results")]) == 1
    assert "Not a directory" in capsys.readouterr().err
