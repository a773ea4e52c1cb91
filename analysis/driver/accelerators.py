"""Half an hour on a machine with accelerators: gradients, memory, throughput, a duel with other systems, rates.

The parts are commands that run one after the other. Finished parts are kept if a later one fails, the time is over or
the driver is killed; the same command continues. A dry run on made-up accelerators with tiny sizes runs on any machine;
its records are marked, and no figure uses them.
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
    """The time limit of all parts is over."""


PARTS = {  # experiment -> what makes it small in a dry run, besides the model and the number of accelerators
    "gpu_gradients": ("num_steps=1", "num_microbatches=2", "dtype=float32"),
    "gpu_single": ("num_steps=1", "num_microbatches=2", "chunks_per_device=2", "seed=0"),
    "gpu_duel": ("num_microbatches=2", "chunks_per_device=2", "dtype=float32", "mode.num_starts=1"),
}


def has_accelerators() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def run_on_accelerators(results: Path, out: Path, dry: int | None, say: Callable[[str], None]) -> list[str]:
    """Run every part that has no records yet and write `gpu.html` into `out`; returns a line for each problem.

    `dry` is the number of made-up accelerators, None for the real ones.
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
    """Calibrate the first accelerator with its links, layers and collectives, unless that is done."""
    import torch

    folder, logs, num = results / "cluster", results / LOGS, dry or torch.accelerator.device_count()
    path = results / ANSWER
    said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if said and ("evidence" in said) == (dry is not None):  # a dry run names its evidence
        return []
    command = [sys.executable, "-m", "rpbench", "calibrate", "device=accelerator", "name=this_gpu", f"out={folder}"]
    command += [f"dry={dry}"] if dry else []
    say("calibrate: rates of the first accelerator, its links and its layers")
    tries = {logs / "calibrate.log": [*command, f"ranks={num}"] if num > 1 else command}
    if num > 1:  # if the collectives fail, calibrate one accelerator alone
        tries[logs / "calibrate_alone.log"] = command
    end, problems = time.monotonic() + limit_s, list[str]()
    for log, words in tries.items():
        found = _ended(words, log, max(0.0, end - time.monotonic()))
        problems += found
        if not found:
            write_atomically(path, log.read_text(encoding="utf-8").splitlines()[-1])
            break
    return problems


def _ended(command: Sequence[str], log: Path, limit_s: float) -> list[str]:
    with log.open("wb") as words:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=words, stderr=words, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return [f"calibrate did not end in time (log: {log})"]
    return [f"calibrate ended with status {done.returncode} (log: {log})"] if done.returncode else []
