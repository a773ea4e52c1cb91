"""The experiments behind the exhibits, run through the command line, two at a time; the last long one by two processes.

While the records that a manifest names stand and neither the code nor the configuration has changed, its sweep need
not be asked again: composing configurations takes longer than most runs.

A start of Python with Hydra takes a second of a core, and a reproduction makes a dozen. Where a process cannot fork,
and for what is timed, the command starts afresh.
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
    """A command in a copy of this process that ends with it; a sweep asks what it would of `subprocess.Popen`."""

    def __init__(self, *command: Any) -> None:
        super().__init__()
        self._command, self._driver = command, os.getpid()

    def run(self) -> None:
        end_with(self._driver)
        sys.exit(_run(*self._command))

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; TimeoutExpired if it takes longer."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("rpbench", timeout or 0.0)
        return self.exitcode


def can_fork() -> bool:
    """True if this system copies processes safely."""
    return sys.platform == "linux"


def fork_command(arguments: Sequence[str], folder: Path, out: IO[bytes], err: IO[bytes]) -> Forked:
    """Run `python -m rpbench` with some arguments in a copy of this process, which ends with it, even if it is killed.

    Args:
        folder: the working directory.
        out, err: files that take its output.
    """
    import rpbench.sweep.multirun  # noqa: F401  # here, so that no copy has to

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

# A machine with one core gains nothing from two, and the planner's search wants a core of its own.
_AT_ONCE = 2
_POLL_S = 0.1
_LONG_S = 30.0  # a sweep that has taken so long when nothing else waits gets a second process; they share its cells


@dataclass(frozen=True)
class Scope:
    """The sweeps of a name; the longest stands first, so that it does not run alone at the end."""

    name: str
    sweeps: tuple[Sweep, ...]

    def experiments(self, results: Path) -> Experiments:
        """Its experiments, as far as they have been run into a folder."""
        return Experiments(results, tuple(sweep for sweep in self.sweeps if sweep.overrides))

    def plans(self, need: Need, experiments: Experiments) -> bool:
        """True if a run belongs to the scope."""
        known = any(sweep.experiment == need.experiment for sweep in self.sweeps)
        return known and experiments.plans(need.experiment, need.choices)


# Experiments by what is known of them; `sweeps.yaml` says what each list is for.
_LISTS: dict[str, Any] = read_keys(Path(__file__).with_suffix(".yaml"))
ON_REQUEST = tuple(_LISTS["on_request"])


def experiments() -> list[str]:
    """The experiments of `conf/experiment/` that any machine can run and everybody waits for; long ones first."""
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
    """A sweep that did not end well, and the last words of its log."""

    sweep: Sweep
    status: int
    words: str
    log: Path


def run_sweeps(
    sweeps: Sequence[Sweep], results: Path, say: Callable[[str], None], tick: Callable[[str], None]
) -> list[Failure]:
    """Run every sweep and return those that failed; what has a record is not run again.

    Sweeps that want to be alone run after the others, one by one.

    Args:
        say: told a line for people whenever a sweep ends.
        tick: told how far it is, several times a second.
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
    """True if nothing may run beside a sweep because it measures time; the times of the quick duel are not used."""
    return sweep.experiment in _LISTS["alone"] and sweep not in QUICK.sweeps


def _stands(folder: Path) -> bool:
    """True if a record is there, with every file that it names."""
    row = record.read(folder)
    return row is not None and all(record.kept_file(folder, row, name) is not None for name in row.get("files") or ())


def _wants_help(job: _Running, helped: set[Sweep]) -> bool:
    """True if a second process shortens a sweep; it would disturb a sweep that is timed."""
    long = time.monotonic() - job.began > _LONG_S
    return long and not job.helps and job.sweep not in helped and not measures(job.sweep.arguments(Path()))


def _start(sweep: Sweep, results: Path, *, helps: bool = False) -> _Running:
    stem = sweep.manifest + (".second" if helps else "")
    rows, log = (results / LOGS / f"{stem}.{ending}" for ending in ("jsonl", "log"))
    command = [sys.executable, "-m", "rpbench", *sweep.arguments(results)]
    with rows.open("wb") as out, log.open("wb") as err:
        return _Running(sweep, _open(command, out, err), rows, log, helps=helps)


def _open(command: list[str], out: IO[bytes], err: IO[bytes]) -> "subprocess.Popen[bytes] | Forked":
    arguments = command[3:]  # behind python -m rpbench
    if can_fork() and not measures(arguments):
        return fork_command(arguments, ROOT, out, err)
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _failure(job: _Running) -> Failure:
    lines = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Failure(job.sweep, job.process.returncode or 0, " ".join(lines[-2:]) or "it said nothing", job.log)


def _stop(running: Sequence[_Running]) -> None:
    """End what still runs; finished runs have their records, an unfinished one is made anew."""
    for job in running:
        job.process.terminate()
    for job in running:
        try:
            job.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
