"""What the tests of all layers share. Being here, this file also puts its folder on the path, for `nearby`."""

import json
import signal

import pytest
from hypothesis import settings

from rpbench.cli import dispatch

# How long an example takes says something of the machine and of what else it does, and nothing of the code.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")


def pytest_configure():
    """Children get the usual handler of Ctrl-C, also where this process was started with the signal ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rpbench(capsys, tmp_path, monkeypatch):
    """Run the command line in an empty folder; returns (status, records on stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = dispatch(arguments)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run
