"""A stranger's configuration is data: whatever Hydra would run for it is refused before anything is composed."""

import os
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from rpbench.run.allocator import measures

ROOT = Path(__file__).parents[2]

CALL = "{_target_: pathlib.Path.touch, _args_: [{_target_: pathlib.Path, _args_: [TOUCHED]}]}"


@pytest.mark.parametrize(
    "name, text",
    [
        ("experiment/bad.yaml", f"# @package _global_\nhydra:\n  callbacks:\n    x: {CALL}\n"),
        ("experiment/bad.yaml", f'# @package _global_\n"hy\\x64ra":\n  callbacks:\n    x: {CALL}\n'),
        ("experiment/bad.yaml", f"# @package hydra.callbacks.x\n_target_: x\n_args_: {CALL}\n"),
        ("experiment/bad.yaml", "# @package _global_\nhydra: {job: {env_set: {LD_PRELOAD: x.so}}}\n"),
        ("experiment/bad.yaml", "# @package _global_\nhydra: {job_logging: {handlers: {x: {(): pathlib.Path}}}}\n"),
        ("experiment/bad.yaml", "# @package _global_\nhydra: {launcher: {setup: [touch TOUCHED]}}\n"),
        ("experiment/bad.yaml", "# @package _global_\nhydra: {sweeper: {_target_: pathlib.Path}}\n"),
        ("experiment/bad.yaml", "# @package _global_\ndefaults:\n  - /model@hydra.callbacks.x: evil\n"),
        ("hydra/callbacks/bad.yaml", f"x: {CALL}\n"),
        ("model/unnamed.yaml", f"hydra: {{callbacks: {{x: {CALL}}}}}\n"),
    ],
)
def test_a_file_cannot_make_hydra_run_anything(name, text, rpbench, tmp_path):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("TOUCHED", str(tmp_path / "touched")))
    chosen = ["experiment=bad"] if name.startswith("experiment") else []
    status, rows, err = rpbench("--config-dir", "mine", "-m", *chosen, "num_devices=2")
    assert (status, rows) == (2, [])
    assert str(path) in err
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("sweep", [[], ["-m"]])
@pytest.mark.parametrize(
    "word",
    [
        "hydra.launcher._target_=os.system",
        "hydra.sweeper._target_=subprocess.Popen",
        "+hydra.callbacks.x._target_=os.system",
        "hydra.callbacks={x:{_target_:os.system}}",
        "++hydra.launcher={_target_:os.system}",
    ],
)
def test_a_command_line_chooses_what_hydra_runs_by_its_name(word, sweep, rpbench):
    status, rows, err = rpbench(*sweep, "schedule=gpipe,1f1b" if sweep else "schedule=gpipe", "num_devices=2", word)
    assert (status, rows) == (2, [])
    assert f"{word}: what Hydra runs is chosen by its name" in err


@pytest.mark.parametrize(
    "word, said",
    [
        ("hydra.launcher=null", "hydra.launcher=None: it is chosen by its name"),
        ("hydra.sweeper=5", "hydra.sweeper=5: it is chosen by its name"),
        ("hydra.job.chdir=true", "leave it out"),
        ("hydra.verbose=1.5", "hydra.verbose=1.5: true, false, or the names of loggers"),
        (f"experiment={'a' * 3000}", "unknown experiment"),
        (f"cluster={'a' * 3000}", "unknown cluster"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(word, said, rpbench, tmp_path):
    status, rows, err = rpbench("-m", "schedule=gpipe,1f1b", "num_devices=2", word)
    assert (status, rows) == (2, [])
    assert said in err
    assert not (tmp_path / "results").exists()


def test_a_worker_that_is_killed_is_told_in_a_sentence(rpbench, monkeypatch):
    class TerminatedWorkerError(RuntimeError):
        pass

    def launch(*_: object, **__: object) -> None:
        raise TerminatedWorkerError("A worker process was unexpectedly terminated.\nmore")

    monkeypatch.setattr(Plugins, "instantiate_launcher", launch)
    status, rows, err = rpbench("-m", "schedule=gpipe,1f1b", "num_devices=2")
    assert (status, rows) == (1, [])
    assert "rpbench: a worker of the launcher was killed (TerminatedWorkerError: A worker process was unexp" in err
    assert "Traceback" not in err


def test_what_is_no_text_in_a_folder_of_ones_own_is_one_line(rpbench, tmp_path):
    path = tmp_path / "mine" / "experiment" / "bad.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"hydra: \xff\xfe")
    os.environ["RPBENCH_PATH"] = str(tmp_path / "mine")
    try:
        assert not measures(["experiment=bad"])
    finally:
        del os.environ["RPBENCH_PATH"]
    status, _, err = rpbench("--config-dir", "mine", "experiment=bad")
    assert status == 2
    assert "bad.yaml: it is no UTF-8 text (line 1, byte 7); save it as UTF-8" in err


def test_what_a_file_sweeps_is_swept(rpbench, tmp_path):
    path = tmp_path / "mine" / "experiment" / "good.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nhydra: {sweeper: {params: {schedule: 'gpipe,1f1b'}}}\nnum_devices: 2\n")
    status, rows, _ = rpbench("--config-dir", "mine", "-m", "experiment=good", "num_microbatches=2")
    assert (status, [row["schedule"] for row in rows]) == (0, ["gpipe", "1f1b"])
    _, again, err = rpbench("--config-dir", "mine", "-m", "experiment=good", "num_microbatches=2")
    assert [row["run_id"] for row in again] == [row["run_id"] for row in rows]
    assert "2 of 2 cells are there" in err


@pytest.mark.parametrize("name", ["qwen_${oc.env:SECRET}", "${ oc.env : SECRET }", '"\\x24{oc.${kind}:SECRET}"'])
def test_a_file_cannot_read_the_environment(name, rpbench, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "canary-of-the-environment")
    path = tmp_path / "mine" / "model" / "bent.yaml"
    path.parent.mkdir(parents=True)
    text = (ROOT / "conf" / "model" / "tiny_gpt.yaml").read_text().replace("name: tiny_gpt", f"name: {name}\nkind: env")
    path.write_text(text)
    status, rows, err = rpbench("--config-dir", "mine", "model=bent", "cost=constant", "num_devices=2")
    assert (status, rows) == (2, [])
    assert str(path) in err
    assert "canary" not in err


def test_a_file_may_name_its_own_keys(rpbench, tmp_path):
    path = tmp_path / "mine" / "model" / "own.yaml"
    path.parent.mkdir(parents=True)
    text = (ROOT / "conf" / "model" / "tiny_gpt.yaml").read_text().replace("name: tiny_gpt", "name: of_${model.family}")
    path.write_text(text)
    status, rows, _ = rpbench("--config-dir", "mine", "model=own", "cost=constant", "num_devices=2")
    assert (status, rows[0]["model"]) == (0, "of_gpt")


def test_a_number_without_an_end_is_refused_wherever_it_stands(rpbench, tmp_path):
    path = tmp_path / "mine" / "cluster" / "endless.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: endless\nnum_devices: 2\ndeclared: {matmul_flops_per_s: -.inf}\n")
    status, rows, err = rpbench("--config-dir", "mine", "cluster=endless", "cost=constant", "schedule=1f1b")
    assert (status, rows) == (2, [])
    assert "cluster.declared.matmul_flops_per_s=-inf: a finite number" in err
