"""hydra/launcher=slurm: a job for each cell, torchrun in it, and one sentence where there is no SLURM."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
from hydra.core.config_store import ConfigStore

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.records.manifest import read_manifest
from rpbench.sweep import slurm
from rpbench.sweep.multirun import sweep
from rpbench.sweep.slurm import Slurm, asked_for, refuse_without_slurm, run_task
from rpbench.sweep.worker import RunFailed

ROW = {"run_id": "a1", "status": "ok", "reason": None, "mode": "roofline", "model": "m", "cluster": "c",
       "convention": "artifact"}  # fmt: skip
CELL = ("schedule=1f1b", "backend=torch", "model=tiny_gpt", "num_devices=4")


class Executor:
    """submitit's, with jobs that end at once."""

    answers = ((0, [json.dumps(ROW)], ""), (0, [], ""))

    def __init__(self, folder, cluster):
        self.told, self.submitted = {}, []
        type(self).last = self

    def update_parameters(self, **told):
        self.told = told

    def submit(self, *call):
        self.submitted.append(call)
        return SimpleNamespace(job_id="7", results=self.results)

    def results(self):
        return list(self.answers)


def put(monkeypatch, executor):
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=executor))


def test_a_cell_is_a_job_whose_record_is_said_and_in_the_manifest(monkeypatch, tmp_path, capsys):
    put(monkeypatch, Executor)
    hosts = ("hydra.launcher.num_hosts=2", "hydra.launcher.ranks_per_host=2", "hydra.launcher.partition=long")
    assert sweep(["-m", "hydra/launcher=slurm", *hosts, *CELL, f"results_dir={tmp_path}"]) == 0
    assert json.loads(capsys.readouterr().out) == ROW
    ((call, ranks, overrides),) = Executor.last.submitted
    assert (call, ranks) == (run_task, 2)
    assert overrides == [*CELL, f"results_dir={tmp_path}"]
    assert Executor.last.told == {
        "name": "rpbench", "timeout_min": 60, "nodes": 2, "tasks_per_node": 1, "slurm_partition": "long",
    }  # fmt: skip
    (name,) = (path.name for path in (tmp_path / "manifests").iterdir())
    (cell,) = read_manifest(tmp_path, name).cells
    assert list(cell.run_ids) == ["a1"]


def test_submitit_writes_its_log_on_stderr_alone(monkeypatch):
    put(monkeypatch, Executor)
    log = logging.getLogger("submitit")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(stream) for stream in (sys.stderr, sys.stdout)])
    log.handlers[0].name, log.handlers[1].name = "submitit_err", "submitit_out"  # its own names
    slurm.import_submitit()
    assert [handler.name for handler in log.handlers] == ["submitit_err"]


def test_without_slurm_there_is_one_sentence_and_nothing_begins(monkeypatch, tmp_path):
    class Missing:
        def __init__(self, folder, cluster):
            raise RuntimeError('Could not detect "srun", are you indeed on a slurm cluster?')

    put(monkeypatch, Missing)
    words = ["-m", "hydra/launcher=slurm", *CELL, f"results_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="this host has no srun, so it is on no SLURM cluster; give the command on a"):
        sweep(words)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r'by submitit, which is not here: pip install -e "\.\[slurm\]"'):
        sweep(words)
    assert not (tmp_path / "manifests").exists()


def test_a_job_without_a_record_says_its_last_words(monkeypatch, tmp_path):
    class Failing(Executor):
        answers = ((0, [], ""), (1, [], "rpbench: rank 3 died (signal 9)"))

    put(monkeypatch, Failing)
    with pytest.raises(RunFailed, match=r"job 7 left no record; host 1 said last: rpbench: rank 3 died \(signal 9\)"):
        Slurm(folder=str(tmp_path)).run(load(CELL))


def test_a_job_that_is_lost_is_a_sentence(monkeypatch, tmp_path):
    class Lost(Executor):
        def results(self):
            raise TimeoutError("job 7 was killed\nTraceback ...")

    put(monkeypatch, Lost)
    with pytest.raises(RunFailed, match=r"^job 7: TimeoutError: job 7 was killed; its logs are in /logs$"):
        Slurm(folder="/logs").run(load(CELL))


def test_runs_of_one_process_are_sent_elsewhere():
    with pytest.raises(ConfigError, match="set backend=torch, or take hydra/launcher=submitit_slurm"):
        Slurm(folder="x").run(load(["schedule=1f1b"]))


@pytest.mark.parametrize(
    "given, said",
    [
        ({"num_hosts": 0}, r"hydra\.launcher\.num_hosts=0: a whole number of at least 1"),
        ({"executor": "pbs"}, r"hydra\.launcher\.executor=pbs: one of slurm, local"),
        ({"hosts": 2}, "hosts"),
    ],
)
def test_what_cannot_be_asked(given, said):
    with pytest.raises(ConfigError, match=said):
        asked_for({"_target_": slurm.TARGET, "folder": "x"} | given)
    assert asked_for({"_target_": "hydra.basic_launcher"}) is None


def test_every_task_starts_torchrun_for_its_host(monkeypatch):
    seen = []

    def ran(arguments, **options):
        seen.append(arguments)
        errors = "rpbench: WORLD_SIZE=4: start 8\ntorch: exitcode 1\n"
        return SimpleNamespace(returncode=1, stdout='{"a": 1}\nnot data\n', stderr=errors)

    monkeypatch.setattr(slurm.subprocess, "run", ran)
    for rank in (0, 1):
        job = SimpleNamespace(hostnames=["n7", "n9"], num_tasks=2, global_rank=rank, job_id="31415")
        monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(JobEnvironment=lambda job=job: job))
        assert run_task(4, CELL) == (1, ['{"a": 1}'], "rpbench: WORLD_SIZE=4: start 8")
        assert f"--node-rank={rank}" in seen[-1]
        assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=n7:31415"} <= set(seen[-1])
        assert seen[-1][-len(CELL) :] == list(CELL)


def test_the_script_asks_slurm_for_a_task_a_host(tmp_path):
    """As submitit writes it; nothing is handed in."""
    script = pytest.importorskip("submitit.slurm.slurm")
    asked = Slurm(folder=str(tmp_path), num_hosts=3, gpus_per_host=8, partition="long", more={"constraint": "h100"})
    renamed = {"timeout_min": "time", "name": "job_name", "tasks_per_node": "ntasks_per_node"}
    told = {renamed.get(key, key).removeprefix("slurm_"): value for key, value in asked.parameters().items()}
    text = script._make_sbatch_string(command="true", folder=tmp_path, **told)
    lines = text.splitlines()
    for line in ("nodes=3", "ntasks-per-node=1", "gpus-per-node=8", "partition=long", "time=60", "constraint=h100"):
        assert f"#SBATCH --{line}" in lines


@pytest.mark.slow
def test_two_processes_stand_for_two_hosts(tmp_path):
    """submitit's local executor: each task starts torchrun with a rank, and both meet on loopback."""
    pytest.importorskip("submitit.slurm.slurm")  # the package itself: its name alone may be a stand-in of another test
    request = load(["schedule=1f1b", "backend=torch", "model=tiny_gpt", "num_devices=2", "num_microbatches=4",
                    "recompute=none", "verify=true", "dtype=float64", f"results_dir={tmp_path}"])  # fmt: skip
    job = Slurm(executor="local", num_hosts=2, ranks_per_host=1, timeout_min=5, folder=str(tmp_path / ".slurm"))
    (row,) = job.run(request)
    assert row["status"] == "ok"
    assert row["grad_max_abs_diff"] == 0.0
    assert (tmp_path / row["run_id"] / "record.json").exists()


HANDING_IN = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@pytest.mark.parametrize(
    "asked, said",
    [
        (
            "hydra/launcher=handing_in",
            r"this host has no srun, .* give the command on a login node, or take hydra/launcher=submitit_lo",
        ),
        ("hydra/launcher=of_no_worker", r"hydra\.launcher\.n_jobs=0: so many workers run the cells; leave it out"),
        ("hydra/launcher=foo", r"hydra/launcher=foo: none of this name is installed; leave it out, or install"),
        ("hydra.launcher.num_host=2", r"did you mean hydra\.launcher\.num_hosts\? Keys: .*executor, folder, "),
        ("hydra.launcher.num_hosts=2", r"not a key of the chosen hydra\.launcher; .* that have it: slurm$"),
    ],
    ids=["submitit_slurm", "joblib", "foo", "misspelled", "of another"],
)
def test_a_launcher_that_cannot_serve_here_is_one_line_before_anything_is_written(asked, said, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, node in (("handing_in", {}), ("of_no_worker", {"n_jobs": 0})):
        ConfigStore.instance().store(group="hydra/launcher", name=name, node={"_target_": HANDING_IN, **node})
    with pytest.raises(ConfigError, match=said) as refused:
        sweep(["-m", asked, "schedule=gpipe,1f1b", f"results_dir={tmp_path / 'results'}"])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("word", ["hydra/launcher=slurm", "+hydra.launcher.num_hosts=2"])
def test_a_launcher_of_one_run_is_refused_and_not_left_out(word, tmp_path):
    with pytest.raises(ConfigError, match="a launcher is of sweeps: put -m before"):
        sweep([word, "schedule=gpipe", f"results_dir={tmp_path / 'results'}"])
    assert not (tmp_path / "results").exists()


def test_a_host_with_srun_is_taken_for_a_cluster(monkeypatch, tmp_path):
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    refuse_without_slurm({"_target_": HANDING_IN})
