"""The lock of the machine: one run at a time, and all ranks of a run together."""

import subprocess
import sys
import time

import pytest

from rpbench.sweep import multirun
from rpbench.sweep.multirun import machine_alone

HOLD = """
import sys
from pathlib import Path
from rpbench.sweep import multirun
multirun._path = lambda: Path(sys.argv[1])
with multirun.machine_alone(wanted=True):
    print("in", flush=True)
    sys.stdin.read()
"""
RANK = {"RANK": "1", "TORCHELASTIC_RUN_ID": "job7", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def held(tmp_path, monkeypatch):
    """Starts a process that holds the lock of this test, as a rank or as a run of its own."""
    path = tmp_path / "lock"
    monkeypatch.setattr(multirun, "_path", lambda: path)
    started = []

    def start(environment):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": ":".join(sys.path)},
        )
        started.append(process)
        assert process.stdout.readline() == "in\n"
        return process

    yield start
    for process in started:
        process.communicate("")


def test_ranks_of_one_run_do_not_wait_for_each_other(held, monkeypatch):
    held(RANK | {"RANK": "0"})
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with machine_alone(wanted=True):
        assert multirun._held == 0  # the other one has it
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("other", [{}, RANK | {"TORCHELASTIC_RUN_ID": "job8"}], ids=["a run", "ranks of another run"])
def test_other_runs_wait(held, monkeypatch, capsys, other):
    process = held(other)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)

    def end_it(seconds):
        if process.poll() is None:
            process.communicate("")

    monkeypatch.setattr(multirun.time, "sleep", end_it)
    with machine_alone(wanted=True):
        assert process.poll() is not None
        assert multirun._held == 1
    assert "another run measures time on this machine" in capsys.readouterr().err
