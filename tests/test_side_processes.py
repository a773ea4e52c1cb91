"""Processes beside ours: they end with it, however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rpbench.side_processes import side_processes

PARENT = """
import os, sys, time
from rpbench.side_processes import side_processes
if __name__ == "__main__":
    with side_processes(2, sys.argv[1]) as pool:
        busy = [pool.submit(time.sleep, 60) for _ in range(2)]
        print(*pool._processes, flush=True)
        busy[0].result()
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_they_leave_when_theirs_is_killed(start, tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, str(program), start]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) > 0
        assert all(map(lives, pids))
        process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    while any(map(lives, pids)):
        assert time.monotonic() - began < 30, "they go on without their parent"
        time.sleep(0.05)


def lives(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_they_begin_as_they_are_told(capfd):
    with side_processes(1, "fork", print, "hello") as pool:
        assert pool.submit(abs, -2).result() == 2
    assert "hello" in capfd.readouterr().out
