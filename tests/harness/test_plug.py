"""Pull the plug: a sweep broken at a write boundary, by a kill or the disk, and started again ends as if unbroken."""

import errno
import io
import os
import random
import signal

import pytest
from spared import spared

from rpbench.cli import dispatch
from rpbench.commands.store import export
from rpbench.harness import record

SWEEP = ("-m", "schedule=gpipe,1f1b", "num_microbatches=4,5", "num_devices=2", "cost=constant", "save_timeline=true")
FAULTS = ("kill", "torn", errno.ENOSPC, errno.EIO)


def in_a_child(results, fault=None, at=0, count=None):
    """Run the sweep in a process of its own, which breaks at a boundary; the number of boundaries it has passed."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read, "rb") as passed:
            told = passed.read()
        return os.waitpid(child, 0)[1], len(told)

    def boundary():
        nonlocal at
        os.write(write, b".")
        at -= 1
        if fault is None or at:
            return
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        os.kill(os.getpid(), signal.SIGKILL)

    record.boundary = boundary
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        os._exit(dispatch((*SWEEP, f"results_dir={results}")))


def table(results, form="csv"):
    text = io.StringIO()
    export(["--format", form, f"results_dir={results}"], text)
    return text.getvalue()


def tear(results, chance):
    """Cut the end off a journal, as a file system may after a power cut."""
    for path in results.glob("manifests/*/*.jsonl"):
        path.write_bytes(path.read_bytes()[: -chance.randrange(1, 40)])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    results = tmp_path_factory.mktemp("undisturbed")
    status, number = in_a_child(results)
    assert status == 0
    return table(results), number


def broken_and_resumed(results, fault, at, expected, chance):
    status, _ = in_a_child(results, fault, at)
    assert status != 0
    if fault == "torn":
        tear(results, chance)
    assert in_a_child(results)[0] == 0
    assert table(results) == expected
    assert len(list(results.glob("*/record.json"))) == 4
    assert not list(results.glob(".leases/*"))


@pytest.mark.parametrize("fault", spared(FAULTS, lambda fault: fault == "torn"))
def test_a_sweep_that_was_broken_ends_with_the_same_table(fault, undisturbed, tmp_path):
    expected, number = undisturbed
    chance = random.Random(str(fault))
    broken_and_resumed(tmp_path, fault, chance.randint(1, number), expected, chance)


@pytest.mark.exhaustive
def test_two_thousand_faults_leave_no_trace(undisturbed, tmp_path):
    expected, number = undisturbed
    chance = random.Random(0)
    for case in range(2000):
        at = 1 + case % number if case < 4 * number else chance.randint(1, number)
        broken_and_resumed(tmp_path / str(case), FAULTS[case // number % len(FAULTS)], at, expected, chance)


def test_two_sweeps_over_a_folder_share_its_cells(undisturbed, tmp_path):
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            os._exit(in_a_child(tmp_path)[0])
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert table(tmp_path) == undisturbed[0]
    started = [path.read_text().count('"started"') for path in tmp_path.glob("*/events.jsonl")]
    assert started == [1] * 4, "no run was made twice"


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="no regular file"):
            record.write_atomically(path, "text")
    assert (tmp_path / "pipe").is_fifo()
