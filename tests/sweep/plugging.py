"""Pulling the plug on sweeps in processes of their own: what the tests of kills and of write faults share.

What no fault touches - imports, and Hydra's composition, most of a small sweep's time - is paid once, before the fork.
"""

import io
import json
import os
import pickle
import signal
from functools import partial

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from rpbench.cli import dispatch
from rpbench.commands.recorded.store import export
from rpbench.config import composing
from rpbench.places import CONF
from rpbench.records import record
from rpbench.sweep import lease, worker


def table(results, form="csv"):
    text = io.StringIO()
    export(["--format", form, f"results_dir={results}"], text)
    return text.getvalue()


def remembering(load, known, *arguments, **named):
    """What Hydra composes from the same words; a copy, since a caller may change it."""
    words = repr((arguments, sorted(named.items())))
    if words not in known:
        known[words] = pickle.dumps(load(*arguments, **named))
    return pickle.loads(known[words])


def compose_once(patch):
    """Keep what is composed in this process and in those that it forks, and wait for torn leases half a second.

    Args:
        patch: a `pytest.MonkeyPatch`.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = type(GlobalHydra.instance().config_loader())
    composer, load, known = composing.Composer(), loader._load_configuration_impl, {}
    patch.setattr(worker, "Composer", lambda known: composer)
    patch.setattr(lease, "LAPSE_S", 0.5)
    patch.setattr(
        loader,
        "_load_configuration_impl",
        lambda self, *arguments, **named: remembering(partial(load, self), known, *arguments, **named),
    )


def forked(work):
    """The process of a fork that does the work, says nothing, and ends with the status that it gives."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        status = work()
    finally:
        os._exit(status)


def swept(results, overrides, boundary=None):
    """Sweep in this process, which is a fork; `boundary` is called between the steps of every write."""
    results.mkdir(exist_ok=True)
    os.chdir(results)  # so that every sweep of a test has the same words, and is composed once
    record.boundary = boundary or record.boundary
    return dispatch((*overrides, "results_dir=."))


def warm(results, overrides):
    """Sweep in this process once, so that those forked from it have everything imported and composed."""
    with pytest.MonkeyPatch.context() as within, open(os.devnull, "w") as nowhere:
        within.chdir(results)
        within.setattr("sys.stdout", nowhere)
        within.setattr("sys.stderr", nowhere)
        assert swept(results, overrides) == 0


def in_a_child(results, overrides, fault=None, at=0):
    """Run a sweep in a process of its own, which breaks at a boundary; its status, and the boundaries it has passed."""
    read, write = os.pipe()

    def boundary():
        nonlocal at
        os.write(write, b".")
        at -= 1
        if fault is None or at:
            return
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(lambda: swept(results, overrides, boundary))
    os.close(write)
    with os.fdopen(read, "rb") as passed:
        told = passed.read()
    return os.waitpid(child, 0)[1], len(told)


def tear(results, chance):
    """Cut the end off a journal, as a file system may after a power cut."""
    for path in results.glob("manifests/*/*.jsonl"):
        path.write_bytes(path.read_bytes()[: -chance.randrange(1, 40)])


def rests(results):
    """What a sweep that has ended has no use for: leases, and the temporaries of writes."""
    return [path for path in results.rglob("*") if path.is_file() and path.name.startswith(".")] + [
        path for path in results.glob(".leases/*") if path.is_file()
    ]


def starts(results):
    """How often each run was started, by the name of its folder."""
    told = {path.parent.name: path.read_text().splitlines() for path in results.glob("*/events.jsonl")}
    return {name: sum(json.loads(line)["event"] == "started" for line in lines) for name, lines in told.items()}
