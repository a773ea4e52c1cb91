"""Leases: one owner at a time, whose end - however sudden - ends the lease; no clock is compared with another."""

import json
import os
import signal
import threading

import pytest

from rpbench.sweep import lease
from rpbench.sweep.lease import Leases, Owner


def owned_by(path, **change):
    path.write_text(json.dumps(Owner.me().__dict__ | change))


def test_one_of_many_gets_a_lease(tmp_path):
    got = []
    start = threading.Barrier(8)

    def take():
        start.wait()
        got.append(Leases(tmp_path).take("run"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(path is not None for path in got) == 1


def test_a_lease_that_is_given_back_is_free_and_leaves_nothing(tmp_path):
    mine, other = Leases(tmp_path), Leases(tmp_path)
    path = mine.take("run")
    assert other.take("run") is None
    assert other.is_held("run")
    mine.give_back(path)
    assert not other.is_held("run")
    other.give_back(other.take("run"))
    assert not list((tmp_path / lease.FOLDER).iterdir())


def test_the_lease_of_a_killed_process_lapses_at_once(tmp_path):
    child = os.fork()
    if not child:
        Leases(tmp_path).take("run")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    mine = Leases(tmp_path)
    path = mine.take("run")
    assert path is not None
    assert path.suffix == ".2", "the next generation: nobody removes what another may just have taken"
    mine.give_back(path)
    assert not list((tmp_path / lease.FOLDER).iterdir())


def test_a_lease_is_not_taken_beside_one_that_began_anew(tmp_path, monkeypatch):
    """Between a look and the taking, others may end what was seen and begin again at the first generation."""
    folder = tmp_path / lease.FOLDER
    folder.mkdir()
    owned_by(folder / "run.1", boot="another")  # it has lapsed

    def slowly(path, text, create=lease.create):
        monkeypatch.setattr(lease, "create", create)
        other = Leases(tmp_path)
        other.give_back(other.take("run"))
        assert other.take("run").suffix == ".1"
        return create(path, text)

    monkeypatch.setattr(lease, "create", slowly)
    assert Leases(tmp_path).take("run") is None
    assert [path.name for path in folder.iterdir()] == ["run.1"]


def test_leases_of_the_gone_are_removed_and_those_of_the_living_stay(tmp_path):
    folder = tmp_path / lease.FOLDER
    folder.mkdir()
    owned_by(folder / "done.1", boot="another")
    owned_by(folder / "busy.3")
    Leases(tmp_path).remove_lapsed()
    assert [path.name for path in folder.iterdir()] == ["busy.3"]


@pytest.mark.parametrize("change", [{"boot": "another"}, {"began": "7"}])
def test_a_process_that_has_the_number_of_another_does_not_hold_its_lease(change, tmp_path):
    path = Leases(tmp_path).take("run")
    owned_by(path, **change)
    assert Leases(tmp_path).take("run") is not None


def test_a_lease_of_another_host_lapses_when_it_is_seen_untouched_for_long(tmp_path, monkeypatch):
    path = Leases(tmp_path).take("run")
    owned_by(path, host="another", pid=1)
    now = [1000.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    mine = Leases(tmp_path)
    for wall in (0, 4e9, 1e9):  # its clock, or ours, jumps: to be touched is what counts
        os.utime(path, (wall, wall))
        assert mine.take("run") is None
        now[0] += lease.LAPSE_S - 1
        assert mine.take("run") is None
    now[0] += 2
    assert mine.take("run") is not None


def test_an_owner_touches_its_leases(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    mine = Leases(tmp_path)
    path = mine.take("run")
    os.utime(path, (0, 0))
    for _ in range(500):
        if path.stat().st_mtime:
            break
        threading.Event().wait(0.01)
    mine.close()
    assert not path.exists()
