"""What the tests of all layers share. Being here, this file also puts its folder on the path, for `nearby`."""

import json

import pytest

from rpbench.cli import dispatch


@pytest.fixture
def rpbench(capsys, tmp_path, monkeypatch):
    """Run the command line in an empty folder; returns (status, records on stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = dispatch(arguments)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run
