"""Half an hour on a machine with accelerators: gradients, memory, pace, a duel with other systems, rates.

Each part is a command of its own, run one after the other; what has ended is kept when a later one fails, when the time
is over, or when the driver is killed, and the same command goes on from there. Dry, on made-up accelerators and at
tiny sizes, every part runs on any machine: its records say so, and no figure takes them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.driver.sweeps import LOGS, ROOT, run_sweeps
from analysis.exhibits.figures.calibrated import ANSWER
from analysis.records.experiments import Sweep, open_cells
from analysis.report import build
from rpbench.records.record import write_atomically

LIMIT_S = 30 * 60.0
NONE_HERE = (
    "gpu: torch finds no accelerator on this machine; --dry N runs every part on N made-up ones, to check the order of "
    "their streams"
)
_TINY = ("model=tiny_gpt", "model.num_layers=2", "model.hidden=16", "model.vocab=32", "model.seq_len=8")


class TimeIsUp(Exception):
    """The whole has taken as long as it may."""


# The experiments, and what makes each small where accelerators are made up, beside the model and their number.
PARTS = {
    "gpu_gradients": ("num_steps=1", "num_microbatches=2", "dtype=float32"),
    "gpu_single": ("num_steps=1", "num_microbatches=2", "chunks_per_device=2", "seed=0"),
    "gpu_duel": ("num_microbatches=2", "chunks_per_device=2", "dtype=float32", "mode.num_starts=1"),
}


def has_accelerators() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def run_on_accelerators(results: Path, out: Path, dry: int | None, say: Callable[[str], None]) -> list[str]:
    """Run every part and write the page.

    Args:
        results: folder of the records; what is in it already is not run again.
        out: folder for `gpu.html`.
        dry: how many accelerators are made up; None: the real ones.

    Returns:
        What went wrong, a line each.
    """
    end, problems = time.monotonic() + LIMIT_S, list[str]()

    def tick(_: str) -> None:
        if time.monotonic() > end:
            raise TimeIsUp

    made_up = () if dry is None else (f"backend.dry_accelerators={dry}", *_TINY)
    for number, (experiment, small) in enumerate(PARTS.items()):
        sweep = Sweep(experiment, (*made_up, *small) if made_up else ())
        try:
            failures = run_sweeps([sweep], results, say, tick)
        except TimeIsUp:
            left = ", ".join([*PARTS][number:])
            problems.append(f"{LIMIT_S / 60:.0f} minutes are over: {left} did not end; the same command goes on there")
            break
        problems += [f"experiment={each.sweep.experiment}: {each.words} (log: {each.log})" for each in failures]
        problems += open_cells(results, sweep)
    problems += _calibrated(results, dry, max(0.0, end - time.monotonic()), say)
    try:
        say(f"page: {build(results, out / 'gpu.html')}")
    except ValueError as error:  # no record at all
        problems.append(str(error))
    return problems


def _calibrated(results: Path, dry: int | None, limit_s: float, say: Callable[[str], None]) -> list[str]:
    """Rates of the first accelerator, its links, its layers and collectives, as a cluster, unless they are there."""
    import torch

    folder, logs, num = results / "cluster", results / LOGS, dry or torch.accelerator.device_count()
    if _is_answered(results, dry):
        return []
    command = [sys.executable, "-m", "rpbench", "calibrate", "device=accelerator", "name=this_gpu", f"out={folder}"]
    command += [f"dry={dry}"] if dry else []
    say("calibrate: rates of the first accelerator, its links and its layers")
    tries = {logs / "calibrate.log": [*command, f"ranks={num}"] if num > 1 else command}
    if num > 1:  # the rates of one are kept where its collectives fail
        tries[logs / "calibrate_alone.log"] = command
    end, problems = time.monotonic() + limit_s, list[str]()
    for log, words in tries.items():
        found = _ended(words, log, max(0.0, end - time.monotonic()))
        problems += found
        if not found:
            write_atomically(results / ANSWER, log.read_text(encoding="utf-8").splitlines()[-1])
            break
    return problems


def _is_answered(results: Path, dry: int | None) -> bool:
    """True if the accelerators that are asked for, real or made up, have been calibrated."""
    path = results / ANSWER
    said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return bool(said) and ("evidence" in said) == (dry is not None)


def _ended(command: Sequence[str], log: Path, limit_s: float) -> list[str]:
    with log.open("wb") as words:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=words, stderr=words, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return [f"calibrate did not end in time (log: {log})"]
    return [f"calibrate ended with status {done.returncode} (log: {log})"] if done.returncode else []
