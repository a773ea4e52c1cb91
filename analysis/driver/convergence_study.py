"""The convergence study: every method at its best settings; no run reads a part of the text twice.

    python -m analysis.driver.convergence_study [--budget 12] [--seeds 5] [--num-steps 600] [--results DIR] [--out CSV]

The same number of settings is drawn for every method from the same ranges: learning rate, warm-up, and the method's own
constants. The settings with the least final loss on unseen text are run with every seed. Methods that never use late
weights do the same arithmetic: they are searched once, and their curves must agree. The runs are ordinary runs of
`experiment=convergence_study`; the same command continues after a kill.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import pandas as pd

from analysis.predictions import tables
from rpbench.run.modes.duel.verdict import student_quantile
from rpbench.yaml_file import read_keys

ROOT = Path(__file__).parents[2]
OUT = ROOT / "analysis" / "kept" / "convergence_study.csv"

_METHODS = read_keys(Path(__file__).with_suffix(".yaml"))
SYNCHRONOUS, LATE = (tuple(_METHODS[kind]) for kind in ("synchronous", "late"))
LEARNING_RATES = (5e-4, 3e-2)  # drawn uniformly in the logarithm
WARM_UPS = (0.0, 0.25)  # fraction of a method's updates
OWN: Mapping[str, Mapping[str, tuple[float, float, bool]]] = _METHODS["own"]
SAME = 1e-3  # nats by which synchronous methods may differ: they add up gradients in another order
SHARE = 0.75  # the goal of all methods is the synchronous methods' loss after this fraction of the tokens

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The size of a study; the defaults are those of the kept one."""

    budget: int = 12
    num_seeds: int = 5
    num_steps: int = 600
    results: Path = ROOT / "results"

    def settings(self, method: str) -> Iterator[tuple[str, ...]]:
        """Overrides of the search's runs: draws common to all methods, then those for the method's own constants.

        A Latin hypercube: each range is cut into as many parts as there are runs, and each part is drawn from once.
        """
        columns = {}
        for name in ("learning_rate", "warm_up", *OWN.get(method, {})):
            draw = Random(f"convergence {name}")
            places = draw.sample(range(self.budget), self.budget)
            columns[name] = [(place + draw.random()) / self.budget for place in places]
        for run in range(self.budget):
            yield tuple(self._overrides(method, {name: column[run] for name, column in columns.items()}))

    def _overrides(self, method: str, places: Mapping[str, float]) -> Iterator[str]:
        updates = self.num_steps * _METHODS["updates_per_batch"].get(method, 1)
        low, high = LEARNING_RATES
        yield f"optimizer.learning_rate={low * (high / low) ** places['learning_rate']:.4g}"
        yield f"optimizer.num_warmup_steps={round(updates * _between(WARM_UPS, places['warm_up']))}"
        for name, (start, end, counts) in OWN.get(method, {}).items():
            value = _between((start, end), places[name])
            yield f"schedule.{name}={round(updates * value) if counts else f'{value:.3g}'}"

    def run(self, method: str, overrides: Sequence[str], seed: int) -> Row:
        """A run's record, made or found; RuntimeError if the run failed."""
        command = [
            *(sys.executable, "-m", "rpbench", "experiment=convergence_study", f"schedule={method}"),
            *overrides,
            *(f"num_steps={self.num_steps}", f"seed={seed}", f"results_dir={self.results}"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        if len(rows) != 1:
            raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip().splitlines()[-1:]}")
        return dict(rows[0])

    def search(self, method: str) -> tuple[str, ...]:
        """The settings with the least final loss on unseen text."""
        found: list[tuple[float, tuple[str, ...]]] = []
        for number, overrides in enumerate(self.settings(method)):
            loss = last_loss(self.run(method, overrides, seed=0))
            _tell(f"{method} {number + 1} of {self.budget}: {' '.join(overrides)}: {loss:.4f}")
            found.append((loss, overrides))
        return min(found)[1]


def _between(ends: tuple[float, float], place: float) -> float:
    return ends[0] + place * (ends[1] - ends[0])


def last_loss(row: Row) -> float:
    """The final loss on unseen text; infinite for a run that broke or diverged."""
    return float(row["validation_curve"][-1]) if row["status"] == "ok" else float("inf")


def tokens_to(row: Row, goal: float) -> float | None:
    """Tokens until a run's loss reaches a goal, by linear interpolation; None if it never does."""
    if row["status"] != "ok":
        return None
    losses, tokens = row["validation_curve"], [row["tokens_per_step"] * each for each in row["validation_updates"]]
    for place, loss in enumerate(losses):
        if loss <= goal:
            if place == 0:
                return tokens[0]
            share = (losses[place - 1] - goal) / (losses[place - 1] - loss)
            return tokens[place - 1] + share * (tokens[place] - tokens[place - 1])
    return None


def goal_of(rows: Sequence[Row]) -> float:
    """The mean loss of the synchronous runs after `SHARE` of the tokens, which depends on no late method."""
    curves = [row["validation_curve"] for row in rows]
    return mean(curve[max(0, round(SHARE * len(curve)) - 1)] for curve in curves)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean over seeds, and Student's 95 % interval."""
    centre = mean(values)
    if len(values) < 2:
        return centre, float("-inf"), float("inf")
    half = student_quantile(0.95, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return centre, centre - half, centre + half


def check_same(runs: Mapping[str, Sequence[Row]]) -> float:
    """The largest difference of the synchronous methods' losses, seed by seed; RuntimeError if it exceeds `SAME`."""
    curves = [[row["validation_curve"] for row in runs[method]] for method in SYNCHRONOUS if method in runs]
    far = max(
        abs(a - b) for one in curves for pair in zip(one, curves[0], strict=True) for a, b in zip(*pair, strict=True)
    )
    if far > SAME:
        raise RuntimeError(f"synchronous methods differ by {far:g} nats, more than {SAME:g}: one of them is not")
    return far


def tabulate(runs: Mapping[str, Sequence[Row]], settings: Mapping[str, Sequence[str]], command: str) -> list[Row]:
    """One row for each method: lag, settings, final loss and tokens to the goal with their intervals."""
    goal = goal_of([row for method in SYNCHRONOUS for row in runs.get(method, ())])
    rows = []
    for method, found in runs.items():
        ok = [row for row in found if row["status"] == "ok"]
        needed = [tokens for row in ok if (tokens := tokens_to(row, goal)) is not None]
        rows.append(
            {
                "method": method,
                "lag_updates": max((row["staleness_steps"] for row in ok), default=""),
                "updates": max((row["num_updates"] for row in ok), default=""),
                "settings": " ".join(settings[method]),
                "seeds": len(found),
                "broken": len(found) - len(ok),
                **_columns("final_loss", [last_loss(row) for row in ok]),
                "goal_loss": f"{goal:.4f}",
                "seeds_at_goal": len(needed),
                **_columns("tokens_to_goal", needed if len(needed) == len(found) else []),
                "command": command,
            }
        )
    return rows


def _columns(name: str, values: Sequence[float]) -> Row:
    """The columns of a mean and its interval; empty without values."""
    ends = [f"{value:.5g}" for value in interval(values)] if values else [""] * 3
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def study(asked: Study, out: Path, methods: Sequence[str] = (*SYNCHRONOUS, *LATE), command: str = "") -> list[Row]:
    settings: dict[str, tuple[str, ...]] = {}
    runs: dict[str, list[Row]] = {}
    for method in methods:
        known = next((settings[name] for name in SYNCHRONOUS if name in settings), None)
        settings[method] = known if method in SYNCHRONOUS and known else asked.search(method)
        seeds = range(1, asked.num_seeds + 1)  # the search used seed 0
        runs[method] = [asked.run(method, settings[method], seed) for seed in seeds]
        _tell(f"{method}: {' '.join(settings[method])}, seeds {[round(last_loss(row), 4) for row in runs[method]]}")
    _tell(f"synchronous methods differ by at most {check_same(runs):.2g} nats")
    rows = tabulate(runs, settings, command)
    pd.DataFrame(rows).to_csv(out, index=False, lineterminator="\r\n")
    return rows


def markdown(path: Path = OUT) -> str:
    rows, found = tables.read(path.stem, path.parent), []
    for row in sorted(rows, key=lambda row: float(row["final_loss"] or "inf")):
        needed = _with_interval(row, "tokens_to_goal", 0) or f"{row['seeds_at_goal']} of {row['seeds']} seeds reach it"
        settings = " ".join(word.partition(".")[2] for word in row["settings"].split())
        broken = f"; {row['broken']} of {row['seeds']} seeds broke" if row["broken"] != "0" else ""
        final = f"{_with_interval(row, 'final_loss', 3) or 'none'}{broken}"
        found.append([f"`{row['method']}`", row["lag_updates"], final, needed, settings])
    goal = f"tokens to a loss of {rows[0]['goal_loss']}"
    return tables.markdown(f"method | updates late | loss on unseen text at the end | {goal} | settings found", found)


def _with_interval(row: Mapping[str, str], name: str, digits: int) -> str:
    if not row[name]:
        return ""
    mean_, low, high = (f"{float(row[name + end]):,.{digits}f}" for end in ("", "_low", "_high"))
    return f"{mean_} ({low} to {high})"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the study; exit status 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m analysis.driver.convergence_study")
    parser.add_argument("--budget", type=int, default=Study.budget, help="settings searched for every method")
    parser.add_argument("--seeds", type=int, default=Study.num_seeds)
    parser.add_argument("--num-steps", type=int, default=Study.num_steps, help="batches of a run")
    parser.add_argument("--methods", default=",".join((*SYNCHRONOUS, *LATE)))
    parser.add_argument("--results", type=Path, default=Study.results, metavar="DIR")
    parser.add_argument("--out", type=Path, default=OUT, metavar="CSV")
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    if wrong := [name for name in methods if name not in (*SYNCHRONOUS, *LATE)]:
        parser.error(f"--methods {','.join(wrong)}: there are {', '.join((*SYNCHRONOUS, *LATE))}")
    if not set(methods) & set(SYNCHRONOUS):
        parser.error(f"--methods {options.methods}: the loss to reach is that of {', '.join(SYNCHRONOUS)}; add one")
    asked = Study(options.budget, options.seeds, options.num_steps, options.results.resolve())
    words = f"--budget {options.budget} --seeds {options.seeds} --num-steps {options.num_steps}"
    command = f"python -m analysis.driver.convergence_study {words}"
    try:
        study(asked, options.out, methods, command)
    except KeyboardInterrupt:
        _tell("interrupted; finished runs are kept, the same command goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
