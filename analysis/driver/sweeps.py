"""The sweeps behind the exhibits, run through the command line, two at a time; two processes share the last long one.

A sweep whose records are complete and of this code and configuration is not run again: composing configurations takes
longer than most runs. Commands run in forks, because starting Python with Hydra takes a second; where forking is not
possible, and for timed sweeps, they start a new Python.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any

from analysis.claims import Need
from analysis.records.experiments import Experiments, Sweep, is_complete
from rpbench.cli import COLLECT_AFTER, dispatch
from rpbench.records import record
from rpbench.run.allocator import measures
from rpbench.side_processes import end_with
from rpbench.yaml_file import read_keys


class Forked(ForkProcess):
    """A command in a fork of this process that ends with it, with the interface of `subprocess.Popen`."""

    def __init__(self, *command: Any) -> None:
        super().__init__()
        self._command, self._driver = command, os.getpid()

    def run(self) -> None:
        end_with(self._driver)
        sys.exit(_run(*self._command))

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("rpbench", timeout or 0.0)
        return self.exitcode


def can_fork() -> bool:
    return sys.platform == "linux"  # elsewhere forking is not safe


def fork_command(arguments: Sequence[str], folder: Path, out: IO[bytes], err: IO[bytes]) -> Forked:
    """Run `python -m rpbench` in a folder, in a fork that ends with this process, even if this is killed."""
    import rpbench.sweep.multirun  # noqa: F401  # before the fork, so that no fork has to

    copy = Forked(arguments, folder, out, err)
    copy.start()
    return copy


def _run(arguments: Sequence[str], folder: Path, out: IO[bytes], err: IO[bytes]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    with open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, out, err)):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, "utf-8", closefd=False) for number in (1, 2))
    sys.argv = ["rpbench", *arguments]
    gc.set_threshold(COLLECT_AFTER)
    try:
        return dispatch(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


ROOT = Path(__file__).parents[2]
LOGS = "logs"  # folder within the results

_AT_ONCE = 2
_POLL_S = 0.1
_LONG_S = 30.0  # a sweep that has run so long when nothing else waits gets a second process


@dataclass(frozen=True)
class Scope:
    """A named list of sweeps; the longest is first, so that it does not run alone at the end."""

    name: str
    sweeps: tuple[Sweep, ...]

    def experiments(self, results: Path) -> Experiments:
        return Experiments(results, tuple(sweep for sweep in self.sweeps if sweep.overrides))

    def plans(self, need: Need, experiments: Experiments) -> bool:
        known = any(sweep.experiment == need.experiment for sweep in self.sweeps)
        return known and experiments.plans(need.experiment, need.choices)


# Lists of experiments; `sweeps.yaml` says what each is for.
_LISTS: dict[str, Any] = read_keys(Path(__file__).with_suffix(".yaml"))
ON_REQUEST = tuple(_LISTS["on_request"])


def experiments() -> list[str]:
    """The experiments of `conf/experiment/` for any machine, without those on request; long ones first."""
    longest, others = _LISTS["longest"], {*_LISTS["on_gpus"], *ON_REQUEST}
    names = sorted({path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")} - others)
    return sorted(names, key=lambda name: longest.index(name) if name in longest else len(longest))


DUELS = Scope("duels", tuple(map(Sweep, _LISTS["duels"])))
ALL = Scope("all", tuple(Sweep(experiment) for experiment in experiments() if experiment not in _LISTS["duels"]))
PAPER = Scope("paper", tuple(map(Sweep, _LISTS["paper"])))
QUICK = Scope("quick", tuple(Sweep(name, tuple(overrides)) for name, overrides in _LISTS["quick"].items()))


@dataclass
class _Running:
    sweep: Sweep
    process: "subprocess.Popen[bytes] | Forked"
    rows: Path  # its stdout: a record a line
    log: Path
    began: float = field(default_factory=time.monotonic)
    helps: bool = False

    @property
    def num_done(self) -> int:
        return self.rows.read_bytes().count(b"\n")

    def __str__(self) -> str:
        outcome = {None: "", 0: " done"}.get(self.process.returncode, " FAILED")
        return f"{self.sweep.experiment}: {self.num_done} runs{outcome}, {time.monotonic() - self.began:.1f} s"


@dataclass(frozen=True)
class Failure:
    """A failed sweep and the last words of its log."""

    sweep: Sweep
    status: int
    words: str
    log: Path


def run_sweeps(
    sweeps: Sequence[Sweep], results: Path, say: Callable[[str], None], tick: Callable[[str], None]
) -> list[Failure]:
    """Run the incomplete sweeps, those that measure time one by one at the end; returns the failed ones.

    `say` is called with a line for people whenever a sweep ends, `tick` with the progress several times a second.
    """
    (results / LOGS).mkdir(parents=True, exist_ok=True)
    known = [sweep for sweep in sweeps if is_complete(results, sweep, lambda run_id: _stands(results / run_id))]
    for sweep in known:
        say(f"{sweep.experiment}: all runs are there")
    waiting = sorted((sweep for sweep in sweeps if sweep not in known), key=_is_alone)
    running: list[_Running] = []
    ended: list[_Running] = []
    helped: set[Sweep] = set()
    total = len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < (1 if _is_alone(waiting[0]) else _AT_ONCE):
                running.append(_start(waiting.pop(0), results))
            time.sleep(_POLL_S)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                if not job.helps:
                    ended.append(job)
                    say(f"[{len(ended)}/{total}] {job}")
            if all(map(_is_alone, waiting)) and len(running) == 1 and _wants_help(running[0], helped):
                helped.add(running[0].sweep)
                running.append(_start(running[0].sweep, results, helps=True))
            main = [job for job in running if not job.helps]
            num_runs = sum(job.num_done for job in (*ended, *main))
            tick(f"[{len(ended)}/{total}] {', '.join(map(str, main))}; {num_runs} runs in all")
    finally:
        _stop(running)
    return [_failure(job) for job in ended if job.process.returncode]


def _is_alone(sweep: Sweep) -> bool:
    """True if a sweep has to run alone because it measures time; the times of the quick duel are not used."""
    return sweep.experiment in _LISTS["alone"] and sweep not in QUICK.sweeps


def _stands(folder: Path) -> bool:
    """True if a record exists with every file that it names."""
    row = record.read(folder)
    return row is not None and all(record.kept_file(folder, row, name) is not None for name in row.get("files") or ())


def _wants_help(job: _Running, helped: set[Sweep]) -> bool:
    """True if a sweep runs long enough for a second process, which would disturb a timed one."""
    long = time.monotonic() - job.began > _LONG_S
    return long and not job.helps and job.sweep not in helped and not measures(job.sweep.arguments(Path()))


def _start(sweep: Sweep, results: Path, *, helps: bool = False) -> _Running:
    stem = sweep.manifest + (".second" if helps else "")
    rows, log = (results / LOGS / f"{stem}.{ending}" for ending in ("jsonl", "log"))
    with rows.open("wb") as out, log.open("wb") as err:
        return _Running(sweep, _open(sweep.arguments(results), out, err), rows, log, helps=helps)


def _open(arguments: list[str], out: IO[bytes], err: IO[bytes]) -> "subprocess.Popen[bytes] | Forked":
    if can_fork() and not measures(arguments):
        return fork_command(arguments, ROOT, out, err)
    command = [sys.executable, "-m", "rpbench", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _failure(job: _Running) -> Failure:
    lines = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Failure(job.sweep, job.process.returncode or 0, " ".join(lines[-2:]) or "it said nothing", job.log)


def _stop(running: Sequence[_Running]) -> None:
    """End the running sweeps; finished runs keep their records."""
    for job in running:
        job.process.terminate()
    for job in running:
        try:
            job.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
