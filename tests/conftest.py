"""What the tests of all layers share. Being here, this file also puts its folder on the path, for `nearby`."""

import gc
import json
import os
import signal
import sys
import tempfile

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from analysis.verbs import VERBS
from rpbench.cli import COLLECT_AFTER, dispatch, register
from rpbench.commands.advising import advise, advise_around
from tests.chromium import browser

# How long an example takes says something of the machine and of what else it does, and nothing of the code.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")
register(VERBS)  # as `python -m rpbench` does


def pytest_configure():
    """Children get the usual handler of Ctrl-C, also where this process was started with the signal ignored.

    They measure nothing that counts, so they wait for no run outside that does, only for each other.
    One thread an operation is enough for small tensors, and leaves the second core to the other worker.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault(
        "RPBENCH_MACHINE_LOCK", os.path.join(tempfile.gettempdir(), f"rpbench-tests-{os.getuid()}.lock")
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Children compile our modules once, and not each for itself.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Ten thousand tests and many large schedules live: they are looked through as seldom as in a run.
    gc.set_threshold(COLLECT_AFTER)


def pytest_unconfigure():
    """What lives to the end is looked through once, and not again in each of the rounds of pytest and Python."""
    gc.collect()
    gc.freeze()


class FilesAndExhibits(LoadScopeScheduling):
    """A file's tests on one worker, and all of `tests/analysis` together: records and exhibits are made once."""

    def _split_scope(self, nodeid):
        file = nodeid.split("::", 1)[0]
        return "tests/analysis" if file.startswith("tests/analysis/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FilesAndExhibits(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def one_process_an_advice():
    """The second core is the other worker's; `tests/advice` holds two processes to the answer of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advise, "usable_cores", lambda: 1)
        patch.setattr(advise_around, "usable_cores", lambda: 1)
        yield


@pytest.fixture
def rpbench(capsys, tmp_path, monkeypatch):
    """Run the command line in an empty folder; returns (status, records on stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = dispatch(arguments)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


@pytest.fixture(scope="module")
def tab():
    """A tab of a browser, for what a reader sees."""
    with browser() as opened:
        yield opened
