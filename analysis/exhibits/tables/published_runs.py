"""Figure 10 as published: every bar beside our schedule of its system with the settings of its run script.

Both also beside the same system at equal tuning, with the setting whose cause of a token's time changed most.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from analysis.exhibits.exhibit import NOTHING, Cell, Table, declared_table, exhibit_of, label, ours, theirs
from analysis.exhibits.tables import comparison
from analysis.records.experiments import Experiments, MissingRuns, index
from analysis.records.published import PUBLISHED_MODELS, RTX4090, Published, look_up
from analysis.records.runs import MODELS
from rpbench.advice.published_runs import SYSTEMS
from rpbench.config.configuration import swept

EXPERIMENT = "figure10_published"
NEAR, AGREE = 0.15, 0.05  # largest error of a simulated bar; largest difference of simulator and predictor
SETTING_OF = {  # cause of a step's time -> the setting that changes it
    "computation": "kernels and uneven microbatches",
    "recomputation": "what is recomputed",
    "optimizer": "tokens of a step",
    "collectives": "tokens between gathers and sums",
    "transfers": "tokens that go with a transfer",
    "bubble": "microbatches of a step and the cut",
}


class Bar(NamedTuple):
    """A published bar and our row of it."""

    row: dict
    published: Published
    status: str

    @property
    def error(self) -> float | None:
        """Our tokens per second over the published ones, less 1."""
        ours, known = self.row["tokens_per_s"], self.published.value
        return None if ours is None or ours != ours or known is None else ours / known - 1

    @property
    def verdict(self) -> str:
        """Whether our bar is near the published one, and what it lacks if not."""
        error = self.error
        if error is None:
            agrees = (self.row["status"] == "ok") == (self.status == "ok")
            return "both do not fit" if agrees else f"differs: published {self.status}, ours {self.row['status']}"
        if abs(error) <= NEAR:
            return f"within {100 * NEAR:.0f} %"
        return f"misses: {'; '.join(self.row['lacks']) or 'no term is known to be missing'}"


def numbers(experiments: Experiments) -> list[Bar]:
    wanted = [(model, system) for model in MODELS for system in swept(EXPERIMENT, "mode.system")]
    rows = index(experiments.cells(EXPERIMENT), ("model", "system"), wanted, EXPERIMENT)
    found = []
    for row in rows.to_dict("records"):
        keys = {"system": row["system"], "model": PUBLISHED_MODELS[row["model"]], "platform": RTX4090}
        status = look_up("throughput", "status", **keys).value
        found.append(Bar(row, look_up("throughput", "tokens_per_s", **keys), status))
    return found


def _table(found: tuple[list[Bar], Experiments]) -> Table:
    """Every bar, beside the rows at equal tuning if these were run."""
    bars, experiments = found
    try:
        rows = comparison.contest_numbers(experiments).to_dict("records")
    except MissingRuns:
        rows = []
    tuned = {(row["model"], row["schedule"]): row for row in rows}
    return declared_table("figure10_bars", (_row(bar, tuned) for bar in bars))


def answer(bars: Sequence[Bar]) -> str:
    compared = [bar for bar in bars if bar.error is not None]
    near = [bar for bar in compared if abs(bar.error or 0) <= NEAR]
    others = [bar for bar in bars if bar.error is None]
    same = [bar for bar in others if bar.verdict == "both do not fit"]
    apart = [gap for bar in bars if (gap := _gap(bar.row)) is not None]
    agree = sum(abs(gap) <= AGREE for gap in apart)
    return (
        f"{len(near)} of {len(compared)} bars are within {100 * NEAR:.0f} %; of {len(others)} others, {len(same)} fit "
        f"neither there nor here. Simulator and predictor are within {100 * AGREE:.0f} % in {agree} of {len(apart)} "
        "cells."
    )


def _gap(row: dict) -> float | None:
    """The simulator's tokens per second over the predictor's, less 1."""
    one, other = row["tokens_per_s"], row["predicted_tokens_per_s"]
    return None if not one or not other or one != one or other != other else one / other - 1


def _row(bar: Bar, tuned: Mapping[tuple[str, str], dict]) -> dict:
    row, known, system = bar.row, bar.published, SYSTEMS[bar.row["system"]]
    equal = tuned.get((row["model"], f"{system.schedule}_async" if system.late else system.schedule))
    return row | {
        "known": label(bar.status) if known.value is None else theirs(known.value, ",.0f", known.source),
        "error": None if bar.error is None else 100 * bar.error,
        "verdict": bar.verdict,
        "apart": _apart(row),
        "equal": NOTHING if equal is None else ours(equal["tokens_per_s"], ",.0f", equal["run_id"]),
        "setting": NOTHING if equal is None else label(_setting(row, equal)),
    }


def _apart(row: dict) -> Cell:
    """The difference of simulator and predictor; beyond 5 % with the largest terms of both."""
    gap = _gap(row)
    if gap is None:
        return NOTHING
    if abs(gap) <= AGREE:
        return label(f"{100 * gap:+.1f} %")
    own, other = (_largest(row[name]) for name in ("step_terms_s", "predicted_terms_s"))
    return label(f"{100 * gap:+.1f} %: {own}; predictor: {other}")


def _largest(terms: Mapping[str, float]) -> str:
    found = sorted(terms.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found)


def _setting(row: dict, equal: dict) -> str:
    """The cause of a token's time that differs most between the two, and its setting."""
    if row["status"] != "ok" or equal["status"] != "ok":
        return "same verdict" if row["status"] == equal["status"] else "memory: what is kept and the microbatch"
    times = [
        {name: 1e6 * seconds / each["tokens_per_step"] for name, seconds in each["step_terms_s"].items()}
        for each in (row, equal)
    ]
    changes = {name: times[1].get(name, 0.0) - seconds for name, seconds in times[0].items()}
    name = max(changes, key=lambda cause: abs(changes[cause]))
    return f"{SETTING_OF[name]} ({name} {changes[name]:+.2f} µs a token)"


exhibit_of(
    "figure10_bars",
    lambda experiments: (numbers(experiments), experiments),
    _table,
    near=100 * NEAR,
    answer=lambda found: answer(found[0]),
)
