"""Kills at random moments, of a sweep's command, of all its processes, or of one worker alone, under three launchers.

Each folder of results sees a few kills; then the same command ends with the table of a sweep that nothing happened to.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plugging import compose_once, forked, rests, starts, swept, table, warm

ROOT = Path(__file__).parents[2]
MARK = "RPBENCH_TEST_KILLS"  # in the environment of every process of a command, however it was started
SWEEP = (
    "-m",
    "schedule=gpipe,1f1b,dapple,zb_h1",
    "num_microbatches=4,5,6,7,8,9",
    "num_devices=2,3",
    "cost=constant",
)
NUM_CELLS = 400  # of a sweep under a launcher, whose kills are to come while cells are run
LONGER = ("-m", "schedule=gpipe,1f1b,dapple,zb_h1", "num_microbatches=range(1,26)", "num_devices=2,3,4,5")
LAUNCHERS = {
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit_local": ("hydra/launcher=submitit_local",),
}
WHO = ("everybody", "command", "everybody", "command", "worker")  # with a worker gone, the others end the sweep
PATIENCE_S = 600


def command(results, *words):
    environment = os.environ | {MARK: str(results), "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "rpbench", *words, f"results_dir={results}"]
    log = (results.parent / f"{results.name}.log").open("ab")
    with log:
        return subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)


def processes_of(results):
    """The processes of commands over a folder, by what their environment says."""
    wanted, found = f"{MARK}={results}\0".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (place / "environ").read_bytes() and (place / "stat").read_text().rpartition(")")[2][1] != "Z":
                found.append(int(place.name))
        except OSError:
            continue
    return found


def kill(who, started, results, chance):
    """Kill; the numbers of processes that went."""
    others = [pid for pid in processes_of(results) if pid != started.pid]
    chosen = {
        "everybody": [started.pid, *others],
        "command": [started.pid],
        "worker": others and [chance.choice(others)],
    }
    for pid in chosen[who] or [started.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if who == "worker":
        started.wait(PATIENCE_S)  # it goes on with the others, or says that one is gone
    started.wait(PATIENCE_S)


def ended(results, words, log):
    """The status of the same command once more, after which no process of any is left."""
    status = command(results, *words).wait(PATIENCE_S)
    for _ in range(600):
        if not processes_of(results):
            break
        time.sleep(0.1)
    assert not processes_of(results), "workers are left"
    assert status == 0, log.read_text()[-3000:]


def check(results, expected, num_restarts):
    assert table(results) == expected
    assert len(list(results.glob("*/record.json"))) == len(expected.splitlines()) - 1
    assert not rests(results)
    counts = starts(results)
    assert sum(counts.values()) <= len(counts) + num_restarts, "at most the cell a killed worker was at is run again"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The table, and the seconds that a forked sweep takes."""
    with pytest.MonkeyPatch.context() as patch:
        compose_once(patch)
        warm(tmp_path_factory.mktemp("here"), SWEEP)
        results, began = tmp_path_factory.mktemp("undisturbed"), time.monotonic()
        assert os.waitpid(forked(lambda: swept(results, SWEEP)), 0)[1] == 0
        yield table(results), time.monotonic() - began


@pytest.mark.exhaustive
def test_a_hundred_and_forty_kills_of_sweeps_in_one_process(undisturbed, tmp_path):
    """Two sweeps over a folder, one of them killed: a worker alone; or one sweep alone."""
    expected, seconds = undisturbed
    chance, num_kills = random.Random(1), 0
    for folder in range(28):
        results = tmp_path / str(folder)
        results.mkdir()
        for _ in range(5):
            both = [forked(lambda where=results: swept(where, SWEEP)) for _ in range(chance.choice((1, 2)))]
            time.sleep(chance.uniform(0, seconds))
            os.kill(both[0], signal.SIGKILL)
            num_kills += 1
            if chance.random() < 0.5:
                for other in both[1:]:
                    os.kill(other, signal.SIGKILL)
                    num_kills += 1
            for child in both:
                os.waitpid(child, 0)
        assert os.waitpid(forked(lambda where=results: swept(where, SWEEP)), 0)[1] == 0
        check(results, expected, 10)
    print(f"\n{num_kills} kills in {folder + 1} folders; an undisturbed sweep took {seconds:.2f} s")
    assert num_kills >= 140


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fifteen_kills_under_a_launcher(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    whole, words = tmp_path / "whole", (*LONGER, "cost=constant", *LAUNCHERS[launcher])
    whole.mkdir()
    ended(whole, (*LONGER, "cost=constant"), tmp_path / "whole.log")
    expected = table(whole)
    assert len(expected.splitlines()) == NUM_CELLS + 1
    chance, told = random.Random(launcher), []
    for folder in range(3):
        results = tmp_path / str(folder)
        results.mkdir()
        for number, done in enumerate(sorted(chance.sample(range(NUM_CELLS - 50), 5))):
            started = command(results, *words)
            while started.poll() is None and len(list(results.glob("*/record.json"))) < done:
                time.sleep(0.01)
            told.append(len(list(results.glob("*/record.json"))))
            kill(WHO[number], started, results, chance)
        ended(results, words, tmp_path / f"{folder}.log")
        check(results, expected, 2 * 5)
    assert sum(done < NUM_CELLS for done in told) >= 10, "kills that come when all is done show little"
    print(f"\n{launcher}: {len(told)} kills, with so many cells done: {told}")


LONG = ("-m", "schedule=gpipe,1f1b,dapple,zb_h1", "num_microbatches=range(1,101)", "num_devices=2,3,4,5,6")


@pytest.mark.exhaustive
def test_two_thousand_cells_over_two_commands_that_are_killed_five_times(tmp_path):
    whole, results = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    results.mkdir()
    began = time.monotonic()
    ended(whole, (*LONG, "cost=constant"), tmp_path / "whole.log")
    seconds, chance = time.monotonic() - began, random.Random(2000)
    told = []
    for _ in range(5):
        both = [command(results, *LONG, "cost=constant") for _ in range(2)]
        time.sleep(chance.uniform(0.1, 0.3) * seconds)
        for one in both:
            one.kill()
            one.wait(PATIENCE_S)
            time.sleep(chance.uniform(0, 1))
        told.append(len(list(results.glob("*/record.json"))))
    both = [command(results, *LONG, "cost=constant") for _ in range(2)]
    assert [one.wait(3 * PATIENCE_S) for one in both] == [0, 0], (tmp_path / "killed.log").read_text()[-3000:]
    expected = table(whole)
    check(results, expected, 2 * 5)
    again = {name: times for name, times in starts(results).items() if times > 1}
    print(f"\n{len(expected.splitlines()) - 1} records; done at each kill: {told}; started more than once: {again}")
