"""Processes beside ours: they end with it, however it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from rpbench import side_processes as beside
from rpbench.side_processes import Forked, Template, _fork_with, end_all, side_processes, start

PARENT = """
import os, sys, time
from rpbench.side_processes import side_processes
if __name__ == "__main__":
    with side_processes(2, sys.argv[1]) as pool:
        busy = [pool.submit(time.sleep, 60) for _ in range(2)]
        print(*pool._processes, flush=True)
        busy[0].result()
"""

PARENT_OF_STARTED = """
import os, sys, time
from rpbench import side_processes
(stdin, ours), (theirs, stdout) = os.pipe(), os.pipe()
for word in "ab":
    one = side_processes.start([sys.argv[1], word], {"RANK": "0"}, stdin=stdin, stdout=stdout, stderr=2)
    print(one.pid, end=" ")
os.close(stdin)
os.read(theirs, 1)
print(os.popen(f"ps -o ppid= -p {one.pid}").read().strip(), flush=True)
time.sleep(60)
"""
PROGRAM = "tests.started_program"


@pytest.mark.parametrize("text, word", [(PARENT, "fork"), (PARENT, "spawn"), (PARENT_OF_STARTED, PROGRAM)])
def test_they_leave_when_theirs_is_killed(text, word, tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(text)
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, str(program), word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) > 0
        assert all(map(lives, pids))
        process.send_signal(signal.SIGKILL)
    assert_gone(pids)


def assert_gone(pids):
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


# --- started by themselves, or forked from a template ---


@contextmanager
def started(word, tmp_path, program=PROGRAM, rank="0"):
    """(process, its stdin, what it says of itself, what it has written to stderr)."""
    (stdin, ours), (theirs, stdout) = os.pipe(), os.pipe()
    with open(ours, "w") as lines, open(theirs) as answers, open(tmp_path / f"{word}.err", "w+") as words:
        process = start([program, word], {"RANK": rank}, stdin=stdin, stdout=stdout, stderr=words.fileno())
        os.close(stdin)
        os.close(stdout)
        line = answers.readline()
        yield process, lines, json.loads(line) if line else {}, lambda: words.seek(0) or words.read()
        end_all([process], [lines], [])


linux = pytest.mark.skipif(sys.platform != "linux", reason="children of their own import each for itself")


@pytest.mark.parametrize("forked", [pytest.param(True, marks=linux), False])
def test_a_started_process_has_its_words_its_variables_and_a_session(forked, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", sys.platform if forked else "darwin")
    monkeypatch.setattr(beside, "_template", None)
    with started("one", tmp_path) as (one, _, said, _), started("two", tmp_path, rank="1") as (two, _, other, _):
        assert isinstance(one, Forked) is forked
        assert (said["word"], other["word"]) == ("one", "two")
        assert (said["with"][3], other["with"][3]) == ("0", "1")
        assert said["imported_here"] is not forked
        assert said["leads"]
        assert said["threads"] == "1"
        assert one.poll() is two.poll() is None
    assert one.poll() == two.poll() == 0


@linux
def test_variables_that_changed_since_reach_what_is_imported_too(tmp_path, monkeypatch):
    """One that is read late reaches a child of the same template; any other one has a template of its own."""
    found = []
    for name, value in (("WITH", "1"), ("RPBENCH_LATE", "2"), ("WITH", "3")):
        monkeypatch.setenv(name, value)
        with started(value, tmp_path) as (_, _, said, _):
            found.append((said["with"][:3], beside._template))
    assert [words for words, _ in found] == [["1", "1", ""], ["1", "1", "2"], ["3", "3", "2"]]
    assert found[0][1] is found[1][1] is not found[2][1]


@pytest.mark.parametrize(
    "line, status, words", [("5", 5, ""), ("kill", -9, ""), ("raise", 1, "ValueError: went wrong")]
)
def test_how_a_started_process_ends_is_known(line, status, words, tmp_path):
    with started("one", tmp_path) as (process, stdin, _, stderr):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        print(line, file=stdin, flush=True)
        assert process.wait(30) == process.returncode == status
        assert words in stderr()
        assert not lives(process.pid)


def test_a_module_that_cannot_be_imported_says_so_and_others_live_on(tmp_path):
    with started("one", tmp_path) as (good, *_), started("two", tmp_path, "tests.no_such") as (bad, _, _, stderr):
        assert bad.wait(30) == 1
        assert "No module named 'tests.no_such'" in stderr()
        assert good.poll() is None


@linux
def test_children_of_a_killed_template_are_ended_and_the_next_one_has_another(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "_template", None)
    with started("one", tmp_path) as (first, *_):
        with open(f"/proc/{first.pid}/stat") as file:
            template = int(file.read().rpartition(")")[2].split()[1])
        os.kill(template, signal.SIGKILL)
        assert first.wait(30) == -signal.SIGKILL
        assert_gone([first.pid])
    with started("two", tmp_path) as (second, *_):
        assert isinstance(second, Forked)


@linux
def test_a_template_ends_with_the_last_who_holds_it(tmp_path):
    template = Template(os.environ | {"PYTHONPATH": str(beside.ROOT)})
    with open(os.devnull, "r+") as nothing:
        child = template.fork(["tests.started_program", "x"], (), os.environ | {"RANK": "0"}, [nothing.fileno()] * 3)
    with open(f"/proc/{child.pid}/stat") as file:
        pid = int(file.read().rpartition(")")[2].split()[1])
    del template
    assert lives(pid)
    child.wait(30)
    del child
    assert not lives(pid)


@linux
def test_what_has_threads_is_not_forked():
    """A child would lack all threads but one, and wait for locks that they held."""
    thread = threading.Timer(60, print)
    thread.start()
    assert _fork_with(["json"]) is None
    thread.cancel()
