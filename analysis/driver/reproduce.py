"""Reproduce everything that this machine can: runs, figures, tables, notebooks, verdicts on the claims, the report.

    python -m analysis.driver.reproduce [paper | all | quick | duels | gpu] [--results DIR] [--out DIR] [--dry N]

`duels` are races in real time; `gpu` needs accelerators, or --dry (`analysis.driver.accelerators`).

Progress goes to stderr, the table of claims and the path of the report to stdout. Exit status 1 if a claim's run is
missing, a verdict is not the declared one, or something could not be made; 130 after an interruption.
"""

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from analysis.claims.catalogue import all_claims, red_text, summary_text
from analysis.claims.expected import held_experiments
from analysis.driver.accelerators import NONE_HERE, has_accelerators, run_on_accelerators
from analysis.driver.notebooks import Kernel, execute, notebooks
from analysis.driver.sweeps import ALL, DUELS, PAPER, QUICK, ROOT, Scope, can_fork, run_sweeps
from analysis.exhibits.exhibit import DECLARED
from analysis.exhibits.figures.files import OUT
from analysis.mutate.check import check, mutants, of_statements, sampled
from analysis.records.experiments import Experiments, MissingRuns, open_cells
from analysis.report.content import Content
from analysis.report.images import Image, draw_all, drawings_of
from analysis.report.page import gather, save_tables, write
from rpbench.cli import COLLECT_AFTER
from rpbench.side_processes import in_fork

MUTANTS = 200  # falsified values of each kind that a reproduction checks

_SCOPES = {scope.name: scope for scope in (PAPER, ALL, QUICK, DUELS)}
GPU = "gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.driver.reproduce", description="Make every figure, table and verdict."
    )
    parser.add_argument(
        "scope", nargs="?", choices=[*_SCOPES, GPU], default=PAPER.name, help="what to run (default: paper)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="folder of the records")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for report.html and figures/ (default: the project's root and analysis/figures)",
    )
    parser.add_argument(
        "--dry", type=_number, metavar="N", help="of gpu: on N made-up accelerators, to check the order"
    )
    options = parser.parse_args(arguments)
    try:
        if options.scope == GPU:
            return _on_accelerators(options.results.resolve(), options.out, options.dry)
        return reproduce(_SCOPES[options.scope], options.results.resolve(), options.out)
    except KeyboardInterrupt:
        print("\ninterrupted; finished runs are kept, the same command goes on from here", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{error.strerror or error}: {error.filename or ''}; nothing more was written", file=sys.stderr)
        return 1


def _number(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: how many accelerators to make up, 1 or more")
    return int(text)


def _on_accelerators(results: Path, out: Path | None, dry: int | None) -> int:
    if dry is None and not has_accelerators():
        print(NONE_HERE, file=sys.stderr)
        return 2
    folder, progress = out or ROOT, _Progress()
    folder.mkdir(parents=True, exist_ok=True)
    return _say_what_is_red(run_on_accelerators(results, folder, dry, progress.say), "")


def reproduce(scope: Scope, results: Path, out: Path | None = None) -> int:
    """Run a scope's experiments, make what their records allow, judge the claims, write the report.

    Existing records are not made again; `out` is for the report and `figures/`, None for the project's own places.
    """
    folder = OUT if out is None else out / "figures"
    progress = _Progress()
    progress.say(f"{scope.name}: {len(scope.sweeps)} experiments, records in {results}")
    failures = run_sweeps(scope.sweeps, results, progress.say, progress.tick)
    problems = [
        f"experiment={each.sweep.experiment} ended with status {each.status}: {each.words} (log: {each.log})"
        for each in failures
    ]
    problems += [line for sweep in scope.sweeps for line in open_cells(results, sweep)]
    try:
        experiments = scope.experiments(results)
        problems += experiments.refusals()
        content = gather(experiments, partial(scope.plans, experiments=experiments), scope.name)
    except ValueError as error:  # no record at all
        problems.append(str(error))
        return _say_what_is_red(problems, "")
    if scope is ALL:
        asked = {sweep.experiment for sweep in scope.sweeps}  # which leaves out duels
        problems += [
            f"exhibit {name} was not made: {why}"
            for name, why in content.missing
            if asked.issuperset(DECLARED[name].get("experiments", ()))
        ]
    progress.tick("notebooks")
    with in_fork(partial(_run_notebooks, scope, results, folder / "notebooks"), apart=can_fork()) as ran:
        content.figures = folder
        content.images = _draw(scope, content, folder, progress)
        num_executed, broken = ran()
    progress.say(f"notebooks: {num_executed} of {len(notebooks())} executed")
    problems += broken
    save_tables(content)
    falsified, survivors = _mutation_sample(experiments, progress)
    problems += survivors
    report = write(content, (out or ROOT) / "report.html")
    progress.say(f"figures and tables in {folder}")
    print(summary_text(content.verdicts))
    print(f"\n{falsified}\n\nreport: {report}")
    return _say_what_is_red(problems, red_text(content.verdicts))


def _mutation_sample(experiments: Experiments, progress: "_Progress") -> tuple[str, list[str]]:
    """Falsify some records, manifests and tables: a sentence with the fractions noticed, and problems."""
    names = experiments.names()
    try:
        drawn = [*chain.from_iterable(mutants(experiments, name) for name in names), *of_statements()]
    except MissingRuns as error:
        return "", [f"falsified evidence: {error}"]
    outcome = check(experiments, all_claims(), sampled(drawn, MUTANTS, seed=0))
    free = ", ".join(sorted({*names} - {*held_experiments()}))
    said = f"Falsified and noticed: {outcome}" + (f"; nothing was accepted of {free}" if free else "")
    progress.say(said)
    lost = outcome.survivors
    return said, [] if outcome.is_enough else [f"falsified evidence: {len(lost)} survive, such as {lost[0]}"]


def _say_what_is_red(problems: Sequence[str], verdicts: str) -> int:
    """Print everything that is red to stdout; returns the exit status."""
    red = [*(f"  {problem}" for problem in problems), *filter(None, [verdicts])]
    if red:
        print("\nRED, not as planned:", *red, sep="\n")
    return 1 if red else 0


def _draw(scope: Scope, content: Content, folder: Path, progress: "_Progress") -> dict[str, Image]:
    """Draw the figures of all exhibits; the quick scope leaves out further drawings, such as single timelines."""
    shown = [replace(exhibit, drawings={}) for exhibit in content.shown] if scope is QUICK else content.shown
    total = sum(len(drawings_of(exhibit)) for exhibit in shown)
    drawn: list[str] = []

    def count(stem: str) -> None:
        drawn.append(stem)
        progress.tick(f"figures: {len(drawn)} of {total}")

    images = draw_all(shown, folder, count)
    progress.say(f"figures: {total} drawn")
    return images


def _run_notebooks(scope: Scope, results: Path, folder: Path) -> tuple[int, list[str]]:
    """The number of executed notebooks, and problems; the quick scope runs the first that has its records."""
    executed, problems = 0, []
    with Kernel(results) as kernel:
        for notebook in notebooks():
            try:
                execute(notebook, results, folder, kernel)
            except MissingRuns as lack:
                problems += [f"notebook {notebook.stem}: {lack}"] if scope is ALL else []
                continue
            except Exception as error:  # the report is written whatever a cell raises
                words = str(error).strip().splitlines()[-1]
                problems.append(f"notebook {notebook.stem}: {type(error).__name__}: {words}")
            else:
                executed += 1
            if scope is QUICK:
                break
    return executed, problems


class _Progress:
    """Lines for people on stderr; `tick` shows passing lines on a terminal only."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._width = 0
        self._is_terminal = sys.stderr.isatty()

    def say(self, line: str) -> None:
        self._clear()
        print(f"{self._elapsed()} {line}", file=sys.stderr, flush=True)

    def tick(self, line: str) -> None:
        """Show a line that the next one replaces."""
        if self._is_terminal:
            self._clear()
            text = f"{self._elapsed()} {line}"[: _terminal_width() - 1]
            self._width = len(text)
            print(text, end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr)
            self._width = 0

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s"


def _terminal_width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 80


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its runs as well
    gc.set_threshold(COLLECT_AFTER)  # forks inherit it
    sys.exit(main())
