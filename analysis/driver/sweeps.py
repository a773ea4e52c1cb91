"""The experiments behind the exhibits, run through the command line, two at a time.

A sweep that ended well leaves a note of its runs beside the logs. While their records stand and neither the code nor
the configuration has changed, it need not be asked again: composing configurations takes longer than most runs.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from analysis.claims import Need
from rpbench.harness import record
from rpbench.harness.provenance import code_version
from rpbench.harness.record import write_atomically

ROOT = Path(__file__).parents[2]
LOGS = "logs"  # folder within the results

# A machine with one core gains nothing from two, and the planner's search wants a core of its own.
_AT_ONCE = 2
_POLL_S = 0.1


@dataclass(frozen=True)
class Sweep:
    """An experiment of `conf/experiment/`, whole or narrowed down by overrides.

    Args:
        keeps: which of the experiment's runs the overrides leave, by their choices; see `claims.evidence.Need`.
        alone: nothing runs beside it, because it measures time.
    """

    experiment: str
    overrides: tuple[str, ...] = ()
    keeps: Callable[[tuple[str | int, ...]], bool] = lambda choices: True
    alone: bool = False

    @property
    def stem(self) -> str:
        """Name of its logs."""
        return "-".join((self.experiment, *self.overrides)).replace("=", "_")

    def arguments(self, results: Path) -> list[str]:
        """What follows `python -m rpbench`."""
        return ["-m", f"experiment={self.experiment}", *self.overrides, f"results_dir={results}"]


@dataclass(frozen=True)
class Scope:
    """What is run under a name; the longest sweep stands first, so that it does not run alone at the end."""

    name: str
    sweeps: tuple[Sweep, ...]

    def plans(self, need: Need) -> bool:
        """Whether a run belongs to the scope."""
        return any(sweep.experiment == need.experiment and sweep.keeps(need.choices) for sweep in self.sweeps)


# What measures time needs the machine for itself.
_ALONE = ("cpu_duel", "baselines_cpu")

# What takes longest, first; experiments that are not named here follow.
_LONGEST = (
    "figure10",
    "equivalence",
    "convergence",
    "figure10_options",
    "gains",
    "thousand_devices",
    "partitions",
    "uneven_head",
    "steady_state",
    "steady_causal",
    "recompute_ahead",
    "roofline",
    "figure17",
)


# Only for a machine with a GPU.
_ON_GPUS = ("gpu_single",)


def experiments() -> list[str]:
    """Every experiment of `conf/experiment/` that any machine can run, those that take long first."""
    names = sorted({path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")} - set(_ON_GPUS))
    return sorted(names, key=lambda name: _LONGEST.index(name) if name in _LONGEST else len(_LONGEST))


FULL = Scope("full", tuple(Sweep(experiment, alone=experiment in _ALONE) for experiment in experiments()))

# The published cells, asynchronous steps as the benchmarks take them, the closed forms of one machine, some schedules
# against plain training, and one round of a small duel.
_SMALL_DUEL = (
    "model=mid_gpt",
    "model.seq_len=32",
    "num_steps=2",
    "backend.num_rounds=1",
    "backend.search_budget=100",
    "backend.calibrate=false",
)
# A schedule of every kind: flushed, split backward, stale, sharded, in shares, dealt.
_SOME_SCHEDULES = "schedule=1f1b,zb_h1,dualpipe,pipedream,zero_3,vocab_parallel,megatron_tp,roundpipe"
QUICK = Scope(
    "quick",
    (
        Sweep("steady_state", ("num_microbatches=10",), lambda choices: choices[1] == 10),
        Sweep("figure17"),
        Sweep("roofline", ("cluster=8x_rtx4090",), lambda choices: choices[1] == "8x_rtx4090"),
        Sweep("causal"),
        Sweep("hand_cuts"),
        Sweep("equivalence", ("backend=virtual", _SOME_SCHEDULES)),
        Sweep("cpu_duel", _SMALL_DUEL, alone=True),
    ),
)


@dataclass
class _Running:
    sweep: Sweep
    process: "subprocess.Popen[bytes]"
    rows: Path  # its stdout: a record a line
    log: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def num_done(self) -> int:
        """Runs that have ended."""
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
    known = [sweep for sweep in sweeps if _is_noted(sweep, results)]
    for sweep in known:
        say(f"{sweep.experiment}: all runs are there")
    waiting = sorted((sweep for sweep in sweeps if sweep not in known), key=lambda sweep: sweep.alone)
    running: list[_Running] = []
    ended: list[_Running] = []
    total = len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < (1 if waiting[0].alone else _AT_ONCE):
                running.append(_start(waiting.pop(0), results))
            time.sleep(_POLL_S)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                ended.append(job)
                _note(job, results)
                say(f"[{len(ended)}/{total}] {job}")
            num_runs = sum(job.num_done for job in (*ended, *running))
            tick(f"[{len(ended)}/{total}] {', '.join(map(str, running))}; {num_runs} runs in all")
    finally:
        _stop(running)
    return [_failure(job) for job in ended if job.process.returncode]


def _start(sweep: Sweep, results: Path) -> _Running:
    rows, log = (results / LOGS / f"{sweep.stem}.{ending}" for ending in ("jsonl", "log"))
    command = [sys.executable, "-m", "rpbench", *sweep.arguments(results)]
    with rows.open("wb") as out, log.open("wb") as err:
        return _Running(sweep, _open(command, out, err), rows, log)


def _open(command: list[str], out: IO[bytes], err: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _failure(job: _Running) -> Failure:
    lines = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Failure(job.sweep, job.process.returncode, " ".join(lines[-2:]) or "it said nothing", job.log)


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


# --- notes of what has ended well ----------------------------------------------------------------------------


def _note(job: _Running, results: Path) -> None:
    if job.process.returncode:
        return
    names = [json.loads(line)["run_id"] for line in job.rows.read_text(encoding="utf-8").splitlines()]
    files = {name: sorted(path.name for path in (results / name).iterdir()) for name in names}
    write_atomically(_note_of(job.sweep, results), json.dumps({"asked": _asked(job.sweep), "files": files}))


def _is_noted(sweep: Sweep, results: Path) -> bool:
    """Whether this very sweep has ended well and all it left behind still stands."""
    try:
        note = json.loads(_note_of(sweep, results).read_text(encoding="utf-8"))
        files = dict(note["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return note.get("asked") == _asked(sweep) and all(
        record.read(results / name) is not None and all((results / name / file).exists() for file in kept)
        for name, kept in files.items()
    )


def _note_of(sweep: Sweep, results: Path) -> Path:
    return results / LOGS / f"{sweep.stem}.ended"


def _asked(sweep: Sweep) -> str:
    """Hash of what decides a sweep's runs: its arguments, the configuration files, the code."""
    digest = hashlib.sha256("\0".join((sweep.experiment, *sweep.overrides, code_version())).encode())
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
