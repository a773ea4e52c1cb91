"""The command starts itself again for measurements, once, and never otherwise."""

import os
import platform
import sys

import pytest

from rpbench.run import allocator


@pytest.fixture
def started(monkeypatch):
    """What the process would have been replaced by."""
    found = []
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    monkeypatch.setattr(os, "execve", lambda *given: found.append(given))
    return found


def test_a_measured_run_starts_again_with_the_settings(started):
    allocator.restart_tuned(["schedule=1f1b", "backend=cpu"])
    ((program, arguments, environment),) = started
    assert program == sys.executable
    assert arguments[1:] == sys.orig_argv[1:]
    assert environment[allocator.VARIABLE] == allocator.TUNABLES
    assert allocator.is_tuned(environment)


def test_it_does_so_once(started, monkeypatch):
    monkeypatch.setenv(allocator.VARIABLE, allocator.TUNABLES)
    allocator.restart_tuned(["backend=cpu"])
    assert not started


def test_other_settings_of_the_user_are_kept(started, monkeypatch):
    monkeypatch.setenv(allocator.VARIABLE, "glibc.pthread.rseq=0")
    allocator.restart_tuned(["backend=cpu"])
    assert started[0][2][allocator.VARIABLE] == f"glibc.pthread.rseq=0:{allocator.TUNABLES}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["mode=duel"],
        ["-m", "backend=virtual,cpu"],
        ["-m", "experiment=cpu_duel"],
        ["-m", "+experiment=dispatch,cpu_duel", "num_steps=1"],
        ["-m", "experiment=equivalence"],  # whose sweep names it
        ["calibrate", "name=mine"],
    ],
)
def test_so_does_whatever_runs_in_real_time(arguments, started):
    allocator.restart_tuned(arguments)
    assert len(started) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["backend=virtual"],
        ["report"],
        ["calibrate", "device=cuda"],
        ["-m", "mode=simulate"],
        ["-m", "experiment=convergence"],  # which has a section of that name
        ["experiment=cpu_duel", "mode=simulate"],
        ["experiment=unheard_of"],
    ],
)
def test_nothing_else_starts_again(arguments, started):
    allocator.restart_tuned(arguments)
    assert not started


def test_another_libc_has_no_such_settings(started, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    allocator.restart_tuned(["backend=cpu"])
    assert not started
