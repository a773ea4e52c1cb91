"""Pull the plug: a sweep broken at a write boundary, by a kill or the disk, and started again ends as if unbroken."""

import errno
import os
import random
from pathlib import Path

import pytest
from plugging import compose_once, forked, in_a_child, rests, starts, swept, table, tear, warm
from spared import spared

from rpbench import whole_file
from rpbench.config.files import read_source
from rpbench.engine.state import checkpoint
from rpbench.records import record
from rpbench.whole_file import read_bytes

SWEEP = ("-m", "schedule=gpipe,1f1b", "num_microbatches=4,5", "num_devices=2", "cost=constant", "save_timeline=true")
FAULTS = ("kill", "torn", errno.ENOSPC, errno.EIO)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The table of a sweep that nothing happened to, and the boundaries between steps of its writes."""
    with pytest.MonkeyPatch.context() as patch:
        compose_once(patch)
        status, number = in_a_child(tmp_path_factory.mktemp("first"), SWEEP)
        assert status == 0
        warm(tmp_path_factory.mktemp("here"), SWEEP)
        results = tmp_path_factory.mktemp("undisturbed")
        assert in_a_child(results, SWEEP) == (0, number)
        yield table(results), number


def broken_and_resumed(results, fault, at, expected, chance):
    status, _ = in_a_child(results, SWEEP, fault, at)
    assert status != 0
    if fault == "torn":
        tear(results, chance)
    assert in_a_child(results, SWEEP)[0] == 0
    assert table(results) == expected
    assert len(list(results.glob("*/record.json"))) == 4
    assert not rests(results)
    assert sum(starts(results).values()) <= 4 + 1, "at most the cell that was being run is run again"


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
    children = [forked(lambda: swept(tmp_path, SWEEP)) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert table(tmp_path) == undisturbed[0]
    assert list(starts(tmp_path).values()) == [1] * 4, "no run was made twice"


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="no regular file"):
            record.write_atomically(path, "text")
    with pytest.raises(ValueError, match="is no folder, and is left alone"):
        checkpoint.save(tmp_path / "pipe", checkpoint.State(1, {}, {}), {})
    assert (tmp_path / "pipe").is_fifo()


def test_what_never_ends_or_is_huge_is_not_read(tmp_path, monkeypatch):
    for name in ("UNWRITTEN_S", "SILENT_S"):
        monkeypatch.setattr(whole_file, name, 0.05)
    for name in ("unwritten", "silent", "endless"):
        os.mkfifo(tmp_path / name)
    silent = os.open(tmp_path / "silent", os.O_RDWR)
    endless = os.open(tmp_path / "endless", os.O_RDWR)
    os.write(endless, b"x" * 40_000)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(5 * 2**30)
    (tmp_path / "zero").symlink_to("/dev/zero")
    refused = {
        "unwritten": "a pipe that nobody writes to",
        "silent": "a pipe that has given nothing for 0.05 s",
        "endless": "more than 10,000 bytes",
        "sparse": "at most",
        "zero": "it is a device, no regular file",
        ".": "it is a folder, no regular file",
    }
    for name, said in refused.items():
        with pytest.raises(ValueError, match=said):
            read_bytes(tmp_path / name, 10_000)
        with pytest.raises(ValueError, match=said if name != "endless" else "given nothing"):
            read_source("schedule_file", str(tmp_path / name))
    os.close(silent)
    os.close(endless)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="a file that Linux makes up")
def test_of_a_file_that_the_system_makes_up_little_is_read(monkeypatch):
    assert read_bytes(Path("/proc/self/maps"))
    monkeypatch.setattr(whole_file, "_PIECE", 64)
    with pytest.raises(ValueError, match="more than 64 bytes"):
        read_bytes(Path("/proc/self/maps"))


def test_a_pipe_is_read_to_its_end(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"1F0 1B0")
    os.close(writing)
    assert read_source("schedule_file", f"/dev/fd/{reading}").content == b"1F0 1B0"
    with pytest.raises(ValueError, match="a pipe, which can be read once"):
        whole_file.sha256(Path(f"/dev/fd/{reading}"))
    os.close(reading)
